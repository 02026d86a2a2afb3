# SPDX-License-Identifier: Apache-2.0
"""The ``vllm:nixl_handoff_*_seconds`` histograms."""

from collections.abc import Mapping, Sequence
from typing import Any

from . import stats as names
from .timeline import Role

_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)

DOCUMENTATION = {
    "queue": "From the arrival of a request until its prefill starts (sender) or the "
    "engine allocates blocks for its KV (receiver, reader).",
    "prefill": "From the start of a prefill until all its KV is computed (sender).",
    "claim": "From the end of a prefill until a decode engine has asked for its KV; "
    "0 where it had asked before (sender).",
    "post": "From when KV is both computed and asked for until its last transfer has "
    "been posted (sender).",
    "transfer": "From the last post until the last transfer has ended (sender), or "
    "from the end of prefill, as far as it is known, until all KV has come "
    "(receiver, reader).",
    "release": "From the end of the last transfer until the blocks are free (sender).",
    "connect": "From the allocation of blocks until the other engine was asked for "
    "their KV (receiver, reader).",
    "answer": "From asking the other engine for KV until its first answer (receiver, "
    "reader).",
    "prefill_wait": "From the first answer of the prefill engine until it had "
    "computed the KV (receiver).",
    "resume": "From when all KV has come until the request is scheduled with it "
    "(receiver, reader).",
    "waiting_for_compute": "Time of a hand-off in which an engine was busy or "
    "computed its prompt.",
    "waiting_for_coordination": "Time of a hand-off in which engines waited for each "
    "other's messages or for the next turn of a loop.",
    "total": "From the arrival of a request until its blocks are free (sender) or it "
    "is scheduled with its KV (receiver, reader).",
}


class HandoffHistograms:
    """The durations of hand-offs, labelled with the ``role`` of this side.

    Args:
        labelnames: those that all metrics have.
        per_engine_labelvalues: their values, per engine.
    """

    def __init__(
        self,
        histogram_cls: Any,
        labelnames: Sequence[str],
        per_engine_labelvalues: Mapping[int, Sequence[object]],
    ) -> None:
        self._labelvalues = per_engine_labelvalues
        self._histograms = {
            name: histogram_cls(
                name=f"vllm:nixl_handoff_{name}_seconds",
                documentation=documentation,
                buckets=list(_BUCKETS),
                labelnames=[*labelnames, "role"],
            )
            for name, documentation in DOCUMENTATION.items()
        }
        # An engine has some of the roles only; the others would be empty series.
        self._children: dict[tuple[int, Role, str], Any] = {}

    def observe(self, data: Mapping[str, Sequence[float]], engine: int) -> None:
        """Record one interval's observations for an engine."""
        for (role, name), key in names.HANDOFF_SECONDS.items():
            values = data.get(key)
            if not values:
                continue
            child = self._children.get((engine, role, name))
            if child is None:
                labels = self._labelvalues[engine]
                child = self._histograms[name].labels(*labels, role.value)
                self._children[engine, role, name] = child
            for value in values:
                child.observe(value)
