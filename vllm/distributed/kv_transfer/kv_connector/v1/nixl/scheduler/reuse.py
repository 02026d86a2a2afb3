# SPDX-License-Identifier: Apache-2.0
"""The prefill side of later turns: KV of the conversation is read back.

A request goes through::

    ASKING ──▶ FOUND ──▶ over (reads)
       └─────────┴──────▶ over (computes)

While the question is open the engine is asked to come again; it passes on to other
requests meanwhile. Whatever goes wrong, the prompt is computed here.
"""

import time
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from vllm.logger import init_logger

from ..auth import Token
from ..handoff.kept import is_kept
from ..ids import Mode, RequestId, TransferId
from ..params import EarlierTurn
from ..side_channel import Address, Exchange, Exchanges
from ..timeline import Stage, Timeline
from ..wire.notifications import Want
from ..wire.questions import Found, Kept, Lookup
from .content import ContentIndex
from .loads import Loads, OnFailure, Purpose
from .records import HandoffRecord, Records

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

logger = init_logger(__name__)

POLL_SECONDS = 0.001
"""Shortest time between two looks at the sockets of all open questions."""


class _Phase(Enum):
    ASKING = auto()
    FOUND = auto()
    OVER = auto()


@dataclass
class _Reuse:
    request: "Request"
    transfer_id: TransferId
    address: Address
    phase: _Phase = _Phase.ASKING
    kept: Kept | None = None
    shared: int = 0
    timeline: Timeline = field(default_factory=Timeline.start)


class ReuseSide:
    """Prompts of which another engine may keep a part.

    Args:
        threshold: fewest tokens that are worth reading.
        lookup_timeout: seconds that the question may take.
        read_timeout: seconds that a READ may take.

    Attributes:
        whole_only: whether KV is of use only if a prompt shares all of it. What a
            sliding window has let go of is not kept, so that a prompt can go on from
            the end of what is kept, and from no other place.
    """

    def __init__(
        self,
        threshold: int,
        lookup_timeout: float,
        read_timeout: float,
        content: ContentIndex,
        loads: Loads,
        records: Records,
        token: Token | None,
    ) -> None:
        self.whole_only = False
        self._threshold = max(1, threshold)
        self._content = content
        self._loads = loads
        self._records = records
        self._purpose = Purpose(
            Mode.PULL, "reader", "read", "recomputed", OnFailure.RECOMPUTE, read_timeout
        )
        self._questions: Exchanges[RequestId] = Exchanges(
            lookup_timeout, "retention_lookup_timeout", token
        )
        self._polled_at = 0.0
        self._reuses: dict[RequestId, _Reuse] = {}

    def new_request(self, request: "Request", earlier: EarlierTurn, now: float) -> None:
        """A prompt continues a conversation of which another engine keeps KV."""
        request_id = RequestId(request.request_id)
        address = (earlier.host, earlier.port)
        reuse = _Reuse(request, earlier.transfer_id, address)
        self._questions.start(request_id, address, Lookup(earlier.transfer_id), now)
        self._reuses[request_id] = reuse

    def matched(self, request_id: RequestId, computed: int) -> int | None:
        """Tokens to be read beyond ``computed``; ``None``: not known yet."""
        reuse = self._reuses.get(request_id)
        if reuse is None or reuse.phase is _Phase.OVER:
            return 0
        if reuse.phase is _Phase.ASKING:
            self._take_answers(time.monotonic())
        if reuse.phase is _Phase.ASKING:
            return None
        more = reuse.shared - computed
        return more if more >= self._threshold else 0

    def allocated(
        self,
        request_id: RequestId,
        blocks: "KVCacheBlocks",
        external_tokens: int,
        now: float,
    ) -> None:
        """The engine has blocks for the request, ``external_tokens`` to be read."""
        reuse = self._reuses.get(request_id)
        if reuse is None or reuse.phase is _Phase.OVER:
            return
        if reuse.phase is _Phase.ASKING:
            # The engine does not wait for requests that must be computed.
            self._questions.abandon(request_id)
        if reuse.kept is None:
            self._end(reuse, "nothing of this prompt is kept")
            return
        if external_tokens <= 0:
            self._end(
                reuse,
                f"too little to gain: {reuse.shared} tokens are kept, of which the "
                "prefix cache lacks less than kv_recompute_threshold",
                self._purpose.failure,
            )
            return
        reuse.phase = _Phase.OVER
        reuse.timeline.mark(Stage.REGISTERED, now)
        first = reuse.shared - external_tokens
        self._loads.begin(
            reuse.request,
            reuse.transfer_id,
            reuse.address,
            Want(reuse.kept.num_tokens, first, external_tokens, b""),
            blocks.blocks,
            self._purpose,
            now,
            reuse.timeline,
            name=reuse.kept.name,
        )

    def finished(self, request_id: RequestId) -> None:
        """The request has ended, in whatever way."""
        reuse = self._reuses.pop(request_id, None)
        if reuse is not None and reuse.phase is _Phase.ASKING:
            self._questions.abandon(request_id)

    def close(self) -> None:
        """Abandon what is open."""
        self._questions.close()

    def sizes(self) -> dict[str, int]:
        """Entries per table."""
        return {
            "reuse_asking": sum(
                reuse.phase is _Phase.ASKING for reuse in list(self._reuses.values())
            )
        }

    # ---- internals

    def _take_answers(self, now: float) -> None:
        # Every waiting request comes by here in every step.
        if now - self._polled_at < POLL_SECONDS:
            return
        self._polled_at = now
        for ended in self._questions.poll(now):
            reuse = self._reuses.get(ended.key)
            if reuse is not None and reuse.phase is _Phase.ASKING:
                self._answered(reuse, ended)

    def _answered(self, reuse: _Reuse, ended: Exchange[RequestId]) -> None:
        if not isinstance(ended.reply, Found):
            self._end(reuse, ended.failure or "an answer of another kind")
            return
        for kept in ended.reply.kept:
            if not is_kept(kept.name):
                # Under any other name it would be asked for as a hand-off.
                continue
            shared = self._content.shared_tokens(reuse.request, kept)
            if self.whole_only and shared < kept.num_tokens:
                continue
            if shared > reuse.shared:
                reuse.shared, reuse.kept = shared, kept
        reuse.phase = _Phase.FOUND

    def _end(self, reuse: _Reuse, why: str, outcome: str = "missed") -> None:
        reuse.phase = _Phase.OVER
        logger.debug("Turn %s is not read back: %s", reuse.transfer_id, why)
        self._records.add(
            HandoffRecord(
                reuse.transfer_id,
                RequestId(reuse.request.request_id),
                "reader",
                outcome,
                cause=why,
                timeline=reuse.timeline,
            )
        )
