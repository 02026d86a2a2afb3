# SPDX-License-Identifier: Apache-2.0
"""A tiny base wheel behind the real pip, and a checkout to lay it into."""

import base64
import hashlib
import platform
import subprocess
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fork_build.pins import PIN_FILE
from fork_build.prepare import Build

OWN = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"
DISTRIBUTION = "fork-test-base"
TAG = f"cp38-abi3-manylinux_2_17_{platform.machine()}"
METADATA = """\
Metadata-Version: 2.4
Name: fork-test-base
Version: {version}
Requires-Dist: filelock>=3
Requires-Dist: torch==2.0+cpu; platform_machine == "x86_64"
Requires-Dist: Torch_Vision; platform_machine != "s390x"
Requires-Dist: nixl>=0.1
Provides-Extra: video
Provides-Extra: bench
Requires-Dist: pandas>=2; extra == "bench"
Requires-Dist: scipy; (python_version < "3.12") and extra == "bench"
"""
ENTRY_POINTS = """\
[console_scripts]
vllm = vllm.cli:main

[vllm.general_plugins]
one = vllm.plugins:one
"""
FILES = {
    "vllm/__init__.py": "BASE = True\n",
    "vllm/cli.py": "def main():\n    print('base cli')\n",
    "vllm/old/only.py": "ONLY = 1\n",
    "vllm/data/table.json": "{}\n",
    "vllm/_C.abi3.so": "not really a library",
    f"{OWN}/__init__.py": "UPSTREAM = True\n",
    f"{OWN}/upstream_only.py": "UPSTREAM = True\n",
}


def make_wheel(
    folder: Path,
    version: str,
    files: Mapping[str, str],
    distribution: str = DISTRIBUTION,
    tag: str = TAG,
) -> Path:
    """Write a wheel that pip accepts."""
    name = distribution.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    texts = {
        **files,
        f"{info}/METADATA": METADATA.format(version=version).replace(
            "Name: fork-test-base", f"Name: {distribution}"
        ),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n",
        f"{info}/entry_points.txt": ENTRY_POINTS,
    }
    record = ""
    for path, text in texts.items():
        digest = hashlib.sha256(text.encode()).digest()
        value = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        record += f"{path},sha256={value},{len(text)}\n"
    texts[f"{info}/RECORD"] = record + f"{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in texts.items():
            archive.writestr(zipfile.ZipInfo(path, (2020, 1, 2, 3, 4, 6)), text)
    return wheel


@dataclass
class FakeFork:
    """A checkout with the real build files, whose base is a tiny wheel."""

    root: Path
    index: Path
    cache: Path
    environ: dict[str, str] = field(default_factory=dict)

    def publish(self, version: str = "1.0", files: Mapping[str, str] = FILES) -> Path:
        """Put a base wheel where pip looks for it, and pin it."""
        wheel = make_wheel(self.index, version, files)
        self.pin(wheel, version)
        return wheel

    def pin(self, wheel: Path, version: str = "1.0", sha256: str | None = None) -> None:
        """Rewrite the pin file for this wheel."""
        sha256 = sha256 or hashlib.sha256(wheel.read_bytes()).hexdigest()
        (self.root / PIN_FILE).write_text(
            f'version = "{version}"\nfork_label = "kv1"\nnixl = "1.5.1"\n'
            f'own_paths = ["{OWN}"]\n'
            f'[targets.cpu]\ndistribution = "{DISTRIBUTION}"\nlocal_label = "cpu"\n'
            'dropped_requirements = ["torch-vision"]\n'
            f'[targets.cpu.wheels]\n"{wheel.name}" = "{sha256}"\n'
        )

    def build(self) -> Build:
        """Read the checkout as a new build process would."""
        return Build.from_environment(self.root, self.environ)

    def tree(self) -> dict[str, str]:
        """Text of every file under vllm/."""
        return {
            path.relative_to(self.root).as_posix(): path.read_text()
            for path in (self.root / "vllm").rglob("*")
            if path.is_file()
        }

    def git(self, *arguments: str) -> str:
        """Run git in the checkout."""
        outcome = subprocess.run(
            ["git", "-C", str(self.root), *arguments],
            check=True,
            capture_output=True,
            text=True,
        )
        return outcome.stdout
