"""The page of the `Accelerator` shows every public member, `prepare` first."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import yaml

from accelerate import Accelerator

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api" / "accelerator.md"
OTHER_NAMES = {"set_breakpoint", "check_breakpoint"}  # of set_trigger and check_trigger


def test_the_page_shows_every_member() -> None:
    options = yaml.safe_load(PAGE.read_text().partition("core.Accelerator\n")[2])["options"]
    members = options["members"]
    public = {name for name in dir(Accelerator) if not name.startswith("_")}
    assert members[0] == "prepare"
    assert sorted(members) == sorted(public - OTHER_NAMES), f"list them in {PAGE.name}"


def test_each_documented_name_exists() -> None:
    pages = PAGE.parent.rglob("*.md")
    names = [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE)]
    assert len(names) > 20
    for name in names:
        resolve_name(name)
