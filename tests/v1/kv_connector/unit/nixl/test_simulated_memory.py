# SPDX-License-Identifier: Apache-2.0
"""Every topology on simulated memory: each wanted byte arrives, no other changes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from v1.kv_connector.unit.nixl.simulated_memory import (
    Case,
    Layer,
    Side,
    perform,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import pages, pairing, plan

pytestmark = pytest.mark.timeout(120)

CONTENT = 8
GQA = tuple(Layer(f"l{i}", 4, CONTENT) for i in range(4))
LATENT = tuple(
    Layer(f"l{i}.{part}", 1, content)
    for i in range(2)
    for part, content in (("attn", 12), ("indexer", 4))
)


def _layers(kind: str, heads: int, window: int) -> tuple[Layer, ...]:
    match kind:
        case "gqa":
            return tuple(replace(layer, heads=heads) for layer in GQA)
        case "latent":
            return LATENT
        case _:
            return tuple(
                Layer(f"l{i}", heads, CONTENT, i % 2, window if i % 2 else 0)
                for i in range(4)
            )


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    layout = draw(st.sampled_from(["LBHNC", "LBHNC", "BLHNC", "CPU", "LBNHC"]))
    sizes = st.sampled_from([1, 2, 4, 8])
    giver_tp, taker_tp, heads = draw(sizes), draw(sizes), draw(sizes)
    if layout == "LBNHC":
        taker_tp = giver_tp
    small, larger = draw(st.sampled_from([2, 4])), draw(st.sampled_from([1, 1, 2, 4]))
    blocks = [small, small * larger]
    if draw(st.booleans()):
        blocks.reverse()
    stages = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2)]))
    sides = []
    for tp, pp, block in zip((giver_tp, taker_tp), stages, blocks, strict=True):
        split = block > 2 and layout != "BLHNC" and draw(st.booleans())
        sides.append(Side(tp, pp, block, 2 if split else 1, 60, layout))
    prompt = draw(st.integers(1, 40))
    taking = sides[1].block
    first = draw(st.integers(0, (prompt - 1) // taking)) * taking
    whole = draw(st.booleans())
    count = prompt - first if whole else draw(st.integers(1, prompt - first))
    kind = draw(st.sampled_from(["gqa", "latent", "windows"]))
    return Case(
        giver=sides[0],
        taker=sides[1],
        layers=_layers(kind, heads, draw(st.integers(1, 16))),
        prompt=prompt,
        first=first,
        count=count,
        writes=draw(st.booleans()),
        parts=draw(st.sampled_from([1, 1, 2, 3])),
        max_bytes=draw(st.sampled_from([1, 200, 1 << 30])),
        chunk_blocks=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 1000)),
    )


@settings(
    max_examples=1200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(_cases())
def test_what_is_wanted_arrives_and_nothing_else_changes(case: Case) -> None:
    perform(case)


def _case(giver: Side, taker: Side, kind: str = "gqa", **changes: Any) -> Case:
    layers = _layers(kind, 4, 9)
    return replace(Case(giver, taker, layers, prompt=29, first=0, count=29), **changes)


# Each of these is moved rightly, and shows the defect that it stands beside.
DIVIDED = _case(Side(tp=1), Side(tp=2))
JOINED = _case(Side(tp=4), Side(tp=1), writes=False)
SMALLER = _case(Side(block=8), Side(block=4))
LARGER = _case(Side(block=4), Side(block=8), first=8, count=21, writes=False)
WINDOWS = _case(Side(block=4), Side(block=8), "windows")


@pytest.mark.parametrize("case", [DIVIDED, JOINED, SMALLER, LARGER, WINDOWS])
def test_the_examples_are_sound(case: Case) -> None:
    assert perform(case).descriptors


def _another_head(original: Callable[..., Any]) -> Callable[..., Any]:
    def heads(here: Any, there: Any, gives: bool) -> tuple[int, int, int] | None:
        found: tuple[int, int, int] | None = original(here, there, gives)
        if found is None:
            return None
        mine, theirs, count = found
        return (mine + 1) % (here[1].heads - count + 1), theirs, count

    return heads


def _one_unit_on(original: Callable[..., Any]) -> Callable[..., Any]:
    def units(*arguments: Any) -> Any:
        found = original(*arguments)
        local, remote = (
            (ids, (unit + 1) % side.units)
            for (ids, unit), side in (
                (found.local, found.group.local),
                (found.remote, found.group.remote),
            )
        )
        return replace(found, local=local, remote=remote)

    return units


def _one_piece_less(original: Callable[..., Any]) -> Callable[..., Any]:
    def joined(unit: int, local: Any, remote: Any, lengths: Any) -> Any:
        found = original(unit, local, remote, lengths)
        return replace(
            found,
            local=found.local[:, 1:],
            remote=found.remote[:, 1:],
            lengths=found.lengths[1:],
        )

    return joined


def _longer(original: Callable[..., Any]) -> Callable[..., Any]:
    def rows(piece: Any, *arguments: Any) -> Any:
        return [replace(r, length=r.length + 1) for r in original(piece, *arguments)]

    return rows


def _a_block_on(original: Callable[..., Any]) -> Callable[..., Any]:
    def numbers(self: Any, ids: Any, units: Any) -> Any:
        return original(self, (ids + 1) % self.blocks, units)

    return numbers


@pytest.mark.parametrize(
    ("case", "where", "name", "defect"),
    [
        (DIVIDED, pages, "_heads", _another_head),
        (JOINED, pages, "_heads", _another_head),
        (SMALLER, plan, "_in_units", _one_unit_on),
        (LARGER, plan, "_in_units", _one_unit_on),
        (SMALLER, pairing, "_joined", _one_piece_less),
        (DIVIDED, pages, "_rows", _longer),
        (WINDOWS, pages.SidePages, "numbers", _a_block_on),
    ],
)
def test_a_planted_defect_is_found(
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
    where: Any,
    name: str,
    defect: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    pairing._pieces.cache_clear()
    monkeypatch.setattr(where, name, defect(getattr(where, name)))
    try:
        with pytest.raises(AssertionError):
            perform(case)
    finally:
        pairing._pieces.cache_clear()
