"""Comparison of the factors by which ranks with parts of a model scale their gradients before a step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate.base import StateError
from accelerate.ops import local_tensor
from accelerate.strategies.tolerances import must_compare

_NUM_PARAMETERS, _NUM_ELEMENTS = 8, 64
"""Number of parameters whose gradients are sampled, and of elements of each."""
_MIN_COMPARED = 8
"""Number of elements from which the factor of a rank is known."""


class GradientScales:
    """Observer of an optimizer that raises an error if ranks scale their gradients by different factors.

    A loop that computes the norm of the gradients of its optimizer has the norm of the stages or shards of
    its rank, so that the ranks clip differently. Steps whose number is a power of two are compared.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._computed: list[tuple[Tensor, Tensor]] = []  # parameters, and elements of their gradients
        self._num_steps = 0

    @torch.no_grad()
    def after_batch(self, parameters: Iterable[Tensor]) -> None:
        """Keeps elements of the gradients of the parameters of the optimizer."""
        if must_compare(self._num_steps + 1):
            trained = (p for p in parameters if p.grad is not None and not p.grad.is_sparse)
            self._computed = [(p, _elements(p).clone()) for p in islice(trained, _NUM_PARAMETERS)]

    def before_step(self, optimizer: object) -> None:
        """Raises an error on all ranks of the group if their factors differ."""
        self._num_steps += 1
        if not must_compare(self._num_steps):
            return
        own = torch.tensor(self._factor(), dtype=torch.float32, device=self._device)
        self._computed = []
        factors = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(factors, own, group=self._group)
        table = torch.stack(factors)
        known, errors = table[table[:, 0] != 0].unbind(1)
        if len(known) and known.max() - known.min() > errors.max() * known.abs().max():
            texts = ", ".join(f"{factor:.3g}" for factor in known.tolist())
            raise StateError(
                f"Ranks with parts of a model have scaled their gradients by different factors ({texts}) "
                "between the backward pass and the step, such as by a norm of the gradients of their own "
                "stages or shards. Call accelerator.clip_grad_norm_(model.parameters(), max_norm), which "
                "computes the norm of all gradients, or set learning rates of parameter groups to scale the "
                "updates of layers."
            )

    @torch.no_grad()
    def _factor(self) -> tuple[float, float]:
        """Returns the factor of all gradients, 0 without one, and its relative error."""
        pairs = [(_elements(p), computed) for p, computed in self._computed if p.grad is not None]
        if not pairs:
            return 0.0, 0.0
        after, before = (torch.cat([each.double() for each in column]) for column in zip(*pairs, strict=True))
        is_compared = before.isfinite() & after.isfinite() & (before.abs() > 1e-30)
        ratios = (after / before)[is_compared]
        error = 16 * max(torch.finfo(computed.dtype).eps for _, computed in pairs)
        if len(pairs) < 2 or len(ratios) < _MIN_COMPARED:
            return 0.0, 0.0
        lowest, highest = ratios.aminmax()
        is_uniform = highest - lowest <= error * highest.abs()
        return (float(highest), error) if is_uniform else (0.0, 0.0)


def _elements(parameter: Tensor) -> Tensor:
    """Returns the first elements of the gradient of a parameter."""
    gradient: Tensor = local_tensor(parameter.grad)
    return gradient.reshape(-1)[:_NUM_ELEMENTS]
