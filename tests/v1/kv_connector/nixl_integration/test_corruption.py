# SPDX-License-Identifier: Apache-2.0
"""Spoilt KV gives other answers: what arrives is what is used."""

from __future__ import annotations

import pytest

import verify_legs
from handoff_client import Client, assert_clean, completion, new_transfer_id
from handoff_engines import EngineRoom
from handoff_workload import Ask, References, fresh
from modes import PULL_IN_FULL
from noisy_connector import SPOIL_PREFIX
from pd_launcher import Engine, Mode
from verify_engines import Engine as VerifiedEngine
from verify_judgement import ANSWERS
from verify_report import render
from verify_result import Status
from verify_run import verify
from verify_targets import Settings, parse_engine
from verify_transport import BACKEND

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300, func_only=True)]

MOST = 0.9


@PULL_IN_FULL
async def test_spoilt_kv_changes_answers(
    room: EngineRoom, references: References, client: Client, mode: Mode
) -> None:
    pair = room.pair(mode, f"{mode}-prefill-noisy", f"{mode}-decode")
    for prompt in fresh("unspoilt"):
        _, decode = await client.hand_off(
            pair, mode, completion(Ask(prompt)), new_transfer_id()
        )
        assert decode.tokens == references.expected(prompt)

    changed = 0
    for prompt in fresh("spoilt"):
        _, decode = await client.hand_off(
            pair, mode, completion(Ask(prompt)), new_transfer_id(SPOIL_PREFIX)
        )
        changed += decode.tokens != references.expected(prompt)

    print(f"{changed} of {len(fresh('spoilt'))} answers changed")
    assert changed >= MOST * len(fresh("spoilt"))
    await assert_clean(client, pair)


@pytest.mark.full
async def test_verification_finds_spoilt_kv(
    room: EngineRoom,
    references: References,
    client: Client,
    mode: Mode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bytes are moved and all is released, and yet the pair is not sound."""
    pair = room.pair(mode, f"{mode}-prefill-noisy", f"{mode}-decode")
    monkeypatch.setattr(
        verify_legs, "new_transfer_id", lambda: new_transfer_id(SPOIL_PREFIX)
    )

    report = await verify(
        Settings((_engine("prefill", pair.prefill),), (_engine("decode", pair.decode),))
    )

    print(render(report))
    failed = {check.name for check in report.checks if check.status is Status.FAIL}
    # The noisy connector has a name of its own, which is told, too.
    assert failed == {BACKEND, ANSWERS}
    assert report.exit_status == 1
    await assert_clean(client, pair)


def _engine(role: str, running: Engine) -> VerifiedEngine:
    return parse_engine(f"{running.url},{running.side_channel}", role)
