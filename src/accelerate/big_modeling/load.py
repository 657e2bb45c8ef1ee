"""Fill a model from files of weights, tensor by tensor: it is never in memory twice."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base.errors import AccelerateError, CheckpointError, ConfigurationError
from accelerate.base.text import listed
from accelerate.big_modeling.device_map import check_device_map
from accelerate.checkpointing.shards import find_shards
from accelerate.weights.int8 import quantize_and_offload_8bit
from accelerate.weights.modules import all_tensors, get_non_persistent_buffers
from accelerate.weights.packed import INT8
from accelerate.weights.placement import (
    find_home,
    place_of,
    read_dtype,
    resolve_device,
    set_module_tensor_to_device,
)
from accelerate.weights.reading import Weights
from accelerate.weights.store import STATISTICS, Index, beside, offload_weight, save_offload_index
from accelerate.weights.tied import find_tied_parameters

logger = logging.getLogger(__name__)  # also used where no run is set up

CPU = torch.device("cpu")
META = torch.device("meta")
DISK = "disk"


@dataclass(frozen=True)
class Move:
    """Where one tensor of the model comes from, and where it goes.

    Attributes:
        name: in the model.
        source: in the files; another one for a tied parameter that is stored under that.
        device: where it goes.
        on_disk: whether it goes to the folder of offloaded weights, and the model gets one without a value.
        dtype: it is converted to.
        in_place: whether the tensor that the model has is filled, and not replaced.
        in_8_bits: whether it is quantized before it goes to the disk.
    """

    name: str
    source: str
    device: torch.device
    on_disk: bool = False
    dtype: torch.dtype | None = None
    in_place: bool = False
    in_8_bits: bool = False


@dataclass(frozen=True)
class Plan:
    """What is done with each tensor.

    Attributes:
        moves: one for each tensor of the model that the files hold.
        missing: names in the model's state dict that the files lack.
        unexpected: names in the files that the model lacks.
        misshapen: tensors whose shapes differ, each as a text.
    """

    moves: Sequence[Move]
    missing: Sequence[str]
    unexpected: Sequence[str]
    misshapen: Sequence[str]


@dataclass(frozen=True)
class Wishes:
    """How the user wants tensors placed.

    Attributes:
        device_map: devices by module; None leaves tensors where they are; those without a value come to the
            CPU.
        dtype: of floating-point tensors; None keeps those of the model.
        kept: modules whose tensors are float32 whatever `dtype` says.
        offload_buffers: whether buffers of modules on the disk go there, too.
        in_8_bits: whether weights of layers in 8 bits are quantized before they go to the disk.
    """

    device_map: Mapping[str, Any] | None = None
    dtype: torch.dtype | None = None
    kept: Sequence[str] = ()
    offload_buffers: bool = False
    in_8_bits: bool = False


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
    path = Path(checkpoint)
    if broadcast_from_rank0 or is_sharded(model):
        _load_sharded(model, path, full_state_dict, broadcast_from_rank0, strict)
        return
    wishes = Wishes(
        device_map,
        None if dtype is None else read_dtype(dtype),
        tuple(keep_in_fp32_modules or ()),
        offload_buffers,
        offload_8bit_bnb,
    )
    tied = find_tied_parameters(model)
    if device_map is not None:
        check_device_map(model, device_map)
    weights = Weights.open(find_shards(path))
    plan = plan_moves(model, weights, wishes, tied)
    _report(plan, path, type(model).__name__, strict)
    to_disk = any(move.on_disk for move in plan.moves)
    if to_disk and offload_folder is None:
        raise ConfigurationError(
            'device_map puts modules on the "disk", and there is no folder for them. Pass offload_folder.'
        )
    index: Index = {}
    for move in plan.moves:
        _carry_out(model, move, weights, offload_folder, index)
    if offload_folder is not None:
        save_offload_index(index, offload_folder)
    _retie(model, tied)
    for name, file in weights.extra.items():
        if _takes_extra(model, name):
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(file.read(name, CPU))


def plan_moves(model: nn.Module, weights: Weights, wishes: Wishes, tied: Sequence[Sequence[str]]) -> Plan:
    """Decide what is done with each tensor; nothing is changed.

    Args:
        model: the module.
        weights: the opened files.
        wishes: of the user.
        tied: groups of names in the model that stand for one parameter each.
    """
    own = all_tensors(model)
    sources = _find_sources(own, weights.files, tied)
    needed = own.keys() - get_non_persistent_buffers(model, recurse=True, fqns=True)
    return Plan(
        moves=[_plan_move(name, source, own[name], wishes) for name, source in sources.items()],
        missing=[name for name in own if name in needed and name not in sources],
        unexpected=sorted(
            [
                *(name for name in weights.files if name not in own and not _is_statistics(name, own)),
                *(name for name in weights.extra if not _takes_extra(model, name)),
            ]
        ),
        misshapen=[
            f"{name} is {tuple(weights.shape(source))} and not {tuple(own[name].shape)}"
            for name, source in sources.items()
            if weights.shape(source) != own[name].shape
        ],
    )


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters of a model are spread over processes."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _find_sources(
    own: Mapping[str, Tensor], stored: Mapping[str, Any], tied: Sequence[Sequence[str]]
) -> dict[str, str]:
    """Return, for each tensor of the model that the files hold, the name it has there."""
    twins = {name: group for group in tied for name in group}
    found = {
        name: next((each for each in (name, *twins.get(name, ())) if each in stored), None) for name in own
    }
    return {name: source for name, source in found.items() if source is not None}


def _plan_move(name: str, source: str, old: Tensor, wishes: Wishes) -> Move:
    dtype = _dtype_for(name, old, wishes)
    if wishes.device_map is None:
        has_value = old.device.type != "meta"
        return Move(
            name,
            source,
            old.device if has_value else CPU,
            dtype=dtype,
            in_place=has_value and dtype == old.dtype,
        )
    place = place_of(name, wishes.device_map)
    if place != DISK:
        return Move(name, source, resolve_device(place), dtype=dtype)
    stays = not (isinstance(old, nn.Parameter) or wishes.offload_buffers)
    in_8_bits = wishes.in_8_bits and type(old).__name__ == INT8
    return Move(name, source, CPU if stays else META, on_disk=not stays, dtype=dtype, in_8_bits=in_8_bits)


def _dtype_for(name: str, old: Tensor, wishes: Wishes) -> torch.dtype:
    if wishes.dtype is None or not (old.is_floating_point() or old.is_complex()):
        return old.dtype
    is_kept = any(f".{module}." in f".{name}." for module in wishes.kept)
    return torch.float32 if is_kept else wishes.dtype


def _takes_extra(model: nn.Module, name: str) -> bool:
    """Whether the module of that name takes what is kept beside tensors."""
    path = name.rpartition(".")[0]
    modules = dict(model.named_modules())
    return path in modules and type(modules[path]).set_extra_state is not nn.Module.set_extra_state


def _is_statistics(name: str, own: Mapping[str, Tensor]) -> bool:
    """Whether this is what a weight in 8 bits is multiplied by, stored beside it."""
    return name == beside(name, STATISTICS) and beside(name, "weight") in own


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


def _retie(model: nn.Module, tied: Sequence[Sequence[str]]) -> None:
    """Let names that stood for one parameter do so again, where they are on the same device."""
    for group in tied:
        first: dict[tuple[torch.device, torch.dtype], nn.Parameter] = {}
        for name in group:
            path, _, last = name.rpartition(".")
            owner = model.get_submodule(path)
            parameter = owner.get_parameter(last)
            owner._parameters[last] = first.setdefault((parameter.device, parameter.dtype), parameter)


def _load_sharded(model: nn.Module, path: Path, full: bool, broadcast: bool, strict: bool) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    state: dict[str, Any] = {}
    fault: AccelerateError | None = None
    if not broadcast or torch.distributed.get_rank() == 0:
        try:
            state = _read_all(model, path, strict)
        except AccelerateError as error:
            fault = error
    if broadcast:  # the other ranks must not wait for tensors that never come
        said: list[Any] = [fault]
        torch.distributed.broadcast_object_list(said, src=0)
        fault = said[0]
    if fault is not None:
        raise fault
    options = StateDictOptions(full_state_dict=full, broadcast_from_rank0=broadcast, strict=False)
    set_model_state_dict(model, state, options=options)


def _read_all(model: nn.Module, path: Path, strict: bool) -> dict[str, Any]:
    weights = Weights.open(find_shards(path))
    plan = plan_moves(model, weights, Wishes(), find_tied_parameters(model))
    _report(plan, path, type(model).__name__, strict)
    return {move.name: weights.read(move.source, CPU) for move in plan.moves}
