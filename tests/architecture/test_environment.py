"""Environment variables are accessed in `base/environ.py` only; other code receives a mapping."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

GUARDED = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
HOME = "base/environ.py"


def touches(source: Any) -> Iterator[int]:
    """The lines of a file on which it reaches the environment through `os`."""
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in GUARDED
            and ast.unparse(node.value) in {"os", "posix"}
        ):
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module in {"os", "posix"}:
            yield from (node.lineno for alias in node.names if alias.name in GUARDED | {"*"})


def test_only_base_environ_accesses_the_environment(sources: list[Any]) -> None:
    found = [f"{source}:{line}" for source in sources if str(source) != HOME for line in touches(source)]
    assert not found, f"take a mapping, or call {HOME}: {found}"


def test_base_environ_accesses_the_environment(sources: list[Any]) -> None:
    assert any(list(touches(source)) for source in sources if str(source) == HOME)
