"""Identity of a tensor while it is offloaded, and the check of optimizer steps that would not update it."""

from __future__ import annotations

import weakref
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from accelerate.base import StateError
from accelerate.hooks.unloaded import is_unloaded

TIE = "_accelerate_tie"
"""Attribute of a tensor with its `Tie`."""


class Tie:
    """Identity of a tensor while its entries are offloaded, the same for all entries of a tied tensor.

    Entries that different hooks offload are tied again when the hooks are removed.
    """

    __slots__ = ("num_slots", "original", "restored")

    def __init__(self) -> None:
        self.num_slots = 0  # slots that are offloaded
        self.original: weakref.ref[Tensor] | None = None  # the tensor that was offloaded
        self.restored: weakref.ref[Tensor] | None = None  # the tensor of the entries that have one again

    def __reduce__(self) -> Any:  # a copy of the model has other tensors
        return Tie, ()

    def refill(self, tensor: Tensor) -> Tensor:
        """Returns the tensor that was offloaded with the values of another, so that optimizers still hold it.

        Returns the other tensor if the first one was deleted or does not have its dtype and shape.
        """
        original = None if self.original is None else self.original()
        if original is None or original.is_meta or is_unloaded(original):
            return tensor
        if any(getattr(original, name) != getattr(tensor, name) for name in ("__class__", "dtype", "shape")):
            return tensor
        original.data = tensor.data
        original.requires_grad_(tensor.requires_grad)
        vars(original).update(vars(tensor))
        return original

    def restore(self, tensor: Tensor) -> None:
        """Records the tensor of a slot that is no longer offloaded."""
        self.restored = weakref.ref(tensor)
        self.num_slots -= 1
        if self.num_slots > 0:
            tensor.__dict__[TIE] = self
        else:
            tensor.__dict__.pop(TIE, None)


def tie_of(tensor: Tensor) -> Tie:
    """Returns the `Tie` of a tensor for a slot that is offloaded now."""
    tie: Tie = tensor.__dict__.setdefault(TIE, Tie())
    tie.num_slots += 1
    tie.original, tie.restored = weakref.ref(tensor), None
    return tie


class OffloadedSteps:
    """Check of all optimizer steps of a process in which modules are offloaded.

    The gradients of an offloaded parameter belong to the tensor of one forward. An optimizer holds another
    tensor, which has no gradient, so its step would ignore the parameter.
    """

    def __init__(self) -> None:
        register_optimizer_step_pre_hook(check_step)


def check_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Raises an error if an optimizer steps trainable parameters that are offloaded."""
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    num_offloaded = sum(parameter.requires_grad for parameter in parameters if _is_offloaded(parameter))
    if num_offloaded:
        name = type(optimizer).__name__
        raise StateError(
            f"{name}.step(): {num_offloaded} trainable parameters are offloaded. Their values are loaded for "
            "each forward, so they would not be updated. Pass the optimizer other parameters only, such as "
            "those of an adapter, or train the model without offload."
        )


def _is_offloaded(parameter: Tensor) -> bool:
    if is_unloaded(parameter):
        return True
    tie: Tie | None = parameter.__dict__.get(TIE)
    return tie is not None and tie.num_slots > 0 and tie.original is not None and tie.original() is parameter
