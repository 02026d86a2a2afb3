# SPDX-License-Identifier: Apache-2.0
"""The side that obtains KV from another engine, for one worker rank.

It draws on one or more ranks of that engine, its sources, and needs all of them: one
that fails ends the attempt for all. One attempt goes through::

    CONNECTING ──▶ REQUESTED ──▶ ACCEPTED ──▶ received                    WRITE
    CONNECTING ──▶ REQUESTED ──▶ READING ──▶ received, TELLING ──▶ gone   READ
    CONNECTING ────────────────▶ READING ──▶ received, TELLING ──▶ gone   by a hint
                                    └──▶ CONFIRMING ──▶ received          too late
          any but TELLING ──▶ QUIESCING ──▶ gone

A lease is not taken back before its time is over, so a READ that has ended within it
counts at once. Its lender is told (TELLING) until it confirms, or is lost. Where the
READ has taken longer, or the answer that grants the lease is missing, it counts if its
lender confirms that what was read is what it still holds for this attempt.

A READ by a hint begins while its lease is asked for. What it reads was held ever since
the hint's generation began, which the lease names; one on other blocks than the hint's
fails the attempt.

QUIESCING means that the outcome is known to the scheduler while it is not yet
proven that nothing writes into the blocks: until every source has said so, or is
proven gone, or this rank's own READ has ended. No timer ends it.
"""

from collections import Counter
from collections.abc import Sequence

from ..ids import AgentName, RegistrationId, TransferId
from ..timeline import Stage
from ..wire.blocks import BlockArray, pack_blocks, unpack_blocks
from ..wire.codec import WireError
from ..wire.notifications import (
    Cancel,
    Done,
    LeaseGranted,
    LeaseRequest,
    Message,
    Register,
)
from .actions import (
    Action,
    FailureKind,
    Received,
    ReceiveFailed,
    ReceiveQuiet,
    Report,
    Send,
    StartRead,
    TransferSize,
)
from .attempts import Attempt, ReceiveRequest, Source, State


class ReceiverTable:
    """All attempts of this rank to obtain KV.

    Args:
        repeat: seconds after which an unanswered request is said again, and
            after which a lease in use is renewed.
    """

    def __init__(self, repeat: float) -> None:
        self._repeat = repeat
        self._attempts: dict[RegistrationId, Attempt] = {}

    # ---- what the scheduler side and the connection say

    def receive(self, request: ReceiveRequest, now: float) -> None:
        """Begin an attempt; it waits for :meth:`connected`."""
        self._attempts[request.registration_id] = Attempt(
            request, started_at=now, deadline=now + request.timeout
        )

    def connected(
        self,
        registration_id: RegistrationId,
        sources: Sequence[AgentName],
        now: float,
    ) -> list[Action]:
        """The prefill ranks that hold a part of it can be spoken to."""
        attempt = self._attempts.get(registration_id)
        if attempt is None or attempt.state is not State.CONNECTING:
            return []
        attempt.sources = {name: Source() for name in sources}
        attempt.state = State.REQUESTED
        attempt.asked_at = now
        attempt.stamps.mark(Stage.ASKED, now)
        actions = self._ask(attempt, now)
        hint = attempt.request.hint
        if hint is not None and attempt.reads:
            # Nobody is told where KV lies before it is computed.
            attempt.stamps.mark(Stage.PREFILL_ENDED, now)
            for name in sources:
                actions.append(self._read(attempt, name, hint.generation, hint.blocks))
        return actions

    def unreachable(
        self, registration_id: RegistrationId, reason: str, now: float
    ) -> list[Action]:
        """No connection could be made; nothing was ever exposed."""
        attempt = self._attempts.get(registration_id)
        if attempt is None or attempt.state is not State.CONNECTING:
            return []
        return self._fail(attempt, FailureKind.UNREACHABLE, reason, now)

    def cancel(
        self, registration_id: RegistrationId, reason: str, now: float
    ) -> list[Action]:
        """The request has ended; give its blocks back as soon as that is safe."""
        attempt = self._attempts.get(registration_id)
        if attempt is None or attempt.state is State.TELLING:
            return [Report(ReceiveQuiet(registration_id))]
        if attempt.state is State.QUIESCING:
            return []
        return self._fail(attempt, FailureKind.CANCELLED, reason, now)

    def wind_up(self, reason: str, now: float) -> list[Action]:
        """All requests end; give their blocks back as soon as that is safe."""
        return [
            action
            for registration_id in list(self._attempts)
            for action in self.cancel(registration_id, reason, now)
        ]

    # ---- what prefill engines say

    def accepted(
        self, peer: AgentName, registration_id: RegistrationId, now: float
    ) -> list[Action]:
        """P knows of it and will write."""
        attempt, _ = self._lookup(peer, registration_id)
        if attempt is not None and attempt.state is State.REQUESTED:
            attempt.state = State.ACCEPTED
            attempt.stamps.mark(Stage.ANSWERED, now)
        return []

    def piece(self, peer: AgentName, msg: Done, now: float) -> list[Action]:
        """One piece has landed."""
        attempt, source = self._lookup(peer, msg.registration_id)
        if attempt is None or source is None or attempt.reads:
            return []
        is_end = msg.last and source.last_chunk is None
        if source.landed(msg):
            attempt.landed(msg, now, is_end)
        return self._progress(attempt, now)

    def finished(
        self, peer: AgentName, registration_id: RegistrationId, now: float
    ) -> list[Action]:
        """All pieces have landed, said again."""
        attempt, source = self._lookup(peer, registration_id)
        if attempt is None or source is None or attempt.reads:
            return []
        source.finished = True
        return self._progress(attempt, now)

    def refused(
        self, peer: AgentName, registration_id: RegistrationId, reason: str, now: float
    ) -> list[Action]:
        """P will not provide it, and does not write any more."""
        attempt, source = self._lookup(peer, registration_id)
        if attempt is None or source is None:
            return []
        source.quiet = True
        if attempt.state is State.TELLING:
            self._drop_if_told(attempt)
            return []
        if attempt.state is State.QUIESCING:
            return self._quiesce(attempt)
        return self._fail(attempt, FailureKind.REFUSED, reason, now)

    def cancelled(
        self, peer: AgentName, registration_id: RegistrationId
    ) -> list[Action]:
        """P does not write any more."""
        attempt, source = self._lookup(peer, registration_id)
        if attempt is None or source is None:
            return []
        if attempt.state is not State.QUIESCING:
            return []
        source.quiet = True
        return self._quiesce(attempt)

    def granted(self, peer: AgentName, msg: LeaseGranted, now: float) -> list[Action]:
        """P has leased its blocks to us: read them, if they are not yet being read."""
        attempt, source = self._lookup(peer, msg.registration_id)
        if attempt is None or source is None or not attempt.reads:
            return []
        if attempt.state in (State.QUIESCING, State.TELLING):
            return []
        if source.granted is not None:
            if source.granted.generation != msg.generation:
                return self._fail(
                    attempt, FailureKind.LEASE, "the leased KV was replaced", now
                )
            return []
        try:
            remote = tuple(unpack_blocks(group) for group in msg.blocks)
        except WireError as error:
            return self._fail(attempt, FailureKind.LEASE, str(error), now)
        wanted = [len(group) for group in attempt.request.blocks]
        if msg.block_size:
            count = len(attempt.request.want.block_range(msg.block_size))
            wanted = [count] * len(wanted)
        if [len(group) for group in remote] != wanted:
            return self._fail(
                attempt,
                FailureKind.LEASE,
                f"the lease covers other blocks than the {wanted} wanted",
                now,
            )
        source.granted = msg
        attempt.stamps.mark(Stage.ANSWERED, now)
        if source.remote is None:
            # What may be read is computed.
            attempt.stamps.mark(Stage.PREFILL_ENDED, now)
            return [self._read(attempt, peer, msg.generation, remote)]
        if source.is_read_as(msg.generation, remote):
            return self._progress(attempt, now)
        return self._fail(
            attempt,
            FailureKind.LEASE,
            "kv_transfer_params names other remote_block_ids or another "
            "remote_generation than the prefill engine leases",
            now,
        )

    def read_ended(
        self,
        peer: AgentName,
        registration_id: RegistrationId,
        size: TransferSize,
        failure: str | None,
        now: float,
    ) -> list[Action]:
        """This rank's READ from ``peer`` has ended."""
        attempt, source = self._lookup(peer, registration_id)
        if attempt is None or source is None or source.remote is None:
            return []
        attempt.open_reads -= 1
        attempt.size += size
        ok = failure is None and attempt.state is not State.QUIESCING
        actions: list[Action] = [Send(peer, attempt.read_done(source, ok))]
        if attempt.state is State.QUIESCING:
            return actions + self._quiesce(attempt)
        if failure is not None:
            if source.granted is None:
                failure = f"remote_block_ids of kv_transfer_params: {failure}"
            return actions + self._fail(attempt, FailureKind.TRANSFER, failure, now)
        source.read_at = now
        if all(source.read for source in attempt.sources.values()):
            attempt.state = State.CONFIRMING
        return actions + self._progress(attempt, now)

    def read_confirmed(
        self, peer: AgentName, registration_id: RegistrationId, ok: bool, now: float
    ) -> list[Action]:
        """Whether the blocks we read were held for us until we had read them."""
        attempt, source = self._lookup(peer, registration_id)
        if attempt is None or source is None or attempt.state is State.QUIESCING:
            return []
        if attempt.state is State.TELLING:
            source.confirmed = True
            self._drop_if_told(attempt)
            return []
        if attempt.is_leased(source):
            # It may have heard of it too late.
            source.confirmed = True
            return []
        if not ok:
            return self._fail(
                attempt,
                FailureKind.LEASE,
                "the prefill engine let go of the KV before it was read",
                now,
            )
        if not source.read:
            return []
        source.confirmed = source.finished = True
        return self._progress(attempt, now)

    # ---- what the transport and the clock say

    def peer_lost(self, peer: AgentName, reason: str, now: float) -> list[Action]:
        """``peer`` does not answer. That is no proof that it cannot write."""
        actions: list[Action] = []
        for attempt in list(self._attempts.values()):
            source = attempt.sources.get(peer)
            if source is None:
                continue
            if attempt.reads and source.done:
                source.quiet = True
            if attempt.state is State.TELLING:
                self._drop_if_told(attempt)
            elif attempt.state is not State.QUIESCING and not source.done:
                actions += self._fail(attempt, FailureKind.PEER_LOST, reason, now)
        return actions

    def peer_gone(self, peer: AgentName, reason: str, now: float) -> list[Action]:
        """It is proven that ``peer`` can write no more."""
        actions: list[Action] = []
        for attempt in list(self._attempts.values()):
            source = attempt.sources.get(peer)
            if source is None:
                continue
            source.quiet = True
            if attempt.state is State.TELLING:
                self._drop_if_told(attempt)
            elif attempt.state is State.QUIESCING:
                actions += self._quiesce(attempt)
            elif not source.done:
                actions += self._fail(attempt, FailureKind.PEER_LOST, reason, now)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Fail what is late and say again what was not answered."""
        actions: list[Action] = []
        for attempt in list(self._attempts.values()):
            if attempt.state is State.TELLING and now > attempt.deadline:
                del self._attempts[attempt.request.registration_id]
            elif attempt.state is not State.QUIESCING and now > attempt.deadline:
                actions += self._fail(
                    attempt,
                    FailureKind.TIMEOUT,
                    f"no KV came within {attempt.request.timeout:g} s",
                    now,
                )
            elif attempt.state is not State.CONNECTING and now >= attempt.next_send:
                actions += self._ask(attempt, now)
        return actions

    # ---- what the shell asks

    def sizes(self) -> dict[str, int]:
        """Entries per table; all zero when nothing is under way."""
        states = Counter(attempt.state for attempt in self._attempts.values())
        quiescing, telling = states[State.QUIESCING], states[State.TELLING]
        return {
            "receiver_attempts": len(self._attempts) - quiescing - telling,
            "receiver_quiescing": quiescing,
            "receiver_telling": telling,
        }

    def peers(self) -> set[AgentName]:
        """Agents that owe something."""
        return {
            name
            for attempt in self._attempts.values()
            for name, source in attempt.sources.items()
            if not source.quiet
            and not (source.confirmed if attempt.reads else source.done)
        }

    def transfer_id(self, registration_id: RegistrationId) -> TransferId | None:
        """The hand-off that an attempt belongs to, for logs."""
        attempt = self._attempts.get(registration_id)
        return None if attempt is None else attempt.request.transfer_id

    @property
    def busy(self) -> bool:
        """Whether an answer that is waited for may come at any moment."""
        return any(
            attempt.state not in (State.QUIESCING, State.TELLING)
            for attempt in self._attempts.values()
        )

    # ---- internals

    def _lookup(
        self, peer: AgentName, registration_id: RegistrationId
    ) -> tuple[Attempt | None, Source | None]:
        attempt = self._attempts.get(registration_id)
        if attempt is None:
            return None, None
        return attempt, attempt.sources.get(peer)

    @staticmethod
    def _read(
        attempt: Attempt,
        peer: AgentName,
        generation: int,
        remote: tuple[BlockArray, ...],
    ) -> StartRead:
        source, request = attempt.sources[peer], attempt.request
        source.remote, source.generation = remote, generation
        attempt.state = State.READING
        attempt.open_reads += 1
        return StartRead(
            peer, request.registration_id, request.want, request.blocks, remote
        )

    def _ask(self, attempt: Attempt, now: float) -> list[Action]:
        attempt.next_send = now + self._repeat
        request = attempt.request
        message: Message
        if attempt.state is State.QUIESCING:
            message = Cancel(request.registration_id, request.transfer_id)
        elif attempt.state in (State.CONFIRMING, State.TELLING):
            return [
                Send(name, attempt.read_done(source, True))
                for name, source in attempt.sources.items()
                if not source.confirmed and not source.quiet
            ]
        elif not attempt.reads:
            message = Register(
                request.transfer_id,
                request.registration_id,
                request.want,
                tuple(pack_blocks(group) for group in request.blocks),
            )
        else:
            message = LeaseRequest(
                request.transfer_id, request.registration_id, request.want
            )
        return [
            Send(name, message)
            for name, source in attempt.sources.items()
            if not source.quiet and not source.done
        ]

    def _progress(self, attempt: Attempt, now: float) -> list[Action]:
        if attempt.state is State.QUIESCING:
            return self._quiesce(attempt)
        for source in attempt.sources.values():
            source.finished |= attempt.is_leased(source)
        if not all(source.done for source in attempt.sources.values()):
            return []
        request = attempt.request
        attempt.state = State.TELLING
        self._drop_if_told(attempt)
        attempt.stamps.chunks = sum(s.num_chunks for s in attempt.sources.values())
        attempt.stamps.mark(Stage.ANSWERED, now)
        attempt.stamps.mark(Stage.LAST_NOTIFICATION, now)
        return [
            Report(
                Received(
                    request.registration_id,
                    request.want.num_tokens,
                    attempt.size,
                    now - attempt.started_at,
                    attempt.stamps,
                )
            )
        ]

    def _drop_if_told(self, attempt: Attempt) -> None:
        sources = attempt.sources.values()
        if not attempt.reads or all(s.confirmed or s.quiet for s in sources):
            del self._attempts[attempt.request.registration_id]

    def _fail(
        self, attempt: Attempt, kind: FailureKind, reason: str, now: float
    ) -> list[Action]:
        exposed = attempt.state is not State.CONNECTING
        attempt.state = State.QUIESCING
        registration_id = attempt.request.registration_id
        quiet = not exposed or self._is_quiet(attempt)
        if quiet:
            del self._attempts[registration_id]
        # A reader that gives up tells its lender; a writer has spoken already.
        told: list[Action] = self._ask(attempt, now) if exposed else []
        failed = ReceiveFailed(registration_id, kind, reason, quiet, attempt.stamps)
        return [*told, Report(failed)]

    def _is_quiet(self, attempt: Attempt) -> bool:
        if attempt.reads:
            return attempt.open_reads == 0
        return all(source.quiet or source.done for source in attempt.sources.values())

    def _quiesce(self, attempt: Attempt) -> list[Action]:
        if not self._is_quiet(attempt):
            return []
        registration_id = attempt.request.registration_id
        del self._attempts[registration_id]
        return [Report(ReceiveQuiet(registration_id))]
