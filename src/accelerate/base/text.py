"""Conversion of sizes, times, names and dictionaries to and from text."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import PurePath
from typing import Any

from accelerate.base.errors import AccelerateError, wrong_value

BYTE_UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB")
SIZE_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(I?)(B?)\s*", re.IGNORECASE)
SMALLEST, LARGEST = -(2**63), 2**63 - 1
"""Range of signed 64-bit integers."""
_CLOCK = re.compile(r"(?:(?P<days>\d+)-)?(?:(?:(?P<hours>\d+):)?(?P<minutes>\d+):)?(?P<seconds>\d+)")
_UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
PREFIX_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def convert_bytes(size: float) -> str:
    """Formats a number of bytes, such as 1536 as `"1.5 KB"` (1 KB = 1024 bytes)."""
    for unit in BYTE_UNITS[:-1]:
        if abs(size) < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} {BYTE_UNITS[-1]}"


def convert_file_size_to_int(size: int | str) -> int:
    """Converts a size to a number of bytes.

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
    """Converts a time like `5400`, `90.5`, `MM:SS`, `HH:MM:SS` or `D-HH:MM:SS` to seconds.

    Raises ValueError for other text.
    """
    clock = _CLOCK.fullmatch(text.strip())
    if clock:
        seconds = float(sum(float(clock[unit] or 0) * factor for unit, factor in _UNITS.items()))
    else:
        seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError(text)
    return seconds


def whole_number(text: str) -> int:
    """Converts text to a signed 64-bit integer.

    Raises ValueError for other text.
    """
    number = int(text)
    if not SMALLEST <= number <= LARGEST:
        raise ValueError("more than 64 bits")
    return number


def get_pretty_name(obj: Any) -> str:
    """Returns the name of a class or function, or of the class of another object, for messages."""
    target = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(target, "__qualname__", None) or target.__name__)


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merges one dictionary into another in place, including nested dictionaries.

    Args:
        source: Its values take precedence.
        destination: The dictionary that is changed.

    Returns:
        `destination`.
    """
    for key, value in source.items():
        current = destination.get(key)
        if isinstance(value, dict):
            destination[key] = merge_dicts(value, current if isinstance(current, dict) else {})
        else:
            destination[key] = value
    return destination


def recursive_getattr(obj: object, attr: str) -> Any:
    """Returns an attribute by its dotted path, as in `recursive_getattr(model, "encoder.layer")`."""
    return reduce(getattr, attr.split("."), obj)


def listed(names: Sequence[str], shown: int = 5) -> str:
    """Joins names for a message, and counts those after the first few."""
    rest = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {rest} more" if rest > 0 else "")


def itemized(problems: Sequence[str], heading: str) -> str:
    """Returns one problem as it is, and several as a list below their count and a heading."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} {heading}:", *(f"  - {problem}" for problem in problems)])


def refuse_outside(name: object) -> str | None:
    """Returns the reason why a relative name from a file leaves its folder or is invalid, or None.

    Only the name, which is any JSON value, is checked. A link of that name may lead to another folder.
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
    """Returns the message of an error, after its type where the message alone is unclear."""
    if str(error) and isinstance(error, (AccelerateError, OSError)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def spell_ranks(ranks: Sequence[int]) -> str:
    """Formats sorted ranks with ranges, such as `[0, 2, 3, 4]` as `"ranks 0, 2-4"`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def describe_mesh(sizes: Mapping[str, int]) -> str:
    """Returns the sizes of the dimensions of a mesh, such as "pp 2 x dp_shard 4", without those of size 1."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def describe_position(sizes: Mapping[str, int], rank: int) -> str:
    """Returns the index of a rank along each dimension of a mesh, such as "pp 1, dp_shard 0".

    Args:
        sizes: Size of each dimension by its name, the outermost first. Dimensions of size 1 are left out.
        rank: A rank of the mesh, whose ranks are in row-major order.
    """
    indices: list[str] = []
    for name, size in reversed(list(sizes.items())):
        rank, index = divmod(rank, size)
        if size > 1:
            indices.insert(0, f"{name} {index}")
    return ", ".join(indices)
