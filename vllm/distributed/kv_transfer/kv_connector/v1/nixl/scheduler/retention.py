# SPDX-License-Identifier: Apache-2.0
"""KV that is kept after an answer, for a later turn of the conversation.

It is a cache: it has a budget, its oldest goes first, and it gives way before
anything else suffers. Another engine can read an entry only under a name that it
learns from a lookup. So what nobody has looked up is let go at once; the rest when
every rank has said that nobody reads it.

The table is changed on the engine's thread; lookups come from the side channel's.
"""

import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from ..commands import Command, Keep, Retire
from ..handoff.actions import Offer, SenderClosed
from ..ids import TransferId
from ..wire.questions import Kept
from .patience import is_recent
from .pins import Pin, PinBoard, PinState
from .prefill import LINGER_SECONDS

MAX_NAMES_OF_A_TURN = 64
"""Answers of one turn (``n`` > 1) that are kept."""

MAX_ENTRIES = 4096
"""Entries in all. Conversations with one system prompt share most of their blocks, so
the budget alone does not bound the memory for what is known of each."""

MAX_RELEASES_PENDING = 65536


@dataclass
class _Entry:
    transfer_id: TransferId
    kept: Kept
    pin: Pin
    expires_at: float
    looked_up: bool = False
    closed_ranks: set[int] = field(default_factory=set)
    retired_at: float = 0.0
    retired_step: int = 0


class _Coming:
    """Blocks that are free once some entries have closed, counted as these come."""

    def __init__(self) -> None:
        self.blocks = 0
        self._pins: Counter[int] = Counter()

    def will_close(self, entry: _Entry) -> None:
        """One more that holds its blocks yet."""
        for block in entry.pin.blocks:
            self._pins[block.block_id] += 1
            self.blocks += self._pins[block.block_id] == block.ref_cnt

    def has_closed(self, entry: _Entry) -> None:
        """One that holds its blocks no more; those to come may be the last now."""
        for block in entry.pin.blocks:
            self.blocks += 0 < block.ref_cnt == self._pins[block.block_id]


class Retention:
    """All KV that this engine keeps.

    Args:
        world_size: worker ranks, each of which must let go of an entry.
        ttl: seconds after which an entry goes that nobody has asked for.
        budget: share of the blocks that entries may hold.
        watermark: share of the blocks that entries leave free.
        commands: where orders to the workers are put.

    Attributes:
        evicted: entries that gave way to something else.
        expired: entries that reached the end of their life.
        exhausted: times that a running request lacked blocks and nothing was left
            that could give way; the engine preempts then.
    """

    def __init__(
        self,
        world_size: int,
        ttl: float,
        budget: float,
        watermark: float,
        pins: PinBoard,
        commands: list[Command],
    ) -> None:
        self._world_size = world_size
        self._ttl = ttl
        self._budget = budget
        self._watermark = watermark
        self._pins = pins
        self._commands = commands
        self._lock = threading.Lock()
        # Oldest use first.
        self._entries: OrderedDict[TransferId, _Entry] = OrderedDict()
        self._of_turn: dict[TransferId, list[TransferId]] = {}
        self._retiring: dict[TransferId, _Entry] = {}
        self._held: Counter[int] = Counter()
        self._to_release: deque[TransferId] = deque(maxlen=MAX_RELEASES_PENDING)
        self._step = 0
        self._yield_step = -2
        self._yielding_since = (0.0, 0)
        self.evicted = 0
        self.expired = 0
        self.exhausted = 0

    # ---- the engine's thread

    def keep(
        self,
        transfer_id: TransferId,
        kept: Kept,
        blocks: tuple[list[int], ...],
        now: float,
    ) -> bool:
        """Keep what a request leaves behind; whether there was room for it."""
        _, total = self._pins.usage()
        budget = int(self._budget * total)
        # Block 0 stands for one that a window has let go of.
        if not 0 < sum(len(group) - group.count(0) for group in blocks) <= budget:
            return False
        if len(self._of_turn.get(transfer_id, ())) >= MAX_NAMES_OF_A_TURN:
            return False
        pin = self._pins.pin(blocks, PinState.RETAINED)
        with self._lock:
            self._entries[kept.name] = _Entry(transfer_id, kept, pin, now + self._ttl)
            self._of_turn.setdefault(transfer_id, []).append(kept.name)
        self._held.update(block.block_id for block in pin.blocks)
        self._commands.append(
            Keep(
                Offer(
                    kept.name,
                    kept.generation,
                    kept.num_tokens,
                    b"",
                    tuple(np.asarray(group, dtype=np.int32) for group in blocks),
                )
            )
        )
        for entry in self._oldest():
            if len(self._held) <= budget and len(self._entries) <= MAX_ENTRIES:
                break
            self._let_go(entry)
            self.evicted += 1
        return True

    def release(self, transfer_id: TransferId) -> None:
        """A turn's KV is not needed any more."""
        for name in self._of_turn.get(transfer_id, [])[:]:
            self._let_go(self._entries[name])

    def yield_some(self, now: float) -> bool:
        """A running request lacks blocks: let go of a few, if there are any.

        Returns:
            Whether it is worth waiting for a step before a request is preempted.
        """
        if self._yield_step < self._step - 1:
            self._yielding_since = (now, self._step)
        self._yield_step = self._step
        free, total = self._pins.usage()
        self.make_room(free + max(8, total // 50))
        if self._pins.usage()[0] > free:
            return True
        if self._recent(now, *self._yielding_since) and any(
            self._closes_soon(entry, now) for entry in self._retiring.values()
        ):
            return True
        self.exhausted += not self._entries
        return False

    def make_room(self, wanted: int) -> None:
        """Let go of the oldest until ``wanted`` blocks are free, or will be soon."""
        self._pins.make_room(wanted)
        free, _ = self._pins.usage()
        if free >= wanted or not self._entries:
            return
        now = time.monotonic()
        coming = _Coming()
        for entry in self._retiring.values():
            if self._closes_soon(entry, now):
                coming.will_close(entry)
        for entry in self._oldest():
            if self._pins.usage()[0] + coming.blocks >= wanted:
                break
            if self._let_go(entry):
                coming.has_closed(entry)
            else:
                coming.will_close(entry)
            self.evicted += 1

    def tick(self, now: float) -> None:
        """Act on releases, time and lack of room; once per step."""
        self._step += 1
        while self._to_release:
            self.release(self._to_release.popleft())
        for entry in self._oldest():
            if entry.expires_at > now:
                # A lookup renews an entry and puts it last.
                break
            self._let_go(entry)
            self.expired += 1
        if self._entries:
            _, total = self._pins.usage()
            self.make_room(int(self._watermark * total))

    def drop_all(self) -> None:
        """Let go of everything."""
        for entry in self._oldest():
            self._let_go(entry)

    def closed(self, rank: int, event: SenderClosed) -> bool:
        """A rank has let go of an entry; whether the event was about one."""
        entry = self._retiring.get(event.transfer_id)
        if entry is None:
            return False
        entry.closed_ranks.add(rank)
        if len(entry.closed_ranks) == self._world_size:
            del self._retiring[event.transfer_id]
            self._pins.release_gently(entry.pin)
        return True

    def sizes(self) -> dict[str, int]:
        """Entries per table."""
        return {"retained": len(self._entries), "retiring": len(self._retiring)}

    def release_due(self, now: float) -> bool:
        """Whether steps are wanted, since an entry may close at any moment."""
        return bool(self._to_release) or any(
            now - entry.retired_at < LINGER_SECONDS for entry in self._retiring.values()
        )

    # ---- the side channel's thread

    def lookup(self, transfer_id: TransferId) -> tuple[Kept, ...]:
        """What is kept of a turn; its life begins anew."""
        now = time.monotonic()
        with self._lock:
            found = [self._entries[n] for n in self._of_turn.get(transfer_id, ())]
            for entry in found:
                entry.looked_up = True
                entry.expires_at = now + self._ttl
                self._entries.move_to_end(entry.kept.name)
            return tuple(entry.kept for entry in found)

    def release_soon(self, transfer_id: TransferId) -> bool:
        """Release a turn in the next step; whether it is kept."""
        with self._lock:
            known = transfer_id in self._of_turn
        if known:
            self._to_release.append(transfer_id)
        return known

    # ---- internals

    def _oldest(self) -> Iterator[_Entry]:
        while True:
            with self._lock:
                entry = next(iter(self._entries.values()), None)
            if entry is None:
                return
            yield entry

    def _let_go(self, entry: _Entry) -> bool:
        """Begin to end it; whether that is done."""
        name = entry.kept.name
        with self._lock:
            del self._entries[name]
            names = self._of_turn[entry.transfer_id]
            names.remove(name)
            if not names:
                del self._of_turn[entry.transfer_id]
            known_elsewhere = entry.looked_up
        for block in entry.pin.blocks:
            self._held[block.block_id] -= 1
            if not self._held[block.block_id]:
                del self._held[block.block_id]
        self._commands.append(Retire(name))
        if known_elsewhere:
            entry.retired_at = time.monotonic()
            entry.retired_step = self._step
            self._retiring[name] = entry
        else:
            self._pins.release(entry.pin)
        return not known_elsewhere

    def _closes_soon(self, entry: _Entry, now: float) -> bool:
        return self._recent(now, entry.retired_at, entry.retired_step)

    def _recent(self, now: float, since: float, step: int) -> bool:
        return is_recent(now - since, self._step - step)
