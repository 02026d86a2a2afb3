# SPDX-License-Identifier: Apache-2.0
"""Which implementation is chosen."""

import shutil
import sys
from types import ModuleType

import pytest

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import native as native_module
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.native import (
    INTERFACE,
    VARIABLE,
    Native,
    NativeError,
    load,
)

NAME = f"{native_module.__package__}._native"


@pytest.mark.skipif(
    not any(shutil.which(name) for name in ("c++", "g++", "clang++")),
    reason="without a compiler the module is not built",
)
def test_it_is_built_and_used_where_there_is_a_compiler() -> None:
    chosen = load({})
    assert isinstance(chosen, Native), "run `make install`"
    assert chosen.compiled.INTERFACE == INTERFACE
    assert load({VARIABLE: "native"}) == chosen


def test_numpy_can_be_asked_for() -> None:
    assert load({VARIABLE: "numpy"}) is None


def test_an_unknown_choice_is_named() -> None:
    with pytest.raises(NativeError, match=r"VLLM_NIXL_PLANNER is 'rust'.*numpy"):
        load({VARIABLE: "rust"})


@pytest.mark.parametrize("broken", ["missing", "older"])
def test_without_a_usable_module_numpy_serves_unless_native_is_required(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = ModuleType(NAME)
    older.__file__ = "older.so"
    # None in sys.modules is what makes an import fail.
    replacement = {"missing": None, "older": older}[broken]
    monkeypatch.setitem(sys.modules, NAME, replacement)
    assert load({}) is None
    with pytest.raises(NativeError, match=r"cannot be used: .*C\+\+ compiler"):
        load({VARIABLE: "native"})


def test_what_the_process_uses_was_chosen_by_its_environment() -> None:
    chosen = load()
    assert chosen == native_module.NATIVE
