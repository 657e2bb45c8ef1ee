"""Placement of single named tensors of a module on a device.

Supports parameters of classes that other libraries derive from that of torch. Parameters of bitsandbytes
quantize themselves when they are moved to a device. Those in 8 bits (`Int8Params`) have their scales in
`SCB`, those in 4 bits (`Params4bit`) in `quant_state`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from accelerate.base import wrong_value
from accelerate.devices import clear_device_cache, hardware_table, of_device

QUANT_STATE = ".quant_state.bitsandbytes__"
"""Prefix of the entry with shape, dtype and block size of a weight in 4 bits, as JSON in bytes."""

INT8 = "Int8Params"
INT4 = "Params4bit"
_UNQUANTIZED: dict[str, dict[str, Any]] = {
    INT8: {"CB": None, "SCB": None},
    INT4: {"bnb_quantized": False, "quant_state": None},
}
"""Attributes of a parameter that is not yet quantized, by class."""


def is_derived_parameter(tensor: Tensor) -> bool:
    """Returns whether the class of a parameter is one that another library derives from `nn.Parameter`."""
    return type(tensor) is not nn.Parameter and nn.Parameter in type(tensor).__mro__


def is_bnb_parameter(tensor: Tensor) -> bool:
    """Returns whether a parameter is of a class of bitsandbytes."""
    return is_derived_parameter(tensor) and type(tensor).__name__ in _UNQUANTIZED


def is_packed_in_4_bits(tensor: Tensor) -> bool:
    """Returns whether the values of a parameter are packed in 4 bits."""
    return is_derived_parameter(tensor) and type(tensor).__name__ == INT4


def recreate(
    old: Tensor, source: Tensor, target: torch.device, dtype: torch.dtype, statistics: Tensor | None
) -> Tensor:
    """Returns a parameter like `old` with other values on another device, quantized as `old` is.

    `source` has plain numbers, which are converted to the dtype, or packed values like those of `old`.
    `statistics` are the scales of values in 8 bits.
    """
    make = partial(cast("type[nn.Parameter]", type(old)), requires_grad=old.requires_grad)
    attributes, kind = dict(vars(old)), type(old).__name__
    if not is_bnb_parameter(old):  # attributes that the class does not accept are set on the new parameter
        accepted = inspect.signature(type(old).__new__).parameters
        accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
        arguments = {name: value for name, value in attributes.items() if accepts_all or name in accepted}
        new = make(source.to(target, dtype), **arguments)
        vars(new).update({name: value for name, value in attributes.items() if name not in vars(new)})
        return new
    if target.type == "meta":
        return make(source.to(target), **{**attributes, **(_UNQUANTIZED[INT8] if kind == INT8 else {})})
    if _is_packed(old, source):
        return make(source, **{**attributes, **({} if statistics is None else {"SCB": statistics})}).to(
            target
        )
    plain = source.to("cpu", dtype)  # moving it from there quantizes it
    return make(plain, **{**attributes, **_UNQUANTIZED[kind]}).to(target)


def quant_state_names(name: str, stored: Iterable[str]) -> tuple[str, ...]:
    """Returns the names under which the scales of a weight in 4 bits are stored, or none for others."""
    parts = tuple(key for key in stored if key.startswith(f"{name}."))
    return parts if any(key.startswith(f"{name}{QUANT_STATE}") for key in parts) else ()


def unpacked_shape(parts: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Returns the unpacked shape of a weight in 4 bits from the tensors that are stored with it."""
    metadata = next(tensor for name, tensor in parts.items() if QUANT_STATE in name)
    return tuple(json.loads(bytes(metadata.tolist()))["shape"])


def from_prequantized(
    old: Tensor, packed: Tensor, parts: Mapping[str, Tensor], target: torch.device
) -> nn.Parameter:
    """Returns a weight in 4 bits like `old` from its packed values and the tensors stored with them."""
    make = cast("Any", type(old)).from_prequantized
    return make(packed, dict(parts), requires_grad=old.requires_grad, device=target)  # type: ignore[no-any-return]


def load_scales(layer: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Loads a quantized weight with its scales, as a hook of `load_state_dict` that changes `state`."""
    name = f"{prefix}weight"
    parts, scales = quant_state_names(name, state), state.get(f"{prefix}SCB")
    if name not in state or not (parts or scales is not None):
        return
    old = cast("nn.Parameter", layer._parameters["weight"])
    target = old.device if old.device.type != "meta" else torch.device("cpu")
    if scales is None:
        new = from_prequantized(old, state[name], {part: state.pop(part) for part in parts}, target)
    else:
        new = cast("nn.Parameter", recreate(old, state[name], target, torch.int8, scales.to(target)))
        drop_values(layer)
    layer._parameters["weight"] = state[name] = new


def scales_of(owner: nn.Module) -> Tensor | None:
    """Returns the scales of a layer in 8 bits, which the layer itself stores after its first forward."""
    weight = owner._parameters.get("weight")
    if weight is None or type(weight).__name__ != INT8:
        return None
    scales: Tensor | None = getattr(weight, "SCB", None)
    return scales if scales is not None else getattr(getattr(owner, "state", None), "SCB", None)


def drop_values(owner: nn.Module) -> None:
    """Frees the values in 8 bits that a layer has copied from its weight."""
    weight = owner._parameters.get("weight")
    if weight is not None and type(weight).__name__ == INT8:
        state: Any = owner.state
        state.CB = state.SCB = None


def _is_packed(old: Tensor, source: Tensor) -> bool:
    if type(old).__name__ == INT8:
        return source.dtype == torch.int8
    return (
        bool(getattr(old, "bnb_quantized", False)) and source.shape == old.shape and source.dtype == old.dtype
    )


Device = int | str | torch.device
Owner = tuple[nn.Module, str]
"""A module and the name of one of its direct tensors."""


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
    """Moves a parameter or buffer of a module to a device, and optionally sets its value.

    The tensor is replaced, so other references keep the old one. A value with the right device and dtype is
    used without a copy.

    Args:
        module: the module of the tensor, or one that contains it.
        tensor_name: dotted name of the tensor.
        device: target device. An integer is the index of an accelerator, and "meta" leaves no value.
        value: new value. None moves the current value.
        dtype: new dtype. None keeps that of the old tensor. Integers and booleans keep their dtype.
        fp16_statistics: scales of a weight in 8 bits, stored as its attribute `SCB`.
        tied_params_map: tied tensors by the address of the original and by device. An existing copy is
            reused, and a new one is added.
        non_blocking: whether a copy to an accelerator may be asynchronous.
        clear_cache: whether to release the memory of the old tensor on an accelerator at once.

    Raises:
        ConfigurationError: the tensor does not exist, has no value to move, or has another shape.
    """
    owner, name = find_owner(module, tensor_name)
    old: Tensor = getattr(owner, name)
    target = resolve_device(device)
    current = old if value is None else value
    tied_copies = None if current.is_meta or not tied_params_map else tied_params_map.get(current.data_ptr())
    if tied_copies is not None and target in tied_copies:
        _put(owner, name, tied_copies[target])
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
    source = current.detach()
    new_dtype = _dtype_after(source, old, dtype)
    if is_derived_parameter(old):
        scales = scales_of(owner) if fp16_statistics is None and value is None else fp16_statistics
        new = recreate(old, source, target, new_dtype, scales)
    else:
        new = replacement_for(old, source.to(target, new_dtype, non_blocking=non_blocking))
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]
    _put(owner, name, new)
    if tied_copies is not None:
        tied_copies[target] = new
    if clear_cache and not (old.is_cpu or old.is_meta):
        del old, current, source
        clear_device_cache()


def find_owner(module: nn.Module, tensor_name: str) -> Owner:
    """Returns the module that directly contains a tensor of a dotted name, and the last part of the name."""
    path, _, name = tensor_name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        owner = nn.Module()  # without tensors
    if owner._parameters.get(name) is None and owner._buffers.get(name) is None:
        reason = f"this {type(module).__name__} has no parameter or buffer of that name"
        fix = "names are those of its state dict"
        raise wrong_value("tensor_name", tensor_name, reason, fix, AttributeError)
    return owner, name


def resolve_device(device: Device) -> torch.device:
    """Returns a device of torch, where an integer is the index of an accelerator."""
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
    """Raises an error for a device that this machine does not have.

    Device types of other packages are not checked.
    """
    backend = of_device(device)
    if not backend.name or backend.is_host:
        return
    count = backend.count() if backend.available() else 0
    if (device.index or 0) >= count:
        reason = f"this machine has {count} of that kind"
        raise wrong_value("device", str(device), reason, 'pass another, or "cpu"')


def read_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Returns a dtype from its name, "float16" or "torch.float16", or the dtype itself."""
    if isinstance(dtype, torch.dtype):
        return dtype
    resolved = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else None
    if not isinstance(resolved, torch.dtype):
        fix = 'pass one, such as torch.float16 or "float16"'
        raise wrong_value("dtype", dtype, "torch has no such dtype", fix, AttributeError, TypeError)
    return resolved


def mapped_device(name: str, device_map: Mapping[str, Any]) -> Any:
    """Returns the device of a tensor or module in a device map (`map_entry`), or None."""
    entry = map_entry(name, device_map)
    return None if entry is None else device_map[entry]


def map_entry(name: str, device_map: Mapping[str, Any]) -> str | None:
    """Returns the key of a tensor or module in a device map, or that of the innermost module around it."""
    while True:
        if name in device_map:
            return name
        if not name:
            return None
        name = name.rpartition(".")[0]


def check_device_same(first_device: torch.device, second_device: torch.device) -> bool:
    """Returns whether two devices are the same, where a missing index means 0.

    Args:
        first_device: a device.
        second_device: another, or the same.
    """
    return (first_device.type, first_device.index or 0) == (second_device.type, second_device.index or 0)


def id_tensor_storage(tensor: Tensor) -> tuple[torch.device, int, int]:
    """Returns the device, address and size in bytes of the storage of a tensor.

    Args:
        tensor: any tensor with a storage.
    """
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def replacement_for(old: Tensor, data: Tensor) -> Tensor:
    """Returns `data` as a parameter with the attributes of `old`, or unchanged where `old` is a buffer."""
    if is_derived_parameter(old):
        return recreate(old, data, data.device, data.dtype, None)
    if not isinstance(old, nn.Parameter):
        return data
    new = nn.Parameter(data, requires_grad=old.requires_grad)
    vars(new).update(vars(old))  # attributes that users and libraries have set
    return new


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
