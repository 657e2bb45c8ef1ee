"""Build a model without memory, or right where it belongs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from accelerate.base import parse_flag_from_env
from accelerate.weights import Device, replacement_for, resolve_device


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Let the models built inside have parameters on the meta device: shapes without memory.

    Args:
        include_buffers: whether buffers, and all other tensors made inside, have no memory, either; default:
            the environment variable ACCELERATE_INIT_INCLUDE_BUFFERS, otherwise no.

    Returns:
        A context manager.
    """
    return init_on_device(torch.device("meta"), include_buffers)


@contextmanager
def init_on_device(device: Device, include_buffers: bool | None = None) -> Iterator[None]:
    """Let the models built inside have their parameters on a device.

    Args:
        device: where; an integer is the index of an accelerator.
        include_buffers: whether buffers, and all other tensors made inside, are there, too; default: the
            environment variable ACCELERATE_INIT_INCLUDE_BUFFERS, otherwise no.

    Raises:
        ConfigurationError: there is no such device.
    """
    target = resolve_device(device)
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    if include_buffers:
        with target:
            yield
        return

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device == target:
            return None  # torch keeps the parameter: one that is shared stays so
        moved: nn.Parameter = replacement_for(parameter, parameter.detach().to(target))  # type: ignore[assignment]
        return moved

    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # it may return
    try:
        yield
    finally:
        handle.remove()
