"""Every page is in the navigation, every link points to a file, and every picture matches its script."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
PICTURES = sorted((DOCS / "pictures").iterdir())
SCREENS = sorted((DOCS / "screens").iterdir())
LARGEST_SCREEN = 100_000
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)\s]+)\)")
CODE = re.compile(r"^( *)(```+).*?^\1\2$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
SVG = "{http://www.w3.org/2000/svg}"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def pages_of(entry: Any) -> Iterator[str]:
    """Yield the paths in a navigation."""
    if isinstance(entry, str):
        yield entry
        return
    for below in entry.values() if isinstance(entry, dict) else entry:
        yield from pages_of(below)


def load(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(script, DOCS / f"{script}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation_once() -> None:
    named = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


@pytest.mark.parametrize("page", TEXTS, ids=name_of)
def test_every_link_leads_to_a_file(page: Path) -> None:
    links = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    paths = [target.partition("#")[0] for _, _, target in links if "://" not in target]
    assert [path for path in paths if path and not (page.parent / path).exists()] == []
    unnamed = [target for mark, words, target in links if mark and not words.strip()]
    assert unnamed == [], "these pictures need a text for those who do not see them"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_cell_shows_a_backslash(page: Path) -> None:
    """A `|` in code ends the cell, and `\\|` in code shows its backslash on the site."""
    assert re.findall(r"^\|.*`[^`|]*\\\|.*", page.read_text(encoding="utf-8"), re.MULTILINE) == []


@pytest.mark.parametrize("picture", PICTURES, ids=name_of)
def test_each_picture_has_a_title_and_a_description(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    for name in ("title", "desc"):
        found = root.find(f"{SVG}{name}")
        assert found is not None
        assert found.text
    assert "prefers-color-scheme: dark" in root.findtext(f"{SVG}style", "")
    assert [page for page in PAGES if picture.name in page.read_text(encoding="utf-8")] != []


@pytest.mark.parametrize("screen", SCREENS, ids=name_of)
def test_each_screen_is_small_is_shown_and_loads_nothing(screen: Path) -> None:
    data = screen.read_bytes()
    assert len(data) < LARGEST_SCREEN
    assert [page for page in PAGES if screen.name in page.read_text(encoding="utf-8")] != []
    if screen.suffix == ".svg":
        root = ElementTree.fromstring(data)
        assert all(root.findtext(f"{SVG}{name}") for name in ("title", "desc"))
        assert re.findall(rb"url\((?!#)", data) == []


def test_pictures_match_the_script_that_draws_them() -> None:
    files = load("draw_pictures").make_files()
    assert sorted(files) == PICTURES
    assert [path.name for path, text in files.items() if path.read_text(encoding="utf-8") != text] == [], (
        "run `make pictures`"
    )


def test_every_page_has_a_description_of_its_own() -> None:
    heads = [page.read_text(encoding="utf-8").partition("\n---\n")[0] for page in PAGES]
    texts = {yaml.safe_load(head)["description"] for head in heads}
    assert len(texts) == len(heads)


def test_the_list_for_programs_names_every_page() -> None:
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    pages = {page.relative_to(DOCS).with_suffix("").as_posix().removesuffix("/index") for page in PAGES}
    assert set(re.findall(r"^- \[.+?\]\((.+?)/\): \S", text, re.MULTILINE)) == pages - {"index"}
