"""Elements of HTML and SVG for the page of a report, in which all text and all attributes are escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring
from xml.sax.saxutils import escape

Child = Element | str | None
_UNSAFE_CHARACTERS = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters, surrogates, and characters that change the direction of text."""


def tag(name: str, /, *children: Child | Iterable[Child], **attributes: object) -> Element:
    """Returns an element.

    Args:
        name: Name of the element, which is a constant and never a value of a run.
        *children: Elements and text, also in lists. None is skipped.
        **attributes: Attributes by name. None is skipped, `_` becomes `-`, and a trailing `_` is removed.
    """
    encoded = {
        key.rstrip("_").replace("_", "-"): sanitize(str(value))
        for key, value in attributes.items()
        if value is not None
    }
    element = Element(name, encoded)
    for child in children:
        parts = [child] if child is None or isinstance(child, (str, Element)) else child
        for part in parts:
            _append(element, part)
    return element


def _append(element: Element, part: Child) -> None:
    if isinstance(part, Element):
        element.append(part)
    elif part is not None and len(element):
        element[-1].tail = (element[-1].tail or "") + sanitize(part)
    elif part is not None:
        element.text = (element.text or "") + sanitize(part)


def sanitize(text: str) -> str:
    """Replaces characters that are not allowed in a page, or that change how the text is displayed."""
    return _UNSAFE_CHARACTERS.sub("\ufffd", text)


def escaped_size(text: str) -> int:
    """Returns the bytes of a text after it is escaped for a page."""
    return len(escape(sanitize(text)).encode())


def shortened(text: str, size: int) -> str:
    """Returns a text, or its beginning and end if its escaped bytes exceed `size`."""
    if len(text) <= size and escaped_size(text) <= size:
        return text
    return f"{_beginning(text, size - size // 5)}...{_beginning(text[::-1], size // 5)[::-1]}"


def _beginning(text: str, size: int) -> str:
    text = text[:size]
    while (whole := escaped_size(text)) > size:
        text = text[: len(text) * size // whole]
    return text


def render(root: Element) -> str:
    """Returns the text of a page, in which only the constants in `style` and `script` are not escaped."""
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html")
