"""Modules whose tensors lie elsewhere: ask for them, bring them in for a moment, collect them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import ConfigurationError, listed
from accelerate.hooks.align import AlignDevicesHook
from accelerate.hooks.base import hooks_of
from accelerate.weights import Device, named_module_tensors, set_module_tensor_to_device


def has_offloaded_params(module: nn.Module) -> bool:
    """Return whether the tensors of a module come only for its forward, by its one hook.

    Args:
        module: the module.
    """
    hooks = hooks_of(module)
    return len(hooks) == 1 and isinstance(hooks[0], AlignDevicesHook) and hooks[0].offload


def is_any_offloaded(model: nn.Module) -> bool:
    """Return whether weights of a model, or of modules inside, come only for a forward.

    Args:
        model: any module.
    """
    return any(
        isinstance(hook, AlignDevicesHook) and hook.offload
        for module in model.modules()
        for hook in hooks_of(module)
    )


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
    homes = {} if execution_device is None else dict(named_module_tensors(module))
    try:
        for name in homes:
            set_module_tensor_to_device(module, name, execution_device or "cpu")
        yield
    finally:
        now = dict(named_module_tensors(module))
        for name, before in homes.items():
            lost = before if now[name].is_meta else None  # on the meta device the values are left behind
            set_module_tensor_to_device(module, name, before.device, lost)


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: Device = "cpu",
) -> dict[str, Any]:
    """Write the tensors of an offloaded module into a state dict.

    Args:
        module: the module.
        module_name: dotted name of one of its tensors; what stands before the last dot is that of the module.
        state_dict: gets the module's tensors that it has under the same names.
        device_to_put_offload: where they are put.

    Returns:
        The same state dict.
    """
    root = module_name.rpartition(".")[0]
    prefix = f"{root}." if root else ""
    with align_module_device(module, device_to_put_offload):
        found = {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()}
    state_dict.update((name, tensor) for name, tensor in found.items() if name in state_dict)
    return state_dict


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of a model, parts of which lie elsewhere, with all values, on the CPU.

    Args:
        model: the module.

    Raises:
        ConfigurationError: tensors have no value, and no hook brings one.
    """
    values = _offloaded_values(model)
    state: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        found = values.get(name, value) if isinstance(value, Tensor) and value.is_meta else value
        state[name] = found.detach().to("cpu") if isinstance(found, Tensor) and not found.is_meta else found
    missing = [name for name, value in state.items() if isinstance(value, Tensor) and value.is_meta]
    if missing:
        raise ConfigurationError(
            f"{listed(missing)} have no values: they are on the meta device, and no hook brings any. "
            "Load the model first."
        )
    return state


def _offloaded_values(model: nn.Module) -> dict[str, Tensor]:
    cpu = torch.device("cpu")
    places: dict[tuple[int, str], Tensor] = {}
    for module in model.modules():
        for hook in hooks_of(module):
            if isinstance(hook, AlignDevicesHook) and hook.offload:
                places.update(hook.values_by_place(cpu))
    return {
        f"{path}.{key}" if path else key: places[id(tensors), key]
        for path, module in model.named_modules(remove_duplicate=False)
        for tensors in (module._parameters, module._buffers)
        for key in tensors
        if (id(tensors), key) in places
    }
