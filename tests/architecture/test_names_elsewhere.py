"""Programs that `make test` does not collect import names that the package has."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "benchmarks",
    "tests/chaos",
    "tests/device",
    "tests/fuzz",
    "tests/gpu_acceptance",
    "tests/verification",
)


def imported(folder: Path) -> set[tuple[str, str]]:
    """The modules of the package that files of a folder import from, each with a name."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {
        (node.module, alias.name)
        for node in nodes
        if node.module is not None and node.module.partition(".")[0] == "accelerate"
        for alias in node.names
    }


@pytest.mark.parametrize("folder", FOLDERS)
def test_imported_names_exist(folder: str) -> None:
    names = imported(ROOT / folder)
    assert names
    missing = [
        f"{module}.{name}"
        for module, name in sorted(names)
        if not hasattr(import_module(module), name) and find_spec(f"{module}.{name}") is None
    ]
    assert not missing
