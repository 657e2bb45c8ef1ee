"""Moves of weights from files into a model, planned and checked before anything is changed."""

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

logger = logging.getLogger("accelerate.utils.modeling")  # the name by which clients filter it

CPU = torch.device("cpu")
META = torch.device("meta")
DISK = "disk"
LAYOUT = "weight_format"
"""Last part of the name of the layout of a weight in 8 bits of bitsandbytes, which has only one layout."""


@dataclass(frozen=True)
class Move:
    """Source and destination of one tensor of the model."""

    name: str
    source: str  # its name in the files, which may be that of a tied parameter
    device: torch.device

    on_disk: bool = False  # it is offloaded to the folder, and becomes a meta tensor in the model
    dtype: torch.dtype | None = None
    in_place: bool = False  # the tensor of the model is filled instead of replaced
    in_8_bits: bool = False  # it is quantized before it is written to the disk
    parts: Sequence[str] = ()  # names in the files of the scales of a weight in 4 bits


@dataclass(frozen=True)
class LoadPlan:
    """Moves of all tensors of the files, names that differ, and descriptions of shapes that differ."""

    moves: Sequence[Move]
    missing: Sequence[str]
    unexpected: Sequence[str]
    mismatched: Sequence[str]


@dataclass(frozen=True)
class LoadOptions:
    """Arguments of `load_checkpoint_in_model` that determine the moves."""

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
    shard_of: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> LoadPlan:
    """Plans the move of each tensor.

    `shard_of` returns the part of a tensor that the files contain.
    """
    tensors = all_tensors(model)
    sources = _find_sources(tensors, weights.files, tied)
    quantized = {name.partition(QUANT_STATE)[0] for name in weights.files if QUANT_STATE in name}
    parts = {name: quant_state_names(name, weights.files) for name in quantized}
    moves = [
        _plan_move(name, source, tensors[name], options, parts.get(source, ()))
        for name, source in sources.items()
    ]
    differences = [_difference(move, tensors, weights, shard_of(tensors[move.name])) for move in moves]
    unknown = weights.files.keys() - tensors.keys() - {part for move in moves for part in move.parts}
    unexpected = [name for name in unknown if not _belongs_to_weight_in_8_bits(name, tensors)]
    unexpected += [name for name in weights.extra if not takes_extra_state(model, name)]
    optional = get_non_persistent_buffers(model, recurse=True, fqns=True)
    return LoadPlan(
        moves=moves,
        missing=[name for name in tensors if name not in optional and name not in sources],
        unexpected=sorted(unexpected),
        mismatched=[difference for difference in differences if difference],
    )


def _difference(
    move: Move, tensors: Mapping[str, Tensor], weights: StoredWeights, shard: Tensor
) -> str | None:
    """Returns the mismatch between a tensor of the files and the model, or None where it fits."""
    name, scales = move.name, scales_name(move.name)
    in_8_bits = bool(scales) and scales not in tensors and sibling_name(move.source, SCALES) in weights.files
    for bits, is_stored, layer in ((4, bool(move.parts), INT4), (8, in_8_bits, INT8)):
        if is_stored and type(tensors[name]).__name__ != layer:
            fix = f"load_and_quantize_model, load_in_{bits}bit"
            return f"{name} is stored in {bits} bits, and its layer is not ({fix})"
    stored, shape = tuple(weights.shape(move.source)), tuple(shard.shape)
    if move.parts:
        stored = unpacked_shape({key: weights.read(key, CPU) for key in move.parts if QUANT_STATE in key})
        shape = tuple(getattr(getattr(shard, "quant_state", None), "shape", None) or shape)
    return None if stored == shape else f"{name} is {stored} and not {shape}"


def check_fit(plan: LoadPlan, path: Path, kind: str, strict: bool) -> None:
    """Raises an error for files that do not fit a model of class `kind`.

    Different names are a warning unless `strict`.
    """
    rows = (("", plan.mismatched), ("it lacks ", plan.missing), ("the model does not have ", plan.unexpected))
    problems = "; ".join(f"{text}{listed(names)}" for text, names in rows if names)
    if plan.mismatched or (strict and problems):
        raise CheckpointError(f"{path} does not fit this {kind}: {problems}. Nothing was changed.")
    if problems:
        logger.warning(f"{path} does not fit this {kind} exactly: {problems}. The rest is loaded.")


def _find_sources(
    tensors: Mapping[str, Tensor], stored: Mapping[str, Any], tied: Sequence[Sequence[str]]
) -> dict[str, str]:
    """Returns the name in the files of each tensor of the model that they contain."""
    groups = {name: group for group in tied for name in group}
    sources = {
        name: next((key for key in (name, *groups.get(name, ())) if key in stored), None) for name in tensors
    }
    return {name: source for name, source in sources.items() if source is not None}


def _plan_move(name: str, source: str, old: Tensor, options: LoadOptions, parts: Sequence[str]) -> Move:
    dtype = old.dtype
    if options.dtype is not None and old.is_floating_point():
        dtype = torch.float32 if is_inside(name, options.kept) else options.dtype
    if options.device_map is None:
        device = CPU if old.is_meta else old.device
        in_place = not old.is_meta and dtype == old.dtype
        return Move(name, source, device, dtype=dtype, in_place=in_place, parts=parts)
    target = mapped_device(name, options.device_map)
    if target != DISK:
        return Move(name, source, resolve_device(target), dtype=dtype, parts=parts)
    is_kept = not (isinstance(old, nn.Parameter) or options.offload_buffers)
    in_8_bits = options.in_8_bits and type(old).__name__ == INT8
    return Move(name, source, CPU if is_kept else META, not is_kept, dtype, in_8_bits=in_8_bits, parts=parts)


def takes_extra_state(model: nn.Module, name: str) -> bool:
    """Returns whether the module of that entry accepts extra state."""
    path = name.rpartition(".")[0]
    modules = dict(model.named_modules())
    return path in modules and type(modules[path]).set_extra_state is not nn.Module.set_extra_state


def _belongs_to_weight_in_8_bits(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Returns whether an entry of the files is the scales or the layout of a weight in 8 bits."""
    has_weight = sibling_name(name, "weight") in tensors
    return has_weight and name in (sibling_name(name, SCALES), sibling_name(name, LAYOUT))
