"""Put one named tensor of a module on one device.

Some are of classes that other libraries derived from torch's. Parameters of bitsandbytes quantize themselves
when they are moved to a device; one in 8 bits (`Int8Params`) has its scales in `SCB`, one in 4 bits
(`Params4bit`) in `quant_state`.
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
"""Under this name and the kind of 4 bits, shape, dtype and block size are stored, as JSON in bytes."""

INT8 = "Int8Params"
INT4 = "Params4bit"
_FRESH: dict[str, dict[str, Any]] = {
    INT8: {"CB": None, "SCB": None},
    INT4: {"bnb_quantized": False, "quant_state": None},
}
"""Attributes of a parameter that is not quantized yet."""


def is_derived_parameter(tensor: Tensor) -> bool:
    """Return whether a parameter is of a class that another library derived from torch's, with attributes."""
    return type(tensor) is not nn.Parameter and nn.Parameter in type(tensor).__mro__


def is_bnb_parameter(tensor: Tensor) -> bool:
    """Return whether a parameter is of bitsandbytes' kind."""
    return is_derived_parameter(tensor) and type(tensor).__name__ in _FRESH


def is_packed_in_4_bits(tensor: Tensor) -> bool:
    """Return whether the values of a parameter are packed, as those in 4 bits are."""
    return is_derived_parameter(tensor) and type(tensor).__name__ == INT4


def recreate(
    old: Tensor, source: Tensor, target: torch.device, dtype: torch.dtype, statistics: Tensor | None
) -> Tensor:
    """Return a parameter like `old` with other values on another device; it is quantized there.

    `source` holds plain numbers, which get the dtype, or packed ones like those of `old`; `statistics` are
    the scales of values in 8 bits.
    """
    make = partial(cast("type[nn.Parameter]", type(old)), requires_grad=old.requires_grad)
    attributes, kind = dict(vars(old)), type(old).__name__
    if not is_bnb_parameter(old):  # what the class does not take is set on the new parameter
        taken = inspect.signature(type(old).__new__).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
        arguments = {name: value for name, value in attributes.items() if takes_all or name in taken}
        new = make(source.to(target, dtype), **arguments)
        vars(new).update({name: value for name, value in attributes.items() if name not in vars(new)})
        return new
    if target.type == "meta":
        return make(source.to(target), **{**attributes, **(_FRESH[INT8] if kind == INT8 else {})})
    if _is_packed(old, source):
        return make(source, **{**attributes, **({} if statistics is None else {"SCB": statistics})}).to(
            target
        )
    plain = source.to("cpu", dtype)  # it quantizes on its way from there
    return make(plain, **{**attributes, **_FRESH[kind]}).to(target)


def quant_state_names(name: str, stored: Iterable[str]) -> tuple[str, ...]:
    """Return the names under which the scales of a weight in 4 bits are stored; none for any other weight."""
    parts = tuple(key for key in stored if key.startswith(f"{name}."))
    return parts if any(key.startswith(f"{name}{QUANT_STATE}") for key in parts) else ()


def unpacked_shape(parts: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Return the shape of a weight in 4 bits before it was packed, from what is stored with it, by name."""
    outline = next(tensor for name, tensor in parts.items() if QUANT_STATE in name)
    return tuple(json.loads(bytes(outline.tolist()))["shape"])


def from_prequantized(
    old: Tensor, packed: Tensor, parts: Mapping[str, Tensor], target: torch.device
) -> nn.Parameter:
    """Return a weight in 4 bits like `old`, from its packed values and what is stored with them."""
    make = cast("Any", type(old)).from_prequantized
    return make(packed, dict(parts), requires_grad=old.requires_grad, device=target)  # type: ignore[no-any-return]


def load_scales(layer: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Let `load_state_dict`, whose hook this is, fill a quantized layer with its scales; changes `state`."""
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
    """Return the scales of a layer in 8 bits, which keeps them itself from its first forward on."""
    weight = owner._parameters.get("weight")
    if weight is None or type(weight).__name__ != INT8:
        return None
    own: Tensor | None = getattr(weight, "SCB", None)
    return own if own is not None else getattr(getattr(owner, "state", None), "SCB", None)


def drop_values(owner: nn.Module) -> None:
    """Let a layer in 8 bits drop the values that it has taken over from its weight."""
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
    old: Tensor = getattr(owner, name)
    target = resolve_device(device)
    given = old if value is None else value
    copies = None if given.is_meta or not tied_params_map else tied_params_map.get(given.data_ptr())
    if copies is not None and target in copies:
        _put(owner, name, copies[target])
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
    source = given.detach()
    kind = _dtype_after(source, old, dtype)
    if is_derived_parameter(old):
        scales = scales_of(owner) if fp16_statistics is None and value is None else fp16_statistics
        new = recreate(old, source, target, kind, scales)
    else:
        new = replacement_for(old, source.to(target, kind, non_blocking=non_blocking))
    if fp16_statistics is not None:
        new.SCB = fp16_statistics.to(target)  # type: ignore[attr-defined]
    _put(owner, name, new)
    if copies is not None:
        copies[target] = new
    if clear_cache and not (old.is_cpu or old.is_meta):
        del old, given, source
        clear_device_cache()


def find_owner(module: nn.Module, tensor_name: str) -> Owner:
    """Return the module that has a parameter or buffer of a dotted name itself, and its name there."""
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
        reason = f"this machine has {count} of that kind"
        raise wrong_value("device", str(device), reason, 'pass another, or "cpu"')


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
    """Return the name in a device map of a tensor or module, or of the innermost module around it."""
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
