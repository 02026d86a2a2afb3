# SPDX-License-Identifier: Apache-2.0
"""What our sources use of the base, read from them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"


@dataclass
class Uses:
    """Everything that we use.

    Attributes:
        names: the files that import each module and name; without a name, the module.
        overrides: the files that override methods of each imported class, by method.
        attributes: every attribute that our files mention.
    """

    names: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    overrides: dict[tuple[str, str], dict[str, set[str]]] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)

    def add(self, module: str, name: str, path: str) -> None:
        """Note that a file imports something."""
        self.names.setdefault((module, name), set()).add(path)


def uses_of(sources: Mapping[str, str]) -> Uses:
    """What Python files import from the base, override and mention.

    Args:
        sources: their texts by POSIX path.
    """
    uses = Uses()
    for path, source in sources.items():
        tree = ast.parse(source)
        imported: dict[str, tuple[str, str]] = {}
        for node in ast.walk(tree):
            match node:
                case ast.Import(names=aliases):
                    for alias in aliases:
                        if _is_base(alias.name):
                            uses.add(alias.name, "", path)
                case ast.ImportFrom(module=str(module), level=0, names=aliases):
                    if _is_base(module):
                        for alias in aliases:
                            if _is_base(f"{module}.{alias.name}"):
                                uses.add(module, alias.name, path)
                                name = alias.asname or alias.name
                                imported[name] = (module, alias.name)
                case ast.Attribute(attr=attribute):
                    uses.attributes.add(attribute)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                _note_overrides(uses, node, imported, path)
    return uses


def _note_overrides(
    uses: Uses, node: ast.ClassDef, imported: Mapping[str, tuple[str, str]], path: str
) -> None:
    methods = [
        item.name
        for item in node.body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for base in _names(node.bases):
        if base in imported:
            found = uses.overrides.setdefault(imported[base], {})
            for method in methods:
                found.setdefault(method, set()).add(path)


def _names(nodes: Iterable[ast.expr]) -> Iterable[str]:
    return (node.id for node in nodes if isinstance(node, ast.Name))


def _is_base(module: str) -> bool:
    inside = module == "vllm" or module.startswith("vllm.")
    return inside and not f"{module}.".startswith(f"{PACKAGE}.")
