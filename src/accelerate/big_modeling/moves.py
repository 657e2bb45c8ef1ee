"""What filling a model from files does with each tensor: decided before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    """Where one tensor of the model comes from, and where it goes."""

    name: str
    source: str  # its name in the files; that of another tied parameter where it is stored under that
    device: torch.device
    on_disk: bool = (
        False  # it goes to the folder of offloaded weights, and the model gets one without a value
    )
    dtype: torch.dtype | None = None
    in_place: bool = False  # the tensor that the model has is filled, and not replaced
    in_8_bits: bool = False  # it is quantized before it goes to the disk
    parts: Sequence[str] = ()  # names in the files of the scales of a weight that is stored in 4 bits


@dataclass(frozen=True)
class LoadPlan:
    """What is done with each tensor of the files, the names that differ, and texts on shapes that differ."""

    moves: Sequence[Move]
    missing: Sequence[str]
    unexpected: Sequence[str]
    misshapen: Sequence[str]


@dataclass(frozen=True)
class LoadOptions:
    """The arguments of `load_checkpoint_in_model` that say what is done with tensors."""

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
    """Decide what is done with each tensor; `part_of` returns what of a tensor the files hold."""
    own = all_tensors(model)
    sources = _find_sources(own, weights.files, tied)
    quantized = {name.partition(QUANT_STATE)[0] for name in weights.files if QUANT_STATE in name}
    parts = {name: quant_state_names(name, weights.files) for name in quantized}
    moves = [
        _plan_move(name, source, own[name], options, parts.get(source, ()))
        for name, source in sources.items()
    ]
    differences = [_difference(move, own, weights, part_of(own[move.name])) for move in moves]
    unknown = weights.files.keys() - own.keys() - {part for move in moves for part in move.parts}
    unexpected = [name for name in unknown if not _belongs_to_weight_in_8_bits(name, own)]
    unexpected += [name for name in weights.extra if not takes_extra_state(model, name)]
    optional = get_non_persistent_buffers(model, recurse=True, fqns=True)
    return LoadPlan(
        moves=moves,
        missing=[name for name in own if name not in optional and name not in sources],
        unexpected=sorted(unexpected),
        misshapen=[difference for difference in differences if difference],
    )


def _difference(move: Move, own: Mapping[str, Tensor], weights: StoredWeights, part: Tensor) -> str | None:
    """Return how a tensor of the files does not fit the one of the model; None where it does."""
    name, scales = move.name, scales_name(move.name)
    in_8_bits = bool(scales) and scales not in own and sibling_name(move.source, SCALES) in weights.files
    for bits, is_stored, layer in ((4, bool(move.parts), INT4), (8, in_8_bits, INT8)):
        if is_stored and type(own[name]).__name__ != layer:
            wanted = f"load_and_quantize_model, load_in_{bits}bit"
            return f"{name} is stored in {bits} bits, and its layer is not ({wanted})"
    stored, shape = tuple(weights.shape(move.source)), tuple(part.shape)
    if move.parts:
        stored = unpacked_shape({key: weights.read(key, CPU) for key in move.parts if QUANT_STATE in key})
        shape = tuple(getattr(getattr(part, "quant_state", None), "shape", None) or shape)
    return None if stored == shape else f"{name} is {stored} and not {shape}"


def check_fit(plan: LoadPlan, path: Path, kind: str, strict: bool) -> None:
    """Refuse files that do not fit a model of class `kind`; different names are a warning unless `strict`."""
    rows = (
        ("", plan.misshapen),
        ("it lacks ", plan.missing),
        ("the model does not have ", plan.unexpected),
    )
    problems = "; ".join(f"{text}{listed(names)}" for text, names in rows if names)
    if plan.misshapen or (strict and problems):
        raise CheckpointError(f"{path} does not fit this {kind}: {problems}. Nothing was changed.")
    if problems:
        logger.warning(f"{path} does not fit this {kind} exactly: {problems}. The rest is loaded.")


def _find_sources(
    own: Mapping[str, Tensor], stored: Mapping[str, Any], tied: Sequence[Sequence[str]]
) -> dict[str, str]:
    """Return, for each tensor of the model that the files hold, the name it has there."""
    groups = {name: group for group in tied for name in group}
    sources = {
        name: next((key for key in (name, *groups.get(name, ())) if key in stored), None) for name in own
    }
    return {name: source for name, source in sources.items() if source is not None}


def _plan_move(name: str, source: str, old: Tensor, options: LoadOptions, parts: Sequence[str]) -> Move:
    dtype = old.dtype
    if options.dtype is not None and (old.is_floating_point() or old.is_complex()):
        dtype = torch.float32 if is_inside(name, options.kept) else options.dtype
    if options.device_map is None:
        device = CPU if old.is_meta else old.device
        in_place = not old.is_meta and dtype == old.dtype
        return Move(name, source, device, dtype=dtype, in_place=in_place, parts=parts)
    target = mapped_device(name, options.device_map)
    if target != DISK:
        return Move(name, source, resolve_device(target), dtype=dtype, parts=parts)
    stays = not (isinstance(old, nn.Parameter) or options.offload_buffers)
    in_8_bits = options.in_8_bits and type(old).__name__ == INT8
    return Move(name, source, CPU if stays else META, not stays, dtype, in_8_bits=in_8_bits, parts=parts)


def takes_extra_state(model: nn.Module, name: str) -> bool:
    """Whether the module of that entry takes the extra state of a state dict."""
    path = name.rpartition(".")[0]
    modules = dict(model.named_modules())
    return path in modules and type(modules[path]).set_extra_state is not nn.Module.set_extra_state


def _belongs_to_weight_in_8_bits(name: str, own: Mapping[str, Tensor]) -> bool:
    """Whether an entry of the files has the scales or the layout of a weight in 8 bits."""
    has_weight = sibling_name(name, "weight") in own
    return has_weight and name in (sibling_name(name, SCALES), sibling_name(name, LAYOUT))
