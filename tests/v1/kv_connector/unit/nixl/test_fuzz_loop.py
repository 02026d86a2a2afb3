# SPDX-License-Identifier: Apache-2.0
"""A transfer loop on real agents, told anything by peers known and unknown."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from v1.kv_connector.unit.nixl.arena import (
    NoReports,
    free_address,
    keep,
    offer,
    run,
)
from v1.kv_connector.unit.nixl.fuzz_scene import (
    BLOCKS,
    REGISTRATION,
    TRANSFER,
    Scene,
    attempt,
    packet,
    scene,
)
from v1.kv_connector.unit.nixl.hostile import (
    KEPT,
    TRANSFERS,
    bodies,
    mutations,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.commands import (
    Expect,
    Receive,
    Retire,
    Withdraw,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    Event,
    Received,
    ReceiveFailed,
    Report,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.receiver import (
    ReceiverTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    Mode,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.side_channel import (
    SideChannelServer,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import pack_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import encode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Cancelled,
    Done,
    Hello,
    LeaseGranted,
    Ping,
    Refused,
)

EXAMPLES = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    # Examples share agents, so a smaller one proves nothing.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
TOKEN = Token(b"0123456789abcdef0123456789abcdef")


@contextmanager
def open_attempt(s: Scene) -> Iterator[Callable[[], list[Event]]]:
    """The victim waits for the honest engine, and at the end gets what it wants."""
    s.honest.step(Expect(TRANSFER, 1, ()))
    s.victim.step(Receive(attempt(s.mode), s.honest.address))

    def ends() -> list[Event]:
        return [
            event
            for event in s.victim.events
            if isinstance(event, Received | ReceiveFailed)
            and event.registration_id == REGISTRATION
        ]

    yield ends
    assert ends() == []
    s.honest.pages[:, BLOCKS + 7] = 42
    s.victim.pages[:, BLOCKS] = 0
    s.honest.step(offer(TRANSFER, BLOCKS + 7))
    run(s.ranks, lambda: bool(ends()), s.strangers)
    assert isinstance(ends()[0], Received), ends()
    assert (s.victim.pages[:, BLOCKS] == 42).all()


# ---- notifications


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("known", [False, True])
def test_any_bytes_as_a_notification(mode: Mode, known: bool) -> None:
    with scene(mode) as s:
        if known:
            s.introduce(s.stranger.hello())

        @EXAMPLES
        @given(st.lists(st.binary(min_size=15, max_size=400), min_size=1, max_size=30))
        def tell(said: list[bytes]) -> None:
            s.tell(said)
            s.check_bounded(0)

        tell()
        s.tell([bytes(1 << 20), bytes((16 << 20) + 1), packet(Ping()) + bytes(99)])
        s.check()


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("token", [None, TOKEN], ids=["no token", "token"])
def test_any_messages_of_an_agent_that_is_not_known(
    mode: Mode, token: Token | None
) -> None:
    """It has not introduced itself or, with a token, has not proven that it has it."""
    with scene(mode, token) as s:
        hellos: list[Hello | None] = [None]
        if token is not None:
            hellos += [s.stranger.hello(b"wrong"), s.stranger.hello()]
        with open_attempt(s) as ends:

            @EXAMPLES
            @given(
                st.lists(
                    st.tuples(bodies, st.sampled_from(hellos)), min_size=10, max_size=30
                )
            )
            def tell(said: list[tuple[Any, Hello | None]]) -> None:
                s.tell([packet(body, hello) for body, hello in said])
                assert ends() == []
                sizes = s.tables()
                assert sizes.pop("receiver_attempts") == 1
                assert not any(sizes.values()), sizes

            tell()
            assert s.heard == []
        s.check()
        assert s.stranger.hear() == []


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("token", [None, TOKEN], ids=["no token", "token"])
def test_any_messages_of_a_known_peer(mode: Mode, token: Token | None) -> None:
    with scene(mode, token) as s:
        proof = b""
        if token is not None:
            proof = token.introduction(s.stranger.name, s.victim.name)
        hello = s.stranger.hello(proof)
        s.introduce(hello)
        with open_attempt(s) as ends:

            @EXAMPLES
            @given(
                st.lists(
                    st.tuples(bodies, mutations, st.sampled_from([None, None, hello])),
                    min_size=15,
                    max_size=40,
                ),
                st.booleans(),
            )
            def tell(said: list[tuple[Any, Any, Hello | None]], offered: bool) -> None:
                # It may ask for something that is there.
                name = TransferId(TRANSFERS[1])
                s.victim.step(Expect(name, 3, ()))
                if offered:
                    s.victim.step(offer(name, BLOCKS + 20))
                s.tell([mutate(packet(body, hello)) for body, mutate, hello in said])
                # What it has named itself, and no more.
                s.check_bounded(100 * 40)
                # The attempt is the business of another.
                assert ends() == []

            s.victim.step(keep(TransferId(KEPT), BLOCKS + 26))
            tell()
            s.victim.step(
                Retire(TransferId(KEPT)), Withdraw(TransferId(TRANSFERS[1]), "over")
            )
        s.check()


@pytest.mark.parametrize("mode", Mode)
def test_any_messages_of_the_engine_that_is_asked_for_kv(mode: Mode) -> None:
    with scene(mode) as s:
        victim, hello = s.victim, s.stranger.hello()
        address = free_address()
        server = SideChannelServer(address, [encode(s.stranger.info)], NoReports())
        s.introduce(hello)
        mine = np.setdiff1d(np.arange(victim.pages.shape[1]), BLOCKS)
        victim.pages[:, mine] = 7

        def asked() -> bool:
            return s.tables()["receiver_attempts"] == 1

        @EXAMPLES
        @given(st.lists(st.tuples(bodies, mutations), min_size=4, max_size=12))
        def tell(said: list[tuple[Any, Any]]) -> None:
            if not s.tables()["receiver_quiescing"]:
                victim.step(Receive(attempt(s.mode), address))
                run(s.ranks, asked, s.strangers)
            s.tell([packet(Ping(), hello)])
            s.tell([mutate(packet(body)) for body, mutate in said])
            s.check_bounded(100 * 12)
            assert (victim.pages[:, mine] == 7).all()
            if s.tables()["receiver_quiescing"]:
                # Blocks into which it may write are given back when it says so.
                s.tell([packet(Cancelled(REGISTRATION))])

        try:
            tell()
            s.tell([packet(Refused(REGISTRATION, "enough"))])
            s.check()
        finally:
            server.close()


def test_what_is_said_too_early_does_not_end_a_read() -> None:
    """Nothing but its own READ and the lender's lease completes an attempt."""
    table = ReceiverTable(repeat=1.0)
    lender = AgentName("lender")
    table.receive(attempt(Mode.PULL), 0.0)
    table.connected(REGISTRATION, [lender], 0.0)
    granted = LeaseGranted(REGISTRATION, 1, 30.0, (pack_blocks(BLOCKS),))
    piece = Done(
        REGISTRATION, chunk=0, last=True, seq=0, total=1, bytes=1, descriptors=1
    )

    def premature() -> list[Action]:
        return [
            *table.piece(lender, piece, 0.0),
            *table.finished(lender, REGISTRATION, 0.0),
            *table.read_confirmed(lender, REGISTRATION, True, 0.0),
        ]

    assert premature() == []
    assert len(table.granted(lender, granted, 0.0)) == 1
    assert premature() == []
    assert table.sizes()["receiver_attempts"] == 1
    _, report = table.read_ended(lender, REGISTRATION, TransferSize(1, 1), None, 0.0)
    assert isinstance(report, Report)
    assert isinstance(report.event, Received)
