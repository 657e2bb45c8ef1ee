"""Arguments of a model in a batch, and the loss of its outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from accelerate.base import wrong_value

LossFunction = Callable[[Any, Any], Tensor]


def arguments_of(
    model: nn.Module, batch: object, has_loss: bool
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Returns the arguments of a model, and the target of its loss function.

    Args:
        batch: Mapping of arguments of the model by name, and of others that only the loss function reads; or
            tuple of positional arguments, of which the last one is the target; or the one argument.
        has_loss: Whether there is a loss function. Otherwise a tuple has no target.
    """
    if isinstance(batch, Mapping):
        parameters = inspect.signature(model.forward).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        kwargs = {name: value for name, value in batch.items() if takes_all or name in parameters}
        return (), kwargs, batch
    if isinstance(batch, (tuple, list)) and has_loss:
        if len(batch) < 2:
            raise wrong_value(
                "batch",
                f"a {type(batch).__name__} of {len(batch)}",
                "it has no target",
                "Pass (inputs, target)",
            )
        return tuple(batch[:-1]), {}, batch[-1]
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}, batch


def loss_of(outputs: object, target: object, loss_fn: LossFunction | None) -> Tensor:
    """Returns the loss of a micro-batch."""
    if loss_fn is not None:
        loss: Any = loss_fn(outputs, target)
        source = "loss_fn"
    else:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", outputs)
        source = "the model"
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        fix = "Return a tensor with one element" if loss_fn else "Pass loss_fn, or labels in the batch"
        raise wrong_value("loss", got, f"{source} returned no scalar", fix)
    return loss.reshape(())
