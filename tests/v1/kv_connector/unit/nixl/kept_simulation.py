# SPDX-License-Identifier: Apache-2.0
"""Decode ranks that keep KV, and engines that read it, on a controlled network.

What is called a prefill rank in a simulated hand-off keeps KV here: it is the side
that lends. Names are told by a lookup only, as they are random in truth.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from v1.kv_connector.unit.nixl.ground_truth import (
    POSITIONS,
    PROMPT,
    Prefill,
    Violation,
)
from v1.kv_connector.unit.nixl.simulation import Simulation
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    Action,
    Offer,
    Send,
    SenderClosed,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.kept import KeptTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.sender import SenderTable
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    AgentName,
    Mode,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    LeaseGranted,
    LeaseRequest,
    ReadConfirmed,
    ReadDone,
)


class Lender(SenderTable):
    """A rank's table of kept KV, where a simulation has a table of hand-offs."""

    kind: type[KeptTable] = KeptTable

    def __init__(self, lease: float, block_size: int) -> None:
        super().__init__(lease, block_size)
        self.kept = self.kind(lease, block_size)

    def lease_request(
        self, peer: AgentName, msg: LeaseRequest, now: float, readers: int = 1
    ) -> list[Action]:
        return self.kept.lease_request(peer, msg, now)

    def read_done(
        self, peer: AgentName, msg: ReadDone, now: float, readers: int = 1
    ) -> list[Action]:
        return self.kept.read_done(peer, msg, now)

    def cancel(
        self,
        peer: AgentName,
        registration_id: RegistrationId,
        transfer_id: TransferId,
        now: float,
        readers: int = 1,
    ) -> list[Action]:
        return self.kept.cancel(peer, registration_id, now)

    def peer_lost(self, peer: AgentName, now: float) -> list[Action]:
        return []

    def peer_gone(self, peer: AgentName, now: float) -> list[Action]:
        return self.kept.peer_gone(peer, now)

    def tick(self, now: float) -> list[Action]:
        return self.kept.tick(now)

    def sizes(self) -> dict[str, int]:
        return self.kept.sizes()


class KeptSimulation(Simulation):
    """An engine of some ranks that keeps KV, and engines that read it."""

    def __init__(
        self,
        ranks: int = 1,
        readers: int = 1,
        lender: type[Lender] = Lender,
        reader_ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(
            Mode.PULL, ranks, readers, sender=lender, decode_ranks=reader_ranks
        )
        # What the engine's steps carry to each rank: KV to keep, or names to retire.
        self.orders: dict[AgentName, list[Offer | TransferId]] = {
            name: [] for name in self.senders
        }
        self.known: set[TransferId] = set()
        self.gone: set[TransferId] = set()
        self.freed: set[int] = set()
        # By lender and reader.
        self.counted: set[tuple[AgentName, AgentName, RegistrationId]] = set()
        self.granted: dict[tuple[AgentName, AgentName, RegistrationId], int] = {}

    # ---- the keeping engine's scheduler

    def expect(
        self,
        transfer_id: TransferId,
        receivers: int | None = None,
        aliases: tuple[TransferId, ...] = (),
    ) -> None:
        """An answer has ended; its KV is kept, if there are blocks for it."""
        if len(self.prefill_free) < POSITIONS:
            return
        self.generation += 1
        blocks = tuple(self.prefill_free[:POSITIONS])
        del self.prefill_free[:POSITIONS]
        self.prefills[transfer_id] = Prefill(self.generation, blocks)
        table = (np.asarray(blocks, dtype=np.int32),)
        offer = Offer(transfer_id, self.generation, PROMPT, b"", table)
        for rank in self.senders:
            for position, block in enumerate(blocks):
                self.prefill_memory[rank, block] = (transfer_id, position)
            self.orders[rank].append(offer)

    def look_up(self, transfer_id: TransferId) -> None:
        """A reader learns its name."""
        self.known.add(transfer_id)

    def withdraw(self, transfer_id: TransferId) -> None:
        """It is let go of; at once where nobody can know its name."""
        if transfer_id in self.gone:
            return
        self.gone.add(transfer_id)
        for orders in self.orders.values():
            orders.append(transfer_id)
        if self.frees_at_once(transfer_id):
            self._free(transfer_id)

    def frees_at_once(self, transfer_id: TransferId) -> bool:
        """Whether no rank is asked."""
        return transfer_id not in self.known

    def obey(self, rank: AgentName) -> None:
        """A step brings a rank its next order."""
        order = self.orders[rank].pop(0)
        lender = self.senders[rank]
        assert isinstance(lender, Lender)
        if rank in self.dead:
            return
        if isinstance(order, Offer):
            lender.kept.keep(order, self.now)
        else:
            self._perform(rank, lender.kept.retire(order, self.now))

    def own_moves(self) -> Iterator[tuple[str, str, tuple[object, ...]]]:
        """Lookups, and orders that arrive."""
        for name in self.prefills:
            if name not in self.known and name not in self.gone:
                yield f"look up {name}", "look_up", (name,)
        for rank, orders in self.orders.items():
            if orders:
                yield f"{rank} obeys", "obey", (rank,)

    # ---- the readers' schedulers

    def tell_not_needed(
        self,
        rank: AgentName,
        names: Iterable[AgentName],
        transfer_id: TransferId,
        receivers: int,
    ) -> None:
        """Nobody waits for readers of what is kept."""

    def startable(self, transfer_id: TransferId) -> bool:
        """Only a lookup tells the name."""
        return transfer_id in self.known

    # ---- the end

    def settle(self, proofs: bool = True) -> None:
        """All is let go of; see :meth:`Simulation.settle`."""
        for name in list(self.prefills):
            self.withdraw(name)
        for rank, orders in self.orders.items():
            while orders:
                self.obey(rank)
        super().settle(proofs)

    # ---- what is true

    def note_answer(self, owner: AgentName, action: Send) -> None:
        """What is granted is there; what is confirmed was there ever since."""
        super().note_answer(owner, action)
        message = action.message
        match message:
            case LeaseGranted():
                place = owner, action.peer, message.registration_id
                self.granted[place] = message.generation
                if message.generation in self.freed:
                    raise Violation(f"{message.registration_id} is granted freed KV")
            case ReadConfirmed(ok=True):
                place = owner, action.peer, message.registration_id
                if place in self.counted:
                    # Said again; the READ had ended before.
                    return
                self.counted.add(place)
                generation = self.granted.get(place)
                if generation is None or generation in self.freed:
                    raise Violation(
                        f"a READ of {message.registration_id} counts though its "
                        "blocks were freed under it"
                    )
            case _:
                pass

    def _closed(self, owner: AgentName, event: SenderClosed) -> None:
        if event.generation in self.freed:
            return
        super()._closed(owner, event)
        if event.transfer_id not in self.prefills:
            self.freed.add(event.generation)

    def _free(self, transfer_id: TransferId) -> None:
        prefill = self.prefills.pop(transfer_id)
        self.freed.add(prefill.generation)
        for block in prefill.blocks:
            for rank in self.senders:
                self.prefill_memory[rank, block] = None
            self.prefill_free.insert(0, block)
