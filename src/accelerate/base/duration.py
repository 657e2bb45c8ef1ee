"""Spans of time as people write them."""

from __future__ import annotations

import math
import re

_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):)?(?P<seconds>\d+)")
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


def read_seconds(text: str) -> float:
    """Return a span of time in seconds.

    Args:
        text: seconds (`5400`, `90.5`), `MM:SS`, `HH:MM:SS` or `D-HH:MM:SS`.

    Raises:
        ValueError: it is none of these.
    """
    found = _CLOCK.fullmatch(text.strip())
    if found:
        seconds = float(sum(float(found[unit] or 0) * worth for unit, worth in _UNITS.items()))
    else:
        seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError(text)
    return seconds
