"""How a value is written into an environment variable. ``None`` means: leave the variable alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def as_text(value: Any) -> str | None:
    """``str`` of the value; nothing for ``None``."""
    return None if value is None else str(value)


def as_text_or_none(value: Any) -> str:
    """``str`` of the value, the word ``None`` included."""
    return str(value)


def lower(value: Any) -> str | None:
    """Lower-case text: ``True`` becomes ``true``."""
    return None if value is None else str(value).lower()


def upper(value: Any) -> str | None:
    """Upper-case text."""
    return None if value is None else str(value).upper()


def as_bit(value: Any) -> str | None:
    """``1`` or ``0``."""
    return None if value is None else str(int(bool(value)))


def only_true(text: str) -> Callable[[Any], str | None]:
    """Write `text` when the value is true, and nothing otherwise."""
    return lambda value: text if value else None


def unless_empty(value: Any) -> str | None:
    """``str`` of the value; nothing for ``None``, the empty text and ``False``."""
    return str(value) if value else None


def unless_empty_lower(value: Any) -> str | None:
    """Lower-case text; nothing for ``None``, the empty text and ``False``."""
    return str(value).lower() if value else None
