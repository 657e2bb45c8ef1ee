"""The memory plan of a run: its parts on each device, the largest batch that fits, and layouts that fit."""

from __future__ import annotations

import functools
import io
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from accelerate.base import convert_bytes, convert_file_size_to_int, wrong_value
from accelerate.planning.layouts import (
    Layout,
    candidates,
    communication_of,
    host_bytes,
    memory_of,
    read_devices,
)
from accelerate.planning.parts import Parts, Trace

LARGEST_BATCH = 2**20
"""The search for the largest batch ends here."""
LARGEST_GROWTH = 64
"""Factor between a size that fits and the next one that is tried."""
MOST_LAYOUTS = 5
BAR_WIDTH = 60
MARKS = {
    "parameters": "P",
    "buffers": "B",
    "gradients": "G",
    "optimizer": "O",
    "activations": "A",
    "temporary": "t",
    "inputs": "i",
    "communication": "C",
}
"""Part -> its character in a bar."""


class Variant(NamedTuple):
    """What a trace depends on, besides the model."""

    batch_size: int
    checkpointing: bool
    is_sharded: bool
    accumulates: bool


@dataclass(frozen=True)
class Fit:
    """A layout that fits, with bytes of each rank: on its device, on its host, and sent for each sample."""

    layout: Layout
    parts: Parts
    host: float
    communication: float


class Planner:
    """Answers questions about a step by traces, of which each is made once."""

    def __init__(self, trace: Callable[[Variant], Trace]) -> None:
        self.trace = functools.cache(trace)

    def trace_of(self, layout: Layout, batch_size: int) -> Trace:
        """Return the trace that the memory of a layout is computed from."""
        accumulates = layout.accumulation > 1
        return self.trace(Variant(batch_size, layout.checkpointing, layout.is_sharded, accumulates))

    def memory(self, layout: Layout, batch_size: int) -> Parts:
        """Return the parts on each device at the peak."""
        return memory_of(self.trace_of(layout, batch_size), layout)

    def largest_batch(self, layout: Layout, capacity: float, start: int) -> int:
        """Return the largest batch that fits the memory of a device; 0 if not even one sample does."""
        return largest_batch(lambda size: self.memory(layout, size).total, capacity, start)

    def fitting(self, layout: Layout, devices: int, capacity: float, batch_size: int) -> list[Fit]:
        """Return layouts of a number of devices that fit.

        Layouts without offload are first, and those with less communication before others. Of each way to
        shard there is one, with activation checkpointing and offload only where it needs them.

        Args:
            layout: its accumulation counts.
            devices: how many.
            capacity: bytes of each.
            batch_size: samples on each device in one pass.
        """
        can_split = self.trace_of(layout, batch_size).can_split_layers
        found: dict[tuple[str, int], Fit] = {}
        for each in candidates(devices, accumulation=layout.accumulation, can_split_layers=can_split):
            key = (each.sharding, each.tensor_parallel)
            if key in found:
                continue
            trace = self.trace_of(each, batch_size)
            parts = memory_of(trace, each)
            if parts.total <= capacity:
                samples = batch_size * each.accumulation * each.shards
                sent = communication_of(trace, each) / samples
                found[key] = Fit(each, parts, host_bytes(trace, each), sent)
        return sorted(
            found.values(), key=lambda fit: (fit.layout.offload != "none", fit.communication, fit.host)
        )


def largest_batch(bytes_of: Callable[[int], float], capacity: float, start: int) -> int:
    """Return the largest batch whose bytes are at most `capacity`, up to `LARGEST_BATCH`.

    Memory is the largest of several parts that are almost affine in the batch size. So a line through two
    sizes that do not fit leads to the answer from above. Where a line does not halve the interval, its middle
    is next. It is verified that one more sample does not fit.
    """
    known: dict[int, float] = {}
    low, high, guess = 0, LARGEST_BATCH + 1, start
    while high - low > 1:
        guess, width = min(max(guess, low + 1), high - 1), high - low
        known[guess] = bytes_of(guess)
        low, high = (guess, high) if known[guess] <= capacity else (low, guess)
        is_open = high > LARGEST_BATCH
        middle = LARGEST_GROWTH * low if is_open else (low + high) // 2
        line = _on_line(known, capacity, is_open)
        halves = is_open or len(known) < 4 or 2 * (high - low) <= width
        guess = middle if line is None or not halves else min(line, middle) if is_open else line
    return low


def _on_line(known: dict[int, float], capacity: float, is_open: bool) -> int | None:
    """Return where a line reaches the capacity: through the two sizes next to it that do not fit, or fit."""
    sizes = sorted(size for size in known if is_open or known[size] > capacity)
    pair = sizes[-2:] if is_open else sizes[:2]
    if len(pair) < 2:
        return None
    slope = (known[pair[1]] - known[pair[0]]) / (pair[1] - pair[0])
    return int(pair[0] + (capacity - known[pair[0]]) // slope) if slope > 0 else None


@dataclass(frozen=True)
class MemoryPlan:
    """What each device needs at the peak of a training step, before any step has run.

    `print(plan)` shows the parts as a table and a bar.

    Attributes:
        parts: bytes of each part on one device at the peak.
        layout: how devices share the run.
        batch_size: samples on each device in one forward pass.
    """

    parts: Parts
    layout: Layout
    batch_size: int
    planner: Planner

    @property
    def peak(self) -> int:
        """Bytes on each device at the peak."""
        return self.parts.as_dict()["total"]

    def largest_batch_size(self, memory: int | str) -> int:
        """Return the largest batch on each device that fits its memory.

        Args:
            memory: bytes, or text such as "80GB".

        Returns:
            A number of samples; 0 if not even one fits.
        """
        capacity = convert_file_size_to_int(memory)
        return self.planner.largest_batch(self.layout, capacity, self.batch_size)

    def fitting_layouts(self, devices: str) -> list[Fit]:
        """Return layouts that fit: those without offload first, then those with the least communication.

        Args:
            devices: their number and the memory of each, such as "8x80GB".
        """
        count, capacity = read_devices(devices)
        return self.planner.fitting(self.layout, count, capacity, self.batch_size)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as values for JSON, in exact bytes."""
        names = [field.name for field in fields(self.layout)]
        host = round(host_bytes(self.planner.trace_of(self.layout, self.batch_size), self.layout))
        return {
            "batch_size": self.batch_size,
            "layout": {"name": self.layout.name, **{name: getattr(self.layout, name) for name in names}},
            "device_bytes": self.parts.as_dict(),
            "host_bytes": host,
        }

    def __str__(self) -> str:
        return "\n".join([table_of(self.parts), bar_of(self.parts, self.peak)])


def build_plan(planner: Planner, layout: Layout, batch_size: int) -> MemoryPlan:
    """Trace a step, and return its plan."""
    if batch_size < 1:
        raise wrong_value("batch_size", batch_size, "a batch has at least one sample", "Give 1 or more")
    return MemoryPlan(planner.memory(layout, batch_size), layout, batch_size, planner)


def bar_of(parts: Parts, capacity: float) -> str:
    """Draw the parts as a bar of a device's memory; what does not fit is beyond its end."""
    sizes = {name: size for name, size in parts.as_dict().items() if name in MARKS}
    total, bar, drawn = sum(sizes.values()), "", 0.0
    for name, size in sizes.items():
        drawn += size
        bar += MARKS[name] * (round(BAR_WIDTH * drawn / max(capacity, 1)) - len(bar))
    inside, beyond = bar[:BAR_WIDTH].ljust(BAR_WIDTH, "."), bar[BAR_WIDTH : 2 * BAR_WIDTH]
    share = f"{total / max(capacity, 1):.0%}"
    return f"[{inside}]{beyond} {convert_bytes(total)} of {convert_bytes(capacity)}, {share}"


def table_of(parts: Parts) -> str:
    """Return a table with the bytes of each part, those that take nothing left out."""
    sizes = parts.as_dict()
    rows = [
        [f"{MARKS.get(name, ' ')} {name}", convert_bytes(size), f"{size / max(1, sizes['total']):.1%}"]
        for name, size in sizes.items()
        if size
    ]
    return text_table(["part", "on each device", "share"], rows)


def layouts_table(fits: list[Fit]) -> str:
    """Return a table of the first layouts that fit."""
    rows = [
        [
            fit.layout.name,
            convert_bytes(round(fit.parts.total)),
            convert_bytes(round(fit.host)),
            convert_bytes(round(fit.communication)),
        ]
        for fit in fits[:MOST_LAYOUTS]
    ]
    return text_table(["layout", "on each device", "host, each rank", "sent per sample, each rank"], rows)


def text_table(headers: list[str], rows: list[list[str]]) -> str:
    """Return a table as lines of text."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    target = io.StringIO()
    Console(file=target, width=160, color_system=None, markup=False).print(table)
    lines = [line.rstrip() for line in target.getvalue().splitlines() if line.strip()]
    return textwrap.dedent("\n".join(lines))
