"""Private attributes of gradients, and of DistributedDataParallel, which exchanges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

comm_hooks: Callable[[Any], Sequence[Any]] = attrgetter("_comm_hooks")
"""Communication hooks of a DistributedDataParallel module, which torch registers but does not list."""


is_joining: Callable[[nn.Module], bool] = attrgetter("_join_config.enable")
"""Whether a replica is inside of torch's Join, which has no public attribute for it."""

ddp_statistics: Callable[[Any], Any] = methodcaller("_get_ddp_logging_data")
"""Log of the reducer of DistributedDataParallel, which is the only source of the order of gradients."""

in_place_version: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor was changed in place."""


def in_place_versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """Returns how often each of several tensors was changed in place, and 0 for None."""
    return [0 if tensor is None else tensor._version for tensor in tensors]


def set_in_place_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Sets how often tensors were changed in place, which autograd compares with its saved tensors."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def version_counter(tensor: Tensor) -> Tensor:
    """Returns an empty tensor that counts changes of another one in place, without its memory."""
    counter = tensor.detach()
    counter.data = tensor.new_empty(0)
    return counter


def base_of(tensor: Tensor) -> Tensor:
    """Returns the tensor that a tensor is a view of, or the tensor itself."""
    return tensor if tensor._base is None else tensor._base


def is_view(tensor: Tensor) -> bool:
    """Returns whether a tensor is a view of another one."""
    return tensor._is_view()
