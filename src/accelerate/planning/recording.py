"""Bytes of each part of the memory at each operator of a traced step, and their extrapolation to more blocks.

`planning.tracing` makes recordings, and `planning.variants` extrapolates them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from accelerate.planning.parts import Parts, Trace

Sizes = NDArray[np.float64]
COLUMNS = [field.name for field in fields(Parts)]
"""Columns of the sizes of moments, which are the fields of `Parts`."""


@dataclass(frozen=True)
class Phase:
    """Operators of a forward or backward pass, with the bytes of each part after each operator.

    Attributes:
        operators: Identifiers of the operators, of shape (operators,).
        sizes: Bytes of shape (operators, parts).
    """

    operators: NDArray[np.int64]
    sizes: Sizes


@dataclass(frozen=True)
class Recording:
    """Memory of a traced step at each operator.

    Attributes:
        step: Bytes of each part at the peak of gradient clipping and the optimizer step.
        scalars: Other fields of a `Trace` that are numbers.
    """

    phases: tuple[Phase, ...]
    step: Sizes
    scalars: Mapping[str, float]

    def trace(self, **others: Any) -> Trace:
        """Returns the trace of the step.

        Args:
            others: Fields of the `Trace` that are not in the recording.
        """
        numbers: Any = {
            name: size if name == "master_ratio" else round(size) for name, size in self.scalars.items()
        }
        sizes = np.concatenate([phase.sizes for phase in self.phases])
        passes = tuple(_parts(row) for row in _not_dominated(sizes))
        return Trace(forward_backward=passes, step=(_parts(self.step),), **numbers, **others)

    def maxima(self) -> Sizes:
        """Returns the maximum of the total and of each part in each phase and in the optimizer step."""
        phases = [*(phase.sizes for phase in self.phases), self.step[None]]
        return np.array([[sizes.sum(1).max(), *sizes.max(0)] for sizes in phases])


def _parts(row: Sizes) -> Parts:
    return Parts(**dict(zip(COLUMNS, row.tolist(), strict=True)))


def _not_dominated(moments: Sizes) -> Iterator[Sizes]:
    """Yields the moments that can be the peak after each part is multiplied by a factor of its own."""
    rows = np.unique(moments, axis=0)
    rows = rows[np.argsort(-rows.sum(1), kind="stable")]
    while len(rows):
        first = rows[0]
        yield first
        rows = rows[(rows > first).any(1)]


def extrapolate(base: Recording, grown: Sequence[Recording], times: Sequence[float]) -> Recording | None:
    """Returns the recording of a step with more blocks.

    The bytes at an operator are affine in the number of blocks before and after it. So moments of the first
    blocks are matched from the beginning of a phase and those of the last blocks from its end. The moments
    of blocks between them are left out: a moment in the middle is the peak only if blocks differ in an
    attribute, and then exceeds the others by less than a block's own buffers.

    Args:
        base: Recording with at least two repetitions in each list of blocks.
        grown: For each list, a recording with one more repetition.
        times: For each list, the number of repetitions that the step has in addition to those of `base`.

    Returns:
        None if the operators are not those of repeated blocks.
    """
    phases = []
    for index, phase in enumerate(base.phases):
        extrapolated = _extrapolate_phase(phase, [other.phases[index] for other in grown], times)
        if extrapolated is None:
            return None
        phases.append(extrapolated)
    pairs = list(zip(grown, times, strict=True))
    step = base.step + sum(count * (other.step - base.step) for other, count in pairs)
    scalars = {
        name: size + sum(count * (other.scalars[name] - size) for other, count in pairs)
        for name, size in base.scalars.items()
    }
    return Recording(tuple(phases), step, scalars)


def _extrapolate_phase(phase: Phase, grown: Sequence[Phase], times: Sequence[float]) -> Phase | None:
    count = len(phase.operators)
    extrapolated = [(phase.sizes, np.ones(count, dtype=bool))]
    for longer, more in zip(grown, times, strict=True):
        added = len(longer.operators) - count
        if added < 0:
            return None
        same_start = _common_prefix(phase.operators, longer.operators)
        same_end = _common_prefix(phase.operators[::-1], longer.operators[::-1])
        if same_start + same_end < count:
            return None
        middle, overlap = (count - same_end + same_start) // 2, added // 4
        position = np.arange(count)
        from_start = position < min(same_start, middle + overlap)
        from_end = position >= max(count - same_end, middle - overlap)
        extrapolated = [
            (sizes + more * (aligned - phase.sizes), is_valid & is_aligned)
            for sizes, is_valid in extrapolated
            for aligned, is_aligned in ((longer.sizes[:count], from_start), (longer.sizes[added:], from_end))
        ]
    sizes = np.concatenate([sizes[is_valid] for sizes, is_valid in extrapolated])
    return Phase(np.empty(0, dtype=np.int64), sizes)


def _common_prefix(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    length = min(len(one), len(other))
    different = one[:length] != other[:length]
    return int(different.argmax()) if different.any() else length


def is_close(one: Recording, other: Recording, tolerance: float) -> bool:
    """Returns whether two recordings have the same maxima, with a tolerance relative to the total."""
    first, second = one.maxima(), other.maxima()
    return bool((np.abs(first - second) <= tolerance * second[:, :1]).all())
