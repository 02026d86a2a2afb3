# SPDX-License-Identifier: Apache-2.0
"""What another version of the base would ask of us, on small trees."""

import sys
from pathlib import Path

import pytest

from rebase_check.collect import collect, lay_ours
from rebase_check.compare import Finding, compare, shown, touched_classes, unknown
from rebase_check.surface import Surface
from rebase_check.uses import uses_of

OURS = """
from vllm.base import Connector
from vllm.moved import Mover
from vllm.tools import gone, renamed, wait
from vllm.given import LIMIT

class Ours(Connector):
    def hook(self, request):
        return wait(request.size, LIMIT)
"""
BASE = {
    "base.py": "class Connector:\n    def hook(self, request): ...\n",
    "moved.py": "class Mover: ...\n",
    "tools.py": "def gone(): ...\ndef renamed(a): ...\ndef wait(a, limit=1): ...\n",
    "given.py": "LIMIT = 1\nclass Request:\n    size: int = 0\n    unused: int = 0\n",
}
OTHER = {
    "base.py": "class Connector:\n    def hook(self, request, step): ...\n"
    "    def fresh(self): ...\n",
    "elsewhere.py": "class Mover: ...\n",
    "tools.py": "def renamed(b): ...\ndef wait(a: int, limit=2): ...\n",
    "given.py": "LIMIT = 1\nclass Request:\n    size: str = 0\n",
}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": "", **files}.items():
        place = root / "vllm" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return root


@pytest.fixture
def findings(tmp_path: Path) -> dict[str, Finding]:
    uses = uses_of({"ours.py": OURS})
    base = Surface(write(tmp_path / "base", BASE))
    other = Surface(write(tmp_path / "other", OTHER))
    found = compare(uses, base, other, [("vllm.given", "Request")])
    assert shown(found, "1.0", "2.0")
    return {finding.name: finding for finding in found}


def test_planted_changes_are_found_and_no_others(
    findings: dict[str, Finding],
) -> None:
    assert {name: finding.kind for name, finding in findings.items()} == {
        "vllm.tools.gone": "removed",
        "vllm.moved.Mover": "removed",
        "vllm.tools.renamed": "changed",
        "vllm.tools.wait": "changed",
        "vllm.base.Connector.hook": "changed",
        "vllm.base.Connector.fresh": "new",
        "vllm.given.Request.size": "types",
    }
    assert findings["vllm.moved.Mover"].after == "now in vllm.elsewhere"
    wait = findings["vllm.tools.wait"]
    assert (wait.before, wait.after) == ("(a, limit=1)", "(a: int, limit=2)")
    assert findings["vllm.base.Connector.hook"].files == ("ours.py",)


def test_the_same_version_asks_nothing(tmp_path: Path) -> None:
    base = Surface(write(tmp_path, BASE))
    uses = uses_of({"ours.py": OURS})
    assert compare(uses, base, base, touched_classes()) == []
    assert unknown(uses, base, [("vllm.given", "Nothing")]) == ["vllm.given.Nothing"]


def test_tests_that_do_not_import_are_named(tmp_path: Path) -> None:
    tree = write(tmp_path / "tree", OTHER)
    ours = tmp_path / "ours"
    (ours / "tests").mkdir(parents=True)
    (ours / "vllm").mkdir()
    (ours / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\nmarkers = ['full: slow']\n"
    )
    (ours / "tests/test_bad.py").write_text("from vllm.moved import Mover\n")
    (ours / "tests/test_good.py").write_text("def test_one(): ...\n")
    names = ["pyproject.toml", "tests/test_bad.py", "tests/test_good.py"]
    lay_ours(ours, names, [], tree)
    found = collect(tree, "tests", Path(sys.executable), tmp_path / "report")
    assert found.tests == 1
    assert list(found.failed) == ["tests/test_bad.py"]
    assert "No module named 'vllm.moved'" in found.failed["tests/test_bad.py"]
