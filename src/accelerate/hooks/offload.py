"""Keep whole models on the CPU between their turns."""

from __future__ import annotations

from typing import Any

from torch import nn

from accelerate.devices import clear_device_cache, hardware_table
from accelerate.hooks.base import ModelHook, add_hook_to_module, not_traced, remove_hook_from_module
from accelerate.nested import send_to_device
from accelerate.weights import Device, check_device_same, resolve_device


class CpuOffload(ModelHook):
    """A model comes to an accelerator when it is called, and stays there until it is sent back.

    Args:
        execution_device: that computes; None: the accelerator of this process, or the CPU.
        prev_module_hook: of the model that had its turn before, which is sent back first.
    """

    def __init__(
        self, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device: Device = (
            hardware_table.detect().device() if execution_device is None else execution_device
        )

    def init_hook(self, module: nn.Module) -> nn.Module:
        return module.to("cpu")

    @not_traced
    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        device = resolve_device(self.execution_device)
        first = next(module.parameters(), None)
        is_there = first is not None and check_device_same(first.device, device)
        if self.prev_module_hook is not None and not is_there:
            self.prev_module_hook.offload()
            clear_device_cache()
        module.to(device)
        return send_to_device(args, device), send_to_device(kwargs, device)


class UserCpuOffloadHook:
    """A model with its hook, to send it back to the CPU by hand.

    Args:
        model: the model.
        hook: its hook.
    """

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model back to the CPU."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook off the model."""
        remove_hook_from_module(self.model)


def offload_with_hook(
    model: nn.Module, execution_device: Device | None, before: UserCpuOffloadHook | None
) -> UserCpuOffloadHook:
    """Attach a `CpuOffload` to a model.

    Args:
        model: the model.
        execution_device: that computes; None: the accelerator of this process, or the CPU.
        before: of the model that has its turn before.
    """
    hook = CpuOffload(execution_device, before)
    add_hook_to_module(model, hook, append=True)
    return UserCpuOffloadHook(model, hook)
