"""`accelerate.utils` holds old import paths: imports, a docstring, and nothing else."""

from __future__ import annotations

import ast
from typing import Any


def is_import_only(node: ast.stmt) -> bool:
    """Whether a top-level statement may stand in a file of `utils/`."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return isinstance(node, ast.Assign) and ast.unparse(node.value) == "attach(__name__)"


def test_utils_only_imports(sources: list[Any]) -> None:
    files = [source for source in sources if source.parts[1] == "utils"]
    found = [f"{file}:{node.lineno}" for file in files for node in file.tree.body if not is_import_only(node)]
    assert files
    assert not found, f"give this a home to the left of utils and import it: {found}"
