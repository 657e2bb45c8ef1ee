"""`docs/architecture.md` names every file of the package, and no file that is not there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
LISTING = re.compile(r"<!-- files: begin -->(.*)<!-- files: end -->", re.DOTALL)
ROW = re.compile(r"^\| `([^`]+\.py)` \| \S.*\|$", re.MULTILINE)


def list_named() -> list[str]:
    listing = LISTING.search(PAGE.read_text(encoding="utf-8"))
    assert listing is not None
    return ROW.findall(listing.group(1))


def test_the_page_names_every_file(sources: list[Any]) -> None:
    named = list_named()
    real = {str(source) for source in sources if source.path.name != "__init__.py"}
    assert sorted(real - set(named)) == [], "add a row for each to docs/architecture.md"
    assert sorted(set(named) - real) == [], "these rows of docs/architecture.md have no file"
    assert len(named) == len(set(named))
