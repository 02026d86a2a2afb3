# SPDX-License-Identifier: Apache-2.0
"""A victim among peers, for the tests in which these say what they like."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

import numpy as np

from v1.kv_connector.unit.nixl.arena import (
    Rank,
    Stranger,
    hand_off,
    run,
)
from v1.kv_connector.unit.nixl.hostile import (
    REGISTRATIONS,
    TRANSFERS,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.auth import Token
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.attempts import (
    ReceiveRequest,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    Mode,
    RegistrationId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    PROTOCOL_VERSION,
    encode,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import (
    Hello,
    Message,
    Packet,
    Ping,
    Want,
)

TRANSFER = TransferId(TRANSFERS[0])
REGISTRATION = RegistrationId(REGISTRATIONS[0])
BLOCKS = np.arange(6, dtype=np.int32)
WANT = Want(96, 0, 96, b"digest")

_numbers = count()


LONGEST_LINE = 3000


class _Complaints(logging.Handler):
    """Exceptions that were caught but not foreseen, and what spoils a log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            self.found.append(f"{text}: {record.exc_info[1]!r}")
        elif not text.isprintable() or len(text) > LONGEST_LINE:
            self.found.append(repr(text[:LONGEST_LINE]))


class Scene:
    """A victim, an honest engine and a stranger."""

    def __init__(self, mode: Mode, token: Token | None = None) -> None:
        self.mode = mode
        self.victim = Rank("victim", mode, token)
        self.honest = Rank("honest", mode, token)
        self.ranks = [self.victim, self.honest]
        self.strangers: list[Stranger] = []
        self.heard: list[bytes] = []
        self.stranger = self.another()
        self.work()

    def another(self) -> Stranger:
        """One more stranger."""
        name = f"stranger{len(self.strangers)}"
        self.strangers.append(Stranger(name, self.mode, self.victim.info))
        return self.strangers[-1]

    def tell(self, said: Sequence[bytes], by: Stranger | None = None) -> None:
        """Let the victim hear all this, and act on it."""
        stranger = by or self.stranger
        before = self.victim.agent.taken
        for message in said:
            stranger.say(message)

        def heard() -> bool:
            self.heard += stranger.hear()
            return self.victim.agent.taken - before >= len(said)

        run(self.ranks, heard)
        for rank in self.ranks:
            rank.step()

    def introduce(self, hello: Hello, by: Stranger | None = None) -> None:
        """Let the victim know a stranger, and wait for its answer."""
        stranger = by or self.stranger
        answers: list[bytes] = []

        def answered() -> bool:
            answers.extend(stranger.hear())
            return bool(answers)

        stranger.send(Ping(), hello)
        run(self.ranks, answered)

    def work(self) -> None:
        """Hand-offs in both directions are right."""
        number = next(_numbers)
        hand_off(self.victim, self.honest, f"out-{number}", self.strangers)
        hand_off(self.honest, self.victim, f"in-{number}", self.strangers)

    def check(self) -> None:
        """All is well, and in time nothing is held."""
        self.work()
        run(self.ranks, lambda: not any(self.tables().values()), self.strangers)

    def tables(self) -> dict[str, int]:
        return self.victim.loop._table_sizes()

    def check_bounded(self, most: int) -> None:
        assert all(size <= most for size in self.tables().values()), self.tables()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for stranger in self.strangers:
            stranger.close()


@contextmanager
def scene(mode: Mode, token: Token | None = None) -> Iterator[Scene]:
    """A scene that leads to no exception, caught or not, and leaves a clean log."""
    complaints = _Complaints()
    logger = logging.getLogger("vllm")
    # Each ignored notification is a warning: thousands of lines on the screen.
    usual, logger.handlers = logger.handlers, [complaints]
    try:
        made = Scene(mode, token)
        try:
            yield made
        finally:
            made.close()
    finally:
        logger.handlers = usual
    assert complaints.found == []


def packet(body: Message, hello: Hello | None = None) -> bytes:
    return encode(Packet(PROTOCOL_VERSION, hello, body))


def attempt(mode: Mode, timeout: float = 240.0) -> ReceiveRequest:
    return ReceiveRequest(REGISTRATION, TRANSFER, WANT, (BLOCKS,), timeout, mode)
