# SPDX-License-Identifier: Apache-2.0
"""The fake checkout tells the rules; the last tests hold this one to them."""

import subprocess
from pathlib import Path

import pytest

from fake_fork import OWN, FakeFork
from fork_build.checkout import distribution_files, own_files, stray_files
from fork_build.errors import BuildError
from fork_build.overlay import read_stamp
from fork_build.pins import REPOSITORY, load_pins


def ignored(root: Path, names: list[str]) -> set[str]:
    outcome = subprocess.run(
        ["git", "-C", str(root), "check-ignore", "--no-index", "-z", "--stdin"],
        input="\0".join(names).encode(),
        capture_output=True,
        check=False,
    )
    assert outcome.returncode in (0, 1), outcome.stderr
    return {name for name in outcome.stdout.decode().split("\0") if name}


def test_clean_checkout_has_no_strays(fork: FakeFork) -> None:
    fork.build().lay()
    (fork.root / OWN / "new.py").write_text("NEW = 1\n")
    cache = fork.root / "vllm/__pycache__"
    cache.mkdir()
    (cache / "cli.cpython-311.pyc").write_bytes(b"")
    assert stray_files(fork.root) == []
    assert f"{OWN}/new.py" in distribution_files(fork.root)


def test_own_file_outside_the_allow_list_is_found(fork: FakeFork) -> None:
    fork.build().lay()
    (fork.root / "vllm/old/lost.py").write_text("LOST = True\n")
    assert ignored(fork.root, ["vllm/old/lost.py"])
    assert stray_files(fork.root) == [
        "vllm/old/lost.py: neither part of the base nor visible to git"
    ]


def test_edited_base_file_is_found(fork: FakeFork) -> None:
    fork.build().lay()
    (fork.root / "vllm/cli.py").write_text("EDITED = True\n")
    assert stray_files(fork.root) == ["vllm/cli.py: part of the base, edited in place"]


def test_strays_need_a_laid_base(fork: FakeFork) -> None:
    with pytest.raises(BuildError, match="make install"):
        stray_files(fork.root)


def test_missing_own_path_is_named(fork: FakeFork) -> None:
    for path in (fork.root / OWN).iterdir():
        path.unlink()
    (fork.root / OWN).rmdir()
    with pytest.raises(BuildError, match="own_paths"):
        own_files(fork.root, load_pins(fork.root))


def test_folder_without_git_is_named(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no usable git checkout"):
        distribution_files(tmp_path)


@pytest.mark.parametrize("own", load_pins(REPOSITORY).own_paths)
def test_new_file_at_our_paths_is_visible(own: str) -> None:
    if (REPOSITORY / own).is_file():
        new = [own]
    else:
        new = [f"{own}/new_module.py", f"{own}/new/deeper/data.json"]
    assert ignored(REPOSITORY, new) == set()
    assert ignored(REPOSITORY, [f"{own}/__pycache__/new.cpython-311.pyc"])


def test_allow_list_is_no_wider_than_our_paths() -> None:
    lines = (REPOSITORY / ".gitignore").read_text().splitlines()
    allowed = {
        line.removeprefix("!/").removesuffix("/**")
        for line in lines
        if line.startswith("!") and line != "!/vllm/**/"
    }
    assert allowed == set(load_pins(REPOSITORY).own_paths)


def test_every_base_file_is_ignored() -> None:
    stamp = read_stamp(REPOSITORY)
    assert stamp is not None, "run `make install` first"
    names = sorted(stamp.files)
    assert len(names) > 1000
    assert set(names) - ignored(REPOSITORY, names) == set()
    tracked = set(distribution_files(REPOSITORY))
    assert tracked.isdisjoint(names)


def test_nothing_here_is_lost_to_git() -> None:
    assert stray_files(REPOSITORY) == []
