# SPDX-License-Identifier: Apache-2.0
"""The compatibility page says what the code does, and names tests that there are."""

import ast
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from v1.kv_connector.unit.nixl.doc_tables import (
    DOCS,
    QUOTED,
    exists,
    is_distributed,
    named_tests,
    rows,
)
from v1.kv_connector.unit.nixl.refusals import AT_HANDSHAKE, AT_START, refused
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import support
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConfigError
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import Mode
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.worker import facts

PAGE = DOCS / "features" / "compatibility.md"
COLUMNS = ["what", "status", "proof", "remarks"]
TESTED = ("supported", "simulated", "written, never run")
WHEN: Mapping[str, Mapping[str, object]] = {
    "at start": AT_START,
    "in the handshake": AT_HANDSHAKE,
}
SHORTEST_WORDS = 8


def _problems(text: str) -> list[str]:
    found: list[str] = []
    for cells in rows(text, COLUMNS):
        if len(cells) != len(COLUMNS) or not all(cells[:3]):
            found.append(f"{cells[0]}: {len(cells)} cells, or an empty one")
            continue
        what, status, proof, remarks = cells
        found += [
            f"{what}: {name} does not exist"
            for name in named_tests(remarks)
            if not exists(name)
        ]
        if status == "refused":
            problem = _of_refusal(what, proof, remarks)
        elif status in TESTED:
            problem = _of_tests(status, proof)
        else:
            problem = f"no status is called {status}"
        if problem:
            found.append(f"{what}: {problem}")
    return found


def _of_tests(status: str, proof: str) -> str:
    named = named_tests(proof)
    gone = [name for name in named if not exists(name)]
    if gone or not named:
        return f"{', '.join(gone) or 'no test'} does not exist"
    if any(map(is_distributed, named)) != (status == "supported"):
        return f"{status}, but tests with real engines say otherwise"
    return ""


def _of_refusal(what: str, proof: str, remarks: str) -> str:
    when = next((known for known in WHEN if remarks.startswith(known)), "")
    if what not in WHEN.get(when, ()):
        return f"no configuration is refused {when or 'then'}"
    said = refused(what)
    if said is None:
        return "is not refused"
    words = QUOTED.findall(proof)
    if not words or any(
        len(quoted) < SHORTEST_WORDS or quoted not in str(said) for quoted in words
    ):
        return f"{words} is not what is said: {said}"
    return ""


def _page() -> str:
    return PAGE.read_text(encoding="utf-8")


def _planted(*cells: str) -> list[str]:
    line = "|---|---|---|---|"
    return _problems(
        _page().replace(line, f"{line}\n| planted | {' | '.join(cells)} |", 1)
    )


def test_the_page_is_true() -> None:
    text = _page()
    found = rows(text, COLUMNS)
    names = [cells[0] for cells in found]
    assert len(names) == len(set(names))
    assert _problems(text) == []
    assert {cells[0] for cells in found if cells[1] == "refused"} == {
        *AT_START,
        *AT_HANDSHAKE,
    }
    assert {cells[1] for cells in found} == {*TESTED, "refused"}


def test_every_refusal_of_the_start_has_a_row() -> None:
    """Each ``raise`` in the module that refuses is reached by a configuration."""
    assert support.__file__ is not None
    with open(support.__file__, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    raised = {n.lineno for n in ast.walk(tree) if isinstance(n, ast.Raise)}
    reached: set[int] = set()
    for what in AT_START:
        error = refused(what)
        assert isinstance(error, ValueError), what
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == support.__file__:
                reached.add(trace.tb_lineno)
            trace = trace.tb_next
    assert raised <= reached, sorted(raised - reached)


def test_what_must_be_equal_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "get_current_attn_backends", lambda *_: ())
    model = SimpleNamespace(
        model="m",
        revision="r",
        quantization=None,
        dtype="float32",
        get_total_num_kv_heads=lambda: 1,
        get_head_size=lambda: 8,
        get_total_num_hidden_layers=lambda: 2,
    )
    config: Any = SimpleNamespace(
        model_config=model,
        speculative_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(
            static_forward_context={"layer": SimpleNamespace(isa="vec")}
        ),
    )
    cache: Any = SimpleNamespace(kv_cache_layout="LBHNC", transfer_groups=())
    for title, names in (
        ("In any case", facts.layout_facts(config, cache, Mode.PUSH)),
        ("Unless `enforce_handshake_compat` is off", facts.compat_facts(config)),
    ):
        (line,) = (x for x in _page().splitlines() if x.startswith(f"- {title}: "))
        listed = QUOTED.findall(line.partition(": ")[2])
        assert sorted(listed) == sorted(names)


def test_what_is_not_true_is_found() -> None:
    here = "unit/nixl/test_compatibility.py"
    engines = "nixl_integration/test_ranks.py::test_sizes"
    good = f"`{here}::test_the_page_is_true`"
    assert _planted("simulated", good, "") == []
    assert _planted("supported", f"`{engines}[push-1-2]`", "") == []
    untrue = [
        ("supported", good, ""),
        ("simulated", f"`{engines}`", ""),
        ("supported", f"`{engines}[push-3-7]`", ""),
        ("simulated", f"`{here}::test_of_nothing`", ""),
        ("simulated", "by thought alone", ""),
        ("nearly", good, ""),
        ("refused", "`state-space layers`", "at start"),
    ]
    for cells in untrue:
        (problem,) = _planted(*cells)
        assert problem.startswith("planted: "), problem


def test_a_refusal_that_is_none_or_says_something_else_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mamba = ("refused", "`state-space layers`", "at start")
    monkeypatch.setitem(AT_START, "planted", lambda: None)
    assert _planted(*mamba) == ["planted: is not refused"]

    def other() -> None:
        raise ConfigError("something else is wrong")

    monkeypatch.setitem(AT_START, "planted", other)
    (problem,) = _planted(*mamba)
    assert "is not what is said: something else is wrong" in problem
    (problem,) = _planted("refused", "`something else`", "in the handshake")
    assert "no configuration is refused in the handshake" in problem
    assert _planted("refused", "`something else`", "at start; why not") == []
