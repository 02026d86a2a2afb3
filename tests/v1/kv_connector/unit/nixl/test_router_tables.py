# SPDX-License-Identifier: Apache-2.0
"""The tables of the routers' page say what the parser does, field by field."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from field_routers import FIELD, NO_HANDOFF
from v1.kv_connector.unit.nixl.doc_tables import DOCS, QUOTED, exists, rows
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.config import ConnectorConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.ids import (
    EngineId,
    Mode,
    RequestId,
    TransferId,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.params import (
    DecodeParams,
    ParamsError,
    PrefillAddress,
    PrefillParams,
    parse_params,
    prefill_result,
    retention_result,
)

PAGE = DOCS / "features" / "routers.md"
ASKED = ["field", "type", "needed", "meaning", "absent", "malformed"]
ANSWERED = ["field", "type", "meaning"]
FIELD_ROUTERS = ["router", "with", "state", "what to set, what to know"]
TIMES = ["what", "how long", "set by"]

PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "transfer_id": "t2",
    "num_receivers": 2,
    "retained_transfer_id": "t1",
    "remote_request_id": "t1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
}
DECODE: Mapping[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": "t2",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "tp_size": 2,
    "pp_size": 2,
    "remote_block_ids": [[1]],
    "remote_generation": "1f",
    "retain": False,
    "release_transfer_id": "t1",
}
LEGS: Mapping[str, tuple[Mapping[str, Any], type]] = {
    "Prefill leg": (PREFILL, PrefillParams),
    "Decode leg": (DECODE, DecodeParams),
}
ADDRESS = PrefillAddress("10.0.0.1", 5600, EngineId("e"))
ANSWERS: Mapping[str, list[dict[str, Any]]] = {
    "P's answer": [
        prefill_result(
            mode=mode,
            transfer_id=TransferId("t"),
            request_id=RequestId("r"),
            address=ADDRESS,
            block_ids=([1], [2, 3]),
            num_tokens=20,
            generation=generation,
        )
        for mode, generation in ((Mode.PUSH, None), (Mode.PULL, 7))
    ],
    "D's answer": [
        retention_result(
            mode=mode,
            transfer_id=TransferId("t"),
            address=ADDRESS,
            num_groups=2,
            num_tokens=20,
            expires_at=1.5,
        )
        for mode in Mode
    ],
}


def _part(title: str, text: str | None = None) -> str:
    """What stands under a heading."""
    text = PAGE.read_text(encoding="utf-8") if text is None else text
    found = re.search(rf"^### {title}\n(.*?)(?=^##)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, title
    return found[1]


def _fields(title: str, columns: list[str], text: str | None = None) -> list[list[str]]:
    found = rows(_part(title, text), columns)
    assert found, title
    return found


class Watched(dict[str, Any]):
    """A dict that remembers what it was asked for."""

    asked: set[str]

    def get(self, key: str, default: Any = None) -> Any:
        self.asked = {*getattr(self, "asked", ()), key}
        return super().get(key, default)


def _read(params: Mapping[str, Any]) -> set[str]:
    """The fields that the parser looks for, whichever of them there are."""
    asked: set[str] = set()
    for left_out in (None, *params):
        watched = Watched(
            {key: value for key, value in params.items() if key != left_out}
        )
        with contextlib.suppress(ParamsError):
            if parse_params(watched) is not None:
                asked |= watched.asked
    return asked


def _values(kind: str) -> tuple[list[Any], list[Any]]:
    """Values that a type allows, and values next to them that it does not.

    Raises:
        AssertionError: no type is called so.
    """
    others: list[Any] = [{}, [], [[]], 1.5, "", True, 7, "x"]

    def but(*kinds: type) -> list[Any]:
        return [value for value in others if type(value) not in kinds]

    if kind == "boolean":
        return [True, False], but(bool)
    if found := re.fullmatch(r"string of (\d+) to (\d+)", kind):
        least, most = map(int, found.groups())
        long = ["x" * (most + 1), "x" * (least - 1), "a\nb", "kept-x"]
        return ["x" * least, "y" * most], [*but(str), *long]
    if found := re.fullmatch(r"integer from (\d+) to (\d+)", kind):
        least, most = map(int, found.groups())
        return [least, most], [*but(int), least - 1, most + 1]
    if found := re.fullmatch(r"lists of integers from (\d+) to (\d+)", kind):
        least, most = map(int, found.groups())
        wrong: list[Any] = ["x", 7, [], [1], [[least - 1]], [[most + 1]], [["1"]]]
        return [[[least, most]], [[], [1]]], wrong
    assert kind == "hexadecimal string", f"no type is called {kind!r}"
    return ["0", "1f", "7" + "f" * 15], [*but(str), "0x1", "g", "8" + "0" * 15]


def _what_happens(params: Mapping[str, Any], leg: type) -> str:
    try:
        parsed = parse_params(params)
    except ParamsError:
        return "no hand-off"
    if not isinstance(parsed, leg):
        return "not this leg"
    if isinstance(parsed, PrefillParams) and parsed.problem:
        return "nothing is read back"
    return ""


# What may hold "kept-": it names no hand-off.
NO_NAMES = {"remote_host", "remote_engine_id"}


def _problems(title: str, text: str | None = None) -> Iterator[str]:
    params, leg = LEGS[title]
    table = _fields(title, ASKED, text)
    named = [QUOTED.findall(cells[0])[0] for cells in table]
    if missing := _read(params) - set(named):
        yield f"not in the table: {sorted(missing)}"
    if unknown := set(named) - _read(params):
        yield f"not in the parser: {sorted(unknown)}"
    for name, (_, kind, needed, _, absent, malformed) in zip(named, table, strict=True):
        if name not in params:
            continue
        good, bad = _values(kind)
        base = {**params}
        if name == "remote_request_id" and leg is PrefillParams:
            del base["retained_transfer_id"]
        for value in good:
            both = {"do_remote_decode", "do_remote_prefill"}
            if value is not base[name] and name in both:
                continue
            if said := _what_happens({**base, name: value}, leg):
                yield f"{name}: {value!r:.40} means {said}"
        for value in bad:
            if value == "kept-x" and name in NO_NAMES:
                continue
            said = _what_happens({**base, name: value}, leg)
            if said != malformed:
                yield f"{name}: {value!r:.40} means {said!r}, not {malformed!r}"
        without = {key: value for key, value in base.items() if key != name}
        said = _what_happens(without, leg)
        if said != _what_happens({**without, name: None}, leg):
            yield f"{name}: null is not as if it were absent"
        if needed == "yes" and not said:
            yield f"{name}: is not needed"
        if needed == "no" and said:
            yield f"{name}: is needed: {said}"
        if absent == "no hand-off" and said != absent:
            yield f"{name}: its absence means {said!r}"


@pytest.mark.parametrize("title", LEGS)
def test_what_routers_send(title: str) -> None:
    assert list(_problems(title)) == []


@pytest.mark.parametrize(
    ("title", "old", "new", "problem"),
    [
        ("Prefill leg", "| `num_receivers` |", "| `receivers` |", "num_receivers"),
        ("Prefill leg", "from 1 to 4096", "from 0 to 4096", "num_receivers: 0"),
        ("Prefill leg", "from 1 to 65535", "from 1 to 65536", "remote_port: 65536"),
        ("Prefill leg", "| nothing is read back |", "| no hand-off |", "means"),
        ("Decode leg", "| `retain` | boolean |", "| `retain` | string of 1 to 9 |", ""),
        ("Decode leg", "string of 1 to 256 | yes", "string of 1 to 256 | no", "needed"),
        ("Decode leg", "| boolean | no | ours", "| boolean | yes | ours", "not needed"),
        ("Decode leg", "hexadecimal string", "string of 1 to 256", "remote_generation"),
    ],
)
def test_what_is_untrue_is_found(title: str, old: str, new: str, problem: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    part = _part(title, text)
    assert old in part
    found = list(_problems(title, text.replace(part, part.replace(old, new))))
    assert any(problem in said for said in found), found


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
    assert isinstance(value, list)
    return "lists of integers" if any(value) else "lists of nothing"


@pytest.mark.parametrize("title", ANSWERS)
def test_what_engines_answer(title: str) -> None:
    table = {cells[0].strip("`"): cells[1] for cells in _fields(title, ANSWERED)}
    for answer in ANSWERS[title]:
        assert set(table) == set(answer)
    for name, said in table.items():
        kinds = {_kind(answer[name]) for answer in ANSWERS[title]}
        assert kinds == set(said.split(" or ")), name


def test_every_router_has_a_row_and_proof() -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = [cells[0] for cells in rows(text, FIELD_ROUTERS)]
    assert set(named) == {*FIELD, *NO_HANDOFF, "production-stack"}
    assert len(named) == len(set(named))
    for name, test in (
        ("unit/nixl/test_field_routers.py", "test_both_legs_mean_one_hand_off"),
        ("nixl_integration/test_other_routers.py", "test_the_answer_is_right"),
    ):
        assert name in text
        assert exists(f"{name}::{test}")


def test_the_times_are_the_defaults() -> None:
    found = rows(PAGE.read_text(encoding="utf-8"), TIMES)
    assert len(found) > 4
    defaults = ConnectorConfig.parse({})
    for what, said, key in found:
        value = getattr(defaults, key.strip("`"))
        assert said in (f"{value:g} s", "the same"), what
