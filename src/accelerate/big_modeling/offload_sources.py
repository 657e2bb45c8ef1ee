"""Offload sources: the weights of offloaded modules, in CPU memory or on the disk."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import ConfigurationError, as_builtin, listed
from accelerate.big_modeling.device_map import CPU, DISK, device_key
from accelerate.devices import of_device
from accelerate.weights import (
    INDEX,
    Device,
    Folder,
    Index,
    add_write_times,
    all_tensors,
    check_values,
    get_non_persistent_buffers,
    mapped_device,
    offload_state_dict,
    read_index,
    resolve_device,
    scales_name,
    scales_of,
)

PINNED_PART = 0.5
"""Part of the free memory that weights on their way to accelerators may lock."""


def find_offloaded(
    model: nn.Module, device_map: Mapping[str, Any], offload_devices: Collection[str], offload_buffers: bool
) -> dict[str, str]:
    """Return the offloaded tensors of a model, with their devices, which are among `offload_devices`.

    Where a map splits the own tensors of a module, all of them are offloaded: its hook loads all.
    """
    stay = get_non_persistent_buffers(model, recurse=True, fqns=True)
    values = {
        name: device_key(mapped_device(name, device_map))
        for name, tensor in all_tensors(model).items()
        if isinstance(tensor, nn.Parameter) or (offload_buffers and name not in stay)
    }
    away = {name.rpartition(".")[0]: device for name, device in values.items() if device in offload_devices}
    return {name: away[owner] for name in values if (owner := name.rpartition(".")[0]) in away}


def keep_in_memory(
    model: nn.Module, names: Collection[str], state_dict: Mapping[str, Tensor] | None, main: Device
) -> dict[str, Tensor]:
    """Return weights on the CPU, in pinned memory where an accelerator loads them; tied ones once.

    Values come from `state_dict` or else from the model.
    """
    own = all_tensors(model)
    given = state_dict or {}
    values = {name: given.get(name, own[name]).detach() for name in names}
    check_values(values, "keep on the CPU", "Load the model first, or pass state_dict.")
    kept: dict[Any, Tensor] = {}
    lock = _may_lock(values, resolve_device(main))
    for name, tensor in values.items():
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.dtype, tensor.stride())
        if key not in kept or not tensor.numel():
            on_cpu = tensor.to(CPU)
            kept[key] = on_cpu.pin_memory() if lock and not on_cpu.is_pinned() else on_cpu
        values[name] = kept[key]
    return {**values, **_scales(model, names)}


def _scales(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Return the scales of those weights that are in 8 bits."""
    owners = {name: model.get_submodule(name.rpartition(".")[0]) for name in names}
    scales = {scales_name(name): scales_of(owner) for name, owner in owners.items()}
    return {name: value.to(CPU) for name, value in scales.items() if name and value is not None}


def _may_lock(weights: Mapping[str, Tensor], main: torch.device) -> bool:
    if main.type == "meta" or of_device(main).shares_host_memory:
        return False
    import psutil

    return sum(value.nbytes for value in weights.values()) < PINNED_PART * psutil.virtual_memory().available


def keep_on_disk(
    model: nn.Module,
    names: Collection[str],
    folder: Folder | None,
    given: Index | None,
    tied: Collection[Collection[str]],
    device_map: Mapping[str, Any],
) -> Index:
    """Return where weights on the disk are; those with values are written to the folder.

    Weights that are in `given` need not be written; `device_map` is for the message.
    """
    if not names:
        return {}
    own = all_tensors(model)
    index = dict(given or {})
    fresh = {name: own[name] for name in names if name not in index and not own[name].is_meta}
    if folder is None and (fresh or given is None):
        modules = [name or "all modules" for name, device in device_map.items() if device == DISK]
        raise ConfigurationError(
            f"device_map puts {listed(modules)} on the disk, and there is no folder for them. "
            "Pass offload_dir."
        )
    if folder is not None:
        if fresh:
            offload_state_dict(folder, {**fresh, **_scales(model, fresh)})
        path = Path(folder) / INDEX
        index = {**(read_index(path) if os.path.isfile(path) else {}), **index}
    for group in tied:
        known = next((index[name] for name in group if "safetensors_file" in index.get(name, {})), None)
        index.update({name: known for name in group if known is not None and name not in index})
    missing = [name for name in names if name not in index]
    if missing:
        error = ConfigurationError(
            f"{listed(missing)} have no values, and are not among the weights on the disk. Load the model "
            "first, or use load_checkpoint_and_dispatch()."
        )
        raise as_builtin(error, NotImplementedError)
    used = {name: index[name] for name in [*names, *map(scales_name, names)] if name in index}
    return used if folder is None else add_write_times(used, folder)
