# SPDX-License-Identifier: Apache-2.0
"""A transfer loop between whose memory and the caches KV is copied.

KV that is to leave is copied before the loop hears of it, and KV that has come before
the scheduler side does. Both sides of the copies are held by whoever holds the blocks:
the pins of an offer, of kept KV and of a parked request end with what the loop reports,
and it hears, and reports, in the order in which things were said.

The copies are made here, on the transfer thread: an operation of the platform may wait
for its end, and the forward thread must not. They are made piece by piece, so that
peers are answered meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from vllm.logger import init_logger

from .agent import Agent
from .auth import Token
from .commands import Expect, Keep, Receive, Retire, Retract, Withdraw
from .config import ConnectorConfig
from .ending import STEP_SECONDS
from .handoff.actions import (
    Event,
    FailureKind,
    Offer,
    Received,
    ReceiveFailed,
    ReceiveQuiet,
    Send,
)
from .handoff.delivery import HandoffMessage
from .handoff.kept import is_kept
from .host_buffer import BlockCopy, HostBuffer
from .ids import AgentName, Mode, RegistrationId, TransferId
from .orders import Facts, Order, Pace, PendingOffer
from .peers import Peer
from .transfer_loop import TransferLoop
from .wire.notifications import LeaseRequest, Refused
from .wire.ranks import RankInfo

logger = init_logger(__name__)

COPY_SECONDS = 0.005
"""What one step copies in each direction, in time."""

MAX_LEAVING = 4096
"""Copies that wait, from which on no reader of kept KV is added."""


@dataclass
class _Kept:
    """KV that may be read, and the positions of those of its blocks that are here."""

    offer: Offer
    copied: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Asked:
    """A reader that waits for kept KV, and the positions that it lacks here."""

    peer_name: AgentName
    peer: Peer
    body: LeaseRequest
    missing: tuple[int, ...]


class StagedLoop(TransferLoop):
    """The transfer loop of a rank whose registered memory is a :class:`HostBuffer`.

    The arguments are those of :class:`TransferLoop`, and the buffer.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        agent: Agent,
        local: RankInfo,
        mode: Mode,
        token: Token | None,
        publish: Callable[[Facts], None],
        clock: Callable[[], float],
        buffer: HostBuffer,
    ) -> None:
        super().__init__(config, agent, local, mode, token, self._told, clock)
        self._pass_on = publish
        self._buffer = buffer
        self._block_size = local.block_size
        self._leaving: deque[Order | _Asked] = deque()
        self._outward: BlockCopy | None = None
        self._kept_here: dict[TransferId, _Kept] = {}
        self._wanted: dict[RegistrationId, Receive] = {}
        self._arrived: deque[Event] = deque()
        self._inward: BlockCopy | None = None
        self._inner_tables: dict[str, int] = {}
        self._shown: dict[str, int] = {}

    def step(self, commands: Iterable[Order]) -> Pace:
        """Copy some, and take the step of a transfer loop."""
        orders = [order for order in commands if not self._is_held(order)]
        pace = super().step(orders + self._copy_out())
        self._copy_in()
        return Pace.NOW if self._leaving or self._arrived else pace

    def close(self, patience: float = 0.0) -> None:
        """See :meth:`TransferLoop.close`; what is being copied may be taken, too."""
        deadline = self._clock() + patience
        while self._leaving and self._clock() < deadline:
            self.step(())
            time.sleep(STEP_SECONDS)
        super().close(max(0.0, deadline - self._clock()))

    # ---- out of the caches

    def _is_held(self, order: Order) -> bool:
        """Whether an order waits for copies; those behind them on one thing do too."""
        match order:
            case PendingOffer():
                self._leaving.append(order)
                return True
            case Expect() | Withdraw() | Retract():
                name = order.transfer_id
            case Keep():
                self._kept_here[order.offer.transfer_id] = _Kept(order.offer)
                return False
            case Retire():
                name = order.name
            case Receive():
                self._wanted[order.request.registration_id] = order
                return False
            case _:
                return False
        held = name in map(_concerns, self._leaving)
        if held:
            self._leaving.append(order)
        elif isinstance(order, Retire):
            self._kept_here.pop(name, None)
        return held

    def _copy_out(self) -> list[Order]:
        """What the loop may hear now."""
        deadline = time.monotonic() + COPY_SECONDS
        ready: list[Order] = []
        while self._leaving:
            head, spoilt = self._leaving[0], ""
            try:
                if not self._is_copied(head, deadline):
                    break
            except Exception as error:
                logger.exception("KV could not be copied to the host")
                spoilt = f"KV could not be staged: {error}"
            self._leaving.popleft()
            self._outward = None
            ready += self._spoil(head, spoilt) if spoilt else self._let_through(head)
        return ready

    def _let_through(self, head: Order | _Asked) -> list[Order]:
        match head:
            case _Asked():
                self._kept_here[head.body.transfer_id].copied.update(head.missing)
                now = self._clock()
                super()._dispatch(head.peer_name, head.peer, head.body, now)
                return []
            case PendingOffer():
                return [replace(head, fence=_passed, launched_at=self._clock())]
            case Retire():
                self._kept_here.pop(head.name, None)
        return [head]

    def _spoil(self, head: Order | _Asked, reason: str) -> list[Order]:
        """What the loop hears in the place of KV that is not there."""
        if isinstance(head, _Asked):
            refused = Refused(head.body.registration_id, reason)
            self._do([Send(head.peer_name, refused)])
            return []
        assert isinstance(head, PendingOffer)
        # The offer too, so that its blocks are given back.
        offer = replace(head, fence=_passed)
        return [Withdraw(head.offer.transfer_id, reason), offer]

    def _is_copied(self, head: Order | _Asked, deadline: float) -> bool:
        if isinstance(head, PendingOffer):
            if self._outward is None:
                if not head.fence():
                    return False
                offer = head.offer.complete()
                self._outward = self._buffer.out_of_device(
                    offer.blocks, offer.part, offer.parts
                )
        elif isinstance(head, _Asked):
            if self._outward is None:
                offer = self._kept_here[head.body.transfer_id].offer
                positions = [p - offer.first_block for p in head.missing]
                self._outward = self._buffer.out_of_device(
                    tuple(group[positions] for group in offer.blocks)
                )
        else:
            return True
        return self._outward.advance(deadline)

    # ---- of kept KV, what is asked for

    def _dispatch(
        self, name: AgentName, peer: Peer, body: HandoffMessage, now: float
    ) -> None:
        if isinstance(body, LeaseRequest) and is_kept(body.transfer_id):
            missing = self._missing(body)
            if missing:
                self._ask_for(_Asked(name, peer, body, missing))
                return
        super()._dispatch(name, peer, body, now)

    def _ask_for(self, asked: _Asked) -> None:
        same = (
            asked.peer_name == other.peer_name
            and asked.body.registration_id == other.body.registration_id
            for other in self._leaving
            if isinstance(other, _Asked)
        )
        # A reader that is not answered asks again.
        if len(self._leaving) < MAX_LEAVING and not any(same):
            self._leaving.append(asked)

    def _missing(self, body: LeaseRequest) -> tuple[int, ...]:
        """Positions of blocks that a reader wants and that are not in the buffer."""
        kept = self._kept_here.get(body.transfer_id)
        if kept is None:
            return ()
        offer = kept.offer
        begin, end = offer.first_block, offer.first_block + len(offer.blocks[0])
        wanted = body.want.block_range(self._block_size)
        there = range(max(begin, wanted.start), min(end, wanted.stop))
        return tuple(p for p in there if p not in kept.copied)

    # ---- into the caches

    def _told(self, facts: Facts) -> None:
        self._arrived.extend(facts.events)
        self._inner_tables = facts.tables

    def _copy_in(self) -> None:
        deadline = time.monotonic() + COPY_SECONDS
        ready: list[Event] = []
        while self._arrived:
            event = self._arrived[0]
            if isinstance(event, Received):
                try:
                    if not self._is_copied_in(event, deadline):
                        break
                except Exception as error:
                    logger.exception("KV could not be copied to the device")
                    event = ReceiveFailed(
                        event.registration_id,
                        FailureKind.TRANSFER,
                        f"KV could not be staged: {error}",
                        quiet=True,
                        stamps=event.stamps,
                    )
            if isinstance(event, Received | ReceiveFailed | ReceiveQuiet):
                self._wanted.pop(event.registration_id, None)
            ready.append(event)
            self._arrived.popleft()
            self._inward = None
        tables = {
            **self._inner_tables,
            "staging_out": len(self._leaving),
            "staging_in": len(self._arrived),
        }
        if ready or tables != self._shown:
            self._pass_on(Facts(tuple(ready), tables))
            self._shown = tables

    def _is_copied_in(self, event: Received, deadline: float) -> bool:
        if self._inward is None:
            wanted = self._wanted[event.registration_id].complete()
            self._inward = self._buffer.into_device(wanted.blocks)
        return self._inward.advance(deadline)


def _passed() -> bool:
    return True


def _concerns(order: Order | _Asked) -> TransferId | None:
    """The hand-off or the kept KV that is held up."""
    match order:
        case PendingOffer():
            return order.offer.transfer_id
        case _Asked():
            return order.body.transfer_id
        case Expect() | Withdraw() | Retract():
            return order.transfer_id
        case Retire():
            return order.name
    return None
