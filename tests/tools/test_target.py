# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from fork_build import target as target_module
from fork_build.errors import BuildError
from fork_build.pins import REPOSITORY, load_pins
from fork_build.target import choose_target, choose_wheel

PINS = load_pins(REPOSITORY)


@pytest.mark.parametrize("value", ["cpu", "cuda", " CUDA "])
def test_variable_decides(value: str) -> None:
    chosen = choose_target(PINS, {"VLLM_TARGET_DEVICE": value})
    assert chosen.name == value.strip().lower()


@pytest.mark.parametrize(("driver", "expected"), [(True, "cuda"), (False, "cpu")])
def test_driver_decides_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: bool, expected: str
) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(target_module, "_DRIVER_FILE", file)
    monkeypatch.setattr(target_module, "_CUDA_LIBRARY", "libfork-test-absent.so.1")
    if driver:
        file.write_text("NVRM version: 1\n")
    assert choose_target(PINS, {}).name == expected
    assert choose_target(PINS, {"VLLM_TARGET_DEVICE": ""}).name == expected


def test_loadable_cuda_library_counts_as_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_module, "_DRIVER_FILE", tmp_path / "absent")
    monkeypatch.setattr(target_module, "_CUDA_LIBRARY", "libc.so.6")
    assert choose_target(PINS, {}).name == "cuda"


def test_unsupported_value_names_the_supported() -> None:
    with pytest.raises(
        BuildError, match="'rocm' is not supported; use one of: cpu, cuda"
    ):
        choose_target(PINS, {"VLLM_TARGET_DEVICE": "rocm"})


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_each_target_has_a_wheel_for(name: str, machine: str) -> None:
    wheel = choose_wheel(PINS.targets[name], "Linux", machine)
    assert wheel.file.endswith(f"_{machine}.whl")
    assert PINS.version in wheel.file
    assert len(wheel.sha256) == 64


def test_other_machines_are_refused() -> None:
    with pytest.raises(BuildError, match=r"no base wheel is pinned.*Darwin arm64"):
        choose_wheel(PINS.targets["cpu"], "Darwin", "arm64")


def test_cpu_version_is_recognisable_as_such() -> None:
    assert "cpu" in PINS.fork_version(PINS.targets["cpu"])
    assert "cpu" not in PINS.fork_version(PINS.targets["cuda"])
