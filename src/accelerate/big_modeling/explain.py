"""A device map as a table: what each device takes, of what it has."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import nn

from accelerate.base import convert_bytes
from accelerate.weights import Dtype, all_tensors, place_of, tensor_bytes

HEADERS = ("device", "parameters", "buffers", "in all", "of its limit", "modules")
NUMBERED = re.compile(r"(.*?)(\d+)((?:\.\D.*)?)")
WIDEST = 60
"""Characters that the names of modules may take in a row."""


def explain_device_map(
    model: nn.Module,
    device_map: Mapping[str, Any],
    max_memory: Mapping[Any, int] | None = None,
    dtype: Dtype | None = None,
    special_dtypes: Mapping[str, Dtype] | None = None,
) -> str:
    """Return a device map as a table with a row for each device.

    Args:
        model: the module; it may lie on the meta device.
        device_map: devices by module, or by tensor.
        max_memory: bytes by device, as `get_max_memory` returns them; None leaves that column empty.
        dtype: of the model once it is loaded; None: as it is.
        special_dtypes: those of single tensors, by name.

    Returns:
        Lines of text; what several names share is counted once, at the first of them.
    """
    names: dict[Any, list[str]] = defaultdict(list)
    for name, place in device_map.items():
        names[place].append(name)
    taken = _measure(model, device_map, dtype, special_dtypes)
    limits = max_memory or {}
    rows = [
        [
            str(place),
            convert_bytes(taken[place][0]),
            convert_bytes(taken[place][1]),
            convert_bytes(sum(taken[place])),
            _part_of(sum(taken[place]), limits.get(place)),
            shorten(names.get(place, [])),
        ]
        for place in [*limits, *(place for place in names if place not in limits)]
    ]
    return draw([list(HEADERS), *rows])


def draw(rows: list[list[str]]) -> str:
    """Return rows of cells as lines, with columns below each other; the first and last begin at their left.

    Args:
        rows: the first is that of the headers.
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    last = len(widths) - 1
    lines = [
        "  ".join(
            cell.ljust(width) if index in (0, last) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines)


def shorten(names: list[str]) -> str:
    """Write names in a row, those that differ in one number as a range: "layers.0-11, norm".

    Args:
        names: of modules; `""` is the whole model.
    """
    runs: list[tuple[str, int, int, str] | str] = []
    for name in names:
        match = NUMBERED.fullmatch(name)
        if match is None:
            runs.append(name or "all")
            continue
        start, number, end = match[1], int(match[2]), match[3]
        before = runs[-1] if runs else ""
        if isinstance(before, tuple) and (before[0], before[2] + 1, before[3]) == (start, number, end):
            runs[-1] = (start, before[1], number, end)
        else:
            runs.append((start, number, number, end))
    text = ", ".join(run if isinstance(run, str) else _spell(*run) for run in runs)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 4].rstrip(', ')} ..."


def _spell(start: str, first: int, last: int, end: str) -> str:
    return f"{start}{first}{end}" if first == last else f"{start}{first}-{last}{end}"


def _measure(
    model: nn.Module,
    device_map: Mapping[str, Any],
    dtype: Dtype | None,
    special_dtypes: Mapping[str, Dtype] | None,
) -> dict[Any, tuple[float, float]]:
    """Return bytes of parameters and of buffers by place."""
    taken: dict[Any, tuple[float, float]] = defaultdict(lambda: (0, 0))
    counted: set[int] = set()
    for name, tensor in all_tensors(model).items():
        if id(tensor) in counted:
            continue
        counted.add(id(tensor))
        place = place_of(name, device_map)
        size = tensor_bytes(name, tensor, dtype, special_dtypes)
        parameters, buffers = taken[place]
        is_parameter = isinstance(tensor, nn.Parameter)
        taken[place] = (parameters + size * is_parameter, buffers + size * (not is_parameter))
    return taken


def _part_of(size: float, limit: float | None) -> str:
    return f"{size / limit:.0%}" if limit else ""
