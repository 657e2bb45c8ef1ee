"""Gradient synchronization and all-gathers of FSDP units, enabled or disabled for a block.

Strategies call it in `no_sync` and `unsharded`, and `Accelerator.trigger_sync_in_backward` for a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate import torch_private
from accelerate.nested import iterate_tensors

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


_KEPT = "_accelerate_keeps_gathered"
"""Attribute of units of FSDP 2 inside of `keep_gathered`."""


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Enables or disables gradient synchronization of sharded units, as a context manager.

    Afterwards the units of FSDP 1 are as before, and those of FSDP 2 do the opposite.
    """
    modules: list[Any] = list(model.modules())
    wrappers = [(unit, kept) for unit in modules if (kept := torch_private.gradient_sync(unit)) is not None]
    in_place = [unit for unit in modules if hasattr(unit, "set_requires_gradient_sync")]
    for unit, _ in wrappers:
        torch_private.set_gradient_sync(unit, enabled)
    for unit in in_place:
        unit.set_requires_gradient_sync(enabled, recurse=False)
    try:
        yield
    finally:
        for unit, kept in wrappers:
            torch_private.set_gradient_sync(unit, kept)
        for unit in in_place:
            unit.set_requires_gradient_sync(not enabled, recurse=False)


@contextmanager
def reduction_in_replicas(model: nn.Module) -> Iterator[None]:
    """Makes units of FSDP 2 reduce gradients to shards, and add them up without all-reduce over replicas.

    The next backward pass outside of the block all-reduces the sums.
    """
    units = units_of(model)
    for unit in units:
        unit.set_requires_all_reduce(False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_all_reduce(True, recurse=False)


def units_of(model: nn.Module) -> list[FSDPModule]:
    """Returns all units of FSDP 2 in a model, which may be compiled."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def keep_gathered(units: Iterable[tuple[FSDPModule, bool]]) -> Iterator[None]:
    """Gathers units of FSDP 2 and keeps them gathered inside the block.

    Args:
        units: Units, each with whether it is freed after a forward outside of the block.
    """
    units = [(unit, is_freed) for unit, is_freed in units if _KEPT not in vars(unit)]  # of an outer block
    for unit, _ in units:
        unit.unshard()
        unit.set_reshard_after_forward(False, recurse=False)
        vars(unit)[_KEPT] = True
    try:
        yield
    finally:
        for unit, is_freed in units:
            del vars(unit)[_KEPT]
            unit.set_reshard_after_forward(is_freed, recurse=False)
            unit.reshard()


def apply_to_shards(model: nn.Module) -> None:
    """Makes `zero_grad` and `requires_grad_` change the shards of a model of FSDP 2 that are trained.

    While parameters are gathered, the methods of torch change the gathered ones. FSDP 2 keeps those of the
    outermost unit after a forward, for a backward pass. A forward without gradients frees them here.
    """
    model.register_forward_hook(_reshard)
    kinds: set[Any] = {type(unit) for unit in units_of(model)}  # FSDP 2 makes one for each class of modules
    for kind in kinds:
        if "zero_grad" not in vars(kind):
            kind.zero_grad = _zero_grad


def _zero_grad(unit: nn.Module, set_to_none: bool = True) -> None:
    """Removes the gradients of a unit of FSDP 2, but for those of a window that are not reduced yet.

    See `torch.nn.Module.zero_grad`.
    """
    with torch_private.unreduced_gradients_kept(unit):
        # The class that has this function, from which a user's class may be derived
        owner: Any = next(kind for kind in type(unit).__mro__ if vars(kind).get("zero_grad") is _zero_grad)
        super(owner, unit).zero_grad(set_to_none)
    torch_private.zero_sharded_gradients(unit, set_to_none)


def _reshard(model: nn.Module, args: tuple[Any, ...], output: object) -> None:
    if has_no_backward(output):
        _reshard_units(model)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def has_no_backward(outputs: object) -> bool:
    """Returns whether no backward pass can follow a forward with these outputs, such as that of a teacher."""
    if not torch.is_grad_enabled():
        return True
    tensors = list(iterate_tensors(outputs))
    return bool(tensors) and not any(tensor.requires_grad for tensor in tensors)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _reshard_units(model: nn.Module) -> None:
    for unit in units_of(model):
        free_unit(unit)


def free_unit(unit: Any) -> None:
    """Frees the gathered parameters of a unit of FSDP 2, but not in `keep_gathered`."""
    if _KEPT not in vars(unit):
        unit.reshard()


class UnitsFreedBeforeSteps:
    """Observer of an optimizer that frees units which a forward without a backward pass has left gathered.

    Otherwise the next forward would use weights from before the step.

    Args:
        models: Models of the run, to which later ones are added.
        list_units: Returns the units of a model.
        free: Frees a unit if it is gathered.
    """

    def __init__(
        self,
        models: list[nn.Module],
        list_units: Callable[[nn.Module], Iterable[Any]],
        free: Callable[[Any], None],
    ) -> None:
        self._models, self._list_units, self._free = models, list_units, free
        self._known, self._units = list[nn.Module](), list[Any]()

    def before_step(self, optimizer: object) -> None:
        if self._known != self._models:
            self._known = list(self._models)
            self._units = [unit for model in self._models for unit in self._list_units(model)]
        for unit in self._units:
            self._free(unit)
