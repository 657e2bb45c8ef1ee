"""Pages show members of the `Accelerator`, names that exist, and mesh dimensions in order."""

from __future__ import annotations

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

import accelerate
from accelerate import Accelerator
from accelerate.commands.accelerate_cli import make_cli_parser
from accelerate.parallelism_config import AXES
from accelerate.settings import subcommands

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


@pytest.mark.parametrize("page", ["cheat-sheet", "tutorials/from-other-libraries"])
def test_a_table_of_calls_names_members_flags_and_commands_that_exist(page: str) -> None:
    text = (DOCS / f"{page}.md").read_text()
    column = 1 if page == "cheat-sheet" else 2  # the other tables begin with the calls of another library
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    code = re.findall(r"`([^`]+)`", "\n".join(cell for row in rows for cell in row[column - 1 :]))
    assert len(code) > 30
    members = {name for part in code for name in re.findall(r"\baccelerator\.(\w+)", part)}
    assert {name for name in members if not hasattr(Accelerator, name)} == set()
    classes = {name for part in code for name in re.findall(r"\b([A-Z][a-z]\w+)\(", part)}
    assert {name for name in classes if not hasattr(accelerate.utils, name)} <= {"Accelerator"}

    parsers = subcommands(make_cli_parser([]))
    commands = {name for part in code for name in re.findall(r"^accelerate ([\w-]+)", part)}
    assert commands - set(parsers) == set()
    flags = {name for part in code for name in re.findall(r"(?<!\S)(--?[a-z]\w*)", part)}
    known = {flag for parser in parsers.values() for flag in parser._option_string_actions}
    assert flags - known == set()


def test_the_page_about_installation_names_each_extra() -> None:
    project = (DOCS.parent / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    extras = re.findall(r"^(\w+) = \[", project.partition("\n[")[0], re.MULTILINE)
    assert len(extras) > 5
    text = (DOCS / "install.md").read_text().partition("## Extras")[2]
    assert [name for name in extras if f"`{name}`" not in text] == []
