"""Sizes, times, names and dictionaries as text: pure functions without torch."""

import math
import os
import re
from collections.abc import Sequence
from functools import reduce
from pathlib import PurePath
from typing import Any

from accelerate.base.errors import AccelerateError, wrong_value

BYTE_UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB")
SIZE_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)(B?)\s*", re.IGNORECASE)
SMALLEST, LARGEST = -(2**63), 2**63 - 1
"""Whole numbers that 64 bits hold: what torch and operating systems count with."""
_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):)?(?P<seconds>\d+)")
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
PREFIX_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def convert_bytes(size: float) -> str:
    """Write a number of bytes for people: `convert_bytes(1536)` is `"1.5 KB"` (1 KB = 1024 bytes)."""
    for unit in BYTE_UNITS[:-1]:
        if abs(size) < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} {BYTE_UNITS[-1]}"


def convert_file_size_to_int(size: int | str) -> int:
    """Read a size in bytes.

    Args:
        size: A number of bytes, or a number and a unit: `"5GB"` is 5 * 10^9 bytes, `"5GiB"` is
            5 * 2^30 bytes, and a small `b` means bits, so that `"5Gb"` is an eighth of `"5GB"`.

    Returns:
        The number of bytes, rounded down.

    Raises:
        ConfigurationError: If the text is not of that form, or the number is negative.
    """
    if isinstance(size, int):
        if size < 0:
            raise wrong_value("size", size, "negative", "give a number of bytes of at least 0")
        return size
    match = SIZE_PATTERN.fullmatch(size) if isinstance(size, str) else None
    if match is None or (match[3] and not match[2]) or (match[2] and not match[4]):
        kinds = () if isinstance(size, str) else (AttributeError,)
        fix = "write a number and a unit, like '5GB' or '5GiB'"
        raise wrong_value("size", size, "not a size", fix, *kinds)
    number, prefix, binary, letter = match.groups()
    bytes_ = float(number) * (1024 if binary else 1000) ** PREFIX_POWER[prefix.upper()]
    if not math.isfinite(bytes_):
        raise wrong_value("size", size, "too large", "write a number and a unit, like '5GB' or '5GiB'")
    return int(bytes_ / 8) if letter == "b" and prefix else int(bytes_)


def read_seconds(text: str) -> float:
    """Return in seconds a time like `5400`, `90.5`, `MM:SS`, `HH:MM:SS` or `D-HH:MM:SS`; else ValueError."""
    clock = _CLOCK.fullmatch(text.strip())
    if clock:
        seconds = float(sum(float(clock[unit] or 0) * worth for unit, worth in _UNITS.items()))
    else:
        seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError(text)
    return seconds


def whole_number(text: str) -> int:
    """Read a whole number of at most 64 bits, with a sign or without; raise ValueError for others."""
    number = int(text)
    if not SMALLEST <= number <= LARGEST:
        raise ValueError("more than 64 bits")
    return number


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or of the class of any other object, for messages."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Lay one dictionary over another, in place and through nested dictionaries.

    Args:
        source: Its values win.
        destination: The dictionary that is changed.

    Returns:
        `destination`.
    """
    for key, value in source.items():
        below = destination.get(key)
        if isinstance(value, dict):
            destination[key] = merge_dicts(value, below if isinstance(below, dict) else {})
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute by its dotted path: `recursive_getattr(model, "encoder.layer")`."""
    return reduce(getattr, attr.split("."), obj)


def listed(names: Sequence[str], shown: int = 5) -> str:
    """Return names for a message: the first few, and how many more there are."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def itemized(problems: Sequence[str], heading: str) -> str:
    """Return one problem as it is, and several as a list below their number and a heading."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} {heading}:", *(f"  - {problem}" for problem in problems)])


def refuse_outside(name: object) -> str | None:
    """Return why a name read from a file does not stay inside the folder that it is relative to, or None.

    Only the name, any value that JSON can hold, is judged: a link of that name may lead to another folder.
    """
    if not isinstance(name, str):
        return f"is not text but of type {type(name).__name__}"
    if "\0" in name:
        return "contains a NUL character"
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return "cannot be written as the name of a file"
    path = PurePath(name)
    if path.anchor:
        return "is an absolute path"
    if ".." in path.parts:
        return "has a component '..', which leads out of the folder"
    return None if path.name else "names no file"


def describe(error: BaseException) -> str:
    """Return what an error says: its text, after its type where the text alone does not tell."""
    if str(error) and isinstance(error, (AccelerateError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def spell_ranks(ranks: Sequence[int]) -> str:
    """Write rising ranks with their runs: `spell_ranks([0, 2, 3, 4])` is `"ranks 0, 2-4"`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    spelled = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {spelled}" if len(ranks) == 1 else f"ranks {spelled}"
