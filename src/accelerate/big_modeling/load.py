"""Creation of models on the meta device, and loading of their weights tensor by tensor."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

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
from accelerate.ops import Transport, current_transport, local_tensor, run_on_rank_0
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
    """Returns a context manager that creates the parameters of modules on the meta device.

    Args:
        include_buffers: whether to create buffers and all other tensors there, too. Default: the environment
            variable ACCELERATE_INIT_INCLUDE_BUFFERS, or False.

    Returns:
        A context manager.
    """
    return init_on_device(torch.device("meta"), include_buffers)


@contextmanager
def init_on_device(device: Device, include_buffers: bool | None = None) -> Iterator[None]:
    """Creates the parameters of modules on a device inside the context.

    Args:
        device: the device. An integer is the index of an accelerator.
        include_buffers: whether to create buffers and all other tensors there, too. Default: the environment
            variable ACCELERATE_INIT_INCLUDE_BUFFERS, or False.

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

    moves = ParameterMoves(target)
    handles = (
        register_module_parameter_registration_hook(moves.move),  # type: ignore[arg-type]  # may return None
        register_module_module_registration_hook(moves.keep),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class ParameterMoves:
    """Moves of parameters to a device when they are registered in a module, which keep tied ones tied.

    Modules that are created outside of the context keep their tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, _Moved] = {}  # by the identity of the parameter and of the moved one
        self._kept: dict[int, weakref.ref[nn.Parameter]] = {}  # parameters of modules from outside

    def move(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """Returns the parameter on the device, or None if the module shall keep the parameter itself."""
        if parameter is None or (id(parameter) in self._kept and self._kept[id(parameter)]() is parameter):
            return None
        record = self._find(parameter)
        result = None if record is None else record.moved()
        if record is None or result is None:
            if parameter.device == self._device:
                return None
            result = cast("nn.Parameter", replacement_for(parameter, parameter.detach().to(self._device)))
            record = _Moved(weakref.ref(parameter), weakref.ref(result))
            self._moved[id(parameter)] = self._moved[id(result)] = record
        record.entries.append((weakref.ref(module), name))
        return result

    def keep(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        """Keeps the parameters of a submodule from outside, also where they have been moved already."""
        for parameter in () if submodule is None else submodule.parameters():
            if parameter.device == self._device:
                continue
            self._kept[id(parameter)] = weakref.ref(parameter)
            record = self._find(parameter)
            for reference, key in () if record is None else record.entries:
                owner = reference()
                if owner is not None and owner._parameters.get(key) is record.moved():  # type: ignore[union-attr]
                    owner._parameters[key] = parameter

    def _find(self, parameter: nn.Parameter) -> _Moved | None:
        record = self._moved.get(id(parameter))
        is_own = record and (record.original() is parameter or record.moved() is parameter)
        return record if is_own else None


@dataclass
class _Moved:
    """A parameter that was moved, and the entries of modules that have the moved one."""

    original: weakref.ref[nn.Parameter]
    moved: weakref.ref[nn.Parameter]
    entries: list[tuple[weakref.ref[nn.Module], str]] = field(default_factory=list)


def check_options(model: nn.Module, options: LoadOptions) -> None:
    """Raises an error for options that do not work with sharded parameters."""
    devices = set((options.device_map or {}).values())
    if len(devices) > 1 or "disk" in devices:
        reason = "the parameters of this model are sharded over processes, and are not moved"
        raise wrong_value("device_map", options.device_map, reason, "leave device_map out")
    floats = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if options.dtype is not None and floats - {options.dtype}:
        names = listed(sorted(map(str, floats)))
        reason = f"parameters of this model are {names}, and sharded over processes"
        raise wrong_value("dtype", options.dtype, reason, "convert the model before it is sharded")


@dataclass(frozen=True)
class WeightSource:
    """Weights of a model, from files or from rank 0, and the files that this rank has opened."""

    path: Path
    weights: StoredWeights
    opened: StoredWeights | None


@dataclass
class BroadcastFile(WeightFile):
    """All files of a model as one file, which rank 0 reads and broadcasts to all ranks."""

    path: Path
    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]
    extra: Collection[str]
    transport: Transport
    opened: StoredWeights | None = None

    def read(self, name: str, device: torch.device) -> Any:
        value = run_on_rank_0(partial(self._read_on_rank_0, name))
        if name in self.extra:
            return self.transport.broadcast_object(value)
        tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name]) if value is None else value
        return (self.transport.broadcast(tensor) if tensor.numel() else tensor).to(device)

    def release(self) -> None:
        for file in () if self.opened is None else self.opened.files.values():
            file.release()

    def _read_on_rank_0(self, name: str) -> Any:
        assert self.opened is not None
        value = (self.opened.extra if name in self.extra else self.opened.files)[name].read(name, CPU)
        return value.contiguous() if isinstance(value, Tensor) else value


def receive_weights(path: Path, open_files: Callable[[Path], StoredWeights]) -> WeightSource:
    """Returns the weights of files that only rank 0 reads.

    Called on all ranks.
    """
    transport = current_transport()
    opened = run_on_rank_0(partial(open_files, path))
    header = None
    if opened is not None:
        shapes = {name: opened.shape(name) for name in opened.files}
        dtypes = {name: opened.read(name, CPU).dtype for name in opened.files}  # mapped, not read
        header = path, shapes, dtypes, list(opened.extra)
    path, shapes, dtypes, extra = transport.broadcast_object(header)
    file = BroadcastFile(path, shapes, dtypes, extra, transport, opened)
    weights = StoredWeights(dict.fromkeys(file.shapes, file), dict.fromkeys(file.extra, file))
    return WeightSource(path, weights, opened)


def load_full_tensors(model: nn.Module, source: WeightSource, strict: bool) -> None:
    """Loads the shards of each rank from full tensors.

    Called on all ranks.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    opened = source.opened
    plan = plan_moves(model, source.weights, LoadOptions(), find_tied_parameters(model))
    check_fit(plan, source.path, type(model).__name__, strict)
    state: dict[str, Any] = (
        {} if opened is None else {move.name: opened.read(move.source, CPU) for move in plan.moves}
    )
    is_broadcast = opened is not source.weights
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=is_broadcast, strict=False)
    set_model_state_dict(model, state, options=options)


def load_local_shards(model: nn.Module, path: Path, weights: StoredWeights, strict: bool) -> None:
    """Loads the local shards of this rank from files that contain only these shards."""
    tensors = all_tensors(model)
    check_values(tensors, "fill", "Call model.to_empty(device=...) first.")
    plan = plan_moves(model, weights, LoadOptions(), find_tied_parameters(model), shard_of=local_tensor)
    check_fit(plan, path, f"part of a {type(model).__name__}", strict)
    for move in plan.moves:
        local_tensor(tensors[move.name]).detach().copy_(weights.read(move.source, CPU))


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
    """Loads the weights of a model from one file, or from several files with an index.

    The model may be on the meta device. Names, shapes and devices of all tensors are checked before one is
    changed. Tensors of safetensors on the CPU are mapped from the files, and take memory only when they are
    used.

    Args:
        model: the module.
        checkpoint: `*.safetensors`, a file of torch, an index, or a folder with either.
        device_map: device of each module, which is an index, a name such as "cpu", or "disk". None keeps the
            device of each tensor, and moves those on the meta device to the CPU.
        offload_folder: folder of weights on the "disk", with a file for each and an index.
        dtype: dtype of floating-point tensors. None keeps those of the model.
        offload_state_dict: ignored, for compatibility. Tensors are read one by one, so that there is no
            second copy in memory to offload.
        offload_buffers: whether to offload buffers of modules on the "disk" there, and not to the CPU.
        keep_in_fp32_modules: names of modules whose tensors are float32 regardless of `dtype`.
        offload_8bit_bnb: whether to quantize weights on the "disk" of layers in 8 bits before they are
            written.
        strict: whether missing and unexpected names are an error, and not only a warning.
        full_state_dict: whether the files have full tensors, and not the shards of this rank, for a sharded
            model.
        broadcast_from_rank0: whether only rank 0 reads the files and broadcasts. Then called on all ranks.

    Raises:
        ConfigurationError: an argument is invalid, or the device map has no device for a tensor.
        CheckpointError: a file is missing or damaged, or does not fit the model.
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
    """Returns the dtype for floating-point tensors, or None to keep theirs."""
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
    """Loads the weights of a model from files, and offloads those on the disk to `folder`.

    With `leave`, those in safetensors files stay there.

    Returns:
        Entries of the weights that were written to the folder, and of those that stay in their files.
    """
    if model_has_dtensor(model):
        check_options(model, options)
        if options.full_state_dict:
            load_full_tensors(model, _open_or_receive(path, options), options.strict)
        else:
            load_local_shards(model, path, _open(path), options.strict)
        return {}, {}
    tied = find_tied_parameters(model)
    if options.device_map is not None:
        check_devices(options.device_map)
        check_device_map(model, options.device_map)
    source = _open_or_receive(path, options)
    weights = source.weights
    plan = plan_moves(model, weights, options, tied)
    check_fit(plan, source.path, type(model).__name__, options.strict)
    unmoved = _leave_in_files(plan, weights) if leave else {}
    if any(move.on_disk and move.name not in unmoved for move in plan.moves):
        if folder is None:
            raise ConfigurationError(
                'device_map puts modules on the "disk", and there is no folder for them. Pass offload_folder.'
            )
        make_folder(folder)
    written: Index = {}
    for file, moves in _by_file(plan, weights):
        for move in moves:
            _apply(model, move, weights, None if move.name in unmoved else folder, written)
        file.release()
    retie_on_same_device(model, tied)
    for name, file in weights.extra.items():
        if takes_extra_state(model, name):
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(file.read(name, CPU))
    return written, unmoved


def _open(path: Path) -> StoredWeights:
    return StoredWeights.open(find_shards(path))


def _open_or_receive(path: Path, options: LoadOptions) -> WeightSource:
    if options.broadcast:
        return receive_weights(path, _open)
    weights = _open(path)
    expect(sum(file.stat().st_size for file in find_shards(path)))
    return WeightSource(path, weights, weights)


def _by_file(plan: LoadPlan, weights: StoredWeights) -> Iterable[tuple[WeightFile, list[Move]]]:
    """Returns the moves file by file, so that only one file is in memory at a time."""
    groups: dict[int, tuple[WeightFile, list[Move]]] = {}
    for move in plan.moves:
        file = weights.files[move.source]
        groups.setdefault(id(file), (file, []))[1].append(move)
    return groups.values()


def _leave_in_files(plan: LoadPlan, weights: StoredWeights) -> Index:
    """Returns index entries of the weights for the disk that can be mapped from their files."""
    index: Index = {}
    for move in plan.moves:
        location = weights.files[move.source].locate(move.source)
        if move.on_disk and not move.in_8_bits and location is not None:
            path, name = location
            index[move.name] = {"safetensors_file": str(path), "weight_name": name}
            if move.dtype is not None:
                index[move.name]["dtype"] = str(move.dtype).removeprefix("torch.")
    return index


def _apply(
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
