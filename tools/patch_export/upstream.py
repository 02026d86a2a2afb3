# SPDX-License-Identifier: Apache-2.0
"""Edits of upstream's own files, found in their text and not kept here."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection

from patch_export.errors import ExportError
from patch_export.table import Edit


def edited(text: str, edit: Edit, removed: Collection[str]) -> str:
    """The text of a file after an edit.

    Args:
        text: as it is in the base.
        edit: what to do.
        removed: dotted names of the modules that the series removes.

    Raises:
        ExportError: what the edit looks for is not there.
    """
    for name in edit.unregister:
        text = _without_registration(text, edit.path, name)
    for pattern, replacement in edit.substitute:
        text, count = re.subn(pattern, replacement, text)
        if not count:
            raise ExportError(
                f"{edit.path} has nothing that fits {pattern!r}: upstream has changed "
                "it. Adapt the entry in tools/patch_export/series.toml"
            )
    if edit.trim:
        trimmed = _trimmed(text, removed, frozenset(edit.keep))
        if trimmed == text:
            raise ExportError(
                f"{edit.path} no longer uses what the series removes: take its `trim` "
                "out of tools/patch_export/series.toml"
            )
        text = trimmed
    return text


def _without_registration(text: str, path: str, name: str) -> str:
    for node in ast.parse(text).body:
        match node:
            case ast.Expr(
                value=ast.Call(
                    func=ast.Attribute(attr="register_connector"),
                    args=[ast.Constant(value=registered), *_],
                )
            ) if registered == name:
                return _without_lines(text, [(node.lineno, node.end_lineno or 0)])
    raise ExportError(
        f"{path} registers no connector {name!r}: upstream has changed it. Adapt the "
        "entry in tools/patch_export/series.toml"
    )


def _trimmed(text: str, removed: Collection[str], keep: Collection[str]) -> str:
    """Drop imports of removed modules, and each function that uses one.

    A function that uses a dropped one of the same file goes, too.
    """
    tree = ast.parse(text)
    names: set[str] = set()
    gone: list[tuple[int, int]] = []
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and _is_removed(node.module, removed):
            bound = {alias.asname or alias.name for alias in node.names}
            if bound <= set(keep):
                continue
            names |= bound
            gone.append((node.lineno, node.end_lineno or 0))
    dropped: set[ast.stmt] = set()
    while True:
        fresh = {
            function
            for function in _functions(tree)
            if function not in dropped and _uses(function, names, removed, keep)
        }
        if not fresh:
            break
        dropped |= fresh
        names |= {
            node.name
            for node in fresh
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node in tree.body
        }
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and _is_empty_without(node, dropped):
            dropped.add(node)
            dropped -= set(node.body)
    gone += [(_first_line(node), node.end_lineno or 0) for node in dropped]
    return _without_lines(text, gone)


def _functions(tree: ast.Module) -> list[ast.stmt]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found: list[ast.stmt] = [node for node in tree.body if isinstance(node, kinds)]
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found += [item for item in node.body if isinstance(item, kinds)]
    return found


def _uses(
    function: ast.stmt,
    names: Collection[str],
    removed: Collection[str],
    keep: Collection[str],
) -> bool:
    for node in ast.walk(function):
        match node:
            case ast.Name(id=name) if name in names:
                return True
            case ast.Constant(value=str(value)) if _is_removed(value, removed):
                return True
            case ast.ImportFrom(module=module, names=aliases):
                wanted = {alias.name for alias in aliases}
                if _is_removed(module, removed) and not wanted <= set(keep):
                    return True
                if wanted & set(names):
                    return True
    return False


def _is_removed(name: str | None, removed: Collection[str]) -> bool:
    return name is not None and any(
        name == module or name.startswith(module + ".") for module in removed
    )


def _is_empty_without(node: ast.ClassDef, dropped: Collection[ast.stmt]) -> bool:
    functions = [item for item in node.body if not isinstance(item, ast.Expr)]
    return bool(functions) and all(item in dropped for item in functions)


def _first_line(node: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _without_lines(text: str, spans: list[tuple[int, int]]) -> str:
    lines = text.splitlines(keepends=True)
    for first, last in sorted(spans, reverse=True):
        end = last
        while end < len(lines) and not lines[end].strip():
            end += 1
        before = first - 1
        while end == len(lines) and before and not lines[before - 1].strip():
            before -= 1
        del lines[before:end]
    return "".join(lines)
