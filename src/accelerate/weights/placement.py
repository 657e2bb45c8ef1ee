"""Put one named tensor of a module on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from accelerate.base import wrong_value
from accelerate.devices import clear_device_cache, hardware_table, of_device
from accelerate.weights.packed import (
    is_bnb_parameter,
    is_derived_parameter,
    is_packed_in_4_bits,
    recreate,
    scales_of,
)

Device = int | str | torch.device
Owner = tuple[nn.Module, str]
"""A module, and the name of one of its own tensors."""


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: Device,
    value: Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: Tensor | None = None,
    tied_params_map: dict[int, dict[torch.device, Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer of a module on a device, with a new value if one is given.

    The tensor is replaced, not changed: others that hold the old one keep it. A value that has the right
    device and dtype is taken as it is, without being copied.

    Args:
        module: the module, or one around it.
        tensor_name: dotted name of the tensor.
        device: where it goes; an integer is the index of an accelerator, "meta" leaves no value.
        value: its new value; None moves the one it has.
        dtype: its new dtype; None keeps that of the old tensor. Values of integers and booleans keep theirs.
        fp16_statistics: what a weight in 8 bits is multiplied by; becomes its attribute `SCB`.
        tied_params_map: tensors that several modules share, by the address of the original and by device:
            one that is there already is used again, a new one is noted.
        non_blocking: whether a copy to an accelerator may go on in the background.
        clear_cache: whether memory that the old tensor had on an accelerator is given back at once.

    Raises:
        ConfigurationError: there is no such tensor, it has no value to move, or the shapes differ.
    """
    owner, name = find_owner(module, tensor_name)
    old = _own_tensors(owner)[name]
    target = resolve_device(device)
    key, known = _find_twin(tied_params_map, old if value is None else value, target)
    if known is not None:
        _put(owner, name, known)
        return
    if value is None:
        if old.device.type == "meta" and target.type != "meta":
            reason = f"{tensor_name} is on the meta device and has no value to move"
            raise wrong_value("device", str(device), reason, "pass the value")
        if old.device == target and dtype is None:
            return
    elif value.shape != old.shape and not is_packed_in_4_bits(old):
        reason = f"{tensor_name} has the shape {tuple(old.shape)}"
        raise wrong_value("value", tuple(value.shape), reason, "pass a value of that shape")
    source = old.detach() if value is None else value.detach()
    kind = _dtype_after(source, old, dtype)
    if is_derived_parameter(old):
        scales = scales_of(owner) if fp16_statistics is None and value is None else fp16_statistics
        new = recreate(old, source, target, kind, scales)
    else:
        new = replacement_for(old, source.to(target, kind, non_blocking=non_blocking))
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]
    _put(owner, name, new)
    if key is not None and tied_params_map is not None:
        tied_params_map[key][target] = new
    if clear_cache and not (old.is_cpu or old.is_meta):
        del old, source
        clear_device_cache()


def find_owner(module: nn.Module, tensor_name: str) -> Owner:
    """Return the module that has a parameter or buffer of a dotted name itself, and its name there."""
    path, _, name = tensor_name.rpartition(".")
    owner = _submodule(module, path)
    if owner is None or name not in _own_tensors(owner):
        reason = f"this {type(module).__name__} has no parameter or buffer of that name"
        fix = "names are those of its state dict"
        raise wrong_value("tensor_name", tensor_name, reason, fix, AttributeError)
    return owner, name


def _submodule(module: nn.Module, path: str) -> nn.Module | None:
    try:
        return module.get_submodule(path)
    except AttributeError:
        return None


def resolve_device(device: Device) -> torch.device:
    """Return a device that torch knows; an integer is the index of an accelerator."""
    if not isinstance(device, int):
        try:
            return torch.device(device)
        except (RuntimeError, TypeError) as error:
            reason, fix = "torch knows no such device", 'pass one, like "cpu", "cuda:0" or 0'
            raise wrong_value("device", device, reason, fix, RuntimeError) from error
    backend = hardware_table.detect()
    if backend.is_host:
        reason = "numbers are those of accelerators, and there is none here"
        raise wrong_value("device", device, reason, 'pass "cpu"', RuntimeError)
    return backend.device(device)


def check_available(device: torch.device) -> None:
    """Refuse a device that this machine does not have; kinds of other packages are left to them."""
    backend = of_device(device)
    if not backend.name or backend.is_host:
        return
    count = backend.count() if backend.available() else 0
    if (device.index or 0) >= count:
        raise wrong_value(
            "device", str(device), f"this machine has {count} of that kind", 'pass another, or "cpu"'
        )


def read_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Return a dtype, also by its name: "float16" or "torch.float16"."""
    if isinstance(dtype, torch.dtype):
        return dtype
    resolved = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else None
    if not isinstance(resolved, torch.dtype):
        fix = 'pass one, such as torch.float16 or "float16"'
        raise wrong_value("dtype", dtype, "torch has no such dtype", fix, AttributeError, TypeError)
    return resolved


def mapped_device(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return a tensor's or module's device in a device map, None if there is none: see `map_entry`."""
    entry = map_entry(name, device_map)
    return None if entry is None else device_map[entry]


def map_entry(name: str, device_map: Mapping[str, Any]) -> str | None:
    """Return the name in a device map of the innermost module around a tensor or module, or its own.

    The name "" in a device map is the whole model.
    """
    while True:
        if name in device_map:
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Return whether two devices are one; without an index a device is the first of its kind.

    Args:
        first_device: a device.
        second_device: another, or the same.
    """
    return (first_device.type, first_device.index or 0) == (second_device.type, second_device.index or 0)


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Return what identifies the memory of a tensor: its device, address and size in bytes.

    Args:
        tensor: any tensor with a storage.
    """
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def replacement_for(old: Tensor, data: Tensor) -> Tensor:
    """Return data that replaces a tensor: a parameter with the attributes of `old`, or plain for a buffer."""
    if is_derived_parameter(old):
        return recreate(old, data, data.device, data.dtype, None)
    if not isinstance(old, nn.Parameter):
        return data
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    vars(new).update(vars(old))  # what users and libraries have noted on it
    return new


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    own = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in own.items() if tensor is not None}


def _find_twin(
    shared: Mapping[int, Mapping[torch.device, Tensor]] | None, tensor: Tensor, target: torch.device
) -> tuple[int | None, Tensor | None]:
    """Return under which address a tensor is shared, and the one that is on the device already."""
    if not shared or tensor.device.type == "meta":
        return None, None
    key = tensor.data_ptr()
    return (key, shared[key].get(target)) if key in shared else (None, None)


def _dtype_after(source: Tensor, old: Tensor, dtype: str | torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return source.dtype if is_bnb_parameter(old) else old.dtype
    is_integer = not (source.is_floating_point() or source.is_complex())
    return source.dtype if is_integer else read_dtype(dtype)


def _put(owner: nn.Module, name: str, tensor: Tensor) -> None:
    if name in owner._buffers:
        owner._buffers[name] = tensor
    else:
        owner._parameters[name] = cast("nn.Parameter", tensor)
