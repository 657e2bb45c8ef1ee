"""Comparison of the factors by which ranks with parts of a model scale gradients or change weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate.base import StateError
from accelerate.ops import local_tensor
from accelerate.strategies.tolerances import must_compare

_NUM_PARAMETERS, _NUM_ELEMENTS = 8, 64
"""Number of parameters whose gradients are sampled, and of elements of each."""
_NUM_DIVIDED = 64
"""Number of divided parameters whose gradients are sampled."""
_MIN_COMPARED = 8
"""Number of elements from which the factor of a rank is known."""
_MAX_ERROR = 0.05
"""Relative error from which a factor is not known."""

Factor = tuple[float, float]
"""Factor of a rank and its relative error."""
UNKNOWN: Factor = (0.0, 0.0)


class Sample(NamedTuple):
    """Elements of a parameter and of its gradient after a backward pass."""

    parameter: Tensor
    gradient: Tensor
    weight: Tensor


class GradientScales:
    """Observer of an optimizer that raises an error if ranks scale their gradients by different factors.

    A loop that computes the norm of the gradients of its optimizer has the norm of the stages or shards of
    its rank, so that the ranks clip differently, or change weights between two backward passes by different
    multiples of the gradients. Steps whose number is a power of two are compared.

    Args:
        divided: Returns the parameters of which several ranks have elements, in the same order on all ranks.
            The gradient of such a parameter may also be scaled by its own norm.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        divided: Callable[[], Iterable[Tensor]] = tuple,
    ) -> None:
        self._group, self._device, self._divided = group, device, divided
        self._samples: list[Sample] = []  # of the last backward pass before a step
        self._of_divided: list[Sample | None] = []
        self._num_steps = 0

    @torch.no_grad()
    def after_batch(self, parameters: Iterable[Tensor]) -> None:
        """Keeps elements of the gradients of the parameters of the optimizer.

        Called on all ranks of the group.

        Raises:
            StateError: The weights were changed since the backward pass before, without a step, by different
                multiples of its gradients.
        """
        if self._of_divided:
            multiples = [UNKNOWN if each is None else _multiple(each) for each in self._of_divided]
            self._compare("changed their weights by different multiples of their gradients", multiples)
        self._samples, self._of_divided = [], []
        if must_compare(self._num_steps + 1):
            parameters = list(parameters)
            own = set(map(id, parameters))
            trained = (p for p in parameters if p.grad is not None and not p.grad.is_sparse)
            self._samples = [_sample(p) for p in islice(trained, _NUM_PARAMETERS)]
            divided = (p for p in self._divided() if id(p) in own)
            self._of_divided = [None if p.grad is None else _sample(p) for p in islice(divided, _NUM_DIVIDED)]

    @torch.no_grad()
    def before_step(self, optimizer: object) -> None:
        """Raises an error on all ranks of the group if their factors differ."""
        self._num_steps += 1
        if must_compare(self._num_steps):
            factors = [_factor(self._samples) if len(self._samples) > 1 else UNKNOWN]
            factors += [UNKNOWN if each is None else _factor([each]) for each in self._of_divided]
            self._compare("scaled their gradients by different factors", factors)

    def after_update(self, optimizer: object) -> None:
        """Forgets the gradients of a step, whose weights the optimizer has changed."""
        self._samples, self._of_divided = [], []

    def _compare(self, what: str, factors: Sequence[Factor]) -> None:
        own = torch.tensor(factors, dtype=torch.float32, device=self._device)
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, own, group=self._group)
        for column in torch.stack(everyone).unbind(1):
            known, errors = column[column[:, 0] != 0].unbind(1)
            if len(known) and known.max() - known.min() > errors.max() * known.abs().max():
                texts = ", ".join(f"{each:.3g}" for each in known.tolist())
                raise StateError(
                    f"Ranks with parts of a model have {what} ({texts}) between the backward pass and the "
                    "step, such as by a norm of the gradients of their own stages or shards. Call "
                    "accelerator.clip_grad_norm_(model.parameters(), max_norm), which computes the norm of "
                    "all gradients (and changes none with float('inf')), or set learning rates of parameter "
                    "groups to scale the updates of layers. Optimizers that compute such a norm, such as "
                    "SAM, need DistributedDataParallel."
                )


def _sample(parameter: Tensor) -> Sample:
    assert parameter.grad is not None
    return Sample(parameter, _elements(parameter.grad).clone(), _elements(parameter).clone())


def _elements(tensor: Tensor) -> Tensor:
    """Returns the first elements of a parameter or gradient on this rank."""
    local: Tensor = local_tensor(tensor).detach()
    return local.reshape(-1)[:_NUM_ELEMENTS]


def _factor(samples: Sequence[Sample]) -> Factor:
    """Returns the factor by which all gradients were multiplied."""
    pairs = [(_elements(s.parameter.grad), s.gradient) for s in samples if s.parameter.grad is not None]
    pairs = [pair for pair in pairs if pair[0].shape == pair[1].shape]
    if not pairs:
        return UNKNOWN
    after, before = (torch.cat([each.double() for each in column]) for column in zip(*pairs, strict=True))
    is_compared = before.isfinite() & after.isfinite() & (before.abs() > 1e-30)
    ratios = (after / before)[is_compared]
    error = 16 * max(torch.finfo(gradient.dtype).eps for _, gradient in pairs)
    if len(ratios) < _MIN_COMPARED:
        return UNKNOWN
    lowest, highest = ratios.aminmax()
    is_uniform = highest - lowest <= error * highest.abs()
    return (float(highest), error) if is_uniform else UNKNOWN


def _multiple(sample: Sample) -> Factor:
    """Returns the multiple of a gradient that was added to weights."""
    now, before, gradient = (
        t.double() for t in (_elements(sample.parameter), sample.weight, sample.gradient)
    )
    norm = gradient.norm()
    if not len(now) == len(before) == len(gradient) >= _MIN_COMPARED or not norm:
        return UNKNOWN
    change, rounding = now - before, 4 * torch.finfo(sample.weight.dtype).eps * before.abs()
    multiple = float(change @ gradient / norm**2)
    expected = multiple * gradient
    error = 1e-4 + float(rounding.norm() / expected.norm()) if multiple else 1.0
    is_uniform = bool(((change - expected).abs() <= rounding + 1e-4 * expected.abs()).all())
    return (multiple, error) if is_uniform and error < _MAX_ERROR else UNKNOWN
