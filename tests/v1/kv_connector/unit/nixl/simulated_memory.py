# SPDX-License-Identifier: Apache-2.0
"""Two engines in memory: real tensors for every rank, copies by planned descriptors.

What a token's bytes are, and where a cache keeps them, is said here once more and in
another way than in the connector: cell by cell.
"""

import ctypes
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt
import torch

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import AgentName, EngineId
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.layout import (
    CacheLayout,
    LayerShape,
    Row,
    dense,
    describe,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.native import NATIVE
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pages import Lists, pair_ranks
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.plan import Piece, plan
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.serving import (
    count_readers,
    idle_of,
    sources_of,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.topology import heads_of
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.blocks import BlockArray
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.codec import (
    PROTOCOL_VERSION,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.notifications import Want
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.wire.ranks import (
    Plane,
    ProcessInfo,
    RankInfo,
)

Bytes = npt.NDArray[np.uint8]

ITEM = 2
"""Bytes of an element, where a layout tells elements apart."""


@dataclass(frozen=True)
class Layer:
    """A layer of the model: ``heads`` KV heads, each ``content`` bytes per token."""

    name: str
    heads: int
    content: int
    group: int = 0
    window: int = 0


@dataclass(frozen=True)
class Side:
    """An engine: its parallelism, and the blocks of its cache.

    ``layout`` is ``LBHNC``, ``LBNHC``, ``BLHNC`` or ``CPU``: as LBHNC, but in each head
    all keys, one dimension after the other, and then all values.
    """

    tp: int = 1
    pp: int = 1
    block: int = 8
    kernel_blocks: int = 1
    blocks: int = 24
    layout: str = "LBHNC"


@dataclass
class SimulatedRank:
    """One rank: its tensors and what it tells of them."""

    side: Side
    place: tuple[int, int]
    layers: tuple[Layer, ...]
    storage: torch.Tensor
    caches: dict[str, torch.Tensor]
    layout: CacheLayout
    info: RankInfo
    written: dict[int, int] = field(default_factory=dict)

    def heads(self, layer: Layer) -> range:
        return heads_of(self.place[1], self.side.tp, layer.heads)

    def cell(self, layer: Layer, head: int, block: int, token: int) -> list[Bytes]:
        """Views of the bytes of one token of one head, the head counted here."""
        kernel = self.side.block // self.side.kernel_blocks
        lane = self.caches[layer.name][
            block * self.side.kernel_blocks + token // kernel, head
        ].numpy()
        token %= kernel
        if self.side.layout != "CPU":
            return [lane[token]]
        flat = lane.reshape(-1)
        half = layer.content // 2
        keys = [
            flat[(d * kernel + token) * ITEM : (d * kernel + token + 1) * ITEM]
            for d in range(half // ITEM)
        ]
        start = kernel * half + token * half
        return [*keys, flat[start : start + half]]


def _cpu_planes(tokens: int, lane_bytes: int) -> tuple[Plane, ...]:
    half = lane_bytes // 2
    rows = half // tokens // ITEM
    return (
        Plane(0, rows, tokens * ITEM, 1, ITEM),
        Plane(half, 1, 0, 1, half // tokens),
    )


def _tensors(
    side: Side,
    layers: tuple[Layer, ...],
    held: dict[str, int],
    rng: np.random.Generator,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Caches filled with rubbish; layers of different groups overlie each other."""
    kernel = side.block // side.kernel_blocks
    count = side.blocks * side.kernel_blocks
    groups: dict[int, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(layer.group, []).append(layer)
    sizes = {
        layer.name: held[layer.name] * side.block * layer.content for layer in layers
    }
    per_group = [sum(sizes[x.name] for x in group) for group in groups.values()]
    block_bytes = max(per_group)
    storage = torch.from_numpy(
        rng.integers(0, 256, block_bytes * side.blocks, dtype=np.uint8)
    )
    caches: dict[str, torch.Tensor] = {}
    for group in groups.values():
        before = 0
        for layer in group:
            heads, content = held[layer.name], layer.content
            shape = (count, heads, kernel, content)
            inner = (kernel * content, content, 1)
            if side.layout == "LBNHC":
                inner = (content, heads * content, 1)
            if side.layout == "BLHNC":
                offset, stride = before, block_bytes
            else:
                offset, stride = before * side.blocks, heads * kernel * content
            caches[layer.name] = storage.as_strided(shape, (stride, *inner), offset)
            before += sizes[layer.name]
    return storage, caches


def build(
    name: str, side: Side, layers: tuple[Layer, ...], rng: np.random.Generator
) -> list[SimulatedRank]:
    """All ranks of an engine, the layers divided over its stages."""
    ranks: list[SimulatedRank] = []
    for stage, rank in product(range(side.pp), range(side.tp)):
        own = tuple(
            layer
            for index, layer in enumerate(layers)
            if index * side.pp // len(layers) == stage
        )
        held = {x.name: len(heads_of(rank, side.tp, x.heads)) for x in own}
        storage, caches = _tensors(side, own, held, rng)
        shapes = {
            x.name: LayerShape(
                group=x.group,
                tokens=side.block,
                heads=held[x.name],
                model_heads=x.heads,
                window=x.window,
                packing=_cpu_planes if side.layout == "CPU" else dense,
            )
            for x in own
        }
        layout = describe(caches, side.blocks, shapes)
        info = RankInfo(
            protocol=PROTOCOL_VERSION,
            engine_id=EngineId(name),
            agent_name=AgentName(f"{name}:{stage}.{rank}"),
            tp_rank=rank,
            tp_size=side.tp,
            pp_rank=stage,
            pp_size=side.pp,
            block_size=side.block,
            mem_type="DRAM",
            agent_metadata=b"",
            regions=layout.regions,
            compat={},
            layout={},
            process=ProcessInfo("", 0, 0),
        )
        place = (stage, rank)
        ranks.append(SimulatedRank(side, place, own, storage, caches, layout, info))
    return ranks


@dataclass(frozen=True)
class Case:
    """A hand-off: who gives what to whom, by which operation."""

    giver: Side
    taker: Side
    layers: tuple[Layer, ...]
    prompt: int
    first: int
    count: int
    writes: bool = True
    parts: int = 1
    max_bytes: int = 1 << 30
    chunk_blocks: int = 0
    seed: int = 0

    @property
    def want(self) -> Want:
        return Want(self.prompt, self.first, self.count, b"")

    @property
    def unit(self) -> int:
        return min(self.giver.block, self.taker.block)


class Simulation:
    """One hand-off, performed and judged."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = np.random.default_rng(case.seed)
        self.givers = build("giver", case.giver, case.layers, self.rng)
        self.takers = build("taker", case.taker, case.layers, self.rng)
        self.truth = {
            layer.name: self.rng.integers(
                0, 256, (layer.heads, case.prompt, layer.content), dtype=np.uint8
            )
            for layer in case.layers
        }
        groups = 1 + max(layer.group for layer in case.layers)
        self.windows = [
            next(x.window for x in case.layers if x.group == g) for g in range(groups)
        ]
        self.tables = [self._tables(side) for side in (case.giver, case.taker)]
        self._fill()
        self.before = [rank.storage.clone() for rank in self.takers]
        self.descriptors = 0

    def _tables(self, side: Side) -> list[BlockArray]:
        """Per group, a block for each position of the prompt, 0 before the window."""
        length = -(-self.case.prompt // side.block)
        free = list(1 + self.rng.permutation(side.blocks - 1))
        if self.rng.random() < 0.5:
            free.sort(reverse=bool(self.rng.random() < 0.5))
        tables: list[BlockArray] = []
        for window in self.windows:
            table = np.zeros(length, dtype=np.int32)
            for position in range(length):
                skipped = self.case.prompt - window + 1 if window else 0
                if (position + 1) * side.block > skipped:
                    table[position] = free.pop()
            tables.append(table)
        return tables

    def _fill(self) -> None:
        """The givers have computed the prompt."""
        side = self.case.giver
        for rank in self.givers:
            for layer in rank.layers:
                table = self.tables[0][layer.group]
                for here, head in enumerate(rank.heads(layer)):
                    for token in range(self.case.prompt):
                        block = int(table[token // side.block])
                        if block:
                            cell = rank.cell(layer, here, block, token % side.block)
                            _put(cell, self.truth[layer.name][head, token])

    # ---- the hand-off

    def run(self) -> None:
        infos = tuple(rank.info for rank in self.givers)
        asked: Counter[AgentName] = Counter()
        for taker in self.takers:
            for name in sources_of(taker.info, infos):
                asked[name] += 1
                giver = next(r for r in self.givers if r.info.agent_name == name)
                self._move(giver, taker)
        for giver in self.givers:
            if asked[giver.info.agent_name]:
                readers = count_readers(giver.info, self.takers[0].info)
                assert readers == asked[giver.info.agent_name]
        told = [name for rank in self.takers for name in idle_of(rank.info, infos)]
        assert Counter(told) == Counter(
            r.info.agent_name for r in self.givers if not asked[r.info.agent_name]
        )

    def _move(self, giver: SimulatedRank, taker: SimulatedRank) -> None:
        writes = self.case.writes
        local, remote = (giver, taker) if writes else (taker, giver)
        parts = self.case.parts if writes else 1
        lists = pair_ranks(local.info, remote.info, writes, parts)
        moved = 0
        for want in self._chunks():
            tables = [
                [table[_slice(want, side.block)] for table in tables]
                for side, tables in zip(
                    (self.case.giver, self.case.taker), self.tables, strict=True
                )
            ]
            mine, theirs = tables if writes else tables[::-1]
            for part in lists.parts:
                native = NATIVE if self.case.seed % 2 else None
                pieces = plan(part, want, mine, theirs, self.case.max_bytes, native)
                for piece in pieces:
                    self._copy(piece, lists, (local, remote), taker)
                    moved += piece.bytes
        assert moved or not self._anything(giver)

    def _anything(self, giver: SimulatedRank) -> bool:
        return any(not layer.window for layer in giver.layers)

    def _chunks(self) -> list[Want]:
        """What is wanted, cut where blocks of the giver end."""
        case = self.case
        step = case.chunk_blocks * case.giver.block
        if not case.writes or not step:
            return [case.want]
        end = case.first + case.count
        cuts = [c for c in range(0, end, step) if case.first < c < end]
        return [
            Want(case.prompt, start, stop - start, b"")
            for start, stop in pairwise([case.first, *cuts, end])
        ]

    def _copy(
        self,
        piece: Piece,
        lists: Lists,
        ranks: tuple[SimulatedRank, SimulatedRank],
        taker: SimulatedRank,
    ) -> None:
        spans = [
            [_span(rows, int(index)) for index in indices]
            for rows, indices in (
                (lists.local, piece.local),
                (lists.remote, piece.remote),
            )
        ]
        for side, rank in zip(spans, ranks, strict=True):
            for address, length in side:
                assert any(
                    r.address <= address and address + length <= r.address + r.length
                    for r in rank.layout.ranges
                ), "a descriptor leaves the registered memory"
        total = joined = 0
        previous: tuple[int, int] | None = None
        for (mine, length), (theirs, other) in zip(*spans, strict=True):
            assert length == other, "descriptors of different lengths"
            source, target = (mine, theirs) if self.case.writes else (theirs, mine)
            ctypes.memmove(target, source, length)
            taker.written[target] = length
            total += length
            joined += previous == (mine, theirs)
            previous = mine + length, theirs + length
        assert total == piece.bytes
        # At the seam of two rows, pages may follow each other by chance.
        seams = len(piece.pairs.pages.local.bases) - 1
        found = len(spans[0]) - joined
        assert found <= piece.descriptors <= found + seams
        self.descriptors += piece.descriptors

    # ---- the judgement

    def check(self) -> None:
        """What was wanted is there, and nothing else has changed."""
        for rank, before in zip(self.takers, self.before, strict=True):
            expected = replace(rank, caches=_over(rank, before))
            free = replace(rank, caches=_over(rank, mask := torch.zeros_like(before)))
            for layer in rank.layers:
                self._expect(layer, expected, free)
            got, wanted = rank.storage.numpy(), before.numpy()
            wrong = (got != wanted) & (mask.numpy() == 0)
            assert not wrong.any(), (
                f"{np.count_nonzero(wrong)} bytes of {rank.info.agent_name} are not "
                f"what they should be, from byte {np.flatnonzero(wrong)[0]} on"
            )
            self._check_once(rank)

    def _expect(
        self, layer: Layer, expected: SimulatedRank, free: SimulatedRank
    ) -> None:
        """Write what should be into ``expected``, and mark what may be in ``free``."""
        case = self.case
        giving, taking = (tables[layer.group] for tables in self.tables)
        end = case.first + case.count
        for token in range(case.first, -(-end // case.unit) * case.unit):
            position = token // case.taker.block
            block = int(taking[position])
            if not block or not giving[token // case.giver.block]:
                assert layer.window
                assert token < case.prompt - layer.window + 1
                continue
            for here, head in enumerate(expected.heads(layer)):
                where = here, block, token % case.taker.block
                if token < end:
                    value = self.truth[layer.name][head, token]
                    _put(expected.cell(layer, *where), value)
                else:
                    for part in free.cell(layer, *where):
                        part[:] = 1

    @staticmethod
    def _check_once(rank: SimulatedRank) -> None:
        spans = sorted(rank.written.items())
        for (start, length), (following, _) in pairwise(spans):
            assert start + length <= following, "bytes are moved twice"


def _over(rank: SimulatedRank, storage: torch.Tensor) -> dict[str, torch.Tensor]:
    """The rank's caches, in another memory of the same form."""
    return {
        name: storage.as_strided(c.shape, c.stride(), c.storage_offset())
        for name, c in rank.caches.items()
    }


def _put(cell: list[Bytes], value: Bytes) -> None:
    start = 0
    for part in cell:
        part[:] = value[start : start + len(part)]
        start += len(part)
    assert start == len(value)


def _slice(want: Want, block: int) -> slice:
    found = want.block_range(block)
    return slice(found.start, found.stop)


def _span(rows: tuple[Row, ...], index: int) -> tuple[int, int]:
    """Address and length of a descriptor."""
    for row in rows:
        if index < row.count:
            return row.address + index * row.stride, row.length
        index -= row.count
    raise AssertionError("an index beyond the list")


def perform(case: Case) -> Simulation:
    """Do it and judge it."""
    simulation = Simulation(case)
    simulation.run()
    simulation.check()
    return simulation
