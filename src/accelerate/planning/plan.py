"""Memory plan of a run, with the bytes on each device, the largest batch and the layouts that fit.

Returned by `Accelerator.plan_memory`, and printed by `accelerate estimate-memory`.
"""

from __future__ import annotations

import functools
import io
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from accelerate.base import convert_bytes, convert_file_size_to_int, wrong_value
from accelerate.planning.layouts import (
    Layout,
    candidate_layouts,
    communication_of,
    host_bytes,
    least_bytes,
    memory_of,
    parse_devices,
)
from accelerate.planning.parts import Parts, Trace

LARGEST_BATCH = 2**20
"""Upper bound of the search for the largest batch."""
LARGEST_GROWTH = 64
"""Largest factor between a batch size that fits and the next one that is tried."""
MAX_LAYOUTS = 5
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
"""Part of the memory -> its character in a bar."""


class Variant(NamedTuple):
    """Properties of a layout and a batch that the trace of a model depends on."""

    batch_size: int
    checkpointing: bool
    is_sharded: bool
    accumulates: bool
    expert_parallel: int = 1
    offloads_activations: bool = False


@dataclass(frozen=True)
class FittingLayout:
    """Layout that fits, with its memory and communication.

    Attributes:
        parts: Bytes on each device at the peak.
        host: Bytes that each rank keeps in host memory.
        communication: Bytes that each rank sends per sample.
    """

    layout: Layout
    parts: Parts
    host: float
    communication: float


class Planner:
    """Computes memory, batch sizes and layouts from traces of a step, each of which is made once."""

    def __init__(self, trace: Callable[[Variant], Trace]) -> None:
        self.trace = functools.cache(trace)

    def trace_of(self, layout: Layout, batch_size: int) -> Trace:
        """Returns the trace that the memory of a layout is computed from."""
        is_sharded, accumulates = layout.is_sharded, layout.accumulation > 1
        passes = (batch_size, layout.checkpointing, is_sharded, accumulates)
        return self.trace(Variant(*passes, layout.expert_parallel, layout.offload_activations))

    def memory(self, layout: Layout, batch_size: int) -> Parts:
        """Returns the bytes of each part on each device at the peak."""
        return memory_of(self.trace_of(layout, batch_size), layout)

    def largest_batch(self, layout: Layout, capacity: float, start: int) -> int:
        """Returns the largest batch that fits in the memory of a device, or 0 if one sample does not fit."""
        return largest_batch(lambda size: self.memory(layout, size).total, capacity, start)

    def fitting_layouts(
        self, layout: Layout, devices: int, capacity: float, batch_size: int
    ) -> list[FittingLayout]:
        """Returns the layouts of a number of devices that fit.

        Layouts without offload are first, and those with less communication before others. There is one
        layout for each sharding and size of the other axes, with activation checkpointing and offload only if
        it needs them. Layouts with a pipeline are tried if none without fits without offload. Each of their
        micro-batches has `batch_size` samples.

        Args:
            layout: Layout whose gradient accumulation is used.
            capacity: Memory of each device, in bytes.
            batch_size: Samples on each device in one forward pass.
        """
        model = self.trace_of(replace(layout, expert_parallel=1), batch_size)
        fits: dict[Layout, FittingLayout] = {}
        for candidate in candidate_layouts(devices, model, accumulation=layout.accumulation):
            kind = replace(candidate, offload="none", checkpointing=False, offload_activations=False)
            is_needless = candidate.stages > 1 and any(
                fit.layout.stages == 1 and not fit.layout.uses_host for fit in fits.values()
            )
            if kind in fits or is_needless or least_bytes(model, candidate) > capacity:
                continue
            trace = self.trace_of(candidate, batch_size * candidate.num_microbatches)
            parts = memory_of(trace, candidate)
            if parts.total <= capacity:
                samples = batch_size * candidate.samples_per_batch
                sent = communication_of(trace, candidate) / samples
                fits[kind] = FittingLayout(candidate, parts, host_bytes(trace, candidate), sent)
        return sorted(fits.values(), key=lambda fit: (fit.layout.uses_host, fit.communication, fit.host))


def largest_batch(bytes_of: Callable[[int], float], capacity: float, start: int) -> int:
    """Returns the largest batch whose bytes are at most `capacity`, up to `LARGEST_BATCH`.

    The peak is the maximum of several functions that are almost affine in the batch size. So a line through
    two sizes that do not fit reaches the capacity at a size that is too large or the result. If a line does
    not halve the interval, the middle of the interval is tried next. The search verifies that one more sample
    does not fit.
    """
    measured: dict[int, float] = {}
    low, high, guess = 0, LARGEST_BATCH + 1, start
    while high - low > 1:
        guess, width = min(max(guess, low + 1), high - 1), high - low
        measured[guess] = bytes_of(guess)
        low, high = (guess, high) if measured[guess] <= capacity else (low, guess)
        is_open = high > LARGEST_BATCH
        middle = LARGEST_GROWTH * low if is_open else (low + high) // 2
        line = _size_on_line(measured, capacity, is_open)
        halves = is_open or len(measured) < 4 or 2 * (high - low) <= width
        guess = middle if line is None or not halves else min(line, middle) if is_open else line
    return low


def _size_on_line(measured: dict[int, float], capacity: float, is_open: bool) -> int | None:
    """Returns the batch size at which a line through two measured sizes reaches the capacity.

    The line goes through the two smallest sizes that do not fit. If no size has exceeded the bound of the
    search yet (`is_open`), it goes through the two largest sizes.
    """
    sizes = sorted(size for size in measured if is_open or measured[size] > capacity)
    pair = sizes[-2:] if is_open else sizes[:2]
    if len(pair) < 2:
        return None
    slope = (measured[pair[1]] - measured[pair[0]]) / (pair[1] - pair[0])
    return int(pair[0] + (capacity - measured[pair[0]]) // slope) if slope > 0 else None


@dataclass(frozen=True)
class MemoryPlan:
    """Memory that each device needs at the peak of a training step, computed without running a step.

    `print(plan)` shows the parts as a table and a bar.

    Attributes:
        parts: Bytes of parameters, gradients, optimizer state and so on on one device at the peak.
        layout: Distribution of the model over devices.
        batch_size: Samples on each device in one forward pass.
        recomputed: Activations that are recomputed in the backward pass, as text.
        workspace: Measured bytes of the largest workspace of a kernel of this CPU, which are not part of the
            peak. 0 for other devices.
    """

    parts: Parts
    layout: Layout
    batch_size: int
    planner: Planner
    recomputed: str = "nothing"
    workspace: int = 0

    @property
    def host(self) -> int:
        """Bytes that each rank keeps in host memory."""
        return round(host_bytes(self.planner.trace_of(self.layout, self.batch_size), self.layout))

    @property
    def peak(self) -> int:
        """Bytes on each device at the peak."""
        return self.parts.as_dict()["total"]

    def largest_batch_size(self, memory: int | str) -> int:
        """Returns the largest batch on each device that fits in its memory.

        Args:
            memory: Memory of a device in bytes, or text such as "80GB".

        Returns:
            A number of samples, or 0 if one sample does not fit.
        """
        capacity = convert_file_size_to_int(memory)
        return self.planner.largest_batch(self.layout, capacity, self.batch_size)

    def fitting_layouts(self, devices: str) -> list[FittingLayout]:
        """Returns the layouts that fit, sorted by offload and communication.

        Layouts without offload are first, and those with less communication before others. Layouts with a
        pipeline are tried if none without fits without offload. Each of their micro-batches has as many
        samples as a forward pass of this layout.

        Args:
            devices: Number of devices and memory of each, such as "8x80GB".
        """
        count, capacity = parse_devices(devices)
        samples = max(1, self.batch_size // self.layout.num_microbatches)
        return self.planner.fitting_layouts(self.layout, count, capacity, samples)

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as values for JSON, with exact bytes."""
        names = [field.name for field in fields(self.layout)]
        return {
            "batch_size": self.batch_size,
            "layout": {"name": self.layout.name, **{name: getattr(self.layout, name) for name in names}},
            "device_bytes": self.parts.as_dict(),
            "host_bytes": self.host,
        }

    def __str__(self) -> str:
        lines = [format_parts(self.parts), format_bar(self.parts, self.peak)]
        if self.layout.checkpointing:
            lines.append(f"recomputed in backward: {self.recomputed}")
        if self.workspace:
            size = convert_bytes(self.workspace)
            lines.append(f"not included: {size} for the largest workspace of a kernel of this CPU (measured)")
        if self.layout.offload_activations:
            lines.append(f"inputs of recomputed blocks: offloaded, {convert_bytes(self.host)} on the host")
        return "\n".join(lines)


def build_plan(planner: Planner, layout: Layout, batch_size: int, recomputed: str = "nothing") -> MemoryPlan:
    """Returns the memory plan of a step, which is traced for it."""
    if batch_size < 1:
        raise wrong_value("batch_size", batch_size, "a batch has at least one sample", "Give 1 or more")
    return MemoryPlan(planner.memory(layout, batch_size), layout, batch_size, planner, recomputed)


def format_bar(parts: Parts, capacity: float) -> str:
    """Returns a bar of the memory of a device with one character per part.

    Bytes above the capacity are shown behind the end of the bar.
    """
    sizes = {name: size for name, size in parts.as_dict().items() if name in MARKS}
    total, bar, cumulative = sum(sizes.values()), "", 0.0
    for name, size in sizes.items():
        cumulative += size
        bar += MARKS[name] * (round(BAR_WIDTH * cumulative / max(capacity, 1)) - len(bar))
    inside, beyond = bar[:BAR_WIDTH].ljust(BAR_WIDTH, "."), bar[BAR_WIDTH : 2 * BAR_WIDTH]
    percentage = f"{total / max(capacity, 1):.0%}"
    return f"[{inside}]{beyond} {convert_bytes(total)} of {convert_bytes(capacity)}, {percentage}"


def format_parts(parts: Parts) -> str:
    """Returns a table with the bytes of each part that is not empty."""
    sizes = parts.as_dict()
    rows = [
        [f"{MARKS.get(name, ' ')} {name}", convert_bytes(size), f"{size / max(1, sizes['total']):.1%}"]
        for name, size in sizes.items()
        if size
    ]
    return _format_table(["part", "on each device", "share"], rows)


def format_layouts(fits: list[FittingLayout]) -> str:
    """Returns a table of the first layouts that fit."""
    rows = [
        [
            fit.layout.name,
            convert_bytes(round(fit.parts.total)),
            convert_bytes(round(fit.host)),
            convert_bytes(round(fit.communication)),
        ]
        for fit in fits[:MAX_LAYOUTS]
    ]
    return _format_table(["layout", "on each device", "host, each rank", "sent per sample, each rank"], rows)


def _format_table(headers: list[str], rows: list[list[str]]) -> str:
    """Returns a table as lines of text."""
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
