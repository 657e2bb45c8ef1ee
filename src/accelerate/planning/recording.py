"""The bytes of each part at each operator of a traced step, and those of the same step with more blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelerate.planning.parts import Parts, Trace

Sizes = NDArray[np.float64]
COLUMNS = [field.name for field in fields(Parts)]
"""Columns of the sizes of moments."""


@dataclass(frozen=True)
class Phase:
    """A forward or a backward pass: its operators, and the bytes of each part after each of them."""

    operators: NDArray[np.int64]
    sizes: Sizes


@dataclass(frozen=True)
class Recording:
    """A traced step.

    Attributes:
        phases: forward and backward passes.
        step: bytes of each part at the peak of clipping and the optimizer step.
        facts: other fields of a `Trace` that are numbers.
    """

    phases: tuple[Phase, ...]
    step: Sizes
    facts: Mapping[str, float]

    def trace(self, **others: Any) -> Trace:
        """Return the trace of the step, with the fields of a `Trace` that are no bytes."""
        numbers: Any = {name: size if name == "masters" else round(size) for name, size in self.facts.items()}
        work = [_parts(row) for row in _not_dominated(np.concatenate([each.sizes for each in self.phases]))]
        return Trace(work=tuple(work), step=(_parts(self.step),), **numbers, **others)

    def maxima(self) -> Sizes:
        """Return the largest total and the most bytes of each part, of each phase and of the step."""
        phases = [*(phase.sizes for phase in self.phases), self.step[None]]
        return np.array([[sizes.sum(1).max(), *sizes.max(0)] for sizes in phases])


def _parts(row: Sizes) -> Parts:
    return Parts(**dict(zip(COLUMNS, row.tolist(), strict=True)))


def _not_dominated(moments: Sizes) -> Iterator[Sizes]:
    """Return the moments that may be the peak if parts shrink by different factors."""
    rows = np.unique(moments, axis=0)
    rows = rows[np.argsort(-rows.sum(1), kind="stable")]
    while len(rows):
        first = rows[0]
        yield first
        rows = rows[(rows > first).any(1)]


def extrapolate(base: Recording, grown: Sequence[Recording], times: Sequence[float]) -> Recording | None:
    """Return the recording of a step with more blocks.

    The bytes at an operator are affine in the number of blocks before and after it. So moments of the first
    blocks are matched from the beginning of a phase and those of the last blocks from its end. The moments
    of blocks between them are never the peak.

    Args:
        base: with at least two of the blocks that repeat.
        grown: with one more block, for each list of blocks.
        times: how many more blocks than `base` the step has, for each list.

    Returns:
        None if the operators are not those of repeated blocks.
    """
    phases = []
    for index, phase in enumerate(base.phases):
        found = _grow(phase, [each.phases[index] for each in grown], times)
        if found is None:
            return None
        phases.append(found)
    step = base.step + sum(count * (each.step - base.step) for each, count in zip(grown, times, strict=True))
    facts = {
        name: size + sum(count * (each.facts[name] - size) for each, count in zip(grown, times, strict=True))
        for name, size in base.facts.items()
    }
    return Recording(tuple(phases), step, facts)


def _grow(phase: Phase, grown: Sequence[Phase], times: Sequence[float]) -> Phase | None:
    count = len(phase.operators)
    found = [(phase.sizes, np.ones(count, dtype=bool))]
    for each, more in zip(grown, times, strict=True):
        added = len(each.operators) - count
        if added < 0:
            return None
        same_start = _common(phase.operators, each.operators)
        same_end = _common(phase.operators[::-1], each.operators[::-1])
        if same_start + same_end < count:
            return None
        middle, overlap = (count - same_end + same_start) // 2, added // 4
        position = np.arange(count)
        from_start = position < min(same_start, middle + overlap)
        from_end = position >= max(count - same_end, middle - overlap)
        found = [
            (sizes + more * (moved - phase.sizes), is_valid & part)
            for sizes, is_valid in found
            for moved, part in ((each.sizes[:count], from_start), (each.sizes[added:], from_end))
        ]
    return Phase(np.empty(0, dtype=np.int64), np.concatenate([sizes[valid] for sizes, valid in found]))


def _common(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Return how many first elements are the same."""
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def is_close(one: Recording, other: Recording, tolerance: float) -> bool:
    """Return whether two recordings have the same maxima, with a relative tolerance of the total."""
    first, second = one.maxima(), other.maxima()
    return bool((np.abs(first - second) <= tolerance * second[:, :1]).all())
