"""The messages of this package that the page about troubleshooting quotes are those of the source."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"
QUOTED = (
    "Parameters had no gradient in the backward pass before, and gradients were not averaged",
    "is in use on this machine, to which the others connect",
    "is used instead",
    "connection refused",
    "differ between the processes, and this operation needs the same ones on all of them",
    "tensors, numbers, text and plain containers are read",
    "this process already runs with",
    "killed by signal",
    "each batch is split into",
)
JOINED = re.compile(r'"\s*\n\s*f?"')


@pytest.fixture(scope="module")
def source() -> str:
    """Return all source files, with the parts of literals joined."""
    texts = (path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    return JOINED.sub("", "\n".join(texts)).lower()


@pytest.mark.parametrize("message", QUOTED)
def test_a_quoted_message_is_one_of_the_package(source: str, message: str) -> None:
    page = " ".join(PAGE.read_text(encoding="utf-8").split()).lower()
    assert message.lower() in page
    assert message.lower() in source


def test_each_section_about_a_message_is_short() -> None:
    part = PAGE.read_text(encoding="utf-8").partition("## Error messages\n")[2].partition("\n## ")[0]
    sections = part.split("\n### ")[1:]
    assert len(sections) > 25
    prose = [re.sub(r"```.*?```", "", section, flags=re.DOTALL).split("\n", 1) for section in sections]
    assert [heading for heading, text in prose if len(text.strip().splitlines()) > 8] == []
