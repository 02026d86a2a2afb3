# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest

from fork_build.spdx import HEADER, main


@pytest.mark.parametrize(
    ("name", "text", "fine"),
    [
        ("a.py", f"# {HEADER}\nx = 1\n", True),
        ("a.py", "x = 1\n", False),
        ("a.py", f"x = 1\n# {HEADER}\n", False),
        ("__init__.py", "", True),
        ("a.py", f"#!/usr/bin/env python3\n# {HEADER}\n", True),
        ("run", f"#!/usr/bin/env bash\n# {HEADER}\n", True),
        ("run", "#!/usr/bin/env bash\nset -e\n", False),
        ("a.cpp", f"// {HEADER}\n", True),
        ("a.cpp", f"# {HEADER}\n", False),
        ("Makefile", "all:\n", False),
        ("notes.md", "# Notes\n", True),
        ("LICENSE", "Apache License\n", True),
    ],
)
def test_first_line(tmp_path: Path, name: str, text: str, fine: bool) -> None:
    path = tmp_path / name
    path.write_text(text)
    assert main([str(path)]) == (0 if fine else 1)


def test_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bare.py"
    path.write_text("x = 1\n")
    main([str(path)])
    assert str(path) in capsys.readouterr().out
