"""Errors for losses and hooks that parameters of FSDP do not take."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import PreparationError, StateError, listed
from accelerate.strategies.dtensors import ONE_BACKWARD
from accelerate.strategies.tolerances import must_compare

_PENALTY = "The loss adds a value of sharded parameters, such as a penalty on weights, to one of outputs."
_DECAY = "weight_decay of the optimizer."
ERRORS = {
    "storage of size 0": ONE_BACKWARD,
    "got mixed torch.Tensor and DTensor": (
        f"{_PENALTY} Use parameter.full_tensor() in the penalty, or {_DECAY}"
    ),
    "'fsdp::chunk_cat' with arguments from the 'Sparse": (
        "An embedding with sparse=True has sparse gradients, and FSDP reduces dense ones. Set sparse=False, "
        "or add the embedding to ignored_modules."
    ),
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
            managed = filter(self._is_managed, optimizer.parameters())
            hooked = list(filter(torch_private.has_registered_hooks, managed))
            if hooked:
                raise StateError(
                    f"register_hook() was called on {len(hooked)} parameters that FSDP shards, and FSDP sets "
                    f"their gradients without calling hooks. {_FIX}"
                )
