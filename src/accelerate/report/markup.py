"""Elements of HTML and SVG, in which all text and all attributes are escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree.ElementTree import Element, tostring
from xml.sax.saxutils import escape

Child = Element | str | None
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, parts of characters, and what reverses the direction of text."""


def tag(name: str, /, *children: Child | Iterable[Child], **attributes: object) -> Element:
    """Return an element.

    Args:
        name: of the element: a constant, never a value of a run.
        *children: elements and text, also in lists; None is left out.
        **attributes: without those that are None; `_` becomes `-`, and one at the end is left out.
    """
    written = {
        key.rstrip("_").replace("_", "-"): clean(str(value))
        for key, value in attributes.items()
        if value is not None
    }
    element = Element(name, written)
    for child in children:
        parts = [child] if child is None or isinstance(child, (str, Element)) else child
        for part in parts:
            _append(element, part)
    return element


def _append(element: Element, part: Child) -> None:
    if isinstance(part, Element):
        element.append(part)
    elif part is not None and len(element):
        element[-1].tail = (element[-1].tail or "") + clean(part)
    elif part is not None:
        element.text = (element.text or "") + clean(part)


def clean(text: str) -> str:
    """Replace characters that cannot be in a page, or that hide what a text says."""
    return _NO_TEXT.sub("\ufffd", text)


def size_of(text: str) -> int:
    """Return the bytes that a text has in a page."""
    return len(escape(clean(text)).encode())


def fitted(text: str, size: int) -> str:
    """Return a text, or its beginning and its end if it has more bytes in a page than `size`."""
    if len(text) <= size and size_of(text) <= size:
        return text
    return f"{_beginning(text, size - size // 5)}...{_beginning(text[::-1], size // 5)[::-1]}"


def _beginning(text: str, size: int) -> str:
    text = text[:size]
    while (whole := size_of(text)) > size:
        text = text[: len(text) * size // whole]
    return text


def render(root: Element) -> str:
    """Return a page; only what is in `style` and `script`, which are constants, is not escaped."""
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html")
