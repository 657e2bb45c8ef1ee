"""The Python blocks of the pages run, except those marked with the reason why they do not.

The blocks of a page run one after another, with the names that the page has defined so far and those of
`fragments.py`. A block that creates an `Accelerator`, or prepares objects, begins with new objects. A comment
above a block changes this:

    <!-- not run: needs four GPUs -->
    <!-- processes: 2 -->                 it runs on two ranks, with the names of `fragments.py` only
"""

from __future__ import annotations

import re
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ..conftest import reset_states
from ..distributed.conftest import rank_server, run
from .fragments import make_names

__all__ = ["rank_server", "run"]

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"(?:^ *<!-- (?P<mark>[^\n]*?) -->\n+)?"
    r"^(?P<indent> *)```(?P<kind>python|diff)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
CREATES = re.compile(r"\b(Accelerator|PartialState)\(")
MARKS = {f"docs/guides/{name}.md": pytest.mark.slow for name in ("clients", "matrix-optimizers", "memory")}


class Block(NamedTuple):
    """One block of code: its page, line, mark and program."""

    page: str
    line: int
    mark: str
    code: str

    @property
    def num_processes(self) -> int:
        return int(self.mark.removeprefix("processes: ")) if self.mark.startswith("processes: ") else 1


def read_blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            str(path.relative_to(ROOT)),
            text[: match.start("text")].count("\n"),
            match["mark"] or "",
            read_code(match["kind"], match["text"], match["indent"]),
        )
        for match in FENCE.finditer(text)
    ]


def read_code(kind: str, text: str, indent: str) -> str:
    """Return the program of a block; that of a diff has its added lines, and not those that it removes."""
    lines = [line.removeprefix(indent) for line in text.splitlines()]
    return "\n".join(
        line[2:] if kind == "diff" else line for line in lines if kind != "diff" or line[:1] != "-"
    )


PAGES = {
    str(path.relative_to(ROOT)): blocks
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if (blocks := read_blocks(path))
}


def execute(block: Block, names: dict[str, Any]) -> None:
    code = compile("\n" * block.line + block.code, str(ROOT / block.page), "exec")
    exec(code, names)


def execute_on_rank(block: tuple[Any, ...]) -> None:
    warnings.filterwarnings("ignore", "'pin_memory' argument is set as true")  # transformers' default
    execute(Block(*block), make_names(Path(block[0]).stem))


def choose_names(block: Block, known: dict[str, Any]) -> dict[str, Any]:
    """Return the new objects with which a block begins; none if it continues the blocks before it."""
    page = Path(block.page).stem
    if CREATES.search(block.code):
        return make_names(page)
    if ".prepare(" in block.code:
        return make_names(page, accelerator=True)
    if not known or ("accelerator." in block.code and "accelerator" not in known):
        return make_names(page, prepared="accelerator." in block.code)
    return {}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's inductor
@pytest.mark.parametrize("page", [pytest.param(page, marks=MARKS.get(page, ())) for page in PAGES])
def test_the_blocks_of_a_page_run(
    page: str, run: Callable[..., Any], states: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for block in PAGES[page]:
        if block.mark.startswith("not run: "):
            continue
        if block.num_processes > 1:
            run(execute_on_rank, tuple(block), processes=block.num_processes)
            continue
        if CREATES.search(block.code) or ".prepare(" in block.code:
            reset_states()
        names.update(choose_names(block, names))
        execute(block, names)
        for process in [value for value in names.values() if isinstance(value, subprocess.Popen)]:
            process.wait()


def test_each_mark_is_known() -> None:
    marks = {block.mark for blocks in PAGES.values() for block in blocks if block.mark}
    assert [mark for mark in marks if not re.fullmatch(r"not run: \S.*|processes: \d+", mark)] == []


def test_there_are_blocks() -> None:
    assert sum(map(len, PAGES.values())) > 80
