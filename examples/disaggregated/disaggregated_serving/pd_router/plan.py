# SPDX-License-Identifier: Apache-2.0
"""Where a router brings in what it knows beyond a single attempt."""

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import Reply
from .workers import Worker


class Plan:
    """What is added to one attempt, and what is noted of it: nothing here."""

    def prefer(self, candidates: Sequence[Worker]) -> Worker | None:
        """The decode worker to take, or ``None`` for the least loaded one."""
        return None

    def prefill_params(self) -> Mapping[str, Any]:
        """Further hand-off parameters of the prefill leg."""
        return {}

    def prefilled(self, reply: Reply) -> None:
        """Note the prefill leg's answer."""

    def decode_params(self, worker: Worker) -> Mapping[str, Any]:
        """Further hand-off parameters of a decode leg that goes to ``worker``."""
        return {}

    def answered(self) -> None:
        """Note that the decode leg has an answer."""

    def finished(self, reply: Reply | None) -> None:
        """Note the answer's normal end; a stream has no ``reply``.

        The client has not been given the end yet, so whatever it sends after it
        meets what is noted here.
        """

    def end(self) -> None:
        """Note that all legs of the attempt have ended, however they did."""
