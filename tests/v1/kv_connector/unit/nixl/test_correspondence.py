# SPDX-License-Identifier: Apache-2.0
"""Who is heard, who is turned away, and what becomes of what cannot be said."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from v1.kv_connector.unit.nixl import arena
from v1.kv_connector.unit.nixl.arena import (
    CONFIG,
    PATIENCE_S,
    Memory,
    Rank,
    Stranger,
    hand_off,
    request,
    run,
)
from v1.kv_connector.unit.nixl.test_transfer_loop import THERE, Pair, T
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import correspondence as module
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.agent import AgentError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import Receive
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connections import Connections
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.correspondence import (
    Correspondence,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    ReceiveFailed,
    Send,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.delivery import (
    HandoffMessage,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    Mode,
    RegistrationId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peers import Peer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    FAILED_NOTIFICATIONS,
    StatsCollector,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import pack_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Finished,
    Goodbye,
    HelloAck,
    Ping,
    Pong,
    Refused,
    Register,
    Want,
    decode_packet,
)

pytestmark = pytest.mark.timeout(60)

R, S = RegistrationId("r"), RegistrationId("s")
REGISTER = Register(T, R, Want(16, 0, 16, b""), (pack_blocks([1]),))


class Listener:
    """The notifications of one rank, and a stranger who speaks to it."""

    def __init__(self) -> None:
        self.memory = Memory("listener", Mode.PUSH)
        agent, info = self.memory.agent, self.memory.info
        self.stats = StatsCollector()
        self.connections = Connections(CONFIG, agent, info, None)
        self.answers: deque[Action] = deque()
        self.heard: list[HandoffMessage] = []
        self.words = Correspondence(
            agent, self.connections, self.stats, time.monotonic, self.answers.extend
        )
        self.stranger = Stranger("stranger", Mode.PUSH, info)

    def listen(self, count: int, hear: Callable[..., None] | None = None) -> None:
        """Until so many notifications have been taken."""
        deadline = time.monotonic() + PATIENCE_S
        until = self.memory.agent.taken + count
        while self.memory.agent.taken < until:
            assert time.monotonic() < deadline
            self.words.listen(time.monotonic(), hear or self._hear)
            self.stranger.hear()
            time.sleep(0.0002)

    def said(self) -> list[Any]:
        """The answers to the stranger, which are taken off."""
        answers = [
            action.message for action in self.answers if isinstance(action, Send)
        ]
        self.answers.clear()
        return answers

    def close(self) -> None:
        self.connections.close()
        self.memory.agent.close()
        self.stranger.close()

    def _hear(
        self, name: AgentName, peer: Peer, body: HandoffMessage, now: float
    ) -> None:
        assert name == peer.info.agent_name == self.stranger.name
        self.heard.append(body)


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    monkeypatch.setattr(
        module.logger, "warning", lambda text, *v: told.append(text % v)
    )
    return told


def test_who_has_not_introduced_itself_is_not_heard(
    listener: Listener, warned: list[str]
) -> None:
    listener.stranger.send(REGISTER)
    listener.stranger.say(b"no message")
    listener.listen(2)
    assert (listener.heard, listener.said()) == ([], [])
    assert len(warned) == 2
    assert any("has not introduced itself" in text for text in warned)
    assert any("not a notification" in text for text in warned)


def test_what_is_about_kv_is_passed_on_and_nothing_else(listener: Listener) -> None:
    stranger = listener.stranger
    stranger.send(REGISTER, stranger.hello())
    listener.listen(1)
    assert listener.said() == [HelloAck(None)]
    for message in (Ping(), Pong(), HelloAck(None), Finished(S)):
        stranger.send(message)
        listener.listen(1)
    assert listener.heard == [REGISTER, Finished(S)]
    assert listener.said() == [Pong()]
    stranger.send(Goodbye())
    listener.listen(1)
    assert listener.connections.usable(stranger.name) is None


def test_who_does_not_fit_is_turned_away_when_it_asks(listener: Listener) -> None:
    stranger = listener.stranger
    stranger.send(Ping(), stranger.hello(layout={"connector_mode": "pull"}))
    listener.listen(1)
    (answer,) = listener.said()
    assert "connector_mode differs" in answer.refusal
    stranger.send(REGISTER)
    stranger.send(Finished(S))
    listener.listen(2)
    assert listener.said() == [Refused(R, answer.refusal)]
    assert listener.heard == []


def test_what_is_not_understood_here_does_not_silence_the_next(
    monkeypatch: pytest.MonkeyPatch, listener: Listener
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        module.logger, "exception", lambda text, *v: told.append(text % v)
    )
    stranger = listener.stranger
    stranger.send(Ping(), stranger.hello())
    listener.listen(1)

    def hear(name: AgentName, peer: Peer, body: HandoffMessage, now: float) -> None:
        listener.heard.append(body)
        raise RuntimeError("a defect")

    for message in (Finished(R), Finished(S)):
        stranger.send(message)
        listener.listen(1, hear)
    assert listener.heard == [Finished(R), Finished(S)]
    assert told == [f"A notification of agent {stranger.name} failed"] * 2


def test_a_deaf_nixl_is_told_once(
    monkeypatch: pytest.MonkeyPatch, listener: Listener, warned: list[str]
) -> None:
    def deaf() -> Any:
        raise AgentError("not now")

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(listener.memory.agent, "notifications", deaf)
            for _ in range(3):
                assert not listener.words.listen(0.0, listener._hear)
        assert not listener.words.listen(0.0, listener._hear)
    assert warned == ["NIXL could not be asked for notifications: not now"] * 2


def test_what_cannot_be_said_is_counted(
    monkeypatch: pytest.MonkeyPatch, listener: Listener, warned: list[str]
) -> None:
    stranger = listener.stranger
    listener.words.send(stranger.name, Ping())
    assert listener.stats.take() is None, "it is not known, and nothing is tried"
    stranger.send(Ping(), stranger.hello())
    listener.listen(1)

    def failing(*_: Any) -> None:
        raise AgentError("not now")

    with monkeypatch.context() as patch:
        patch.setattr(listener.memory.agent, "notify", failing)
        listener.words.send(stranger.name, Ping())
    taken = listener.stats.take()
    assert taken is not None
    assert taken.data[FAILED_NOTIFICATIONS] == [1]
    assert warned == [f"Ping to agent {stranger.name} was not sent: not now"]

    listener.words.send(stranger.name, Pong())
    deadline = time.monotonic() + PATIENCE_S
    while not (got := stranger.hear()):
        assert time.monotonic() < deadline
        listener.words.listen(time.monotonic(), listener._hear)
    assert [decode_packet(data).body for data in got] == [Pong()]


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("number", range(2))
def test_a_message_that_is_not_sent_is_said_again(
    monkeypatch: pytest.MonkeyPatch, mode: Mode, number: int
) -> None:
    """The first or the second of either side; a lease outlasts a repetition."""
    monkeypatch.setattr(arena, "CONFIG", replace(arena.CONFIG, kv_lease_duration=20.0))
    pair = Pair(mode)
    failed: list[Rank] = []

    def failing(rank: Rank) -> Callable[..., None]:
        notify, sent = rank.agent.notify, 0

        def maybe(*args: Any) -> None:
            nonlocal sent
            sent += 1
            if sent == number + 1:
                failed.append(rank)
                raise AgentError("not now")
            notify(*args)

        return maybe

    for rank in (pair.p, pair.d):
        monkeypatch.setattr(rank.agent, "notify", failing(rank))
    hand_off(pair.p, pair.d, "once")
    hand_off(pair.p, pair.d, "again")
    assert failed
    pair.until_idle()
    pair.close()


def test_the_two_connectors_refuse_each_other() -> None:
    pushing, pulling = Rank("prefill", Mode.PUSH), Rank("decode", Mode.PULL)
    pulling.step(Receive(request(T, THERE, pulling.mode), pushing.address))
    run([pushing, pulling], lambda: bool(pulling.events))
    (failed,) = [event for event in pulling.events if isinstance(event, ReceiveFailed)]
    assert "connector_mode differs (local pull, remote push)" in failed.reason
    assert failed.quiet
    pulling.close()
    pushing.close()


def test_a_peer_that_the_other_side_has_forgotten_is_introduced_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Idle engines are forgotten after engine_ttl, which each side counts for itself.
    pair = Pair(Mode.PUSH)
    pair.p.close()
    monkeypatch.setattr(arena, "CONFIG", replace(arena.CONFIG, engine_ttl=0.3))
    pair.p = Rank("forgetful", Mode.PUSH)
    hand_off(pair.p, pair.d, "before")
    pair.until_idle()
    end = time.monotonic() + 1.5
    run([pair.p], lambda: time.monotonic() > end)
    hand_off(pair.p, pair.d, "after")
    pair.until_idle()
    pair.close()
