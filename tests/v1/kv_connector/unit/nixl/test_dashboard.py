# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard asks only for what an engine exports."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from v1.kv_connector.unit.nixl.exported import engine_metrics, families
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.prom_handoff import (
    DOCUMENTATION,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.timeline import Role, durations

ROOT = Path(__file__).resolve().parents[5]
DASHBOARD = ROOT / "examples" / "observability" / "nixl_handoff_dashboard.json"
DOCS = ROOT / "docs" / "features" / "nixl_observability.md"
_NAME = re.compile(r"vllm:[a-z0-9_]+")


@pytest.fixture(scope="module")
def exported() -> Iterator[dict[str, set[str]]]:
    with engine_metrics() as found:
        yield found


def _dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def _expressions() -> list[str]:
    dashboard = _dashboard()
    found = [
        target["expr"]
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]
    return found + [
        variable["query"]
        for variable in dashboard["templating"]["list"]
        if variable["type"] == "query"
    ]


def test_every_metric_of_the_dashboard_is_exported(
    exported: dict[str, set[str]],
) -> None:
    asked = {name for text in _expressions() for name in _NAME.findall(text)}
    assert asked
    assert asked <= set(exported)


def test_every_label_of_the_dashboard_is_one_of_its_metrics(
    exported: dict[str, set[str]],
) -> None:
    selector = re.compile(r"(vllm:[a-z0-9_]+)\{([^}]*)\}")
    found = 0
    for text in _expressions():
        for name, labels in selector.findall(text):
            asked = {label.partition("=")[0].strip("~") for label in labels.split(",")}
            # Prometheus adds this one.
            assert asked - {"instance"} <= exported[name], text
            found += 1
    assert found


def test_every_metric_of_ours_is_on_the_dashboard_and_in_the_docs(
    exported: dict[str, set[str]],
) -> None:
    shown = " ".join(_expressions())
    told = DOCS.read_text()
    ours = families(name for name in exported if name.startswith("vllm:nixl_"))
    assert ours
    for name in ours:
        assert name in shown, f"{name} is not on the dashboard"
        assert name in told, f"{name} is not in {DOCS.name}"


def test_panels_have_a_place_of_their_own() -> None:
    panels = _dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_every_duration_has_a_histogram() -> None:
    names = {name for role in Role for name in durations(role)}
    assert names == set(DOCUMENTATION)
