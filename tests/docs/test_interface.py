"""The page of the `Accelerator` shows every public member, `prepare` first."""

from __future__ import annotations

from pathlib import Path

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
