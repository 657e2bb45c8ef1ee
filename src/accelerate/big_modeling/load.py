"""Fill a model from files of weights, tensor by tensor: it is never in memory twice."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base.errors import AccelerateError, CheckpointError, ConfigurationError
from accelerate.base.text import listed
from accelerate.big_modeling.device_map import check_device_map
from accelerate.big_modeling.moves import CPU, META, Move, Plan, Wishes, plan_moves, takes_extra
from accelerate.checkpointing.shards import find_shards
from accelerate.weights.int8 import quantize_and_offload_8bit
from accelerate.weights.placement import (
    find_home,
    read_dtype,
    set_module_tensor_to_device,
)
from accelerate.weights.reading import Weights
from accelerate.weights.store import STATISTICS, Index, beside, offload_weight, save_offload_index
from accelerate.weights.tied import find_tied_parameters, retie_on_same_device

logger = logging.getLogger(__name__)  # also used where no run is set up


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Iterable[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> None:
    """Fill a model from a file of weights, or several with an index; it may lie on the meta device.

    Names, shapes and places of all tensors are checked before one is changed. Tensors on the CPU are mapped
    from the files, which cost memory only once they are used.

    Args:
        model: the module.
        checkpoint: `*.safetensors`, a file of torch, an index, or a folder with either.
        device_map: devices by module: a number, a name such as "cpu", or "disk". None leaves each tensor
            where it is; those on the meta device come to the CPU.
        offload_folder: where weights on the "disk" go: a file each, and an index.
        dtype: dtype of floating-point tensors; None keeps those of the model.
        offload_state_dict: taken for compatibility: tensors are read one by one, so that no second copy is in
            memory which could be put aside.
        offload_buffers: whether buffers of modules on the "disk" go there, too, and not to the CPU.
        keep_in_fp32_modules: names of modules whose tensors are float32 whatever `dtype` says.
        offload_8bit_bnb: whether weights on the "disk" that belong to layers in 8 bits are quantized before
            they go there.
        strict: whether missing and unexpected names are an error; otherwise they are a warning.
        full_state_dict: for a sharded model: whether the files hold whole tensors, not those of this rank.
        broadcast_from_rank0: for a sharded model, called on all ranks: whether rank 0 alone reads the files.

    Raises:
        ConfigurationError: an argument cannot work, or the device map has no place for a tensor.
        CheckpointError: a file is missing or broken, or does not fit the model.
    """
    wishes = Wishes(
        device_map,
        None if dtype is None else read_dtype(dtype),
        tuple(keep_in_fp32_modules or ()),
        offload_buffers,
        offload_8bit_bnb,
    )
    source = Source(Path(checkpoint), strict, full_state_dict, broadcast_from_rank0)
    index, _ = fill_model(model, source, wishes, offload_folder)
    if offload_folder is not None:
        save_offload_index(index, offload_folder)


@dataclass(frozen=True)
class Source:
    """The files that a model is filled from, and how they are taken.

    Attributes:
        path: a file of weights, an index, or a folder with either.
        strict: whether missing and unexpected names are an error.
        full: for a sharded model: whether the files hold whole tensors.
        broadcast: for a sharded model: whether rank 0 alone reads them.
        leave: whether weights that go to the disk stay in the files of safetensors that they are in.
    """

    path: Path
    strict: bool = False
    full: bool = True
    broadcast: bool = False
    leave: bool = False


def fill_model(
    model: nn.Module, source: Source, wishes: Wishes, folder: str | os.PathLike[str] | None
) -> tuple[Index, Index]:
    """Fill a model from files.

    Args:
        model: the module.
        source: the files.
        wishes: of the user.
        folder: where weights on the disk go.

    Returns:
        Entries of the weights that were written to the folder, and of those that stay in their files.

    Raises:
        ConfigurationError: the device map does not fit the model, or there is no folder.
        CheckpointError: a file is missing or broken, or does not fit the model.
    """
    if source.broadcast or is_sharded(model):
        _load_sharded(model, source)
        return {}, {}
    tied = find_tied_parameters(model)
    if wishes.device_map is not None:
        check_device_map(model, wishes.device_map)
    weights = Weights.open(find_shards(source.path))
    plan = plan_moves(model, weights, wishes, tied)
    _report(plan, source.path, type(model).__name__, source.strict)
    left = _leave_in_files(plan, weights) if source.leave else {}
    if folder is None and any(move.on_disk and move.name not in left for move in plan.moves):
        raise ConfigurationError(
            'device_map puts modules on the "disk", and there is no folder for them. Pass offload_folder.'
        )
    written: Index = {}
    for move in plan.moves:
        _carry_out(model, move, weights, None if move.name in left else folder, written)
    retie_on_same_device(model, tied)
    for name, file in weights.extra.items():
        if takes_extra(model, name):
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(file.read(name, CPU))
    return written, left


def _leave_in_files(plan: Plan, weights: Weights) -> Index:
    """Return entries of the weights for the disk that can be mapped from where they are."""
    found: Index = {}
    for move in plan.moves:
        where = weights.files[move.source].locate(move.source)
        if move.on_disk and not move.in_8_bits and where is not None:
            path, name = where
            found[move.name] = {"safetensors_file": str(path), "weight_name": name}
            if move.dtype is not None:
                found[move.name]["dtype"] = str(move.dtype).removeprefix("torch.")
    return found


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters of a model are spread over processes."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _report(plan: Plan, path: Path, kind: str, strict: bool) -> None:
    lines = [
        *([f"it lacks {listed(plan.missing)}"] if plan.missing else []),
        *([f"the model does not have {listed(plan.unexpected)}"] if plan.unexpected else []),
    ]
    if plan.misshapen or (strict and lines):
        problems = [*([listed(plan.misshapen)] if plan.misshapen else []), *lines]
        raise CheckpointError(f"{path} does not fit this {kind}: {'; '.join(problems)}. Nothing was changed.")
    if lines:
        logger.warning(f"{path} does not fit this {kind} exactly: {'; '.join(lines)}. The rest is loaded.")


def _carry_out(
    model: nn.Module, move: Move, weights: Weights, folder: str | os.PathLike[str] | None, index: Index
) -> None:
    value = weights.read(move.source, CPU if move.in_place or move.device == META else move.device)
    if move.in_place:
        with torch.no_grad():
            owner, name = find_home(model, move.name)
            getattr(owner, name).copy_(value)
        return
    if move.in_8_bits and folder is not None:
        factors = _factors_of(move.source, weights, CPU)
        quantize_and_offload_8bit(model, value, move.name, move.dtype, folder, index, factors)
        return
    if move.on_disk and folder is not None:
        offload_weight(value.to(move.dtype), move.name, folder, index)
    factors = _factors_of(move.source, weights, move.device)
    dtype = value.dtype if factors is not None else move.dtype
    set_module_tensor_to_device(
        model, move.name, move.device, value, dtype, fp16_statistics=factors, clear_cache=False
    )


def _factors_of(name: str, weights: Weights, device: torch.device) -> Tensor | None:
    factors = beside(name, STATISTICS)
    is_wanted = name == beside(name, "weight") and factors in weights.files and device != META
    return weights.read(factors, device) if is_wanted else None


def _load_sharded(model: nn.Module, source: Source) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state: dict[str, Any] = {}
    fault: AccelerateError | None = None
    if not source.broadcast or torch.distributed.get_rank() == 0:
        try:
            state = _read_all(model, source.path, source.strict)
        except AccelerateError as error:
            fault = error
    if source.broadcast:  # the other ranks must not wait for tensors that never come
        said: list[Any] = [fault]
        torch.distributed.broadcast_object_list(said, src=0)
        fault = said[0]
    if fault is not None:
        raise fault
    options = StateDictOptions(
        full_state_dict=source.full, broadcast_from_rank0=source.broadcast, strict=False
    )
    set_model_state_dict(model, state, options=options)


def _read_all(model: nn.Module, path: Path, strict: bool) -> dict[str, Any]:
    weights = Weights.open(find_shards(path))
    plan = plan_moves(model, weights, Wishes(), find_tied_parameters(model))
    _report(plan, path, type(model).__name__, strict)
    return {move.name: weights.read(move.source, CPU) for move in plan.moves}
