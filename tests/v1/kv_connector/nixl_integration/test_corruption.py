# SPDX-License-Identifier: Apache-2.0
"""Spoilt KV gives other answers: what arrives is what is used."""

from __future__ import annotations

import pytest

from handoff_client import Client, assert_clean, completion, new_transfer_id
from handoff_engines import EngineRoom
from handoff_workload import Ask, References, fresh
from modes import PULL_IN_FULL
from noisy_connector import SPOIL_PREFIX
from pd_launcher import Mode

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
