# SPDX-License-Identifier: Apache-2.0
"""Alert rules and runbook name what there is, and say what to do about all of it."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from v1.kv_connector.unit.nixl.exported import (
    engine_metrics,
    families,
    router_metrics,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import stats as names
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.handoff.actions import (
    FailureKind,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.timeline import Role

ROOT = Path(__file__).resolve().parents[5]
FOLDER = ROOT / "examples" / "observability"
RULES, CASES = FOLDER / "nixl_alerts.yml", FOLDER / "nixl_alerts_test.yml"
RUNBOOK = ROOT / "docs" / "features" / "runbook.md"
ROUTER = ROOT / "examples" / "disaggregated" / "disaggregated_serving" / "pd_router"
OURS = ("vllm:nixl_", "pd_router_")
ADDED_BY_PROMETHEUS = {"instance", "job", "le", "alertname", "severity"}
VALUES = {
    "kind": set(FailureKind),
    "role": {*Role, "prefill", "decode"},
    "outcome": set(names.REUSE_OUTCOMES),
    "reason": set(names.RETAINED_ENDS),
}
NOT_FOUND = "Debian's package prometheus has promtool"


@cache
def _rules() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    return {rule["alert"]: rule for rule in rules}


@pytest.fixture(scope="module")
def exported() -> Iterator[dict[str, set[str]]]:
    with engine_metrics() as found:
        yield {**found, **router_metrics()}


def _selectors(expression: str) -> list[Any]:
    found: list[Any] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


def _grouped_by(expression: str) -> set[str]:
    return {
        label.strip()
        for labels in re.findall(r"(?:by|on) \(([^)]*)\)", expression)
        for label in labels.split(",")
    }


@pytest.mark.parametrize("name", _rules())
def test_a_rule_asks_for_metrics_and_labels_that_there_are(
    name: str, exported: dict[str, set[str]]
) -> None:
    expression = _rules()[name]["expr"]
    selectors = _selectors(expression)
    assert selectors
    known: set[str] = set(ADDED_BY_PROMETHEUS)
    for selector in selectors:
        assert selector.name in exported
        labels = exported[selector.name]
        known |= labels
        for matcher in selector.matchers.matchers:
            assert matcher.name in labels, f"{selector.name} has no {matcher.name}"
            values = VALUES.get(matcher.name, set())
            for value in matcher.value.split("|"):
                assert value in values or _is_said_by_the_router(value), value
    assert _grouped_by(expression) <= known


def _is_said_by_the_router(value: str) -> bool:
    return any(f'"{value}"' in file.read_text() for file in ROUTER.glob("*.py"))


@pytest.mark.parametrize("name", _rules())
def test_a_rule_says_how_bad_it_is_and_what_to_do(name: str) -> None:
    rule = _rules()[name]
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert {"summary", "description", "runbook"} == set(rule["annotations"])
    assert all(rule["annotations"].values())
    shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
    grouped = _grouped_by(rule["expr"])
    assert not grouped or shown <= grouped
    page, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert ROOT / page == RUNBOOK
    assert anchor in _anchors()
    assert f"`{name}`" in RUNBOOK.read_text()


def _anchors() -> set[str]:
    """What the headings of the runbook can be linked by."""
    headings = re.findall(r"^#+ (.*)$", RUNBOOK.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


def test_every_rule_has_a_case_that_fires_and_one_that_does_not() -> None:
    cases = yaml.safe_load(CASES.read_text())
    fires: dict[str, list[bool]] = {}
    for case in cases["tests"]:
        (asked,) = case["promql_expr_test"]
        (selector,) = _selectors(asked["expr"])
        (name,) = (m.value for m in selector.matchers.matchers if m.name == "alertname")
        fires.setdefault(name, []).append(bool(asked["exp_samples"]))
    assert set(fires) == set(_rules())
    assert all(sorted(which) == [False, True] for which in fires.values())


def test_the_cases_feed_series_that_there_are(exported: dict[str, set[str]]) -> None:
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for series in case["input_series"]:
            (selector,) = _selectors(series["series"])
            labels = {matcher.name for matcher in selector.matchers.matchers}
            assert labels - ADDED_BY_PROMETHEUS <= exported[selector.name], series


@pytest.mark.skipif(shutil.which("promtool") is None, reason=NOT_FOUND)
@pytest.mark.parametrize("what", [["check", "rules", RULES], ["test", "rules", CASES]])
def test_promtool_agrees(what: list[str | Path]) -> None:
    done = subprocess.run(
        ["promtool", *map(str, what)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_runbook_names_all_metrics_of_ours_and_no_others(
    exported: dict[str, set[str]],
) -> None:
    page = RUNBOOK.read_text()
    told = families(
        name
        for name in re.findall(r"`((?:vllm:|pd_router_)[a-z0-9_]+)(?:\{[^`]*)?`", page)
        if name.startswith(OURS)
    )
    ours = families(name for name in exported if name.startswith(OURS))
    assert told == ours
    rows = {line.split("|")[1] for line in page.splitlines() if line.startswith("| `")}
    for name in ours:
        assert any(f"`{name}" in row for row in rows), f"{name} has no row"


def test_the_runbook_links_to_what_there_is() -> None:
    page = RUNBOOK.read_text()
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page):
        if "://" not in target:
            assert (RUNBOOK.parent / target).exists(), target
    for anchor in re.findall(r"\]\(#([^)]+)\)", page):
        assert anchor in _anchors(), anchor
