"""HTML page of a report, which loads no other files and compares one or several runs."""

from __future__ import annotations

import hashlib
import time
from base64 import b64encode
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.resources import files
from xml.etree.ElementTree import Element

from accelerate.report import sections
from accelerate.report.markup import render, tag
from accelerate.report.reading import Run


def write_page(runs: Sequence[Run], now: float | None = None) -> str:
    """Returns the text of the page.

    Args:
        now: Time at which the page is written, in seconds since the epoch. None uses the current time.
    """
    now = time.time() if now is None else now
    title = " and ".join(run.name for run in runs)
    style, script = _package_file("page.css"), _package_file("page.js")
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The browser loads nothing for the page and runs no other script. The icon is empty.
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", style),
    )
    parts: list[Element | None] = [
        *sections.headings(runs, now),
        *sections.failures(runs),
        sections.conclusions(runs),
        sections.goodput(runs),
        sections.values(runs),
        sections.speed(runs),
        sections.phase_times(runs),
        sections.ranks(runs),
        sections.checkpoints(runs),
        sections.starts(runs),
        sections.events(runs),
        sections.configuration(runs),
        sections.nodes(runs),
    ]
    made = datetime.fromtimestamp(now, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    footer = tag("p", f"Made by accelerate report on {made}.", class_="note")
    return render(
        tag("html", head, tag("body", tag("main", parts), footer, tag("script", script)), lang="en")
    )


def _package_file(name: str) -> str:
    return (files("accelerate.report") / name).read_text(encoding="utf-8")
