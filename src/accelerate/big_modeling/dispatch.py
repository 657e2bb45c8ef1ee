"""Dispatch of a model by a device map, with hooks that move inputs and load offloaded weights."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from accelerate.base import ConfigurationError, StateError, as_builtin, listed
from accelerate.big_modeling.budget import Memory
from accelerate.big_modeling.device_map import CPU, DISK, check_devices, device_key, plan_device_map
from accelerate.big_modeling.load import fill_model, read_floating
from accelerate.big_modeling.moves import LoadOptions
from accelerate.devices import of_device
from accelerate.hooks import (
    METHODS_THAT_MOVE,
    AlignDevicesHook,
    CpuOffload,
    UserCpuOffloadHook,
    add_hook_to_module,
    align_hooks,
    attach_align_device_hook_on_blocks,
    hooks_of,
    remove_hook_from_module,
)
from accelerate.weights import (
    INDEX,
    Device,
    Folder,
    Index,
    OffloadedWeightsLoader,
    add_write_times,
    all_tensors,
    check_values,
    find_tied_parameters,
    get_non_persistent_buffers,
    mapped_device,
    memory_of,
    move_module,
    offload_state_dict,
    read_index,
    resolve_device,
    retie_on_same_device,
    save_offload_index,
    scales_name,
    scales_of,
)

PINNED_PART = 0.5
"""Maximum fraction of the free memory for pinned weights."""


FIX_META = (
    "Load the model first, as load_checkpoint_and_dispatch() does; build it with "
    "include_buffers=False where they are buffers that no checkpoint holds."
)


def find_offloaded(
    model: nn.Module, device_map: Mapping[str, Any], offload_devices: Collection[str], offload_buffers: bool
) -> dict[str, str]:
    """Returns the offloaded tensors of a model with their devices.

    The direct tensors of a module are offloaded together, because one hook loads them.
    """
    non_persistent = get_non_persistent_buffers(model, recurse=True, fqns=True)
    values = {
        name: device_key(mapped_device(name, device_map))
        for name, tensor in all_tensors(model).items()
        if isinstance(tensor, nn.Parameter) or (offload_buffers and name not in non_persistent)
    }
    owners = {name.rpartition(".")[0]: device for name, device in values.items() if device in offload_devices}
    return {name: owners[owner] for name in values if (owner := name.rpartition(".")[0]) in owners}


def keep_in_memory(
    model: nn.Module, names: Collection[str], state_dict: Mapping[str, Tensor] | None, main: Device
) -> dict[str, Tensor]:
    """Returns the offloaded weights on the CPU, pinned for accelerators, where tied ones share memory.

    They come from `state_dict` or from the model.
    """
    tensors = all_tensors(model)
    state = state_dict or {}
    values = {name: state.get(name, tensors[name]).detach() for name in names}
    check_values(values, "keep on the CPU", "Load the model first, or pass state_dict.")
    by_memory: dict[Any, Tensor] = {}
    pin = _may_pin(values, resolve_device(main))
    for name, tensor in values.items():
        key = memory_of(tensor)
        if key not in by_memory:
            on_cpu = tensor.to(CPU)
            by_memory[key] = on_cpu.pin_memory() if pin and not on_cpu.is_pinned() else on_cpu
        values[name] = by_memory[key]
    return {**values, **_scales(model, names)}


def check_resident(
    model: nn.Module, offloaded: Collection[str], device_map: Mapping[str, Any], main: Device
) -> None:
    """Raises an error if tensors that are not offloaded have no values for the forward."""
    devices = {device_key(target): target for target in device_map.values()}
    resident = {name: tensor for name, tensor in all_tensors(model).items() if name not in offloaded}
    on_main = (CPU, DISK)
    for key, target in devices.items():
        device = main if key in on_main else target
        tensors = {n: t for n, t in resident.items() if device_key(mapped_device(n, device_map)) == key}
        if resolve_device(device).type != "meta":
            check_values(tensors, f"move to {device}", FIX_META)


def _scales(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Returns the scales of those weights that are in 8 bits."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    scales = {scales_name(name): scales_of(owner) for name, owner in owners.items()}
    return {name: value.to(CPU) for name, value in scales.items() if name and value is not None}


def _may_pin(weights: Mapping[str, Tensor], main: torch.device) -> bool:
    if main.type == "meta" or of_device(main).shares_host_memory:
        return False
    import psutil

    return sum(value.nbytes for value in weights.values()) < PINNED_PART * psutil.virtual_memory().available


def keep_on_disk(
    model: nn.Module,
    names: Collection[str],
    folder: Folder | None,
    known: Index | None,
    tied: Collection[Collection[str]],
    device_map: Mapping[str, Any],
) -> Index:
    """Returns the index entries of weights on the disk, and writes those missing in `known` to the folder."""
    if not names:
        return {}
    tensors = all_tensors(model)
    index = dict(known or {})
    new = {name: tensors[name] for name in names if name not in index and not tensors[name].is_meta}
    if folder is None and (new or known is None):
        modules = [name or "all modules" for name, device in device_map.items() if device == DISK]
        raise ConfigurationError(
            f"device_map puts {listed(modules)} on the disk, and there is no folder for them. "
            "Pass offload_dir."
        )
    if folder is not None:
        if new:
            offload_state_dict(folder, {**new, **_scales(model, new)})
        path = Path(folder) / INDEX
        index = {**(read_index(path) if os.path.isfile(path) else {}), **index}
    for group in tied:
        stored = next((index[name] for name in group if "safetensors_file" in index.get(name, {})), None)
        index.update({name: stored for name in group if stored is not None and name not in index})
    missing = [name for name in names if name not in index]
    if missing:
        error = ConfigurationError(
            f"{listed(missing)} have no values, and are not among the weights on the disk. Load the model "
            "first, or use load_checkpoint_and_dispatch()."
        )
        raise as_builtin(error, NotImplementedError)
    used = {name: index[name] for name in [*names, *map(scales_name, names)] if name in index}
    return used if folder is None else add_write_times(used, folder)


logger = logging.getLogger(__name__)  # also used without a `PartialState`


def remove_old_hooks(model: nn.Module) -> None:
    """Removes the hooks of an earlier device map, which would load weights a second time."""
    for module in model.modules():
        if any(isinstance(hook, AlignDevicesHook) for hook in hooks_of(module)):
            remove_hook_from_module(module)


def move_whole(model: nn.Module, target: Device) -> None:
    tensors = all_tensors(model)
    device = resolve_device(target)
    if device.type != "meta":
        check_values(tensors, f"move to {target}", FIX_META)
    if any(tensor.device != device for tensor in tensors.values()):
        move_module(model, device)


def guard_moves(model: nn.Module) -> None:
    for name in METHODS_THAT_MOVE:
        if hasattr(nn.Module, name):
            plain = getattr(type(model), name)
            guarded = functools.partial(_move_guarded, model, name)
            setattr(model, name, functools.update_wrapper(guarded, plain))


def _move_guarded(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    hooks = align_hooks(model)
    call = f"{type(model).__name__}.{name}()"
    is_cast = name == "to" and {"device", "tensor"}.isdisjoint(kwargs)
    if hooks and not (is_cast and (not args or isinstance(args[0], torch.dtype))):
        logger.warning(
            f"You shouldn't move a model that is dispatched using accelerate hooks. {call} does, and "
            "inputs still go to the devices of its device_map."
        )
    if any(hook.offload for hook in hooks):
        raise StateError(
            f"You can't move a model that has some modules offloaded to cpu or disk, as {call} does. Load it "
            "with another device_map, or remove its hooks with remove_hook_from_submodules()."
        )
    return getattr(type(model), name)(model, *args, **kwargs)


Model = TypeVar("Model", bound=nn.Module)


def dispatch_model(
    model: Model,
    device_map: Mapping[str, Any],
    main_device: Device | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    offload_dir: Folder | None = None,
    offload_index: Index | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
) -> Model:
    """Moves each module of a model to its device in a device map, and keeps the model callable as before.

    Modules on accelerators compute there, and inputs are moved to them. Modules on the "cpu" (if there are
    accelerators) and on the "disk" compute on the main device. The weights of each block are loaded for its
    forward, and those of the next block are prefetched meanwhile.

    Args:
        model: the module.
        device_map: device of each module or tensor, which is an index, a name, "cpu" or "disk".
        main_device: device of the forward of offloaded modules. None: the first accelerator in the map,
            or the CPU.
        state_dict: weights of modules on the "cpu". None: those of the model.
        offload_dir: folder of weights of modules on the "disk". Those with values are written there.
        offload_index: index entries of weights on the "disk", in safetensors files or in raw files of
            `offload_dir`. None reads the index of that folder.
        offload_buffers: whether to offload the buffers of offloaded modules, too.
        skip_keys: keyword arguments and keys of outputs that are not moved.
        preload_module_classes: names of classes whose weights are loaded as a whole.
        force_hooks: whether to attach hooks also to a model on one device.

    Returns:
        The model, with the map as its `hf_device_map`.

    Raises:
        ConfigurationError: the map does not fit the model, or weights have no values or no folder.
    """
    check_devices(device_map)
    # Clients replace this function in the package, so it is looked up there.
    sys.modules["accelerate.big_modeling"].check_device_map(model, device_map)
    remove_old_hooks(model)
    targets = {device_key(target): target for target in device_map.values()}
    if len(targets) == 1 and DISK not in targets and not force_hooks:
        move_whole(model, next(iter(targets.values())))
        model.hf_device_map = dict(device_map)  # type: ignore[assignment]
        return model
    accelerators = (target for target in device_map.values() if device_key(target) not in (CPU, DISK))
    main = main_device if main_device is not None else next(accelerators, CPU)
    offload_devices = {DISK} if str(main) == CPU else {DISK, CPU}
    tied = find_tied_parameters(model)
    weights = find_offloaded(model, device_map, offload_devices, offload_buffers)
    if weights:
        logger.warning(
            "Some parameters are on the meta device because they were offloaded to the "
            f"{' and '.join(sorted(set(weights.values())))}."
        )
    in_memory = keep_in_memory(model, [name for name in weights if weights[name] == CPU], state_dict, main)
    on_disk = [name for name in weights if weights[name] == DISK]
    index = keep_on_disk(model, on_disk, offload_dir, offload_index, tied, device_map)
    check_resident(model, weights, device_map, main)
    loader = OffloadedWeightsLoader(in_memory, offload_dir, index)
    offload = {name: device_key(target) in offload_devices for name, target in device_map.items()}
    attach_align_device_hook_on_blocks(
        model,
        execution_device={"": main, **{n: main if offload[n] else p for n, p in device_map.items()}},
        offload=offload,
        weights_map=loader.open_files(),  # programs may overwrite the files from which they load
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
    )
    retie_on_same_device(model, tied)
    guard_moves(model)
    model.hf_device_map = dict(device_map)  # type: ignore[assignment]
    return model


def cpu_offload(
    model: Model,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    preload_module_classes: Collection[str] | None = None,
) -> Model:
    """Offloads all weights of a model to the CPU, and loads those of each block for its forward.

    Args:
        model: the module.
        execution_device: device of the forward. None: that of the first parameter.
        offload_buffers: whether to offload buffers, too.
        state_dict: the weights. None: those of the model.
        preload_module_classes: names of classes whose weights are loaded as a whole.

    Returns:
        The model.
    """
    remove_old_hooks(model)
    main = _device_of(model) if execution_device is None else execution_device
    names = list(find_offloaded(model, {"": CPU}, {CPU}, offload_buffers))
    weights = OffloadedWeightsLoader(keep_in_memory(model, names, state_dict, main))
    check_resident(model, names, {"": CPU}, main)
    return _attach_all(model, main, weights, offload_buffers, preload_module_classes)


def cpu_offload_with_hook(
    model: Model, execution_device: Device | None = None, prev_module_hook: UserCpuOffloadHook | None = None
) -> tuple[Model, UserCpuOffloadHook]:
    """Keeps a whole model on the CPU until it is called, and then on the execution device.

    Args:
        model: the module.
        execution_device: device of the forward. None: the accelerator of this process, or the CPU.
        prev_module_hook: hook of the previous model, which is offloaded first.

    Returns:
        The model, and a handle that offloads it or removes the hook.
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def disk_offload(
    model: Model,
    offload_dir: Folder,
    execution_device: Device | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Collection[str] | None = None,
) -> Model:
    """Offloads all weights of a model to files, and loads those of each block for its forward.

    Args:
        model: the module.
        offload_dir: folder of the files. Weights with values are written there.
        execution_device: device of the forward. None: that of the first parameter, or the CPU.
        offload_buffers: whether to offload buffers, too.
        preload_module_classes: names of classes whose weights are loaded as a whole.

    Returns:
        The model.

    Raises:
        ConfigurationError: weights have no values, neither in the model nor in the folder.
    """
    remove_old_hooks(model)
    main = _device_of(model) if execution_device is None else execution_device
    names = list(find_offloaded(model, {"": DISK}, {DISK}, offload_buffers))
    index = keep_on_disk(model, names, offload_dir, None, find_tied_parameters(model), {"": DISK})
    check_resident(model, names, {"": DISK}, main)
    weights = OffloadedWeightsLoader(save_folder=offload_dir, index=index)
    return _attach_all(model, main, weights, offload_buffers, preload_module_classes)


def load_checkpoint_and_dispatch(
    model: Model,
    checkpoint: Folder,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Memory | None = None,
    no_split_module_classes: str | Collection[str] | None = None,
    offload_folder: Folder | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: Collection[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
) -> Model:
    """Loads the weights of a model from files, and dispatches it by a device map.

    The model may be on the meta device. Weights on the "disk" stay in their safetensors files, from which
    they are mapped.

    Args:
        model: the module.
        checkpoint: `*.safetensors`, a file of torch, an index, or a folder with either.
        device_map: device of each module, or a method. "auto" and "balanced" distribute the model evenly over
            all accelerators, "balanced_low_0" puts as little as possible on the first, "sequential" fills one
            after the other. None loads without hooks.
        max_memory: bytes, or strings such as "10GB", by device. None: the free memory.
        no_split_module_classes: names of classes that are not split. None: `_no_split_modules` of the model.
        offload_folder: folder of weights on the "disk" that are not in safetensors files.
        offload_buffers: whether to offload the buffers of offloaded modules, too.
        dtype: dtype of floating-point tensors. None keeps those of the model.
        offload_state_dict: ignored, for compatibility. Tensors are read one by one.
        skip_keys: keyword arguments and keys of outputs that are not moved.
        preload_module_classes: names of classes whose weights are loaded as a whole.
        force_hooks: whether to attach hooks also to a model on one device.
        strict: whether missing and unexpected names are an error, and not only a warning.
        full_state_dict: whether the files have full tensors, and not the shards of this rank, for a sharded
            model.
        broadcast_from_rank0: whether only rank 0 reads the files and broadcasts. Then called on all ranks.

    Returns:
        The model.

    Raises:
        ConfigurationError: an argument is invalid, or the device map does not fit the model.
        CheckpointError: a file is missing or damaged, or does not fit the model.
    """
    if isinstance(device_map, str):
        sizes = {"no_split_module_classes": no_split_module_classes, "dtype": dtype}
        device_map = plan_device_map(model, device_map, max_memory, offload_buffers, **sizes)
    options = LoadOptions(
        device_map,
        read_floating(dtype),
        offload_buffers=offload_buffers,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast=broadcast_from_rank0,
    )
    written, unmoved = fill_model(model, Path(checkpoint), options, offload_folder, leave=True)
    if offload_folder is not None:
        save_offload_index(written, offload_folder)
    if device_map is None:
        return model
    return dispatch_model(
        model,
        device_map,
        offload_dir=offload_folder,
        offload_index={**written, **unmoved} or None,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
    )


def _attach_all(
    model: Model, main: Device, weights: Mapping[str, Tensor], buffers: bool, whole: Collection[str] | None
) -> Model:
    attach_align_device_hook_on_blocks(model, main, True, weights, buffers, preload_module_classes=whole)
    return model


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return first.device if first is not None and first.device.type != "meta" else torch.device(CPU)
