"""Whole models on the CPU between their forwards, and modules whose tensors are offloaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.devices import clear_device_cache, hardware_table
from accelerate.hooks.align import AlignDevicesHook
from accelerate.hooks.base import Arguments, ModelHook, hooks_of, not_traced, remove_hook_from_module
from accelerate.nested import send_to_device
from accelerate.weights import (
    Device,
    check_device_same,
    check_values,
    named_module_tensors,
    resolve_device,
    set_module_tensor_to_device,
)


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
    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Arguments:
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


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether the tensors of a module come only for its forward, by its one hook.

    Args:
        module: the module.
    """
    hooks = hooks_of(module)
    return len(hooks) == 1 and isinstance(hooks[0], AlignDevicesHook) and hooks[0].offload


def align_hooks(model: nn.Module) -> list[AlignDevicesHook]:
    """Return the hooks of all modules of a model that move tensors and inputs."""
    hooks = (hook for module in model.modules() for hook in hooks_of(module))
    return [hook for hook in hooks if isinstance(hook, AlignDevicesHook)]


def is_any_offloaded(model: nn.Module) -> bool:
    """Return whether weights of a model, or of modules inside, are loaded for each forward."""
    return any(hook.offload for hook in align_hooks(model))


@contextmanager
def align_module_device(module: nn.Module, execution_device: Device | None = None) -> Iterator[None]:
    """Have the own tensors of a module on a device, inside.

    Args:
        module: the module, offloaded or not; the modules inside it are left alone, unless its hook is that of
            all of them.
        execution_device: the device; None: that on which an offloaded module computes, and no change for any
            other.
    """
    hook: Any = getattr(module, "_hf_hook", None)
    if has_offloaded_params(module):
        before = hook.execution_device
        hook.execution_device = before if execution_device is None else execution_device
        try:
            hook.pre_forward(module)
            yield
        finally:
            hook.post_forward(module, ())
            hook.execution_device = before
        return
    tensors = {} if execution_device is None else dict(named_module_tensors(module))
    try:
        for name in tensors:
            set_module_tensor_to_device(module, name, execution_device or "cpu")
        yield
    finally:
        moved = dict(named_module_tensors(module))
        for name, tensor in tensors.items():
            value = tensor if moved[name].is_meta else None  # on the meta device the values are lost
            set_module_tensor_to_device(module, name, tensor.device, value)


def get_state_dict_from_offload(
    module: nn.Module, module_name: str, state_dict: dict[str, Any], device_to_put_offload: Device = "cpu"
) -> dict[str, Any]:
    """Write the tensors of an offloaded module into a state dict.

    Args:
        module: the module.
        module_name: dotted name of one of its tensors; what precedes the last dot is that of the module.
        state_dict: gets the module's tensors that it has under the same names.
        device_to_put_offload: where they are put.

    Returns:
        The same state dict.
    """
    root = module_name.rpartition(".")[0]
    prefix = f"{root}." if root else ""
    with align_module_device(module, device_to_put_offload):
        filled = {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}
    state_dict.update((name, tensor) for name, tensor in filled.items() if name in state_dict)
    return state_dict


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model, parts of which are offloaded, with all values, on the CPU.

    Args:
        model: the module.

    Raises:
        ConfigurationError: tensors have no value, and no hook loads one.
    """
    values = _offloaded_values(model)
    state = model.state_dict()
    tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}
    tensors = {
        name: values.get(name, tensor) if tensor.is_meta else tensor for name, tensor in tensors.items()
    }
    check_values(tensors, "save", "No hook loads any. Load the model first.")
    return {**state, **{name: tensor.detach().to("cpu") for name, tensor in tensors.items()}}


def _offloaded_values(model: nn.Module) -> dict[str, Tensor]:
    cpu = torch.device("cpu")
    by_slot: dict[tuple[int, str], Tensor] = {}
    for hook in align_hooks(model):
        by_slot.update(hook.values_by_slot(cpu))
    return {
        f"{path}.{key}" if path else key: by_slot[id(tensors), key]
        for path, module in model.named_modules(remove_duplicate=False)
        for tensors in (module._parameters, module._buffers)
        for key in tensors
        if (id(tensors), key) in by_slot
    }
