# SPDX-License-Identifier: Apache-2.0
"""Whether KV was really moved, or computed again where nobody would notice."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verify_engines import POLL_S, Engines, Told

_BYTES = "vllm:nixl_bytes_transferred_sum"
_TRANSFERS = "vllm:nixl_bytes_transferred_count"
_DESCRIPTORS = "vllm:nixl_num_descriptors_sum"
_ENDED = "vllm:nixl_handoff_total_seconds_count"
_FAILED = (
    "vllm:nixl_num_failed_handoffs_total",
    "vllm:nixl_num_failed_transfers_total",
    "vllm:nixl_num_kv_expired_reqs_total",
)
_COMPUTED = "local_compute"
_ARRIVED = ("received", "not_needed")


@dataclass(frozen=True)
class Movement:
    """What engines told of the hand-offs between two moments.

    Attributes:
        bytes, transfers, descriptors: as counted by whoever moved them.
        recorded: D's record of each of our requests that has one, by its id.
        recorded_bytes: of these, and of what P read back meanwhile.
        ended: hand-offs that D counted; ``None`` where it does not count them.
        computed: prompt tokens that D computed itself, ``None`` as above.
        failures: counters of failures that went up, with by how much.
    """

    bytes: int
    transfers: int
    descriptors: int
    recorded: Mapping[str, Mapping[str, Any]]
    recorded_bytes: int
    ended: int | None
    computed: int | None
    failures: Mapping[str, int]


def movement(before: Told, after: Told, asked: Sequence[str]) -> Movement:
    """What happened between; ``asked`` are the ids of our requests."""

    def grown(name: str, role: str) -> int:
        old, new = before.of(role), after.of(role)
        return int(
            sum(b.sample(name) - a.sample(name) for a, b in zip(old, new, strict=True))
        )

    def both(name: str) -> int:
        return grown(name, "prefill") + grown(name, "decode")

    recorded = {}
    for record in after.records("decode", "receiver"):
        ours = [one for one in asked if one in record["request_id"]]
        recorded.update(dict.fromkeys(ours, record))
    known = {_key(r) for r in before.records("prefill", "reader")}
    read = [r for r in after.records("prefill", "reader") if _key(r) not in known]
    decode = after.of("decode")
    tells_end = any(_ENDED in state.samples for state in decode)
    nudged = after.nudged("decode") - before.nudged("decode")
    computed = [
        new.prompt_tokens.get(_COMPUTED, 0.0) - old.prompt_tokens.get(_COMPUTED, 0.0)
        for old, new in zip(before.of("decode"), decode, strict=True)
        if new.prompt_tokens
    ]
    return Movement(
        bytes=both(_BYTES),
        transfers=both(_TRANSFERS),
        descriptors=both(_DESCRIPTORS),
        recorded=recorded,
        recorded_bytes=sum(r["bytes"] for r in (*recorded.values(), *read)),
        ended=grown(_ENDED, "decode") if tells_end else None,
        computed=int(sum(computed)) - nudged if computed else None,
        failures={name: n for name in _FAILED if (n := both(name))},
    )


async def settled(
    engines: Engines, before: Told, asked: Sequence[str], seconds: float
) -> Movement:
    """The movement once all is told of these requests, or after so many seconds.

    Raises:
        AskError, Unchecked: as :meth:`Engines.told`.
    """
    deadline = time.monotonic() + seconds
    while True:
        await engines.nudge()
        await asyncio.sleep(POLL_S)
        found = movement(before, await engines.told(), asked)
        if engines.have_side_channels:
            whole = len(found.recorded) == len(asked)
            whole = whole and found.bytes == found.recorded_bytes
        else:
            whole = found.ended is None or found.ended >= len(asked)
        if whole or time.monotonic() > deadline:
            return found


def problems(found: Movement, asked: Sequence[str], alone: bool) -> list[str]:
    """Why it is not believed that KV of all these requests was moved.

    If the engines were used ``alone``, by nobody else meanwhile, counts are exact.
    """
    said = []
    if not found.bytes or not found.descriptors:
        said.append(
            f"{found.bytes} bytes in {found.descriptors} descriptors were moved for "
            f"{len(asked)} requests: their prompts were computed again"
        )
    bad = [r for r in found.recorded.values() if r["outcome"] not in _ARRIVED]
    said += [
        f"the hand-off of {r['request_id']} ended as {r['outcome']}: "
        f"{r['cause'] or 'no cause is told'}"
        for r in bad
    ]
    missing = [one for one in asked if one not in found.recorded]
    if found.recorded and missing:
        said.append(
            f"{len(missing)} of {len(asked)} requests have no hand-off on D, such as "
            f"{missing[0]}: D computed their prompts itself"
        )
    # A hand-off leaves one token to be computed at most.
    if alone and found.computed is not None and found.computed > len(asked):
        said.append(
            f"D computed {found.computed} prompt tokens of {len(asked)} requests itself"
        )
    # Nothing is handed over where D has it all, which is so for none of these.
    few = not found.recorded and found.ended is not None and found.ended < len(asked)
    if alone and few:
        said.append(f"D counts {found.ended} hand-offs, expected {len(asked)}")
    if alone and found.recorded and found.bytes != found.recorded_bytes:
        said.append(
            f"{found.bytes} bytes are counted, but {found.recorded_bytes} are in the "
            "records of the hand-offs"
        )
    if alone:
        said += [f"{name} went up by {n}" for name, n in found.failures.items()]
    return said


def failed_causes(told: Told, asked: Sequence[str]) -> list[str]:
    """Why hand-offs of these requests failed, as D recorded it, one for each."""
    return [
        f"{record['outcome']}: {record['cause'] or 'no cause is told'}"
        for record in told.records("decode", "receiver")
        if record["outcome"] not in _ARRIVED
        and any(one in record["request_id"] for one in asked)
    ]


def by_kind(
    found: Movement, kinds: Mapping[str, str]
) -> dict[str, list[Mapping[str, Any]]]:
    """The records of each kind of prompt; ``kinds`` are by request id."""
    grouped: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for one, record in found.recorded.items():
        grouped[kinds[one]].append(record)
    return dict(grouped)


def _key(record: Mapping[str, Any]) -> tuple[str, str]:
    return record["transfer_id"], record["request_id"]
