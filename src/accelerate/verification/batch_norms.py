"""Batch normalization of a large batch as several ranks compute it, each for its part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def find_batch_norms(model: nn.Module) -> list[str]:
    """Returns the names of normalizations whose statistics are those of the batch of one rank."""
    return [name for name, module in model.named_modules() if isinstance(module, KINDS)]


def normalize_in_groups(model: nn.Module, num_groups: int) -> None:
    """Lets batch normalizations treat a batch as that of several ranks.

    The running statistics are those of the first rank, as with `DistributedDataParallel`.
    """
    for name in find_batch_norms(model) if num_groups > 1 else ():
        module = model.get_submodule(name)
        module.forward = partial(_normalize, module, module.forward, num_groups)


def _normalize(
    module: nn.Module, forward: Callable[..., Any], num_groups: int, input: Tensor
) -> Any:  # the name of torch
    if not module.training or input.shape[0] % num_groups:
        return forward(input)
    first, *others = input.chunk(num_groups)
    outputs, buffers = [forward(first)], dict(module.named_buffers())
    for part in others:
        for name, buffer in buffers.items():
            setattr(module, name, buffer.clone())
        outputs.append(forward(part))
    for name, buffer in buffers.items():
        setattr(module, name, buffer)
    return torch.cat(outputs)
