# SPDX-License-Identifier: Apache-2.0
"""What the router counts of conversations, read at scrape time."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .config import Mode
from .multiturn import Multiturn

_BY_LABEL = (
    (
        "pd_router_conversation_turns",
        "Answered turns; hit: prefill was told where the history is kept",
        "result",
        "turns",
    ),
    (
        "pd_router_conversations_dropped",
        "Conversations that the router has forgotten",
        "reason",
        "dropped",
    ),
    (
        "pd_router_conversation_moves",
        "Answered turns that another decode engine took over",
        "reason",
        "moved",
    ),
    (
        "pd_router_conversation_releases",
        "Requests over the side channel to let go of what is kept",
        "result",
        "releases",
    ),
)
_PLAIN = (
    (
        "pd_router_conversation_prompt_tokens",
        "Prompt tokens of the hits for which prefill reported cached tokens",
        "prompt_tokens",
    ),
    (
        "pd_router_conversation_saved_tokens",
        "Those of them that prefill had cached or read and did not compute",
        "saved_tokens",
    ),
)


class ConversationCollector(Collector):
    """The series of one router's conversations."""

    def __init__(self, mode: Mode, multiturn: Multiturn) -> None:
        self._mode = str(mode)
        self._multiturn = multiturn

    def describe(self) -> list[Metric]:
        """Nothing ahead of time: registering must not touch the table."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All series as they are now."""
        self._multiturn.refresh()
        table = self._multiturn.table
        for name, text, label, attribute in _BY_LABEL:
            family = CounterMetricFamily(name, text, labels=["mode", label])
            counts: Mapping[str, int] = getattr(table.totals, attribute)
            for value, count in counts.items():
                family.add_metric([self._mode, value], count)
            yield family
        for name, text, attribute in _PLAIN:
            family = CounterMetricFamily(name, text, labels=["mode"])
            family.add_metric([self._mode], getattr(table.totals, attribute))
            yield family
        known = GaugeMetricFamily(
            "pd_router_conversations", "Conversations known", labels=["mode"]
        )
        known.add_metric([self._mode], len(table))
        yield known
