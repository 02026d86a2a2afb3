# SPDX-License-Identifier: Apache-2.0
"""The metrics that there are: of an engine with the connector, and of the routers."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.registry import CollectorRegistry

from pd_router.config import ConversationSettings, Mode
from pd_router.conversation_metrics import ConversationCollector
from pd_router.metrics import Metrics
from pd_router.multiturn import Multiturn
from pd_router.side_channel import SideChannelClient
from pd_router.workers import Registry
from tiny_model import tiny_model
from vllm.config import KVTransferConfig, ModelConfig, VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger

_SUFFIXES = ("_bucket", "_count", "_sum", "_created", "_total")


@contextmanager
def engine_metrics() -> Iterator[dict[str, set[str]]]:
    """Names of samples that a real engine with the connector exports, with labels."""
    before = set(REGISTRY._collector_to_names)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(tiny_model()), skip_tokenizer_init=True, dtype="float32"
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlPushConnector", kv_role="kv_both"
        ),
    )
    PrometheusStatLogger(config, [0])
    made = set(REGISTRY._collector_to_names) - before
    try:
        yield _named(REGISTRY, made)
    finally:
        for collector in set(REGISTRY._collector_to_names) - before:
            REGISTRY.unregister(collector)


def router_metrics() -> dict[str, set[str]]:
    """The same of a router that remembers conversations."""
    workers = Registry()
    metrics = Metrics(Mode.PUSH, workers)
    registry = metrics.registry
    found = _named(registry, set(registry._collector_to_names))
    conversations = ConversationCollector(
        Mode.PUSH,
        Multiturn(ConversationSettings(), workers, SideChannelClient(None)),
    )
    read_at_scrape = [
        *conversations.collect(),
        *(family for family in registry.collect() if family.name not in found),
    ]
    for family in read_at_scrape:
        labels = set(getattr(family, "_labelnames", ()))
        name = f"{family.name}_total" if family.type == "counter" else family.name
        if name not in found:
            found[name] = labels
    return found


def families(names: Iterable[str]) -> set[str]:
    """The names as they are declared, of those of samples."""
    return {_family(name) for name in names}


def _family(name: str) -> str:
    for suffix in _SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def _named(registry: CollectorRegistry, made: Iterable[Any]) -> dict[str, set[str]]:
    names: Mapping[Any, list[str]] = registry._collector_to_names
    return {
        name: set(getattr(collector, "_labelnames", ()))
        for collector in made
        for name in names[collector]
    }
