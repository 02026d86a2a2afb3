# SPDX-License-Identifier: Apache-2.0
"""What a tree of the base defines under a name, read without importing it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DEPTH = 12
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Member:
    """One thing that callers see: how it is called, or its value or annotation."""

    shape: str
    """With types left out."""

    full: str


@dataclass(frozen=True)
class Definition:
    """What a name stands for.

    Attributes:
        kind: `module`, `class`, `function` or `value`.
        module: dotted name of where it is defined.
        members: of a class, by name; of anything else, the thing itself under "".
    """

    kind: str
    module: str
    members: dict[str, Member]


class Surface:
    """A tree of sources; `root` holds the folder vllm/."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._parsed: dict[str, ast.Module | None] = {}

    def has_module(self, module: str) -> bool:
        """Whether there is a file or a folder of this dotted name."""
        return self._file(module) is not None or self._folder(module).is_dir()

    def find(self, module: str, name: str, depth: int = 0) -> Definition | None:
        """What `from module import name` gives, or None where that fails."""
        if not name:
            return Definition("module", module, {}) if self.has_module(module) else None
        tree = self._tree(module)
        if tree is not None and depth < _DEPTH:
            found = self._in_module(tree, module, name, depth)
            if found is not None:
                return found
        return self.find(f"{module}.{name}", "")

    def where_defined(self, name: str) -> list[str]:
        """Dotted names of the modules that define a class or function of this name."""
        pattern = re.compile(
            rf"^(?:class|def|async def) {re.escape(name)}\b", re.MULTILINE
        )
        found = []
        for path in sorted((self._root / "vllm").rglob("*.py")):
            if pattern.search(path.read_text(encoding="utf-8", errors="replace")):
                parts = path.relative_to(self._root).with_suffix("").parts
                found.append(".".join(parts).removesuffix(".__init__"))
        return found

    def _in_module(
        self, tree: ast.Module, module: str, name: str, depth: int
    ) -> Definition | None:
        stars: list[str] = []
        for node in _statements(tree.body):
            match node:
                case ast.ClassDef(name=found) if found == name:
                    members = self._class_members(node, module, depth)
                    return Definition("class", module, members)
                case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found) if (
                    found == name
                ):
                    return Definition("function", module, {"": _call(node)})
                case ast.Assign() | ast.AnnAssign() if name in _targets(node):
                    return Definition("value", module, {"": _value(node)})
                case ast.ImportFrom(names=aliases):
                    source = _absolute(node, module, self._file(module))
                    for alias in aliases:
                        if alias.name == "*":
                            stars.append(source)
                        elif (alias.asname or alias.name) == name:
                            return self.find(source, alias.name, depth + 1)
        for source in stars:
            found_there = self.find(source, name, depth + 1)
            if found_there is not None and found_there.kind != "module":
                return found_there
        return self._lazy(tree, module, name, depth)

    def _lazy(
        self, tree: ast.Module, module: str, name: str, depth: int
    ) -> Definition | None:
        """A name that a table of `module:name` texts gives out on demand."""
        for node in ast.walk(tree):
            if not isinstance(node, ast.Dict):
                continue
            for key, value in zip(node.keys, node.values, strict=True):
                match key, value:
                    case ast.Constant(value=str(found)), ast.Constant(
                        value=str(place)
                    ) if found == name and place.startswith("."):
                        source, _, attribute = place.partition(":")
                        return self.find(module + source, attribute, depth + 1)
        return None

    def _class_members(
        self, node: ast.ClassDef, module: str, depth: int
    ) -> dict[str, Member]:
        members: dict[str, Member] = {}
        for base in reversed(node.bases):
            inherited = (
                self.find(module, base.id, depth + 1)
                if isinstance(base, ast.Name) and depth < _DEPTH
                else None
            )
            if inherited is not None and inherited.kind == "class":
                members |= inherited.members
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                members[item.name] = _call(item)
                if item.name == "__init__":
                    members |= {
                        name: Member("attribute", "attribute")
                        for name in _self_attributes(item)
                        if name not in members
                    }
            elif isinstance(item, ast.Assign | ast.AnnAssign):
                for name in _targets(item):
                    members[name] = _value(item)
        return members

    def _tree(self, module: str) -> ast.Module | None:
        if module not in self._parsed:
            path = self._file(module)
            self._parsed[module] = (
                ast.parse(path.read_text(encoding="utf-8")) if path else None
            )
        return self._parsed[module]

    def _file(self, module: str) -> Path | None:
        folder = self._folder(module)
        for path in (folder.with_suffix(".py"), folder / "__init__.py"):
            if path.is_file():
                return path
        return None

    def _folder(self, module: str) -> Path:
        return self._root.joinpath(*module.split("."))


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those behind `if` and `try` included, the last first."""
    for node in reversed(body):
        yield node
        match node:
            case ast.If(body=inner, orelse=other):
                yield from _statements([*inner, *other])
            case ast.Try(body=inner, orelse=other, handlers=handlers):
                for handler in handlers:
                    yield from _statements(handler.body)
                yield from _statements([*inner, *other])


def _absolute(node: ast.ImportFrom, module: str, path: Path | None) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    if path is None or path.name != "__init__.py":
        parts = parts[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _targets(node: ast.stmt) -> list[str]:
    match node:
        case ast.Assign(targets=targets):
            return [item.id for item in targets if isinstance(item, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _self_attributes(function: Function) -> Iterator[str]:
    for node in ast.walk(function):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def _value(node: ast.stmt) -> Member:
    value: ast.expr | None = getattr(node, "value", None)
    annotation: ast.expr | None = getattr(node, "annotation", None)
    shape = f" = {ast.unparse(value)}" if value is not None else ""
    typed = f": {ast.unparse(annotation)}" if annotation is not None else ""
    return Member(shape, typed + shape)


def _call(node: Function) -> Member:
    decorators = [
        f"@{ast.unparse(item)} "
        for item in node.decorator_list
        if isinstance(item, ast.Name)
        and item.id in {"property", "classmethod", "staticmethod", "abstractmethod"}
    ]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    full = f"{''.join(decorators)}({ast.unparse(node.args)}){returns}"
    bare = ast.unparse(_without_types(node.args))
    return Member(f"{''.join(decorators)}({bare})", full)


def _without_types(arguments: ast.arguments) -> ast.arguments:
    def bare(items: list[ast.arg]) -> list[ast.arg]:
        return [ast.arg(item.arg) for item in items]

    return ast.arguments(
        posonlyargs=bare(arguments.posonlyargs),
        args=bare(arguments.args),
        vararg=ast.arg(arguments.vararg.arg) if arguments.vararg else None,
        kwonlyargs=bare(arguments.kwonlyargs),
        kw_defaults=arguments.kw_defaults,
        kwarg=ast.arg(arguments.kwarg.arg) if arguments.kwarg else None,
        defaults=arguments.defaults,
    )
