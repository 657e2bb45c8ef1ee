"""Largest differences between a computation that is split over ranks and the same one on one rank."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class Tolerance(NamedTuple):
    """Largest difference of two tensors.

    Attributes:
        relative: Norm of the difference relative to that of the tensor.
        absolute: Norm of the difference of two gradients relative to the largest norm of a gradient. Some
            gradients are zero but for rounding.
    """

    relative: float
    absolute: float


TOLERANCES = {
    "no": Tolerance(1e-3, 1e-5),
    "fp16": Tolerance(3e-2, 3e-3),
    "bf16": Tolerance(5e-2, 5e-3),
    "fp8": Tolerance(0.3, 3e-2),
}
"""Tolerances by the mixed precision of the run."""


def tolerance_of(model: nn.Module, precision: str) -> Tolerance:
    """Returns the tolerance of a model, whose weights may have a lower precision than the run."""
    is_low = any(p.is_floating_point() and p.element_size() < 4 for p in model.parameters())
    return TOLERANCES["bf16" if is_low and precision == "no" else precision]
