# SPDX-License-Identifier: Apache-2.0
"""Two engines in two processes, and hand-offs between them, timed."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from microbench_connector import STAMPS, Post
from microbench_engine import Arena, Engine, Setting, set_up_process
from microbench_peer import Peer
from microbench_play import Ask, Play, Played, run

LEAD_SECONDS = 0.15
"""From the order to play to its first request."""


@dataclass(frozen=True)
class Timed:
    """One hand-off; milliseconds from when registration and last KV were both there.

    Attributes:
        posted: until NIXL was entered for the first WRITE after that.
        returned: until that call had returned.
        heard: until the receiver had the last notification.
        started: until the step of the receiver began that ran the request.
        moving: from the first WRITE of all to the last notification.
        bytes: bytes of the hand-off.
        late_bytes: those of them that were posted when both were there.
        descriptors: descriptors that NIXL was given.
    """

    posted: float
    returned: float
    heard: float
    started: float
    moving: float
    bytes: int
    late_bytes: int
    descriptors: int


@dataclass
class Result:
    """What came of one play on both engines.

    Attributes:
        timed: the hand-offs that were pushed.
        mine: the prefill engine's part.
        theirs: the decode engine's part.
        outside: cores that all other processes of the machine used meanwhile.
    """

    timed: list[Timed]
    mine: Played
    theirs: Played
    outside: float


@dataclass(frozen=True)
class Arrivals:
    """When the two legs of each hand-off arrive; seconds.

    Attributes:
        count: hand-offs.
        period: from one to the next.
        prefill_after: from a hand-off's beginning to its prefill leg.
        decode_after: the same for its decode leg.
    """

    count: int
    period: float
    prefill_after: float = 0.0
    decode_after: float = 0.0


@dataclass
class Forward:
    """The prefill engine's forward pass; see :class:`Play`."""

    busy: bool = False
    step_seconds: float = 0.01
    token_seconds: float = 0.0
    slice_seconds: float = 0.004
    layered: bool = False


class Pair:
    """This process's prefill engine and a child's decode engine."""

    def __init__(self, arena_bytes: int) -> None:
        self._peer = Peer(arena_bytes)
        self._folder = tempfile.TemporaryDirectory(prefix="microbench-")
        self._count = 0
        set_up_process()
        self.arena = Arena(arena_bytes)
        self.engine: Engine | None = None
        self._decode_port = 0

    @property
    def folder(self) -> str:
        """Where models are described."""
        return self._folder.name

    @contextmanager
    def open(self, setting: Setting) -> Iterator[Engine]:
        """Both engines, connected; one setting at a time."""
        self._peer.tell("open", setting)
        engine = self.engine = Engine("prefill", setting, self.arena)
        self._decode_port = int(self._peer.answer())
        try:
            self.play(Arrivals(2, 0.2), engine.shape.block_size, Forward())
            yield engine
        finally:
            self.engine = None
            engine.close()
            self._peer.close_engine()

    @property
    def decode_port(self) -> int:
        """The decode engine's side channel."""
        return self._decode_port

    def arrange(self, fragmented: bool) -> None:
        """See :meth:`Engine.arrange`; on both engines."""
        assert self.engine is not None
        self.engine.arrange(fragmented)
        self._peer.arrange(fragmented)

    def play(
        self,
        arrivals: Arrivals,
        tokens: int,
        forward: Forward,
        decode_step: float = 0.001,
    ) -> Result:
        """Hand prompts of ``tokens`` over, as they arrive.

        ``decode_step`` is the length in seconds of the decode engine's steps.
        """
        assert self.engine is not None
        start = time.monotonic_ns() + int(LEAD_SECONDS * 1e9)
        period = int(arrivals.period * 1e9)
        prefill: list[Ask] = []
        decode: list[Ask] = []
        for number in range(arrivals.count):
            self._count += 1
            name, seed = f"h{self._count}", self._count
            at = start + number * period
            due = at + int(arrivals.prefill_after * 1e9)
            prefill.append(Ask(name, seed, tokens, due))
            due = at + int(arrivals.decode_after * 1e9)
            decode.append(Ask(name, seed, tokens, due, self.engine.port))
        until = start + arrivals.count * period
        STAMPS.posts.clear()
        before = _busy_cores_seconds()
        self._peer.play(Play(decode, slice_seconds=decode_step, until=until))
        mine = run(
            self.engine,
            Play(
                prefill,
                forward.busy,
                forward.step_seconds,
                forward.token_seconds,
                forward.slice_seconds,
                until,
                forward.layered,
            ),
        )
        theirs = self._peer.played()
        total = _busy_cores_seconds() - before
        outside = (total - mine.cpu - theirs.cpu) / max(mine.wall, 1e-9)
        posts: dict[str, list[Post]] = {}
        for post in STAMPS.posts:
            posts.setdefault(post.attempt, []).append(post)
        timed = [
            _timed(name, mine, theirs, posts)
            for name in theirs.seen
            if theirs.seen[name].attempt in posts
        ]
        return Result(timed, mine, theirs, max(0.0, outside))

    def close(self) -> None:
        """End the other process."""
        self._peer.close()
        self._folder.cleanup()


def _timed(
    name: str, mine: Played, theirs: Played, posts: dict[str, list[Post]]
) -> Timed:
    seen = theirs.seen[name]
    both = max(seen.registered, mine.seen[name].handed[-1])
    all_posts = posts[seen.attempt]
    late = [post for post in all_posts if post.entered >= both]
    first = late[0] if late else all_posts[-1]
    return Timed(
        posted=(first.entered - both) / 1e6,
        returned=(first.left - both) / 1e6,
        heard=(seen.heard - both) / 1e6,
        started=(seen.started - both) / 1e6,
        moving=(seen.heard - all_posts[0].entered) / 1e6,
        bytes=seen.bytes,
        late_bytes=sum(post.bytes for post in late),
        descriptors=seen.descriptors,
    )


def _busy_cores_seconds() -> float:
    """CPU seconds that all processes of the machine have used."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq = (int(field) for field in fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
