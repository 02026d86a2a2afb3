# SPDX-License-Identifier: Apache-2.0
"""Conversations: what decode legs leave behind, and what prefill legs read back."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from ..auth import Token
from ..commands import Command
from ..config import ConnectorConfig
from ..handoff.actions import SenderClosed
from ..handoff.kept import new_name
from ..ids import Mode, RequestId, TransferId
from ..params import DecodeParams, EarlierTurn, PrefillAddress, retention_result
from ..wire.questions import Kept
from .content import ContentIndex
from .loads import Loads
from .pins import PinBoard
from .records import Records
from .reset import before_reset
from .retention import Retention
from .reuse import ReuseSide

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

_ANSWERED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass(frozen=True)
class _Turn:
    transfer_id: TransferId
    params: DecodeParams


class Turns:
    """Both sides of re-use over the turns of a conversation.

    Args:
        mode: who moves the bytes of a hand-off; told to routers, as ``address`` is.
        address: this engine's side channel.
        block_size: tokens per block.
        world_size: worker ranks, each of which reports on its own.
    """

    def __init__(
        self,
        mode: Mode,
        config: ConnectorConfig,
        address: PrefillAddress,
        block_size: int,
        content: ContentIndex,
        world_size: int,
        loads: Loads,
        pins: PinBoard,
        records: Records,
        commands: list[Command],
        token: Token | None,
    ) -> None:
        self._mode = mode
        self._address = address
        self._ttl = config.decoder_kv_blocks_ttl
        self._block_size = block_size
        self._content = content
        self._retention = Retention(
            world_size,
            config.decoder_kv_blocks_ttl,
            config.retention_budget,
            config.retention_watermark,
            pins,
            commands,
        )
        self._reuse = ReuseSide(
            config.kv_recompute_threshold,
            config.retention_lookup_timeout,
            config.kv_lease_duration,
            content,
            loads,
            records,
            token,
        )
        self._decoding: dict[RequestId, _Turn] = {}
        self._generation = 0

    def bind(self, manager: "KVCacheManager", keeps_all: bool) -> None:
        """The engine's cache manager; what is kept goes before its cache is reset.

        ``keeps_all``: a request has the blocks of all its tokens, at any time.
        """
        self._reuse.whole_only = not keeps_all
        self._content.hash_block_size = manager.block_pool.hash_block_size
        before_reset(manager, self.drop_all)

    # ---- requests

    def new_prefill(self, request: "Request", earlier: EarlierTurn, now: float) -> None:
        """A prefill leg that names the turn before it."""
        self._reuse.new_request(request, earlier, now)

    def new_decode(
        self, request: "Request", params: DecodeParams, transfer_id: TransferId
    ) -> None:
        """A decode leg, whose KV may be kept when it has ended."""
        turn = _Turn(transfer_id, params)
        self._decoding[RequestId(request.request_id)] = turn

    def matched(self, request_id: RequestId, computed: int) -> int | None:
        """See :meth:`ReuseSide.matched`."""
        return self._reuse.matched(request_id, computed)

    def allocated(
        self,
        request_id: RequestId,
        blocks: "KVCacheBlocks",
        external_tokens: int,
        now: float,
    ) -> None:
        """See :meth:`ReuseSide.allocated`."""
        self._reuse.allocated(request_id, blocks, external_tokens, now)

    def finished(
        self, request: "Request", block_ids: tuple[list[int], ...], now: float
    ) -> dict[str, Any] | None:
        """The request has ended. Returns what the client of a decode leg gets."""
        request_id = RequestId(request.request_id)
        self._reuse.finished(request_id)
        turn = self._decoding.pop(request_id, None)
        if turn is None:
            return None
        answered = request.status in _ANSWERED
        result = None
        if turn.params.retain and (answered or _may_be_answered(request)):
            result = self._keep(request, turn, block_ids, now)
        if turn.params.releases is not None and answered:
            self._retention.release(turn.params.releases)
        return result

    # ---- steps

    def tick(self, now: float) -> None:
        """See :meth:`Retention.tick`."""
        self._retention.tick(now)

    def closed(self, rank: int, event: SenderClosed) -> bool:
        """See :meth:`Retention.closed`."""
        return self._retention.closed(rank, event)

    def make_room(self, blocks: int) -> None:
        """A waiting request needs blocks.

        Its cached prefix counts too: blocks of it that nobody holds are free now,
        and so are those that are let go of here.
        """
        self._retention.make_room(blocks)

    def yield_some(self, now: float) -> bool:
        """See :meth:`Retention.yield_some`."""
        return self._retention.yield_some(now)

    def drop_all(self) -> bool:
        """Let go of all that is kept; whether nothing is left of it."""
        self._retention.drop_all()
        return not any(self._retention.sizes().values())

    def release_due(self, now: float) -> bool:
        """See :meth:`Retention.release_due`."""
        return self._retention.release_due(now)

    def sizes(self) -> dict[str, int]:
        """Entries per table."""
        return {**self._reuse.sizes(), **self._retention.sizes()}

    def counters(self) -> dict[str, int]:
        """What became of kept KV that nobody released, since the start."""
        return {
            "retention_evicted": self._retention.evicted,
            "retention_exhausted": self._retention.exhausted,
            "retention_expired": self._retention.expired,
        }

    def close(self) -> None:
        """Abandon what is open."""
        self._reuse.close()

    # ---- the side channel's thread

    def lookup(self, transfer_id: TransferId) -> tuple[Kept, ...]:
        """See :meth:`Retention.lookup`."""
        return self._retention.lookup(transfer_id)

    def release_soon(self, transfer_id: TransferId) -> bool:
        """See :meth:`Retention.release_soon`."""
        return self._retention.release_soon(transfer_id)

    # ---- internals

    def _keep(
        self,
        request: "Request",
        turn: _Turn,
        block_ids: tuple[list[int], ...],
        now: float,
    ) -> dict[str, Any] | None:
        # The token sampled last has no KV, nor has what an aborted step was to compute.
        computed = request.num_computed_tokens
        if request.status not in _ANSWERED:
            computed -= request.num_in_flight_tokens
        tokens = min(computed, request.num_tokens - 1)
        blocks = -(-tokens // self._block_size)
        if tokens < 1 or any(len(group) < blocks for group in block_ids):
            return None
        self._generation += 1
        kept = self._content.describe(request, tokens, new_name(), self._generation)
        table = tuple(group[:blocks] for group in block_ids)
        if not self._retention.keep(turn.transfer_id, kept, table, now):
            return None
        return retention_result(
            mode=self._mode,
            transfer_id=turn.transfer_id,
            address=self._address,
            num_groups=len(table),
            num_tokens=tokens,
            expires_at=time.time() + self._ttl,
        )


def _may_be_answered(request: "Request") -> bool:
    """Whether the front end may have ended it at a stop string.

    That arrives as an abort, and cannot be told from a client that has gone.
    """
    aborted = request.status is RequestStatus.FINISHED_ABORTED
    return aborted and request.num_output_tokens > 0
