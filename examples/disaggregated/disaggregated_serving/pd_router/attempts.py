# SPDX-License-Identifier: Apache-2.0
"""What a client wants served, and one try at it."""

import functools
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import Role
from .conversations import Key
from .errors import Reply
from .legs import EventStream
from .plan import Plan
from .prompt_size import PromptSize
from .workers import Lease, Work, Worker

logger = logging.getLogger("pd_router")


@dataclass(frozen=True)
class Call:
    """One prompt that a client wants served, perhaps as a conversation's turn."""

    path: str
    body: Mapping[str, Any]
    request_id: str
    headers: Mapping[str, str]
    conversation: Key | None = None

    @functools.cached_property
    def prompt(self) -> PromptSize:
        """Estimates for its prompt."""
        return PromptSize(self.body)

    @property
    def streaming(self) -> bool:
        """Whether the client asked for a stream."""
        return bool(self.body.get("stream"))


class Tries:
    """How many more may be made for a call, whole ones or single legs."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self) -> bool:
        """Make use of one, if there is one left."""
        self._left -= 1
        return self._left >= 0


class Attempt:
    """One try at serving a call; its id is on both legs and on no other try."""

    def __init__(self, call: Call, tries: Tries) -> None:
        self.call = call
        self.tries = tries
        self.transfer_id = uuid.uuid4().hex
        self.prefill: Worker | None = None
        self.decode: Worker | None = None
        self.content: Reply | EventStream | None = None
        self.plan = Plan()
        self.leases: dict[Worker, Lease] = {}
        self.rebound = False
        """Whether a second decode engine was asked for the hand-off."""
        self.lost: set[Worker] = set()
        """Decode engines that were lost on the way."""

    def work(self, role: Role) -> Work:
        """What a leg of it gives a worker to do."""
        return Work(role, self.call.body, self.call.prompt)

    def end(self) -> None:
        """All its legs have ended."""
        for lease in self.leases.values():
            lease.permit.end()
        self.plan.end()

    @property
    def headers(self) -> dict[str, str]:
        """Headers of both legs.

        Engines derive their request ids from these, so parts of a split list and
        retries must not share one.
        """
        leg_id = f"{self.call.request_id}-{self.transfer_id}"
        return {**self.call.headers, "X-Request-Id": leg_id}

    def blame(self, worker: Worker) -> None:
        """Count a failure of a worker that took part."""
        lease = self.leases.get(worker)
        if lease is not None and lease.permit.failure():
            logger.warning(
                "%s has failed %d times in a row and is out of the choice for %.1f s",
                worker,
                worker.breaker.failures,
                worker.breaker.retry_in,
            )

    def take(self, worker: Worker, content: Reply | EventStream) -> bool:
        """Make this the answer, unless there is one already."""
        if self.content is not None:
            return False
        self.decode, self.content = worker, content
        return True

    def complete(self) -> bool:
        """Whether the decode leg has given all it has."""
        content = self.content
        return isinstance(content, Reply) or (content is not None and content.completed)

    def __str__(self) -> str:
        return (
            f"transfer={self.transfer_id} request={self.call.request_id} "
            f"prefill={self.prefill and self.prefill.address} "
            f"decode={self.decode and self.decode.address}"
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """The decode side's answer to a call, known not to begin with a failure."""

    attempt: Attempt
    content: Reply | EventStream
