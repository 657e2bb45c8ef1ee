"""Size of the source tree, and its classes, long functions, loose types and questions about features.

Prints each figure beside its goal. Usage: weight.py
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SOURCE, TESTS = ROOT / "src" / "accelerate", ROOT / "tests"
LONG_FILE, LONG_FUNCTION, SHORT_FUNCTION = 500, 60, 5
CORE = ("accelerator/core.py", "strategies/base.py", "optimizer.py", "accelerator/state_items.py")
"""Files that name no feature."""
FEATURES = r"recovery|average|fast_saves|flops|pipeline|sharded\b|expert|matrix|clock|diloco|local_sgd"


class File(NamedTuple):
    """A parsed source file."""

    path: Path
    text: str
    tree: ast.Module


class Figure(NamedTuple):
    """A measured value, and the largest one that is wanted."""

    name: str
    value: float
    goal: float


def read(folder: Path) -> list[File]:
    """Returns the parsed Python files of a folder."""
    texts = [(path, path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))]
    return [File(path, text, ast.parse(text)) for path, text in texts]


def nodes(files: list[File], *kinds: type[ast.AST]) -> Iterator[ast.AST]:
    """Yields the nodes of some kinds in all files."""
    for file in files:
        yield from (node for node in ast.walk(file.tree) if isinstance(node, kinds))


def functions(files: list[File]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Returns all functions and methods."""
    return list(nodes(files, ast.FunctionDef, ast.AsyncFunctionDef))  # type: ignore[arg-type]


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the number of lines of a function without its docstring."""
    first = function.body[0]
    docstring = (first.end_lineno or 0) - first.lineno + 1 if ast.get_docstring(function) else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def num_lines(files: list[File]) -> int:
    """Returns the number of lines of files."""
    return sum(file.text.count("\n") for file in files)


def loose_parameters(files: list[File]) -> int:
    """Returns the number of parameters whose type is `Any`, but for `*args` and `**kwargs`."""
    given = [function.args for function in functions(files)]
    arguments = [each for args in given for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return sum(isinstance(each.annotation, ast.Name) and each.annotation.id == "Any" for each in arguments)


def short_private_functions(files: list[File]) -> list[str]:
    """Returns the private functions of a few lines whose names are used once."""
    words = Counter(word for file in files for word in re.findall(r"\b_\w+\b", file.text))
    return [
        function.name
        for function in functions(files)
        if function.name.startswith("_")
        and not function.name.startswith("__")
        and not function.decorator_list
        and length(function) <= SHORT_FUNCTION
        and words[function.name] == 2  # its definition and one call
    ]


def questions(files: list[File]) -> int:
    """Returns the number of conditions about a feature in the files that name none."""
    chosen = [file for file in files if file.path.relative_to(SOURCE).as_posix() in CORE]
    tests = (node.test for node in nodes(chosen, ast.If, ast.IfExp))  # type: ignore[attr-defined]
    return sum(re.search(FEATURES, ast.unparse(test)) is not None for test in tests)


def figures() -> list[Figure]:
    """Returns all figures."""
    source, tests = read(SOURCE), read(TESTS)
    lines, classes = num_lines(source), sum(1 for _ in nodes(source, ast.ClassDef))
    strategy = next(
        node
        for file in source
        if file.path == SOURCE / "strategies" / "base.py"
        for node in file.tree.body
        if isinstance(node, ast.ClassDef) and node.name == "Strategy"
    )
    return [
        Figure("lines of source", lines, 70_000),
        Figure("lines of tests", num_lines(tests), 80_000),
        Figure("classes for 1,000 lines", 1000 * classes / lines, 7.5),
        Figure("files over 500 lines", sum(num_lines([file]) > LONG_FILE for file in source), 1),
        Figure("functions over 60 lines", sum(length(each) > LONG_FUNCTION for each in functions(source)), 4),
        Figure("parameters of type Any", loose_parameters(source), 600),
        Figure("short private functions used once", len(short_private_functions(source)), 100),
        Figure("methods of Strategy", sum(isinstance(node, ast.FunctionDef) for node in strategy.body), 25),
        Figure("questions about features in the core", questions(source), 0),
    ]


def shown(value: float) -> str:
    """Returns a figure in a column."""
    return f"{value:8,}" if isinstance(value, int) else f"{value:8.1f}"


def main() -> None:
    """Prints all figures."""
    print(f"{'figure':40} {'now':>8} {'goal':>8}")
    for name, value, goal in figures():
        print(f"{name:40} {shown(value)} {shown(goal)}{'' if value <= goal else '  missed'}")


if __name__ == "__main__":
    main()
