"""Largest differences between a computation that is split over ranks and the same one on one rank."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

CHECK_REPLICAS = "check_replicas"
"""Option of gradient accumulation that enables comparisons of ranks."""


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


def must_compare(number: int) -> bool:
    """Returns whether a step or call is compared with its reference.

    Args:
        number: Number of the step or call, from 1. Powers of two are compared, so that later changes of the
            program are found, too, and most steps cost nothing.
    """
    return number & (number - 1) == 0


def tolerance_of(model: nn.Module, precision: str) -> Tolerance:
    """Returns the tolerance of a model, whose weights may have a lower precision than the run."""
    is_low = any(p.is_floating_point() and p.element_size() < 4 for p in model.parameters())
    return TOLERANCES["bf16" if is_low and precision == "no" else precision]


def relative_difference(values: Tensor, right: Tensor, tolerance: float, zero: float = 0.0) -> float:
    """Returns the norm of the difference of two tensors relative to that of the second one.

    Args:
        right: Tensor of that shape, or of another one if only local parts are known.
        tolerance: Largest difference that counts as 0.
        zero: Norm of a difference that counts as 0.

    Returns:
        The difference, infinity if other entries are finite, or 0 for tensors that are not floating-point.
    """
    values, right = as_real(values), as_real(right)
    if not right.is_floating_point() or (values.ndim and right.ndim and values.shape != right.shape):
        return 0.0
    values, right = (each.detach().to("cpu", torch.float64) for each in (values, right))
    if not (values - right).isfinite().all() and not values.isfinite().equal(right.isfinite()):
        return float("inf")
    difference, norm = (float(each.nan_to_num(0.0, 0.0, 0.0).norm()) for each in (values - right, right))
    if difference <= tolerance * norm + zero + 1e-12:
        return 0.0
    return difference / norm if norm else float("inf")


def as_real(tensor: Tensor) -> Tensor:
    """Returns the real and imaginary parts of a complex tensor, and other tensors unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
