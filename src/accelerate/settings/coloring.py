"""Colour in the help, where it is read on a terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

BOLD, CYAN, YELLOW, PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[33m", "\x1b[0m"
HEADING = re.compile(r"^(usage:|\S[^\n]*:)(?=$| )", re.MULTILINE)
FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")
VALUE = re.compile(r"(?<=[\w,]) ([A-Z][A-Z_]+)(?=$|[ ,])")
INVOCATION = re.compile(r"^  -[^\n]*?(?=  |$)", re.MULTILINE)


def wants_color(stream: Any, environ: Mapping[str, str]) -> bool:
    """Whether text on a stream may be coloured.

    Args:
        stream: where the text goes.
        environ: this process's variables; ``NO_COLOR`` and ``TERM=dumb`` say no.
    """
    if environ.get("NO_COLOR") or environ.get("TERM") == "dumb":
        return False
    return bool(getattr(stream, "isatty", lambda: False)())


def colored(text: str) -> str:
    """Colour a help text: headings bold, flags cyan, and the values that flags take yellow.

    Args:
        text: as argparse lays it out; no character but the colours is added.
    """
    text = INVOCATION.sub(lambda match: VALUE.sub(rf" {YELLOW}\1{PLAIN}", match[0]), text)
    text = FLAG.sub(lambda match: f"{CYAN}{match[0]}{PLAIN}", text)
    return HEADING.sub(lambda match: f"{BOLD}{match[0]}{PLAIN}", text)
