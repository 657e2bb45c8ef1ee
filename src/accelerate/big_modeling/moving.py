"""Move a model as a whole, and guard one that its device map keeps in place."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import nn

from accelerate.base import ConfigurationError, StateError, as_builtin, listed
from accelerate.hooks import AlignDevicesHook, hooks_of, remove_hook_from_module
from accelerate.weights import all_tensors, resolve_device

logger = logging.getLogger(__name__)  # also used where no run is set up

MOVES = ("to", "cpu", "cuda", "npu", "xpu", "mlu", "sdaa", "musa")
"""Methods of a module that would move it."""


def remove_old_hooks(model: nn.Module) -> None:
    """Take the hooks of an earlier map off, which would bring weights a second time."""
    for module in model.modules():
        if any(isinstance(hook, AlignDevicesHook) for hook in hooks_of(module)):
            remove_hook_from_module(module)


def move_whole(model: nn.Module, place: Any) -> None:
    tensors = all_tensors(model)
    empty = [name for name, tensor in tensors.items() if tensor.is_meta]
    device = resolve_device(place)
    if empty and device.type != "meta":
        error = ConfigurationError(
            f"{listed(empty)} have no values to bring to {place}: they are on the meta device. Load the "
            "model first, as load_checkpoint_and_dispatch() does; build it with include_buffers=False where "
            "they are buffers that no checkpoint holds."
        )
        raise as_builtin(error, NotImplementedError)
    if any(tensor.device != device for tensor in tensors.values()):
        model.to(device)


def guard_moves(model: nn.Module) -> None:
    for name in MOVES:
        plain = getattr(type(model), name, None)
        if plain is not None:
            guarded = functools.partial(_move_guarded, model, name)
            setattr(model, name, functools.update_wrapper(guarded, plain))


def _names_device(*args: Any, **kwargs: Any) -> bool:
    """Whether arguments of `Module.to` name a device, and not only a dtype."""
    by_place = bool(args) and not isinstance(args[0], torch.dtype)
    return by_place or not {"device", "tensor"}.isdisjoint(kwargs)


def _move_guarded(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    found = [hook for module in model.modules() for hook in hooks_of(module)]
    hooks = [hook for hook in found if isinstance(hook, AlignDevicesHook)]
    call = f"{type(model).__name__}.{name}()"
    if hooks and (name != "to" or _names_device(*args, **kwargs)):
        logger.warning(
            f"You shouldn't move a model that is dispatched using accelerate hooks. {call} does, and "
            "inputs still go to the devices of its device_map."
        )
    if any(hook.offload for hook in hooks):
        raise StateError(
            f"You can't move a model that has some modules offloaded to cpu or disk, as {call} does. Load it "
            "with another device_map, or take its hooks off with remove_hook_from_submodules()."
        )
    return getattr(type(model), name)(model, *args, **kwargs)
