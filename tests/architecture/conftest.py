"""What the architecture tests read: every source file of the package, parsed once, and the imports in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import pytest

from accelerate.base.lazy import read_table

ROOT = Path(__file__).parents[2] / "src" / "accelerate"
PACKAGE = ROOT.name


class Import(NamedTuple):
    """One imported module or name, absolute, and where it is imported.

    `target` is where the name is defined, `asked` where the import looks for it: a package's table (its
    `__init__.pyi`) may be between them.
    """

    target: str
    asked: str
    line: int
    inside_function: bool
    for_types: bool


class Source:
    """One file of the package."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = (PACKAGE, *path.relative_to(ROOT).with_suffix("").parts)
        self.module = ".".join(part for part in self.parts if part != "__init__")

    def __repr__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text(encoding="utf-8"), filename=str(self.path))

    @cached_property
    def imports(self) -> tuple[Import, ...]:
        return tuple(self._walk(self.tree, inside_function=False, for_types=False))

    def _walk(self, node: ast.AST, *, inside_function: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in self._targets(node):
                yield Import(defined_in(target), target, node.lineno, inside_function, for_types)
        inside_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for name, value in ast.iter_fields(node):
            types = for_types or (name == "body" and is_type_checking(node))
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._walk(child, inside_function=inside_function, for_types=types)

    def _targets(self, node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        base = node.module or ""
        if node.level:
            package = self.parts[: len(self.parts) - node.level]
            base = ".".join((*package, base)) if base else ".".join(package)
        return [f"{base}.{alias.name}" for alias in node.names]


@cache
def table(package: str) -> dict[str, str]:
    """The names of a package's `__init__.pyi`, and where each comes from."""
    stub = ROOT.parent.joinpath(*package.split("."), "__init__.pyi")
    if package.split(".")[0] != PACKAGE or not stub.is_file():
        return {}
    return {name: f"{module}.{attribute}" for module, attribute, name in read_table(package)}


def defined_in(target: str) -> str:
    """Follow a dotted name through the tables of packages to the module that defines it."""
    package, _, name = target.rpartition(".")
    home = table(package).get(name, target)
    return target if home == target else defined_in(home)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    """Every Python file of the package."""
    return [Source(path) for path in sorted(ROOT.rglob("*.py"))]


@pytest.fixture(scope="session")
def modules(sources: list[Source]) -> frozenset[str]:
    """The dotted names of all modules and packages."""
    return frozenset(source.module for source in sources)
