# SPDX-License-Identifier: Apache-2.0
"""All checks, and which routers they are for."""

from __future__ import annotations

from router_contract import checks, failure_checks, turn_checks
from router_contract.checks import Check, Run
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode


def _check(run: Run, *modes: Mode, conversations: bool = False) -> Check:
    name = getattr(run, "__name__", "")
    return Check(name, run, modes or tuple(Mode), conversations)


CHECKS = (
    _check(checks.legs_share_a_fresh_name),
    _check(checks.prefill_leg_is_one_whole_token),
    _check(checks.order_of_legs),
    _check(checks.decode_leg_has_the_prefill_address),
    _check(checks.coordinates_are_relayed_as_they_are, Mode.PULL),
    _check(checks.receivers_are_announced),
    _check(checks.request_reaches_decode_as_it_is),
    _check(checks.params_of_clients_have_no_effect),
    _check(checks.params_of_engines_are_kept_from_clients),
    _check(checks.prompts_of_a_list_are_handed_off_singly),
    _check(checks.chats_are_handed_off),
    _check(checks.streams_arrive_as_they_are_made),
    _check(checks.requests_at_once_are_not_mixed),
    _check(turn_checks.the_turn_before_is_named_to_prefill, conversations=True),
    _check(turn_checks.the_turn_before_is_named_after_streams, conversations=True),
    _check(turn_checks.conversations_are_their_callers_own, conversations=True),
    _check(turn_checks.conversations_are_not_mixed, conversations=True),
    _check(turn_checks.failed_turns_are_not_named, conversations=True),
    _check(failure_checks.clients_that_leave_end_the_legs),
    _check(failure_checks.clients_that_leave_a_stream_end_it),
    _check(failure_checks.failed_prefill_is_no_answer),
    _check(failure_checks.failed_prefill_may_be_retried),
    _check(failure_checks.refusals_are_passed_on),
    _check(failure_checks.failed_decode_is_no_answer),
    _check(failure_checks.failed_decode_may_be_retried),
    _check(failure_checks.failed_decode_ends_the_prefill, Mode.PUSH),
    _check(failure_checks.streams_that_break_off_do_not_end_well),
    _check(failure_checks.another_try_has_another_name),
    _check(failure_checks.gone_engines_are_a_failure),
)
"""In this order: what makes a router doubt its engines comes last."""
