"""Source, docs, tests, benchmarks and examples use the vocabulary of the PyTorch documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTEAD = {
    r"mend(s|ed|ing)?": "fix",
    r"councils?": "consensus",
    r"parcels?": "flat buffer",
    r"slabs?": "shard",
    r"bulletins?": "hang channel",
    r"crews?": "workers",
    r"catalogues?": "table, registry, index or metadata: what it is",
    r"in vain": "what happens: a deadlock, a timeout",
    r"for ever": "without end, or what happens",
    r"takes? down": "records",
    r"told apart": "recognised, different",
    r"as heavy as": "weighted by",
    r"told": "what is passed, set or sent",
    r"kin": "the names themselves",
    r"(hear[sd]?|settles?)": "receive, agree or decide",
    r"lies?": "is stored, is at",
    r"wires?": "process group, transport or network",
    r"travel(s|led|ling)?": "is sent, copied or gathered",
    r"(comes?|came) back": "is returned, loaded or restored",
    r"elsewhere": "on another rank, device or machine",
    r"strangers?": "another rank, run or process",
    r"nobody": "no rank, no process",
    r"twins?": "copy, tied parameter, version: what it is",
    r"stands": "replaces, is at",
    r"wishes": "options, settings",
    r"ways? of training": "strategy",
    r"play(s|ed)": "simulates, replaces",
    r"lives": "is stored, runs",
}
"""Word that no reader would search for -> what to write."""


def texts() -> list[Path]:
    """Every file with Python code or text, but the table itself; of src and docs as well as of the tests."""
    folders = ("src", "docs", "tests", "benchmarks", "examples")
    paths = [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md")]
    return [*sorted(path for path in paths if path != Path(__file__)), ROOT / "README.md"]


@pytest.mark.parametrize("word", INSTEAD)
def test_texts_and_names_contain_no_house_words(word: str) -> None:
    spaced = word.replace(" ", "[ _]")  # `_` separates words in names
    pattern = re.compile(rf"(?<![A-Za-z])(?:{spaced})(?![A-Za-z])", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"write {INSTEAD[word]}: " + "\n".join(found)
