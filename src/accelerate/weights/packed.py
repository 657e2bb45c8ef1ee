"""Parameters of classes that other libraries derived from torch's: bitsandbytes packs values in them.

Its parameters quantize themselves when they are moved to a device; one in 8 bits (`Int8Params`) has its
scales in `SCB`, one in 4 bits (`Params4bit`) in `quant_state`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

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
    make = cast("type[nn.Parameter]", type(old))
    attributes = dict(vars(old))
    if not is_bnb_parameter(old):
        return _recreate_by_class(make, source.to(target, dtype), old.requires_grad, attributes)
    if target.type == "meta":
        kept = {**attributes, **(_FRESH[INT8] if type(old).__name__ == INT8 else {})}  # its numbers go, too
        return make(source.to(target), requires_grad=old.requires_grad, **kept)
    if _is_packed(old, source):
        known = {} if statistics is None else {"SCB": statistics}
        kept = {**attributes, **known}
        return make(source, requires_grad=old.requires_grad, **kept).to(target)
    fresh = {**attributes, **_FRESH[type(old).__name__]}
    plain = source.to("cpu", dtype)  # it quantizes on its way from there
    return make(plain, requires_grad=old.requires_grad, **fresh).to(target)


def _recreate_by_class(
    make: type[nn.Parameter], data: Tensor, requires_grad: bool, attributes: dict[str, Any]
) -> Tensor:
    """Make a parameter of any other library: what its class does not take is set on it."""
    taken = inspect.signature(make.__new__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    new = make(
        data,
        requires_grad=requires_grad,
        **{name: value for name, value in attributes.items() if takes_all or name in taken},
    )
    vars(new).update({name: value for name, value in attributes.items() if name not in vars(new)})
    return new


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
    make = cast("Any", type(old))
    made: nn.Parameter = make.from_prequantized(
        packed, dict(parts), requires_grad=old.requires_grad, device=target
    )
    return made


def load_scales(layer: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Let `load_state_dict` fill a quantized layer, used or not, with its stored scales; changes `state`.

    It is a hook of torch, which passes further arguments.
    """
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
