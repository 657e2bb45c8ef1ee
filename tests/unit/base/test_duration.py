"""Spans of time as people write them."""

from __future__ import annotations

import re

import pytest

from accelerate.base import read_seconds


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("90", 90.0),
        (" 90.5 ", 90.5),
        ("01:30", 90.0),
        ("01:30:00", 5400.0),
        ("100:00:00", 360000.0),
        ("1-12:00:00", 129600.0),
    ],
)
def test_forms(text: str, seconds: float) -> None:
    assert read_seconds(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "soon", "-1", "1:2:3:4", "1h", "nan", "inf", "12:", "1-", "9" * 400, "9" * 5000, "1e999", "\u00b2"],
    ids=lambda text: text[:9],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="could not convert|^" + re.escape(text)):
        read_seconds(text)
