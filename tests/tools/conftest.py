# SPDX-License-Identifier: Apache-2.0
import shutil
from pathlib import Path

import pytest

from fake_fork import OWN, FakeFork
from fork_build.pins import REPOSITORY


@pytest.fixture
def fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFork:
    """A fresh fake checkout under git; pip sees nothing but its index folder."""
    root = tmp_path / "checkout"
    shutil.copytree(
        REPOSITORY / "tools" / "fork_build",
        root / "tools" / "fork_build",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in ("setup.py", "pyproject.toml", ".gitignore", "LICENSE"):
        shutil.copy(REPOSITORY / name, root / name)
    (root / OWN).mkdir(parents=True)
    (root / OWN / "__init__.py").write_text("OURS = True\n")
    index = tmp_path / "index"
    index.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    cache = tmp_path / "cache"
    environ = {"KVFORK_CACHE_DIR": str(cache), "VLLM_TARGET_DEVICE": "cpu"}
    fake = FakeFork(root, index, cache, environ)
    fake.git("init", "--quiet")
    fake.publish()
    fake.git("add", ".")
    return fake
