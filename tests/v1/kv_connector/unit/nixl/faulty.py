# SPDX-License-Identifier: Apache-2.0
"""Tables with a planted defect, which the searches must find."""

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    CloseReason,
    ReceiveQuiet,
    Report,
    Retracted,
    Send,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.kept import KeptTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.receiver import (
    ReceiverTable,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.sender import SenderTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire import (
    Done,
    ReadConfirmed,
    ReadDone,
    Refused,
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
                actions += self._end(handoff, claim, answer)
            actions += self._close(handoff, CloseReason.EXPIRED, now)
        return actions + super().tick(now)


class RetractsUnderWrites(SenderTable):
    """Says that nothing reads from retracted blocks as soon as it is told."""

    def retract(self, transfer_id: TransferId, generation: int) -> list[Action]:
        return super().retract(transfer_id, generation) or [
            Report(Retracted(transfer_id, generation))
        ]


class ConfirmsAnyRead(SenderTable):
    """Says yes to a READ without a look at its lease."""

    def read_done(self, peer: AgentName, msg: ReadDone, now: float) -> list[Action]:
        yes = Send(peer, ReadConfirmed(msg.registration_id, ok=True))
        return [
            yes if isinstance(action, Send) else action
            for action in super().read_done(peer, msg, now)
        ]


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
