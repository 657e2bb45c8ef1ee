"""Errors for programs whose assignments and steps do not change parameters that are DTensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import StateError, listed
from accelerate.ops import is_dtensor, local_tensor
from accelerate.strategies.dtensors.names import named_parameters
from accelerate.strategies.tolerances import must_compare

_SIGNS_OF_TORCH = ("harding strategy registered", "require placement changes", "harding propagation failed")
_SIGN_OF_MIXED = "got mixed torch.Tensor and DTensor"


class AssignedData:
    """Hook of a sharded model that raises an error if `parameter.data` has been assigned.

    torch stores the shard of a DTensor in an attribute, so that the assignment changes nothing. It only
    replaces the storage of the wrapper, which has no elements. Forwards whose number is a power of two are
    checked.
    """

    def __init__(self, model: nn.Module) -> None:
        sharded = {name: p for name, p in named_parameters(model).items() if is_dtensor(p)}
        self._known = {name: (p, _parts(p)) for name, p in sharded.items()}
        self._num_forwards = 0
        model.register_forward_pre_hook(self._check)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": {}}  # a copy of the model has other storages

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _check(self, model: nn.Module, args: object) -> None:
        if torch.is_inference_mode_enabled():  # its tensors have no versions
            return
        self._num_forwards += 1
        if not must_compare(self._num_forwards):
            return
        assigned = []
        for name, (parameter, before) in self._known.items():
            now = _parts(parameter)
            if now.elements == before.elements and now.wrapper != before.wrapper:
                assigned.append(name)
            self._known[name] = (parameter, now)
        if assigned:
            raise StateError(
                f"`parameter.data = ...` was called for {listed(assigned)}, and torch does not change "
                "sharded parameters in this assignment. Change the values in place, such as by "
                "`parameter.data.copy_(values)`, or `parameter.copy_(values)` under torch.no_grad()."
            )


class _Parts(NamedTuple):
    """Storages of the elements of a DTensor on this rank, and of the wrapper around them."""

    elements: int
    wrapper: int
    kept: torch.UntypedStorage  # so that no other storage of a wrapper has its number


def _parts(parameter: Tensor) -> _Parts:
    shard = local_tensor(parameter.detach())
    return _Parts(shard.data_ptr(), torch_private.storage_id(parameter), parameter.untyped_storage())


def explain_step_errors(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Returns a wrapper of the step of an optimizer that explains errors of torch about DTensors."""
    return partial(_step, optimizer)


def _step(optimizer: torch.optim.Optimizer, step: Callable[..., Any], *args: Any) -> Any:
    try:
        return step(*args)
    except (RuntimeError, NotImplementedError) as error:
        text, name = str(error), type(optimizer).__name__
        if _SIGN_OF_MIXED in text:
            raise StateError(
                f"{name} combines sharded parameters with tensors that were not sharded, such as copies of "
                "parameters from before `prepare`. Create the tensors of the optimizer in its first step, or "
                "from the parameters in its groups after `prepare`."
            ) from error
        if not any(sign in text for sign in _SIGNS_OF_TORCH):
            raise
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        fix = "Pass fused=False to it" if is_fused else "Step whole parameters: prepare(whole_matrices=True)"
        raise StateError(
            f"{name}{'(fused=True)' if is_fused else ''} cannot step sharded parameters: torch has no "
            f"implementation of an operation for DTensors. {fix}, or use another optimizer, such as AdamW."
        ) from error
