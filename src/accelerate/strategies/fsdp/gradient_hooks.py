"""Errors for losses and hooks that parameters of FSDP do not take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import PreparationError, StateError, listed
from accelerate.strategies.dtensors import ONE_BACKWARD
from accelerate.strategies.tolerances import must_compare

_PENALTY = "The loss adds a value of sharded parameters, such as a penalty on weights, to one of outputs."
_DECAY = "weight_decay of the optimizer."
_SPARSE = (
    "An embedding with sparse=True has sparse gradients, and FSDP reduces dense ones. Set sparse=False, or "
    "add the embedding to ignored_modules."
)
ERRORS = {
    "storage of size 0": ONE_BACKWARD,
    "got mixed torch.Tensor and DTensor": (
        f"{_PENALTY} Use parameter.full_tensor() in the penalty, or {_DECAY}"
    ),
    "'fsdp::chunk_cat' with arguments from the 'Sparse": _SPARSE,
    "reshape is not implemented for sparse": _SPARSE,
    "SplitWithSizesBackward0 returned an invalid gradient": (
        f"{_PENALTY} Set use_orig_params=True, or use {_DECAY}"
    ),
}
"""Messages for errors of torch in a backward pass, by a part of their texts."""
_FIX = (
    "Change gradients between accelerator.backward and optimizer.step, or, with FSDP 2 or tensor "
    "parallelism, call register_post_accumulate_grad_hook of the parameters after `prepare`."
)


def hooked_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a model that have hooks on their gradients, by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if torch_private.has_registered_hooks(parameter, torch_private.GRADIENT_HOOKS)
        or torch_private.is_stepped_in_backward(parameter)
    }


def refuse_lost_hooks(
    hooked: dict[str, nn.Parameter], replaced: Iterable[tuple[Tensor, Tensor | None]]
) -> None:
    """Raises an error for parameters with hooks that others have replaced."""
    lost = {id(old) for old, new in replaced if new is not old}
    if names := [name for name, parameter in hooked.items() if id(parameter) in lost]:
        raise PreparationError(
            f"{listed(names)}: hooks on the gradients of parameters that `prepare` shards would not be "
            f"called, because other parameters replace them. {_FIX}"
        )


class GradientHookCheck:
    """Observer of an optimizer that raises an error for hooks which torch does not call.

    FSDP sets the gradients of its parameters itself. Steps whose number is a power of two are checked.

    Args:
        is_managed: Returns whether FSDP sets the gradient of a parameter.
    """

    def __init__(self, is_managed: Callable[[Tensor], bool]) -> None:
        self._is_managed, self._num_steps = is_managed, 0

    def before_step(self, optimizer: Any) -> None:
        self._num_steps += 1
        if must_compare(self._num_steps):
            refuse_hooks(filter(self._is_managed, optimizer.parameters()))


def refuse_hooks(managed: Iterable[Tensor], names: Sequence[str] = ("_backward_hooks",)) -> None:
    """Raises an error for parameters with hooks on gradients that FSDP sets without calling them.

    Args:
        managed: Parameters whose gradients FSDP sets.
        names: Attributes with hooks.
    """
    hooked = [p for p in managed if torch_private.has_registered_hooks(p, names)]
    if hooked:
        raise StateError(
            f"register_hook() was called on {len(hooked)} parameters that FSDP shards, and FSDP sets their "
            f"gradients without calling hooks. {_FIX}"
        )
