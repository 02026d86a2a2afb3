# SPDX-License-Identifier: Apache-2.0
"""Silence of peers, and the bounded memory of what has ended."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.history import History
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.liveness import Liveness
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import AgentName

A, B = AgentName("a"), AgentName("b")
TIMEOUT = 9.0


def test_a_silent_peer_is_pinged_and_then_lost() -> None:
    liveness = Liveness(TIMEOUT)
    assert liveness.tick([A], 0) == ([], [])
    assert liveness.tick([A], 3) == ([], [])
    assert liveness.tick([A], 3.1) == ([A], [])
    assert liveness.tick([A], 4) == ([], [])
    assert liveness.tick([A], 6.2) == ([A], [])
    assert liveness.tick([A], 9) == ([], [])
    assert liveness.tick([A], 9.1) == ([], [A])


def test_a_peer_that_answers_is_not_lost() -> None:
    liveness = Liveness(TIMEOUT)
    for now in range(0, 100, 4):
        _, lost = liveness.tick([A], now)
        assert lost == []
        liveness.heard(A, now)


def test_a_peer_is_judged_only_from_when_it_owes_something() -> None:
    liveness = Liveness(TIMEOUT)
    liveness.tick([A], 0)
    assert liveness.tick([], 8) == ([], [])
    assert liveness.tick([A], 20) == ([], [])
    assert liveness.tick([A], 29.1) == ([], [A])


def test_peers_are_judged_apart() -> None:
    liveness = Liveness(TIMEOUT)
    liveness.tick([A, B], 0)
    liveness.heard(B, 5)
    assert liveness.tick([A, B], 9.5) == ([B], [A])
    liveness.forget(B)
    assert liveness.tick([B], 30) == ([], [])


def test_own_silence_is_not_held_against_others() -> None:
    liveness = Liveness(TIMEOUT)
    liveness.tick([A], 0)
    liveness.excuse(100)
    assert liveness.tick([A], 100) == ([], [])
    assert liveness.tick([A], 109.1) == ([], [A])


def test_strangers_are_not_remembered() -> None:
    liveness = Liveness(TIMEOUT)
    liveness.heard(A, 100)
    liveness.forget(A)
    assert liveness.tick([A], 0) == ([], [])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9)), st.integers(1, 4))
def test_history_keeps_the_latest(keys: list[int], capacity: int) -> None:
    history: History[int, int] = History(capacity)
    for place, key in enumerate(keys):
        history.put(key, place)
    latest = list(dict.fromkeys(reversed(keys)))[:capacity]
    assert len(history) == len(latest)
    for key in range(10):
        expected = len(keys) - 1 - keys[::-1].index(key) if key in latest else None
        assert history.get(key) == expected
