# SPDX-License-Identifier: Apache-2.0
"""Tables with a planted defect, which the searches must find."""

import msgspec

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    CloseReason,
    ReceiveQuiet,
    Report,
    Retracted,
    Send,
    TransferSize,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.claims import (
    ClaimState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.kept import KeptTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.receiver import (
    ReceiverTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.sender import SenderTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import blocks_digest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Done,
    LeaseGranted,
    LeaseRequest,
    ReadConfirmed,
    ReadDone,
    Refused,
    Register,
)


class FreesOnTheLease(SenderTable):
    """Lets go of the KV when the lease ends, whoever uses it."""

    def tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for handoff in list(self._handoffs.values()):
            if handoff.offer is None or now <= handoff.deadline:
                continue
            for claim in list(handoff.claims.values()):
                answer = Refused(claim.registration_id, "expired")
                actions += self._desk.end(handoff, claim, answer)
            actions += self._desk.close(handoff, CloseReason.EXPIRED, now)
        return actions + super().tick(now)


class RetractsUnderWrites(SenderTable):
    """Says that nothing reads from retracted blocks as soon as it is told."""

    def retract(self, transfer_id: TransferId, generation: int) -> list[Action]:
        return super().retract(transfer_id, generation) or [
            Report(Retracted(transfer_id, generation))
        ]


class ServesTheFirstRankOnly(SenderTable):
    """Takes each rank of a receiver for the whole of it."""

    def register(
        self, peer: AgentName, msg: Register, now: float, readers: int = 1
    ) -> list[Action]:
        return super().register(peer, msg, now)

    def lease_request(
        self, peer: AgentName, msg: LeaseRequest, now: float, readers: int = 1
    ) -> list[Action]:
        return super().lease_request(peer, msg, now)


class ServesTheLastRankOnly(SenderTable):
    """Takes all ranks of a receiver for one, of which it hears again."""

    def register(
        self, peer: AgentName, msg: Register, now: float, readers: int = 1
    ) -> list[Action]:
        for handoff in self._handoffs.values():
            for claim in list(handoff.claims.values()):
                if claim.registration_id == msg.registration_id and claim.peer != peer:
                    self._handoffs.drop_claim(handoff, claim)
        return super().register(peer, msg, now)


class ConfirmsAnyRead(SenderTable):
    """Says yes to a READ without a look at its lease."""

    def read_done(
        self, peer: AgentName, msg: ReadDone, now: float, readers: int = 1
    ) -> list[Action]:
        yes = Send(peer, ReadConfirmed(msg.registration_id, ok=True))
        return [
            yes if isinstance(action, Send) else action
            for action in super().read_done(peer, msg, now, readers)
        ]


class ForgetsTheSilent(SenderTable):
    """Takes a lease back from a peer of which nothing is heard."""

    def peer_lost(self, peer: AgentName, now: float) -> list[Action]:
        return self.peer_gone(peer, now)


class WithdrawsUnderReaders(SenderTable):
    """Takes leases back when the prefill request is aborted."""

    def withdraw(
        self, transfer_id: TransferId, reason: str, now: float
    ) -> list[Action]:
        handoff = self._handoffs.get(transfer_id)
        for claim in list(handoff.claims.values()) if handoff else ():
            if claim.state is ClaimState.LEASED and handoff is not None:
                self._desk.end(handoff, claim, Refused(claim.registration_id, reason))
        return super().withdraw(transfer_id, reason, now)


class QuietOnTimeout(ReceiverTable):
    """Gives blocks back when a cancelled attempt has waited long enough."""

    def tick(self, now: float) -> list[Action]:
        actions = super().tick(now)
        for key, attempt in list(self._attempts.items()):
            if attempt.state.name == "QUIESCING" and now > attempt.started_at + 3.0:
                del self._attempts[key]
                actions.append(Report(ReceiveQuiet(key)))
        return actions


class TrustsTheLastPiece(ReceiverTable):
    """Takes a piece of the last chunk for the last one to land."""

    def piece(self, peer: AgentName, msg: Done, now: float) -> list[Action]:
        if msg.last:
            return self.finished(peer, msg.registration_id, now)
        return super().piece(peer, msg, now)


class TrustsTheHint(ReceiverTable):
    """Takes the end of a READ for its success."""

    def read_ended(
        self,
        peer: AgentName,
        registration_id: RegistrationId,
        size: TransferSize,
        failure: str | None,
        now: float,
    ) -> list[Action]:
        actions = super().read_ended(peer, registration_id, size, failure, now)
        return actions + self.read_confirmed(peer, registration_id, True, now)


class TrustsTheGrant(ReceiverTable):
    """Takes a lease for the confirmation of the READ that has ended before."""

    def granted(self, peer: AgentName, msg: LeaseGranted, now: float) -> list[Action]:
        actions = super().granted(peer, msg, now)
        return actions + self.read_confirmed(peer, msg.registration_id, True, now)


class ConfirmsOtherBlocks(SenderTable):
    """Says yes to a READ of that generation without a look at what was read."""

    def read_done(
        self, peer: AgentName, msg: ReadDone, now: float, readers: int = 1
    ) -> list[Action]:
        found = self._handoffs.claim((peer, msg.registration_id))
        offer = None if found is None else found[0].offer
        if found is not None and offer is not None:
            wanted = found[1].want.block_range(self._block_size)
            blocks = [group[wanted.start : wanted.stop] for group in offer.blocks]
            msg = msgspec.structs.replace(msg, blocks=blocks_digest(blocks))
        return super().read_done(peer, msg, now, readers)


class ConfirmsAnyGeneration(SenderTable):
    """Says yes to a READ of the right blocks, whenever they were read."""

    def read_done(
        self, peer: AgentName, msg: ReadDone, now: float, readers: int = 1
    ) -> list[Action]:
        found = self._handoffs.claim((peer, msg.registration_id))
        offer = None if found is None else found[0].offer
        if offer is not None:
            msg = msgspec.structs.replace(msg, generation=offer.generation)
        return super().read_done(peer, msg, now, readers)


class ClosesUnderReaders(KeptTable):
    """Takes an order to retire for the end."""

    def retire(self, name: TransferId, now: float) -> list[Action]:
        entry = self._entries.get(name)
        for lease in list(entry.leases.values()) if entry else ():
            self._end(self._entries[name], lease, False)
        return super().retire(name, now)


class ConfirmsLateReads(KeptTable):
    """Says yes to a READ whose lease has ended."""

    def read_done(self, peer: AgentName, msg: ReadDone, now: float) -> list[Action]:
        yes = Send(peer, ReadConfirmed(msg.registration_id, ok=msg.ok))
        return [
            yes if isinstance(action, Send) else action
            for action in super().read_done(peer, msg, now)
        ]
