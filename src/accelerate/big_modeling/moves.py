"""What filling a model from files does with each tensor: decided before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import CheckpointError, listed
from accelerate.weights import (
    INT4,
    INT8,
    QUANT_STATE,
    SCALES,
    StoredWeights,
    all_tensors,
    get_non_persistent_buffers,
    is_inside,
    mapped_device,
    quant_state_names,
    resolve_device,
    scales_name,
    sibling_name,
    unpacked_shape,
)

logger = logging.getLogger(__name__)  # also used where no run is set up

CPU = torch.device("cpu")
META = torch.device("meta")
DISK = "disk"
LAYOUT = "weight_format"
"""Last part of the name under which bitsandbytes stores the layout of a weight in 8 bits; there is one."""


@dataclass(frozen=True)
class Move:
    """Where one tensor of the model comes from, and where it goes.

    Attributes:
        name: in the model.
        source: its name in the files; that of another tied parameter where it is stored under that.
        on_disk: whether it goes to the folder of offloaded weights, and the model gets one without a value.
        in_place: whether the tensor that the model has is filled, and not replaced.
        in_8_bits: whether it is quantized before it goes to the disk.
        parts: names in the files of the scales of a weight that is stored in 4 bits.
    """

    name: str
    source: str
    device: torch.device
    on_disk: bool = False
    dtype: torch.dtype | None = None
    in_place: bool = False
    in_8_bits: bool = False
    parts: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadPlan:
    """What is done with each tensor of the files, the names that differ, and texts on shapes that differ."""

    moves: Sequence[Move]
    missing: Sequence[str]
    unexpected: Sequence[str]
    misshapen: Sequence[str]


@dataclass(frozen=True)
class LoadOptions:
    """The arguments of `load_checkpoint_in_model` that say what is done with tensors.

    Attributes:
        kept: modules whose tensors are float32 whatever `dtype` says.
        in_8_bits: whether weights of layers in 8 bits are quantized before they go to the disk.
        broadcast: whether rank 0 alone reads the files.
    """

    device_map: Mapping[str, Any] | None = None
    dtype: torch.dtype | None = None
    kept: Sequence[str] = ()
    offload_buffers: bool = False
    in_8_bits: bool = False
    strict: bool = False
    full_state_dict: bool = True
    broadcast: bool = False


def plan_moves(
    model: nn.Module,
    weights: StoredWeights,
    options: LoadOptions,
    tied: Sequence[Sequence[str]],
    part_of: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> LoadPlan:
    """Decide what is done with each tensor; nothing is changed.

    `tied` are groups of names of one parameter each; `part_of` returns what of a tensor the files hold.
    """
    own = all_tensors(model)
    sources = _find_sources(own, weights.files, tied)
    packed = _find_packed(own, sources, weights)
    belonging = {part for parts in packed.values() for part in parts}
    needed = own.keys() - get_non_persistent_buffers(model, recurse=True, fqns=True)
    moves = [_plan_move(name, source, own[name], options) for name, source in sources.items()]
    differences = [
        _difference(name, source, own, weights, part_of(own[name]), packed)
        for name, source in sources.items()
    ]
    unknown = weights.files.keys() - own.keys() - belonging
    unexpected = [name for name in unknown if not _belongs_to_weight_in_8_bits(name, own)]
    unexpected += [name for name in weights.extra if not takes_extra_state(model, name)]
    return LoadPlan(
        moves=[replace(move, parts=packed.get(move.name, ())) for move in moves],
        missing=[name for name in own if name in needed and name not in sources],
        unexpected=sorted(unexpected),
        misshapen=[difference for difference in differences if difference],
    )


def _find_packed(
    own: Mapping[str, Tensor], sources: Mapping[str, str], weights: StoredWeights
) -> dict[str, tuple[str, ...]]:
    """Return, for each tensor that is stored in 4 bits, the names of its scales."""
    if not any(QUANT_STATE in name for name in weights.files):
        return {}
    packed = {name: quant_state_names(source, weights.files) for name, source in sources.items()}
    return {name: parts for name, parts in packed.items() if parts}


def _difference(
    name: str,
    source: str,
    own: Mapping[str, Tensor],
    weights: StoredWeights,
    part: Tensor,
    packed: Mapping[str, tuple[str, ...]],
) -> str | None:
    """Return how a tensor of the files does not fit the one of the model; None where it does."""
    kind, scales = type(own[name]).__name__, scales_name(name)
    in_8_bits = bool(scales) and scales not in own and sibling_name(source, SCALES) in weights.files
    for bits, is_stored, layer in ((4, name in packed, INT4), (8, in_8_bits, INT8)):
        if is_stored and kind != layer:
            wanted = f"load_and_quantize_model, load_in_{bits}bit"
            return f"{name} is stored in {bits} bits, and its layer is not ({wanted})"
    stored, shape = tuple(weights.shape(source)), tuple(part.shape)
    if name in packed:
        stored = unpacked_shape({key: weights.read(key, CPU) for key in packed[name] if QUANT_STATE in key})
        shape = tuple(getattr(getattr(part, "quant_state", None), "shape", None) or shape)
    return None if stored == shape else f"{name} is {stored} and not {shape}"


def check_fit(plan: LoadPlan, path: Path, kind: str, strict: bool) -> None:
    """Refuse files that do not fit a model of class `kind`, or warn where only names differ.

    With `strict` different names are an error, too.

    Raises:
        CheckpointError: with all differences.
    """
    lines = [
        *([f"it lacks {listed(plan.missing)}"] if plan.missing else []),
        *([f"the model does not have {listed(plan.unexpected)}"] if plan.unexpected else []),
    ]
    if plan.misshapen or (strict and lines):
        problems = [*([listed(plan.misshapen)] if plan.misshapen else []), *lines]
        raise CheckpointError(f"{path} does not fit this {kind}: {'; '.join(problems)}. Nothing was changed.")
    if lines:
        logger.warning(f"{path} does not fit this {kind} exactly: {'; '.join(lines)}. The rest is loaded.")


def _find_sources(
    own: Mapping[str, Tensor], stored: Mapping[str, Any], tied: Sequence[Sequence[str]]
) -> dict[str, str]:
    """Return, for each tensor of the model that the files hold, the name it has there."""
    twins = {name: group for group in tied for name in group}
    sources = {
        name: next((key for key in (name, *twins.get(name, ())) if key in stored), None) for name in own
    }
    return {name: source for name, source in sources.items() if source is not None}


def _plan_move(name: str, source: str, old: Tensor, options: LoadOptions) -> Move:
    dtype = _dtype_for(name, old, options)
    if options.device_map is None:
        has_value = old.device.type != "meta"
        return Move(
            name,
            source,
            old.device if has_value else CPU,
            dtype=dtype,
            in_place=has_value and dtype == old.dtype,
        )
    device = mapped_device(name, options.device_map)
    if device != DISK:
        return Move(name, source, resolve_device(device), dtype=dtype)
    stays = not (isinstance(old, nn.Parameter) or options.offload_buffers)
    in_8_bits = options.in_8_bits and type(old).__name__ == INT8
    return Move(name, source, CPU if stays else META, on_disk=not stays, dtype=dtype, in_8_bits=in_8_bits)


def _dtype_for(name: str, old: Tensor, options: LoadOptions) -> torch.dtype:
    if options.dtype is None or not (old.is_floating_point() or old.is_complex()):
        return old.dtype
    return torch.float32 if is_inside(name, options.kept) else options.dtype


def takes_extra_state(model: nn.Module, name: str) -> bool:
    """Whether the module of that entry takes the extra state of a state dict."""
    path = name.rpartition(".")[0]
    modules = dict(model.named_modules())
    return path in modules and type(modules[path]).set_extra_state is not nn.Module.set_extra_state


def _belongs_to_weight_in_8_bits(name: str, own: Mapping[str, Tensor]) -> bool:
    """Whether an entry of the files has the scales or the layout of a weight in 8 bits."""
    has_weight = sibling_name(name, "weight") in own
    return has_weight and name in (sibling_name(name, SCALES), sibling_name(name, LAYOUT))
