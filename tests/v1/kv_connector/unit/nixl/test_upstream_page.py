# SPDX-License-Identifier: Apache-2.0
"""The page for upstream's maintainers names what there is, here and in the base."""

import ast
import dataclasses
import os
import re
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from fork_build.fetch import cache_directory
from fork_build.pins import REPOSITORY
from fork_build.prepare import Build
from patch_export.table import load_table
from v1.kv_connector.unit.nixl.doc_tables import DOCS, QUOTED, rows
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import params as params_module
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import prom, prom_handoff
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConnectorConfig

PAGE = DOCS / "design" / "upstream.md"
PACKAGE = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/"
KEYS = ["key", "base's default", "ours", "difference"]
FIELDS = ["field", "in an answer of P", "read by", "difference"]
METRICS = ["metric", "in the base", "ours"]


def table(columns: list[str]) -> list[list[str]]:
    found = rows(PAGE.read_text(encoding="utf-8"), columns)
    assert found, columns
    return found


def quoted(cell: str) -> str:
    (found,) = QUOTED.findall(cell)
    return str(found)


@cache
def base_package() -> dict[str, str]:
    """Sources of the package that ours replaces, from the base's wheel."""
    build = Build.from_environment(REPOSITORY)
    wheel = cache_directory(os.environ) / build.wheel.file
    if not wheel.exists():
        pytest.skip(f"the base's wheel is not in {wheel.parent}; run `make install`")
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name).decode()
            for name in archive.namelist()
            if name.startswith(PACKAGE) and name.endswith(".py")
        }


def base_keys() -> dict[str, str]:
    """Keys that the base reads, with the default in its sources."""
    found: dict[str, str] = {}
    for source in base_package().values():
        for node in ast.walk(ast.parse(source)):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="get_from_extra_config"),
                    args=[ast.Constant(value=str(key)), default],
                ):
                    found[key] = ast.unparse(default)
    return found


def test_keys_are_those_of_config_and_of_the_base() -> None:
    ours = {
        field.name: repr(field.default) for field in dataclasses.fields(ConnectorConfig)
    }
    listed = {quoted(row[0]): quoted(row[2]) for row in table(KEYS)}
    assert listed == ours
    base = {quoted(row[0]): quoted(row[1]) for row in table(KEYS) if row[1] != "-"}
    assert base == base_keys()


def metric_names(sources: Iterator[str]) -> set[str]:
    names = re.findall(r'"(vllm:nixl_[a-z_{}]+)"', "\n".join(sources))
    return {name.replace("{name}", "{phase}") for name in names}


def test_metrics_are_those_of_the_sources() -> None:
    files = (prom.__file__, prom_handoff.__file__)
    ours = metric_names(Path(str(file)).read_text(encoding="utf-8") for file in files)
    assert {quoted(row[0]) for row in table(METRICS)} == ours
    base = {quoted(row[0]) for row in table(METRICS) if row[1] == "yes"}
    assert base == metric_names(iter(base_package().values()))


def test_fields_are_those_that_are_given_and_read() -> None:
    source = Path(str(params_module.__file__)).read_text(encoding="utf-8")
    given: dict[str, set[str]] = {}
    read: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_result"):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Dict):
                    given[node.name] = {
                        ast.literal_eval(key) for key in inner.keys if key
                    }
        match node:
            case ast.Call(
                func=ast.Name(),
                args=[ast.Name(id="params"), ast.Constant(value=str(key)), *_],
            ):
                read.add(key)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="params"), attr="get"),
                args=[ast.Constant(value=str(key))],
            ):
                read.add(key)
    listed: dict[str, list[str]] = {}
    for row in table(FIELDS):
        listed |= dict.fromkeys(QUOTED.findall(row[0]), row)
    assert read | given["prefill_result"] | given["retention_result"] <= listed.keys()
    assert {name for name, row in listed.items() if row[1] == "yes"} == (
        given["prefill_result"]
    )
    assert {name for name, row in listed.items() if row[2] != "-"} >= read - {
        "transfer_id"
    }
    base = "\n".join(base_package().values())
    for name, row in listed.items():
        assert (f'"{name}"' not in base) == row[3].startswith("new"), name


def test_commits_are_those_of_the_series() -> None:
    assert [quoted(row[0]) for row in table(["commit", "holds"])] == [
        commit.key for commit in load_table().commits
    ]
