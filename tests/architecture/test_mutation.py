"""The modules of `make mutate` exist: a renamed module would be omitted without an error."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_listed_modules_and_tests_exist() -> None:
    section = (ROOT / "pyproject.toml").read_text().partition("[tool.mutmut]")[2]
    paths = re.findall(r'"((?:src|tests)/[^"]+\.py)"', section)
    assert len(paths) > 100
    assert [path for path in paths if not (ROOT / path).is_file()] == []
