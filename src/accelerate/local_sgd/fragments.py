"""Fragments of a model, whose global parameters are in buffers that are exchanged as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from accelerate.ops import Mean


def divide(sizes: Sequence[int], num_parts: int) -> list[range]:
    """Divides a sequence into adjacent parts of about equal total size, none of which is empty.

    Args:
        sizes: Sizes of the elements.
        num_parts: Number of parts, at most that of the elements.
    """
    ends: list[int] = []
    total, seen = sum(sizes), 0
    for index, size in enumerate(sizes):
        seen += size
        num_further = num_parts - len(ends) - 1
        is_full = seen * num_parts >= total * (len(ends) + 1)
        if num_further and (is_full or len(sizes) - index - 1 == num_further):
            ends.append(index + 1)
    ends.append(len(sizes))
    return [range(*pair) for pair in zip([0, *ends], ends, strict=False)]


@dataclass(frozen=True)
class Bucket:
    """Parameters of one fragment whose global values have one dtype, and one device.

    Attributes:
        flat: Their global values, which are equal on all ranks.
        views: Views of `flat` with the shapes of the parameters, which the outer optimizer steps.
    """

    parameters: list[Tensor]
    flat: Tensor
    views: list[nn.Parameter]

    @classmethod
    def of(cls, parameters: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Bucket:
        """Copies parameters into a buffer."""
        flat = torch.empty(sum(map(Tensor.numel, parameters)), dtype=dtype, device=device)
        views = split_like(flat, parameters)
        for view, parameter in zip(views, parameters, strict=True):
            view.copy_(parameter.detach())
        return cls(list(parameters), flat, [nn.Parameter(view) for view in views])

    @property
    def locals(self) -> list[Tensor]:
        """Values of the parameters on this rank, which share their memory."""
        return [parameter.detach() for parameter in self.parameters]

    @torch.no_grad()
    def difference(self) -> Tensor:
        """Returns the pseudo-gradient of this rank, which is the global values minus those of the model."""
        locals_ = self.locals
        difference = self.flat.to(locals_[0].device, copy=True)
        torch._foreach_sub_(split_like(difference, locals_), locals_)
        return difference

    @torch.no_grad()
    def copy_to_model(self, mixing: float = 0.0) -> None:
        """Sets the parameters of the model to the global values, mixed with a part of their own values."""
        locals_, views = self.locals, [view.detach() for view in self.views]
        if mixing:
            views = [view.to(local.device) for view, local in zip(views, locals_, strict=True)]
            views = [
                view.lerp(local.to(view.dtype), mixing) for view, local in zip(views, locals_, strict=True)
            ]
        torch._foreach_copy_(locals_, views)


def split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of a buffer with the shapes of tensors."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


@dataclass
class Fragment:
    """Part of the parameters of a model, which are exchanged at one step of each interval.

    Attributes:
        offset: Step of the interval at which its exchange starts, from 1.
        started: Step at which its last exchange has started, or 0.
    """

    buckets: list[Bucket]
    offset: int
    started: int = 0


@dataclass(frozen=True)
class Exchange:
    """Exchange of a fragment that has started.

    Attributes:
        started: Step at which it has started.
        means: Means of the pseudo-gradients of all ranks, one for each bucket.
    """

    index: int
    started: int
    means: Sequence[Mean]


def build_fragments(
    parameters: Sequence[Tensor], num_fragments: int, interval: int, device: torch.device | None
) -> list[Fragment]:
    """Returns fragments of about equal size, whose exchanges are spread evenly over an interval.

    The last one starts at the end of the interval.

    Args:
        parameters: Parameters of a model in their order, which is equal on all ranks.
        interval: Number of steps of an interval.
        device: Device of the global values, or None for that of each parameter.
    """
    parts = divide(list(map(Tensor.numel, parameters)), num_fragments)
    return [
        Fragment(
            list(_buckets([parameters[position] for position in part], device)),
            (index + 1) * interval // num_fragments,
        )
        for index, part in enumerate(parts)
    ]


def _buckets(parameters: Sequence[Tensor], device: torch.device | None) -> Iterator[Bucket]:
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        kinds.setdefault((dtype, parameter.device), []).append(parameter)
    for (dtype, own), members in kinds.items():
        yield Bucket.of(members, dtype, own if device is None else device)


def views_by_parameter(fragments: Sequence[Fragment]) -> Mapping[Tensor, nn.Parameter]:
    """Returns the global values of each parameter of a model."""
    return {
        parameter: view
        for fragment in fragments
        for bucket in fragment.buckets
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
    }
