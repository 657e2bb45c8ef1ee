"""Private attributes of gradients, and of DistributedDataParallel, which exchanges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

comm_hooks: Callable[[Any], Sequence[Any]] = attrgetter("_comm_hooks")
"""Communication hooks of a DistributedDataParallel module, which torch registers but does not list."""


def is_joining(replica: nn.Module) -> bool:
    """Returns whether a replica is inside of torch's Join, which has no public attribute for it."""
    config = getattr(replica, "_join_config", None)
    return config is not None and bool(config.enable)


ddp_statistics: Callable[[Any], Any] = methodcaller("_get_ddp_logging_data")
"""Log of the reducer of DistributedDataParallel, which is the only source of the order of gradients."""


def in_place_version(tensor: Tensor) -> int:
    """Returns how often a tensor was changed in place."""
    return tensor._version


def in_place_versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """Returns how often each of several tensors was changed in place, and 0 for None."""
    return [0 if tensor is None else tensor._version for tensor in tensors]


def is_view(tensor: Tensor) -> bool:
    """Returns whether a tensor is a view of another one."""
    return tensor._is_view()
