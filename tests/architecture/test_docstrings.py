"""Docstrings begin with one plain sentence, as in the PyTorch documentation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src/accelerate"
PARTS = sorted(
    path.name for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()
)
"""Packages and modules of the source."""
QUESTION = re.compile("what|how|which|who|whose|whether|where|when|why|whatever")
IMPERATIVE = re.compile(
    "(add|allow|apply|ask|build|call|check|choose|collect|compute|convert|copy|count|create|decide|decode|delete|"
    "detach|draw|encode|fill|find|fit|format|gather|get|give|keep|let|list|load|lay|make|map|move|open|parse|pass|"
    "place|plan|prepare|print|put|raise|read|refuse|register|remove|replace|report|reserve|resolve|restore|return|"
    "run|save|say|seed|send|set|shard|show|split|start|stop|store|submit|sum|take|tell|turn|undo|update|use|wait|"
    "walk|warn|wrap|write|yield) (?!(of|for|with|in|from|object)\\b)"  # not the noun: "Copy of a tensor."
)
NOT_A_VERB = re.compile("this|its|his|as|always|thus|perhaps|bytes|seconds|values|names|plus|versus")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


def is_property(node: Function) -> bool:
    return any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)


def problem_of(node: Documented, line: str) -> str | None:
    """Returns the rule that the first line of a docstring breaks, or None."""
    text = re.sub(r"(`+).+?\1|\([^()]*\)|\"[^\"]*\"", "x", line)  # code, parentheses and quotations are free
    first = line.split()[0].strip("`,.").lower()
    if not line.endswith((".", ".)")):
        return "end the first line with a full stop"
    if re.search(r"[:;?]|[.!] ", text):
        return "write one clause, without a colon or semicolon"
    if QUESTION.fullmatch(first) or IMPERATIVE.match(line.lower()):
        return "begin with a noun phrase or a verb in the third person"
    if not isinstance(node, Function) or is_property(node):
        return None
    return None if first.endswith("s") and not NOT_A_VERB.fullmatch(first) else "begin with a verb"


def first_lines(path: Path) -> Iterator[tuple[Documented, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, Documented) and (text := ast.get_docstring(node)):
            yield node, text.splitlines()[0]


@pytest.mark.parametrize("name", PARTS)
def test_first_lines_are_one_plain_sentence(name: str) -> None:
    problems = [
        f"{path.relative_to(SOURCE)}:{getattr(node, 'lineno', 1)}: {problem}: {line}"
        for path in sorted((SOURCE / name).rglob("*.py")) or [SOURCE / name]
        for node, line in first_lines(path)
        if (problem := problem_of(node, line))
    ]
    assert not problems, "\n".join(problems)


def test_lines_of_another_form_are_problems() -> None:
    function = ast.parse("def f(): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert problem_of(function, "Returns the rank of this process (`0:0`).") is None
    for line in (
        "Return x.",
        "What x does.",
        "The x.",
        "Returns: x.",
        "Returns x; y.",
        "Is x. Is y.",
        "Is x",
    ):
        assert problem_of(function, line), line
