# SPDX-License-Identifier: Apache-2.0
"""A small tree that has of upstream's what the series touches, and no more."""

import subprocess
from pathlib import Path

from patch_export.table import load_table

PACKAGE = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"
DOTTED = PACKAGE.replace("/", ".")
FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
TRIMMED = f'''"""Tests of something else, some of which reach into the package."""

import json
import math

from {DOTTED} import NixlKVConnectorStats


def test_of_something_else():
    assert math.pi > 3


def helper():
    from {DOTTED}.worker import Worker

    return Worker(json)


def test_with_the_helper():
    assert helper()


class TestStats:
    """Half of it stays."""

    def test_stats(self):
        assert NixlKVConnectorStats()

    def test_without(self):
        assert math.tau
'''
FILES = {
    "pyproject.toml": "[tool.ruff.lint]\nselect = ['E', 'F', 'I']\n",
    "PKG-INFO": "Metadata-Version: 2.4\nName: vllm\nVersion: {version}\n",
    "vllm/__init__.py": "",
    "tests/__init__.py": "",
    "tests/v1/__init__.py": "",
    "tests/v1/kv_connector/__init__.py": "",
    "tests/v1/kv_connector/unit/__init__.py": "",
    "tests/v1/kv_connector/nixl_integration/__init__.py": "",
    "examples/disaggregated/disaggregated_serving/disagg_proxy_demo.py": "OLD = 1\n",
    f"{PACKAGE}/__init__.py": "from .worker import Worker\n",
    f"{PACKAGE}/worker.py": "class Worker:\n    pass\n",
    FACTORY: '''class KVConnectorFactory:
    """Connectors by name."""


KVConnectorFactory.register_connector(
    "NixlConnector",
    "package",
    "NixlConnector",
)

KVConnectorFactory.register_connector(
    "NixlPullConnector",
    "package",
    "NixlPullConnector",
)

KVConnectorFactory.register_connector(
    "NixlPushConnector",
    "package",
    "NixlPushConnector",
)

KVConnectorFactory.register_connector(
    "MultiConnector",
    "another",
    "MultiConnector",
)
''',
    "docs/mkdocs/gen_files/generate_metrics.py": """SOURCES = [
    {"path": "one.py", "key": "metrics-one"},
    {
        "path": "nixl/stats.py",
        "key": "metrics-nixl",
    },
    {
        "path": "another.py",
        "key": "metrics-another",
    },
]
""",
    "docs/usage/metrics.md": """# Metrics

## NIXL KV Connector Metrics

--8<-- "gen:metrics-nixl"

## Others
""",
    "docs/features/kv_offloading_usage.md": "[See](nixl_connector_usage.md#part).\n",
}


def make_tree(root: Path, version: str = "0.32.0") -> Path:
    """Write the tree, an unpacked source distribution, and return its root."""
    files = dict(FILES)
    for commit in load_table().commits:
        for path in commit.removes:
            if not path.endswith("**"):
                files.setdefault(path, f'"""{path}."""\n')
        for edit in commit.edits:
            if edit.trim:
                files.setdefault(edit.path, TRIMMED)
    for path, text in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text.replace("{version}", version))
    return root


def git(root: Path, *arguments: str) -> str:
    """What git prints in a tree."""
    return subprocess.run(
        ["git", "-C", str(root), *arguments],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
