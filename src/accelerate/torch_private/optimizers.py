"""Private attributes of gradient scalers, optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState


def reset_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Resets for which optimizers a GradScaler has unscaled gradients, without a call of `update`.

    Args:
        optimizer: The only optimizer that is reset, by default all.
    """
    if optimizer is None:
        scaler._per_optimizer_states.clear()
    else:
        scaler._per_optimizer_states.pop(id(optimizer), None)


def has_stepped(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> bool:
    """Returns whether a GradScaler has stepped an optimizer since its scale was last updated."""
    states = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    return states.get("stage") is OptState.STEPPED


def found_inf(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None) -> bool:
    """Returns whether an optimizer that handles infinite gradients itself has left out its step.

    Called after the step, which a GradScaler always calls for such an optimizer. During the call the scaler
    sets the attribute `found_inf` of the optimizer. If it passes itself as an argument instead, the values
    are read from its states. Returns False for other optimizers, which it does not call in this case.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    found = getattr(optimizer, "found_inf", None)
    if found is not None:
        return bool(found)
    states = getattr(scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
    return any(bool(value) for value in states.get("found_inf_per_device", {}).values())


@contextmanager
def step_replaced(optimizer: Any, step: Callable[..., Any], original: Callable[..., Any]) -> Iterator[None]:
    """Replaces the `step` of an optimizer inside the block, and sets it to `original` after the block.

    A method of the optimizer itself is not kept in its attributes, where it would be a reference cycle.

    A GradScaler requires the same optimizer object as in `unscale_`, and does not return whether it called
    `step`.
    """
    optimizer.step = step
    try:
        yield
    finally:
        if original == type(optimizer).step.__get__(optimizer):
            del optimizer.step
        else:
            optimizer.step = original


def allow_fp16_gradients(scaler: torch.amp.GradScaler) -> None:
    """Allows a gradient scaler to unscale float16 gradients, for which torch has no option."""
    scaler._unscale_grads_ = partial(_unscale_all, scaler._unscale_grads_)  # type: ignore[method-assign]


def _unscale_all(
    unscale: Callable[..., Any], optimizer: torch.optim.Optimizer, *scales: Tensor, **_: Any
) -> Any:
    return unscale(optimizer, *scales[:2], True)


def unscale_shards(scaler: torch.amp.GradScaler) -> None:
    """Makes a gradient scaler unscale gradients of which some are DTensors, on one mesh or several.

    A step is then skipped on all ranks if a shard of any rank has an infinite gradient. torch does not
    unscale DTensors together with plain tensors.
    """
    original = scaler._unscale_grads_
    if getattr(original, "func", None) is not _unscale_shards:
        scaler._unscale_grads_ = partial(_unscale_shards, original)  # type: ignore[method-assign]


def _unscale_shards(
    unscale: Callable[..., Any], optimizer: torch.optim.Optimizer, scale: Tensor, found: Tensor, *others: Any
) -> Any:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(isinstance(parameter, DTensor) for parameter in parameters):
        return unscale(optimizer, scale, found, *others)
    shards: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in (parameter.grad for parameter in parameters if parameter.grad is not None):
        shard = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        shards.setdefault((shard.device, shard.dtype), []).append(shard)
    for (device, _), members in shards.items():
        infinite = found.to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(members, infinite, scale.to(device))
        found = torch.maximum(found, infinite.to(found.device))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return {found.device: found}


def keep_dtypes(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Gives loaded states the dtypes that they were saved in, which torch replaces by those of parameters.

    States are kept that are integers, single numbers, or wider than their parameters. The last are those of
    optimizers that are not torch's, such as float32 averages of bfloat16 gradients.

    Args:
        optimizer: Optimizer that has loaded the state dict.
        state_dict: State dict of the form that torch documents. Others are ignored.
    """
    states = getattr(optimizer, "state", None)  # optimizers that wrap others may have none
    if not (isinstance(states, Mapping) and isinstance(state_dict, Mapping)):
        return
    is_of_torch = type(optimizer).__module__.startswith("torch.optim.")
    numbers = (number for group in state_dict.get("param_groups", ()) for number in group.get("params", ()))
    live = (parameter for group in optimizer.param_groups for parameter in group["params"])
    for number, parameter in zip(numbers, live, strict=False):
        saved, loaded = state_dict.get("state", {}).get(number), states.get(parameter)
        if not (isinstance(saved, Mapping) and isinstance(loaded, dict)):
            continue
        for key, value in saved.items():
            now = loaded.get(key)
            if not (isinstance(value, Tensor) and isinstance(now, Tensor)) or now.dtype == value.dtype:
                continue
            is_wide = not is_of_torch and value.element_size() > now.element_size()
            if key != "step" and (is_wide or value.ndim == 0 or not value.is_floating_point()):
                loaded[key] = value.to(now.device)


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Sets the attribute by which schedulers of torch check that an optimizer has stepped before them."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def set_scheduler_optimizer(
    scheduler: torch.optim.lr_scheduler.LRScheduler, optimizer: torch.optim.Optimizer
) -> None:
    """Sets the optimizer of a scheduler of torch.

    Schedulers of torch warn unless the step of their optimizer sets the attributes that they check.
    """
    if scheduler.optimizer is optimizer:
        return
    scheduler.optimizer = optimizer
    step = optimizer.step

    def marked_step(*args: Any, **kwargs: Any) -> Any:
        mark_stepped(optimizer)
        return step(*args, **kwargs)

    marked_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked_step  # type: ignore[method-assign]
