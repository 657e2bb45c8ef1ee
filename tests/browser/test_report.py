"""The page of `accelerate report` in a browser: charts, texts, widths, modes, and hostile names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelerate.report import read_run, write_page

from ..unit.report.recorded_run import DIGEST, write_run
from ..unit.report.test_page import HOSTILE

pytestmark = pytest.mark.slow

Write = Callable[..., Path]
PHONE = 360


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes the page of runs in folders of these names."""

    def write(*names: str, text: str = "", added: str = "") -> Path:
        for name in names:
            write_run(tmp_path / name, text=text)
        page = write_page([read_run(tmp_path / name) for name in names])
        path = tmp_path / "page of runs.html"
        path.write_text(page.replace("</main>", f"{added}</main>"), encoding="utf-8")
        return path

    return write


def count(browser: Any, selector: str) -> int:
    return int(browser.evaluate(f"document.querySelectorAll({selector!r}).length"))


def test_a_page_opens_without_an_error_and_loads_nothing(browser: Any, write: Write) -> None:
    path = write("run")
    browser.open(path)
    assert browser.errors == []
    assert [address for address in browser.requests if not address.startswith("data:,")] == [path.as_uri()]
    assert DIGEST in browser.evaluate("document.body.innerText")
    assert browser.evaluate("document.title") == "run"


def test_charts_have_marks_of_a_size(browser: Any, write: Write) -> None:
    browser.open(write("run"))
    lengths = browser.evaluate(
        "[...document.querySelectorAll('path.line')].map((path) => path.getTotalLength())"
    )
    assert len(lengths) >= 14
    assert min(lengths) > 10
    boxes = browser.evaluate(
        "[...document.querySelectorAll('svg')].map((svg) => svg.getBoundingClientRect().height)"
    )
    assert min(boxes) > 100
    assert count(browser, "path.area") == 8
    assert count(browser, "path.invalid") == 1
    assert count(browser, "path.repeated") >= 5


def test_malicious_names_and_texts_run_no_script(browser: Any, write: Write) -> None:
    name = "<img src=x onerror=window.injected=1>"
    browser.open(write(name, f"other {name}", text=HOSTILE))
    assert browser.errors == []
    assert browser.evaluate("typeof window.injected") == "undefined"
    assert count(browser, "script") == 1
    assert count(browser, "img, iframe, object, a, form, base") == 0
    assert name in browser.evaluate("document.querySelector('h1').innerText")
    assert HOSTILE in browser.evaluate("document.body.textContent")


def test_a_script_that_was_added_to_the_page_is_refused(browser: Any, write: Write) -> None:
    """The policy of the page is a second barrier, for text that is not escaped."""
    added = "<script>window.injected = 1</script><img src=x onerror='window.injected = 1'>"
    path = write("run", added=f"{added}<script src='https://localhost:1/x.js'></script>")
    browser.open(path)
    assert browser.evaluate("typeof window.injected") == "undefined"
    assert any("Content Security Policy" in error for error in browser.errors)


@pytest.mark.parametrize("names", [("run",), ("first", "second")], ids=["one", "two"])
def test_the_page_fits_a_phone(browser: Any, write: Write, names: tuple[str, ...]) -> None:
    browser.open(write(*(name + "x" * 90 for name in names), text="y" * 300), width=PHONE)
    assert browser.errors == []
    assert browser.evaluate("document.documentElement.scrollWidth") <= PHONE
    elements = "[...document.querySelectorAll('h1, h2, p, pre, figure, li')]"
    assert max(browser.evaluate(f"{elements}.map((one) => one.getBoundingClientRect().right)")) <= PHONE


def test_light_and_dark_mode_have_colors_of_their_own(browser: Any, write: Write) -> None:
    path = write("run")
    colors = []
    for scheme in ("light", "dark"):
        browser.open(path, scheme=scheme)
        style = "((element, name) => getComputedStyle(document.querySelector(element))[name])"
        named = [
            ("body", "backgroundColor"),
            ("body", "color"),
            ("path.line", "stroke"),
            ("path.area", "fill"),
        ]
        colors.append([browser.evaluate(f"{style}({element!r}, {name!r})") for element, name in named])
    assert all(light != dark for light, dark in zip(*colors, strict=True))


def test_the_page_works_without_scripts(browser: Any, write: Write) -> None:
    path = write("run")
    browser.open(path)
    charts, text = count(browser, "path"), browser.evaluate("document.body.innerText")
    browser.open(path, scripts=False)
    assert (count(browser, "path"), browser.evaluate("document.body.innerText")) == (charts, text)
    assert browser.errors == []


def test_the_pointer_shows_the_values_of_a_chart(browser: Any, write: Write) -> None:
    browser.open(write("run"))
    browser.evaluate("document.querySelector('svg').scrollIntoView()")
    where = browser.evaluate(
        "(({left, right, top, bottom}) => [left + (right - left) * 384 / 400, (top + bottom) / 2])"
        "(document.querySelector('svg').getBoundingClientRect())"
    )
    browser.point_at(*where)
    said = browser.evaluate("document.querySelector('figure output').textContent")
    label, value, step = said.replace(": ", " at step ").split(" at step ")
    assert (label, int(step)) == ("rank 0", 300)
    assert float(value) == pytest.approx(0.5 + 2 / 300, abs=0.02)
    assert browser.errors == []
