"""Build a model without memory, and fill it from files, tensor by tensor: it is never in memory twice."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from accelerate.base import (
    ConfigurationError,
    advance,
    expect,
    listed,
    parse_flag_from_env,
    progress_bar,
    wrong_value,
)
from accelerate.big_modeling.device_map import check_device_map, check_devices
from accelerate.big_modeling.moves import (
    CPU,
    META,
    LoadOptions,
    LoadPlan,
    Move,
    check_fit,
    plan_moves,
    takes_extra_state,
)
from accelerate.checkpointing import find_shards
from accelerate.ops import Transport, current_transport, is_dtensor, run_on_rank_0
from accelerate.weights import (
    Device,
    Index,
    StoredWeights,
    WeightFile,
    all_tensors,
    check_values,
    find_owner,
    find_tied_parameters,
    from_prequantized,
    make_folder,
    model_has_dtensor,
    offload_weight,
    quantize_and_offload_8bit,
    read_dtype,
    replacement_for,
    resolve_device,
    retie_on_same_device,
    save_offload_index,
    scales_name,
    set_module_tensor_to_device,
)


def init_empty_weights(include_buffers: bool | None = None) -> AbstractContextManager[None]:
    """Let the models built inside have parameters on the meta device: shapes without memory.

    Args:
        include_buffers: whether buffers, and all other tensors made inside, have no memory, either; default:
            the environment variable ACCELERATE_INIT_INCLUDE_BUFFERS, otherwise no.

    Returns:
        A context manager.
    """
    return init_on_device(torch.device("meta"), include_buffers)


@contextmanager
def init_on_device(device: Device, include_buffers: bool | None = None) -> Iterator[None]:
    """Let the models built inside have their parameters on a device.

    Args:
        device: where; an integer is the index of an accelerator.
        include_buffers: whether buffers, and all other tensors made inside, are there, too; default: the
            environment variable ACCELERATE_INIT_INCLUDE_BUFFERS, otherwise no.

    Raises:
        ConfigurationError: there is no such device.
    """
    target = resolve_device(device)
    if include_buffers is None:
        include_buffers = parse_flag_from_env("ACCELERATE_INIT_INCLUDE_BUFFERS", False)
    if include_buffers:
        with target:
            yield
        return

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device == target:
            return None  # torch keeps the parameter: one that is shared stays so
        moved: nn.Parameter = replacement_for(parameter, parameter.detach().to(target))  # type: ignore[assignment]
        return moved

    handle = register_module_parameter_registration_hook(move)  # type: ignore[arg-type]  # it may return
    try:
        yield
    finally:
        handle.remove()


def check_options(model: nn.Module, options: LoadOptions) -> None:
    """Refuse options that cannot work with parameters that are sharded over processes."""
    devices = set((options.device_map or {}).values())
    if len(devices) > 1 or "disk" in devices:
        reason = "the parameters of this model are sharded over processes, and stay where they are"
        raise wrong_value("device_map", options.device_map, reason, "leave device_map out")
    floats = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if options.dtype is not None and floats - {options.dtype}:
        names = listed(sorted(map(str, floats)))
        reason = f"parameters of this model are {names}, and sharded over processes"
        raise wrong_value("dtype", options.dtype, reason, "convert the model before it is sharded")


@dataclass(frozen=True)
class Opened:
    """The weights of a model, from files or from rank 0, and the files that this rank has opened."""

    path: Path
    weights: StoredWeights
    own: StoredWeights | None


@dataclass
class SentFile(WeightFile):
    """All files of a model as one: rank 0 reads and broadcasts, and all ranks read in one order."""

    path: Path
    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]
    extra: Collection[str]
    transport: Transport
    own: StoredWeights | None = None

    def read(self, name: str, device: torch.device) -> Any:
        value = run_on_rank_0(partial(self._read_on_rank_0, name))
        if name in self.extra:
            return self.transport.broadcast_object(value)
        tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name]) if value is None else value
        return (self.transport.broadcast(tensor) if tensor.numel() else tensor).to(device)

    def release(self) -> None:
        for file in () if self.own is None else self.own.files.values():
            file.release()

    def _read_on_rank_0(self, name: str) -> Any:
        assert self.own is not None
        value = (self.own.extra if name in self.extra else self.own.files)[name].read(name, CPU)
        return value.contiguous() if isinstance(value, Tensor) else value


def receive_weights(path: Path, open_files: Callable[[Path], StoredWeights]) -> Opened:
    """Return the weights of files that rank 0 alone reads; called on all ranks."""
    transport = current_transport()
    own = run_on_rank_0(partial(open_files, path))
    described = None
    if own is not None:
        shapes = {name: own.shape(name) for name in own.files}
        dtypes = {name: own.read(name, CPU).dtype for name in own.files}  # mapped, not read
        described = path, shapes, dtypes, list(own.extra)
    path, shapes, dtypes, extra = transport.broadcast_object(described)
    file = SentFile(path, shapes, dtypes, extra, transport, own)
    weights = StoredWeights(dict.fromkeys(file.shapes, file), dict.fromkeys(file.extra, file))
    return Opened(path, weights, own)


def fill_from_whole(model: nn.Module, opened: Opened, strict: bool) -> None:
    """Give each rank its shards of whole tensors; called on all ranks."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    own = opened.own
    plan = plan_moves(model, opened.weights, LoadOptions(), find_tied_parameters(model))
    check_fit(plan, opened.path, type(model).__name__, strict)
    state: dict[str, Any] = (
        {} if own is None else {move.name: own.read(move.source, CPU) for move in plan.moves}
    )
    is_sent = own is not opened.weights
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_sent, strict=False)
    set_model_state_dict(model, state, options=options)


def fill_local_parts(model: nn.Module, path: Path, weights: StoredWeights, strict: bool) -> None:
    """Overwrite the local shards of this rank, which the files of `path` hold and nothing else."""
    own = all_tensors(model)
    check_values(own, "fill", "Call model.to_empty(device=...) first.")
    plan = plan_moves(model, weights, LoadOptions(), find_tied_parameters(model), part_of=local_part)
    check_fit(plan, path, f"part of a {type(model).__name__}", strict)
    for move in plan.moves:
        local_part(own[move.name]).detach().copy_(weights.read(move.source, CPU))


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor: the local shard of a DTensor, or the whole of any other."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


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
    """Fill a model, also one on the meta device, from a file of weights or several with an index.

    Names, shapes and devices of all tensors are checked before one is changed. Those of safetensors on the
    CPU are mapped from the files, and cost memory only once they are used.

    Args:
        model: the module.
        checkpoint: `*.safetensors`, a file of torch, an index, or a folder with either.
        device_map: devices by module: a number, a name such as "cpu", or "disk". None leaves each tensor
            where it is; those on the meta device go to the CPU.
        offload_folder: where weights on the "disk" go: a file each, and an index.
        dtype: dtype of floating-point tensors; None keeps those of the model.
        offload_state_dict: taken for compatibility: tensors are read one by one, so that there is no second
            copy in memory that could be offloaded.
        offload_buffers: whether buffers of modules on the "disk" go there, too, and not to the CPU.
        keep_in_fp32_modules: names of modules whose tensors are float32 whatever `dtype` says.
        offload_8bit_bnb: whether weights on the "disk" that belong to layers in 8 bits are quantized before
            they go there.
        strict: whether missing and unexpected names are an error; otherwise they are a warning.
        full_state_dict: for a sharded model: whether the files hold whole tensors, or parts of this rank.
        broadcast_from_rank0: whether rank 0 alone reads the files, and sends; called on all ranks.

    Raises:
        ConfigurationError: an argument cannot work, or the device map has no device for a tensor.
        CheckpointError: a file is missing or broken, or does not fit the model.
    """
    options = LoadOptions(
        device_map,
        read_floating(dtype),
        tuple(keep_in_fp32_modules or ()),
        offload_buffers,
        offload_8bit_bnb,
        strict,
        full_state_dict,
        broadcast_from_rank0,
    )
    index, _ = fill_model(model, Path(checkpoint), options, offload_folder)
    if offload_folder is not None:
        save_offload_index(index, offload_folder)


def read_floating(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype that floating-point tensors are converted to; None keeps theirs."""
    resolved = None if dtype is None else read_dtype(dtype)
    if resolved is not None and not (resolved.is_floating_point or resolved.is_complex):
        reason = "parameters are floating-point numbers"
        raise wrong_value("dtype", dtype, reason, "pass one, such as torch.bfloat16")
    return resolved


@progress_bar("Loading weights")
def fill_model(
    model: nn.Module,
    path: Path,
    options: LoadOptions,
    folder: str | os.PathLike[str] | None,
    leave: bool = False,
) -> tuple[Index, Index]:
    """Fill a model from files; weights on the disk go to `folder`, or with `leave` stay in safetensors files.

    Returns:
        Entries of the weights that were written to the folder, and of those that stay in their files.
    """
    if model_has_dtensor(model):
        check_options(model, options)
        if options.full_state_dict:
            fill_from_whole(model, _open_or_receive(path, options), options.strict)
        else:
            fill_local_parts(model, path, _open(path), options.strict)
        return {}, {}
    tied = find_tied_parameters(model)
    if options.device_map is not None:
        check_devices(options.device_map)
        check_device_map(model, options.device_map)
    opened = _open_or_receive(path, options)
    weights = opened.weights
    plan = plan_moves(model, weights, options, tied)
    check_fit(plan, opened.path, type(model).__name__, options.strict)
    left = _leave_in_files(plan, weights) if leave else {}
    if any(move.on_disk and move.name not in left for move in plan.moves):
        if folder is None:
            raise ConfigurationError(
                'device_map puts modules on the "disk", and there is no folder for them. Pass offload_folder.'
            )
        make_folder(folder)
    written: Index = {}
    for file, moves in _by_file(plan, weights):
        for move in moves:
            _carry_out(model, move, weights, None if move.name in left else folder, written)
        file.release()
    retie_on_same_device(model, tied)
    for name, file in weights.extra.items():
        if takes_extra_state(model, name):
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(file.read(name, CPU))
    return written, left


def _open(path: Path) -> StoredWeights:
    return StoredWeights.open(find_shards(path))


def _open_or_receive(path: Path, options: LoadOptions) -> Opened:
    if options.broadcast:
        return receive_weights(path, _open)
    weights = _open(path)
    expect(sum(file.stat().st_size for file in find_shards(path)))
    return Opened(path, weights, weights)


def _by_file(plan: LoadPlan, weights: StoredWeights) -> Iterable[tuple[WeightFile, list[Move]]]:
    """Return the moves file by file, so that no more than one file is in memory."""
    groups: dict[int, tuple[WeightFile, list[Move]]] = {}
    for move in plan.moves:
        file = weights.files[move.source]
        groups.setdefault(id(file), (file, []))[1].append(move)
    return groups.values()


def _leave_in_files(plan: LoadPlan, weights: StoredWeights) -> Index:
    """Return entries of the weights for the disk that can be mapped from where they are."""
    index: Index = {}
    for move in plan.moves:
        where = weights.files[move.source].locate(move.source)
        if move.on_disk and not move.in_8_bits and where is not None:
            path, name = where
            index[move.name] = {"safetensors_file": str(path), "weight_name": name}
            if move.dtype is not None:
                index[move.name]["dtype"] = str(move.dtype).removeprefix("torch.")
    return index


def _carry_out(
    model: nn.Module, move: Move, weights: StoredWeights, folder: str | os.PathLike[str] | None, index: Index
) -> None:
    value = weights.read(move.source, CPU if move.in_place or move.device == META else move.device)
    advance(value.nbytes)
    owner, name = find_owner(model, move.name)
    if move.parts:
        parts = {part: weights.read(part, move.device) for part in move.parts}
        owner._parameters[name] = from_prequantized(getattr(owner, name), value, parts, move.device)
        return
    if move.in_place:
        with torch.no_grad():
            getattr(owner, name).copy_(value)
        return
    scales = None
    if scales_name(move.source) in weights.files and (move.in_8_bits or move.device != META):
        scales = weights.read(scales_name(move.source), CPU if move.in_8_bits else move.device)
    if move.in_8_bits and folder is not None:
        quantize_and_offload_8bit(model, value, move.name, move.dtype, folder, index, scales)
        return
    if move.on_disk and folder is not None:
        offload_weight(value.to(move.dtype), move.name, folder, index)
    dtype = value.dtype if scales is not None else move.dtype
    set_module_tensor_to_device(owner, name, move.device, value, dtype, scales, clear_cache=False)
