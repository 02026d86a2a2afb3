# SPDX-License-Identifier: Apache-2.0
"""Two real transfer loops of which something does not go as it should."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from v1.kv_connector.unit.nixl import arena
from v1.kv_connector.unit.nixl.arena import (
    BLOCK_TOKENS,
    Rank,
    hand_off,
    offer,
    request,
)
from v1.kv_connector.unit.nixl.test_transfer_loop import HERE, THERE, Pair, T
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import connections, movement
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import AgentError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import Expect, Receive
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Event,
    Received,
    ReceiveFailed,
    SenderClosed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import Want

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=Mode)
def mode(request: pytest.FixtureRequest) -> Mode:
    mode: Mode = request.param
    return mode


@pytest.fixture
def pair(mode: Mode) -> Iterator[Pair]:
    pair = Pair(mode)
    yield pair
    pair.close()


def _has(rank: Rank, kind: type[Event]) -> Callable[[], bool]:
    return lambda: any(isinstance(event, kind) for event in rank.events)


def _failure(rank: Rank) -> ReceiveFailed:
    (failed,) = [event for event in rank.events if isinstance(event, ReceiveFailed)]
    return failed


def test_a_part_of_a_prompt_goes_to_its_own_place(pair: Pair) -> None:
    tokens = BLOCK_TOKENS * len(THERE)
    want = Want(tokens, BLOCK_TOKENS, tokens - BLOCK_TOKENS, b"digest")
    wanted = replace(request(T, THERE[1:], pair.d.mode), want=want)
    pair.d.step(Receive(wanted, pair.p.address))
    pair.p.step(Expect(T, 1, ()), offer(T, HERE))
    pair.until(_has(pair.d, Received))
    expected = np.zeros_like(pair.d.pages)
    expected[:, THERE[1:]] = pair.p.pages[:, HERE[1:]]
    assert np.array_equal(pair.d.pages, expected)
    pair.until_idle()


@pytest.mark.parametrize("where", ["post", "prepare", "plan"])
def test_a_transfer_that_cannot_begin_fails_its_receiver(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    pair.receive()
    pair.until(lambda: pair.p.tables.get("sender_claims") == 1)
    mover = pair.p if pair.p.mode is Mode.PUSH else pair.d

    def fail(*_: Any) -> Any:
        raise RuntimeError("a defect") if where == "plan" else AgentError("no room")

    monkeypatch.setattr(movement if where == "plan" else mover.agent, where, fail)
    pair.p.step(Expect(T, 1, ()), offer(T, HERE))
    pair.until(_has(pair.d, ReceiveFailed))
    failed = _failure(pair.d)
    assert failed.quiet
    assert ("a defect" if where == "plan" else "no room") in failed.reason
    pair.until_idle()
    assert pair.untouched()
    (closed,) = [e for e in pair.p.events if isinstance(e, SenderClosed)]
    assert closed.tokens == 0

    monkeypatch.undo()
    hand_off(pair.p, pair.d, "next")


def test_an_order_that_fails_ends_its_attempt(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr(pair.d.loop._connections, "connect", fail)
    pair.receive()
    failed = _failure(pair.d)
    assert (failed.reason, failed.quiet) == ("internal error", True)
    assert pair.d.tables["receiver_attempts"] == 0

    monkeypatch.undo()
    hand_off(pair.p, pair.d, "next")


def test_a_peer_with_something_open_is_not_forgotten(
    monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    monkeypatch.setattr(arena, "CONFIG", replace(arena.CONFIG, engine_ttl=0.3))
    pair = Pair(mode)
    pair.receive()
    pair.p.step(Expect(T, 1, ()))
    pair.until(lambda: pair.p.tables.get("sender_claims") == 1)
    end = time.monotonic() + 1.0
    pair.until(lambda: time.monotonic() > end)
    pair.p.step(offer(T, HERE))
    pair.until(_has(pair.d, Received))
    assert pair.moved()
    pair.until_idle()
    pair.close()


def test_a_peer_that_cannot_be_copied_to_is_named(
    monkeypatch: pytest.MonkeyPatch, mode: Mode
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        connections.logger, "warning", lambda text, *v: told.append(text % v)
    )
    monkeypatch.delenv("UCX_TLS", raising=False)
    why = "the kernel denies it"
    monkeypatch.setattr(connections, "why_not_copied", lambda *_: why)
    pair = Pair(mode)
    hand_off(pair.p, pair.d, "once")
    hand_off(pair.p, pair.d, "again")
    pair.close()
    # Each side says it, once.
    assert len(told) == 2
    assert all("by TCP, which is slower" in text for text in told)
    assert all(f"because {why}" in text for text in told)

    told.clear()
    monkeypatch.setenv("UCX_TLS", "tcp")
    pair = Pair(mode)
    hand_off(pair.p, pair.d, "as was chosen")
    pair.close()
    assert told == []
