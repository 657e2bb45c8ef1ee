"""The table of an inner package lists the names that other packages use, and none for tests alone."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "accelerate"
TABLES = ("diagnostics", "launch", "launch.backends", "ops", "plugins", "settings", "settings.sections")
"""Packages that follow the rule, to be extended to all that users do not import from."""


def names_of(table: Path) -> set[str]:
    statements = ast.parse(table.read_text(encoding="utf-8")).body
    imports = [node for node in statements if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def read_uses(tree: ast.Module) -> list[ast.AST]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Dict | ast.Attribute)]


def used_names(uses: list[ast.AST], package: str) -> set[str]:
    """The names of a package that a file imports from it, reads from it as attributes, or forwards."""
    parent, _, leaf = package.rpartition(".")
    used, aliases = set(), {package}
    for node in uses:
        if isinstance(node, ast.ImportFrom) and node.module == package:
            used |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == parent:
            aliases |= {alias.asname or alias.name for alias in node.names if alias.name == leaf}
        elif isinstance(node, ast.Dict):  # the argument of `attach`
            rows = zip(node.keys, node.values, strict=True)
            words = [value for key, value in rows if isinstance(key, ast.Constant) and key.value == package]
            used |= {
                each.value for value in words for each in ast.walk(value) if isinstance(each, ast.Constant)
            }
    attributes = (node for node in uses if isinstance(node, ast.Attribute) and node.attr not in used)
    return used | {node.attr for node in attributes if dotted(node.value) in aliases}


def dotted(node: ast.expr) -> str:
    """The text of a name with dots, or nothing for another expression."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


@pytest.fixture(scope="module")
def uses() -> list[list[ast.AST]]:
    paths = (path for suffix in ("py", "pyi") for path in SOURCE.rglob(f"*.{suffix}"))
    return [read_uses(ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


@pytest.mark.parametrize("name", TABLES)
def test_each_name_of_a_table_is_used_by_another_file(name: str, uses: list[list[ast.AST]]) -> None:
    table = SOURCE.joinpath(*name.split("."), "__init__.pyi")
    used: set[Any] = set().union(*(used_names(each, f"accelerate.{name}") for each in uses))
    unused = sorted(names_of(table) - used)
    assert not unused, f"remove them from {table}, and let tests import them from their files: {unused}"


def test_the_check_finds_each_kind_of_use() -> None:
    text = (
        "from accelerate import launch\nfrom accelerate.launch import a\n"
        "launch.b\nattach(__name__, {'accelerate.launch': ('c',)})\nother.d\n"
    )
    assert used_names(read_uses(ast.parse(text)), "accelerate.launch") == {"a", "b", "c"}
