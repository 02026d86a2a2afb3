# SPDX-License-Identifier: Apache-2.0
import os
from pathlib import Path

import pytest

from fake_fork import FILES, OWN, FakeFork
from fork_build.errors import BuildError
from fork_build.overlay import read_stamp, remove

OURS = {f"{OWN}/__init__.py": "OURS = True\n"}
LAID = {name: text for name, text in FILES.items() if not name.startswith(OWN)}
NEXT = {
    "vllm/__init__.py": "BASE = 2\n",
    "vllm/cli.py": FILES["vllm/cli.py"],
    "vllm/new/module.py": "NEW = 1\n",
}


def test_lays_all_but_what_is_ours(fork: FakeFork) -> None:
    assert fork.build().lay()
    assert fork.tree() == {**LAID, **OURS}
    status = fork.git("status", "--porcelain", "--", "vllm", ".base")
    assert status == f"A  {OWN}/__init__.py\n"


def test_second_run_touches_nothing(fork: FakeFork) -> None:
    fork.build().lay()
    before = {name: (fork.root / name).stat() for name in LAID}
    (fork.cache / "moved-away").mkdir()
    for wheel in fork.cache.glob("*.whl"):
        wheel.unlink()
    assert not fork.build().lay()
    after = {name: (fork.root / name).stat() for name in LAID}
    assert {name: stat.st_ino for name, stat in before.items()} == {
        name: stat.st_ino for name, stat in after.items()
    }
    assert not list(fork.cache.glob("*.whl"))


def test_missing_file_is_laid_again(fork: FakeFork) -> None:
    fork.build().lay()
    (fork.root / "vllm/cli.py").unlink()
    assert fork.build().lay()
    assert fork.tree() == {**LAID, **OURS}


def test_foreign_file_is_left_alone(
    fork: FakeFork, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = fork.root / "vllm/cli.py"
    mine.write_text("MINE = True\n")
    fork.build().lay()
    assert mine.read_text() == "MINE = True\n"
    assert "left as they are" in capsys.readouterr().err
    stamp = read_stamp(fork.root)
    assert stamp is not None
    assert "vllm/cli.py" not in stamp.files
    fork.publish("2.0", NEXT)
    fork.build().lay()
    assert mine.read_text() == "MINE = True\n"
    remove(fork.root)
    assert mine.read_text() == "MINE = True\n"


def test_foreign_file_taken_away_is_laid(fork: FakeFork) -> None:
    mine = fork.root / "vllm/cli.py"
    mine.write_text("MINE = True\n")
    fork.build().lay()
    mine.unlink()
    assert fork.build().lay()
    assert fork.tree() == {**LAID, **OURS}


def test_own_file_of_a_base_name_wins(fork: FakeFork) -> None:
    pin = fork.root / "tools/fork_build/base.toml"
    pin.write_text(pin.read_text().replace(f'["{OWN}"]', f'["{OWN}", "vllm/cli.py"]'))
    mine = fork.root / "vllm/cli.py"
    mine.write_text("MINE = True\n")
    fork.build().lay()
    assert fork.tree() == {**LAID, **OURS, "vllm/cli.py": "MINE = True\n"}


def test_lost_stamp_is_recovered_by_content(fork: FakeFork) -> None:
    fork.build().lay()
    (fork.root / ".base/stamp.json").unlink()
    assert fork.build().lay()
    stamp = read_stamp(fork.root)
    assert stamp is not None
    assert set(stamp.files) == set(LAID)


def test_unreadable_stamp_says_what_to_do(fork: FakeFork) -> None:
    fork.build().lay()
    (fork.root / ".base/stamp.json").write_text("{")
    with pytest.raises(BuildError, match=r"stamp\.json.*Delete it"):
        fork.build().lay()


def test_new_pin_removes_the_old_files(fork: FakeFork) -> None:
    fork.build().lay()
    cached = fork.root / "vllm/old/__pycache__/only.cpython-311.pyc"
    cached.parent.mkdir()
    cached.write_bytes(b"stale")
    fork.publish("2.0", NEXT)
    assert fork.build().lay()
    assert fork.tree() == {**NEXT, **OURS}
    assert not (fork.root / "vllm/old").exists()


def test_edited_base_file_stops_a_new_pin(fork: FakeFork) -> None:
    fork.build().lay()
    edited = fork.root / "vllm/cli.py"
    edited.write_text("print('being debugged')\n")
    fork.publish("2.0", NEXT)
    with pytest.raises(
        BuildError, match=r"(?s)edited in place.*vllm/cli\.py.*own_paths"
    ):
        fork.build().lay()
    assert fork.tree() == {**LAID, **OURS, "vllm/cli.py": edited.read_text()}
    edited.unlink()
    assert fork.build().lay()


def test_touched_but_equal_file_does_not_stop_it(fork: FakeFork) -> None:
    fork.build().lay()
    os.utime(fork.root / "vllm/cli.py")
    fork.publish("2.0", NEXT)
    assert fork.build().lay()


def test_broken_archive_leaves_the_tree_as_it_was(fork: FakeFork) -> None:
    fork.build().lay()
    wheel = fork.publish("2.0", NEXT)
    content = wheel.read_bytes()
    where = content.index(b"vllm/new/module.py") + len(b"vllm/new/module.py")
    wheel.write_bytes(content[:where] + b"\xff\xff" + content[where + 2 :])
    # The pin is that of the broken file, so that the fault shows while unpacking.
    fork.pin(wheel, "2.0")
    build = fork.build()
    fork.cache.joinpath(wheel.name).write_bytes(wheel.read_bytes())
    with pytest.raises(BuildError, match="cannot lay"):
        build.lay()
    assert fork.tree() == {**LAID, **OURS}
    assert not list((fork.root / ".base").glob("staging-*"))


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_interrupted_move_is_taken_up_again(
    fork: FakeFork, monkeypatch: pytest.MonkeyPatch, moves: int
) -> None:
    fork.build().lay()
    fork.publish("2.0", NEXT)
    real = os.replace
    done = 0

    def failing(source: Path, target: Path) -> None:
        nonlocal done
        if source.suffix == ".partial":
            real(source, target)
            return
        if done == moves:
            raise OSError(28, "No space left on device")
        done += 1
        real(source, target)

    build = fork.build()
    build.archive()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        with pytest.raises(BuildError, match="it takes up from here"):
            build.lay()
    assert fork.build().lay()
    assert fork.tree() == {**NEXT, **OURS}


def test_remove_takes_back_only_what_was_laid(fork: FakeFork) -> None:
    fork.build().lay()
    assert remove(fork.root) == len(LAID)
    assert fork.tree() == OURS
    assert not (fork.root / ".base").exists()
    assert remove(fork.root) == 0


def test_member_outside_the_package_is_refused(fork: FakeFork) -> None:
    fork.publish("2.0", {**FILES, "vllm/../../outside.py": "x"})
    with pytest.raises(BuildError, match=r"outside vllm/"):
        fork.build().lay()
    assert not (fork.root.parent / "outside.py").exists()


def test_damaged_content_leaves_the_tree_as_it_was(fork: FakeFork) -> None:
    wheel = fork.publish("2.0", {**NEXT, "vllm/big.txt": "0123456789" * 1000})
    content = bytearray(wheel.read_bytes())
    where = content.index(b"vllm/big.txt") + len(b"vllm/big.txt") + 8
    content[where : where + 8] = b"\xff" * 8
    wheel.write_bytes(content)
    fork.pin(wheel, "2.0")
    with pytest.raises(BuildError, match="cannot lay"):
        fork.build().lay()
    assert fork.tree() == OURS
