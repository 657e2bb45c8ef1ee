"""Pages show the public members of the `Accelerator`, names that exist, and the dimensions of the mesh in order."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

from accelerate import Accelerator
from accelerate.parallelism_config import AXES

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "reference" / "api" / "accelerator.md"
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


@pytest.mark.parametrize("page", ["layouts", "sharding"])
def test_a_page_lists_the_mesh_dimensions_in_order(page: str) -> None:
    text = (DOCS / "guides" / f"{page}.md").read_text()
    assert ", ".join(f"`{axis}`" for axis in AXES) in text
