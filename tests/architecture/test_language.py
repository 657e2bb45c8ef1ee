"""Source, docs, tests, benchmarks and examples use the vocabulary of the PyTorch documentation."""

from __future__ import annotations

import re
from pathlib import Path

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


def find(text: str) -> list[str]:
    """The lines of a text with one of the words, each with its number and what to write."""
    if not ANY.search(text):
        return []
    return [
        f"{number}: {line.strip()} (write {instead})"
        for number, line in enumerate(text.splitlines(), 1)
        for word, instead in INSTEAD.items()
        if pattern_of(word).search(line)
    ]


def pattern_of(*words: str) -> re.Pattern[str]:
    spaced = "|".join(words).replace(" ", "[ _]")  # `_` separates words in names
    return re.compile(rf"(?<![A-Za-z])(?:{spaced})(?![A-Za-z])", re.IGNORECASE)


ANY = pattern_of(*INSTEAD)


def test_texts_and_names_contain_no_words_of_the_list() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in texts()
        for line in find(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_words_are_found_in_sentences_and_names() -> None:
    assert find("a\nIt lives\nfor_ever, skin") == [
        "2: It lives (write is stored, runs)",
        "3: for_ever, skin (write without end, or what happens)",
    ]
