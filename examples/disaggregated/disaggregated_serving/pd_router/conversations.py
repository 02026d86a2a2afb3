# SPDX-License-Identifier: Apache-2.0
"""Which conversations decode engines hold the KV cache of. No I/O, no contents."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NewType

from .config import Address, ConversationSettings

Key = NewType("Key", bytes)
"""Names a conversation of one caller; neither can be read from it."""


@dataclass(slots=True, eq=False)
class Kept:
    """What a decode engine keeps of one turn, under the turn's transfer id.

    Token counts are ``None`` where no engine has reported them.
    """

    transfer_id: str
    worker: Address
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    current: bool = False
    """The next turn of its conversation continues from here."""
    users: int = 0
    """Turns under way that continue from here."""
    promised: bool = False
    """One of them has told the engine to let go of it at its own normal end."""
    released: bool = False
    """The engine has let go of it, or has been told to."""


@dataclass(slots=True, eq=False)
class Turn:
    """One turn under way, and what it continues from, if anything."""

    key: Key
    base: Kept | None
    releases_base: bool = False
    deleted: bool = False
    """The conversation was ended meanwhile."""
    over: bool = False


@dataclass(slots=True)
class Conversation:
    """A conversation between two turns; times are those of the table's clock."""

    key: Key
    kept: Kept
    began: float
    used: float
    turns: int = 1


@dataclass(slots=True)
class Totals:
    """What has happened to turns and conversations since the start."""

    turns: dict[str, int] = field(default_factory=lambda: {"hit": 0, "miss": 0})
    dropped: dict[str, int] = field(
        default_factory=lambda: {"expired": 0, "evicted": 0, "deleted": 0}
    )
    moved: dict[str, int] = field(
        default_factory=lambda: {"overloaded": 0, "unavailable": 0}
    )
    releases: dict[str, int] = field(
        default_factory=lambda: {"ok": 0, "failed": 0, "skipped": 0}
    )
    prompt_tokens: int = 0
    saved_tokens: int = 0


class Conversations:
    """The table of conversations, bounded in number and in idle time.

    A conversation is used when a turn begins and when one has ended normally. One
    that has not been used for ``ttl`` seconds is forgotten, and the one used
    longest ago where there are more than ``max_entries``.

    What engines need no longer keep is collected and given out by
    :meth:`take_releases`.
    """

    def __init__(
        self, settings: ConversationSettings, clock: Callable[[], float]
    ) -> None:
        self.settings = settings
        self.totals = Totals()
        self._clock = clock
        # In the order of their last use.
        self._entries: dict[Key, Conversation] = {}
        self._running: dict[Key, set[Turn]] = {}
        self._releases: list[Kept] = []

    def __len__(self) -> int:
        self.sweep()
        return len(self._entries)

    def __iter__(self) -> Iterator[Conversation]:
        """The conversations, the one used last first."""
        self.sweep()
        return iter(tuple(reversed(self._entries.values())))

    @property
    def turns_under_way(self) -> int:
        """How many turns have begun and not ended."""
        return sum(len(turns) for turns in self._running.values())

    def begin(self, key: Key) -> Turn:
        """Begin a turn, from what the last one of this conversation left."""
        self.sweep()
        entry = self._entries.get(key)
        turn = Turn(key, None)
        if entry is not None and not self._expired(entry):
            self._touch(entry)
            turn.base = entry.kept
            entry.kept.users += 1
        self._running.setdefault(key, set()).add(turn)
        return turn

    def promise_release(self, turn: Turn) -> str | None:
        """What the engine may let go of when this turn has ended normally.

        ``None`` where another turn under way continues from there too, or where
        it has been promised already.
        """
        base = turn.base
        if base is None or base.users > 1 or base.promised or base.released:
            return None
        base.promised = turn.releases_base = True
        return base.transfer_id

    def withdraw_promise(self, turn: Turn) -> None:
        """The engine that was told to let go has not come to this turn's end."""
        if turn.base is not None and turn.releases_base:
            turn.base.promised = turn.releases_base = False

    def finish(self, turn: Turn, kept: Kept) -> None:
        """Note the normal end of a turn; the one that ends last is continued."""
        if turn.over:
            return
        if turn.base is not None and turn.releases_base:
            turn.base.released = True
        self._leave(turn)
        if turn.deleted:
            self._release_if_idle(kept)
            return
        now = self._clock()
        entry = self._entries.pop(turn.key, None)
        if entry is None:
            entry = Conversation(turn.key, kept, now, now)
        else:
            self._retire(entry.kept)
            entry.kept, entry.used, entry.turns = kept, now, entry.turns + 1
        kept.current = True
        self._entries[turn.key] = entry
        while len(self._entries) > self.settings.max_entries:
            self._drop(next(iter(self._entries.values())), "evicted")

    def end(self, turn: Turn) -> None:
        """Note the end of a turn that left nothing; harmless after ``finish``."""
        if turn.over:
            return
        if turn.base is not None and turn.releases_base:
            # The engine lets go only after a normal end, so another turn may ask.
            turn.base.promised = False
        self._leave(turn)

    def delete(self, key: Key) -> bool:
        """End a conversation, turns under way included; false if it is unknown."""
        self.sweep()
        running = self._running.get(key, set())
        for turn in running:
            turn.deleted = True
        entry = self._entries.get(key)
        if entry is not None:
            self._drop(entry, "deleted")
        return entry is not None or bool(running)

    def sweep(self) -> None:
        """Forget what has not been used for too long."""
        stale = []
        for entry in self._entries.values():
            if not self._expired(entry):
                break
            # A turn that takes long keeps its conversation alive.
            if not entry.kept.users:
                stale.append(entry)
        for entry in stale:
            self._drop(entry, "expired")

    def take_releases(self) -> list[Kept]:
        """What engines should be told to let go of; each is given out once."""
        releases, self._releases = self._releases, []
        return releases

    def idle_seconds(self, entry: Conversation) -> float:
        """Time since the last use of a conversation."""
        return self._clock() - entry.used

    def age_seconds(self, entry: Conversation) -> float:
        """Time since the end of the first turn of a conversation."""
        return self._clock() - entry.began

    def _expired(self, entry: Conversation) -> bool:
        return self._clock() - entry.used >= self.settings.ttl

    def _touch(self, entry: Conversation) -> None:
        entry.used = self._clock()
        self._entries[entry.key] = self._entries.pop(entry.key)

    def _drop(self, entry: Conversation, reason: str) -> None:
        del self._entries[entry.key]
        self.totals.dropped[reason] += 1
        self._retire(entry.kept)

    def _leave(self, turn: Turn) -> None:
        turn.over = True
        running = self._running[turn.key]
        running.discard(turn)
        if not running:
            del self._running[turn.key]
        if turn.base is not None:
            turn.base.users -= 1
            self._release_if_idle(turn.base)

    def _retire(self, kept: Kept) -> None:
        kept.current = False
        self._release_if_idle(kept)

    def _release_if_idle(self, kept: Kept) -> None:
        if not (kept.current or kept.users or kept.released):
            kept.released = True
            self._releases.append(kept)
