"""Source, docs and README use the vocabulary of the PyTorch documentation: words of our own stay out."""

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
    r"(hear|settle)s?": "receive, agree or decide",
    r"lies?": "is stored, is at",
    r"wires?": "process group, transport or network",
}
"""Word that no reader would search for -> what to write."""


def texts() -> list[Path]:
    found = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.py")]
    return [*found, ROOT / "README.md"]


@pytest.mark.parametrize("word", INSTEAD)
def test_words_that_nobody_would_search_for_stay_out(word: str) -> None:
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, f"write {INSTEAD[word]}: " + "\n".join(found)
