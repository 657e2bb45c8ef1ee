from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from accelerate.commands.accelerate_cli import COMMANDS
from accelerate.settings import all_options


@pytest.fixture(scope="module")
def files(reference: Any) -> dict[Path, str]:
    """What `make reference` would write."""
    return dict(reference.make_files())


def test_the_files_are_up_to_date(files: dict[Path, str]) -> None:
    for path, text in files.items():
        assert path.is_file(), f"{path} is missing: run `make reference`"
        assert path.read_text(encoding="utf-8") == text, f"{path} is old: run `make reference`"


def test_every_option_has_its_rows(files: dict[Path, str]) -> None:
    pages = {path.stem: text for path, text in files.items()}
    for row in all_options().values():
        assert not row.flags or row.flags[0] in pages["cli"]
        assert not row.key or f"| `{row.key}` |" in pages["config"]
        for name in row.variables:
            assert f"| `{name}` |" in pages["environment"]
    for name in COMMANDS:
        assert f"## accelerate {name}\n" in pages["cli"]


def test_every_row_has_as_many_cells_as_its_head(files: dict[Path, str]) -> None:
    for path, text in files.items():
        if path.suffix != ".md":
            continue
        for table in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(widths) == 1, table
