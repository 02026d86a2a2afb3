# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from fake_fork import FILES, FakeFork, make_wheel
from fork_build.errors import BuildError
from fork_build.pins import PIN_FILE, load_pins
from fork_build.wheel_file import base_files, base_metadata


def test_requirements_and_entry_points_are_carried_over(fork: FakeFork) -> None:
    metadata = fork.build().metadata()
    assert metadata.requirements == (
        "filelock>=3",
        'torch==2.0+cpu; platform_machine == "x86_64"',
        "nixl==1.5.1",
    )
    assert metadata.extras == {
        "video": [],
        "bench": ["pandas>=2", 'scipy; (python_version < "3.12")'],
    }
    assert metadata.entry_points == {
        "console_scripts": ["vllm = vllm.cli:main"],
        "vllm.general_plugins": ["one = vllm.plugins:one"],
    }


def test_version_names_the_target(fork: FakeFork) -> None:
    assert fork.build().version == "1.0+cpu.kv1"


def test_file_that_is_no_wheel(tmp_path: Path) -> None:
    broken = tmp_path / "base-1.0-py3-none-any.whl"
    broken.write_bytes(b"PK but not really")
    with pytest.raises(BuildError, match="cannot read the base wheel"):
        base_metadata(broken)
    with pytest.raises(BuildError, match="cannot read the base wheel"):
        base_files(broken)


def test_hashes_are_those_of_the_record(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "1.0", FILES)
    files = base_files(wheel)
    assert set(files) == set(FILES)
    assert all(len(digest) == 64 for digest in files.values())


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('nixl = "1.5.1"\n', "", "nixl"),
        ('version = "1.0"', "version = 1.0", "version"),
        ("own_paths = [", "own_paths = [3, ", "own_paths"),
        ('distribution = "', 'distributed = "', "distribution"),
    ],
)
def test_malformed_pin_file_names_the_key(
    fork: FakeFork, old: str, new: str, named: str
) -> None:
    path = fork.root / PIN_FILE
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(BuildError, match=f"base.toml.*{named}"):
        load_pins(fork.root)


def test_missing_pin_file(fork: FakeFork) -> None:
    (fork.root / PIN_FILE).unlink()
    with pytest.raises(BuildError, match="cannot read the pin file"):
        load_pins(fork.root)
