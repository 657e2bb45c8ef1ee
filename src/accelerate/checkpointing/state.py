"""The states of objects as files of a checkpoint, without a run around them; each replaced as a whole."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelerate.base import CheckpointError, replace_files, wrong_value
from accelerate.checkpointing.changes import apply_all
from accelerate.checkpointing.parts import (
    GeneratorsPart,
    Load,
    LoaderPart,
    ModelPart,
    Part,
    custom_part,
    optimizer_parts,
    state_parts,
)
from accelerate.state import PartialState

Folder = str | os.PathLike[str]


def save_accelerator_state(
    output_dir: Folder,
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write the states of objects to a folder; called on all ranks. `Accelerator.save_state` also commits it.

    Args:
        output_dir: the folder; it exists.
        model_states: weights by name, for each model.
        optimizers: in their order, as are the others.
        schedulers: learning-rate schedulers.
        dataloaders: prepared loaders: their order and position are saved.
        process_index: rank of this process.
        step: `Accelerator.step`.
        scaler: the gradient scaler; None without one.
        save_on_each_node: whether the first process of each machine writes what all have in common.
        safe_serialization: whether models are written as safetensors.

    Returns:
        The folder.
    """
    parts: list[Part] = [
        *(ModelPart(index, state, safe=safe_serialization) for index, state in enumerate(model_states)),
        *optimizer_parts(optimizers),
        *state_parts(schedulers, scaler),
        *(LoaderPart(index, loader, process_index) for index, loader in enumerate(dataloaders)),
        GeneratorsPart(process_index, step),
    ]
    _save(parts, Path(output_dir), save_on_each_node)
    return Path(output_dir)


def load_accelerator_state(
    input_dir: Folder,
    models: Sequence[nn.Module],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    scaler: Any = None,
    map_location: Any = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Bring objects to the states in a folder; called on all ranks. All files are read before one is changed.

    Args:
        input_dir: the folder.
        models: in the order in which they were saved, as are the others.
        optimizers: prepared or plain ones.
        schedulers: learning-rate schedulers.
        dataloaders: prepared loaders.
        process_index: rank of this process.
        scaler: the gradient scaler; None without one.
        map_location: where weights are read to; "on_device" is the device of this process, None is the CPU.
        load_kwargs: arguments of `torch.load`.
        **load_model_func_kwargs: arguments of `load_state_dict` of the models, such as `strict`.

    Returns:
        What else is known of the run: `step`.

    Raises:
        CheckpointError: a file is missing, broken, or fits another object.
    """
    options = Load(
        Path(input_dir), read_device(map_location), dict(load_kwargs or {}), load_model_func_kwargs
    )
    parts: list[Part] = [
        *(ModelPart(index, model=model) for index, model in enumerate(models)),
        *optimizer_parts(optimizers),
        *state_parts(schedulers, scaler),
        *(LoaderPart(index, loader, process_index) for index, loader in enumerate(dataloaders)),
    ]
    generators = GeneratorsPart(process_index)
    step = options.read(generators.name).get("step", 0) if options.has(generators.name) else 0
    apply_all([part.read(options) for part in [*parts, generators]], _raise)
    return {"step": step if isinstance(step, int) else 0}


def save_custom_state(obj: Any, path: Folder, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of an object of the user's own to its file; called on all ranks.

    Args:
        obj: has `state_dict` and `load_state_dict`.
        path: the folder.
        index: its place among such objects.
        save_on_each_node: whether the first process of each machine writes it.
    """
    _save([custom_part(index, obj)], Path(path), save_on_each_node)


def load_custom_state(obj: Any, path: Folder, index: int = 0) -> None:
    """Bring an object of the user's own to the state in its file.

    Args:
        obj: has `state_dict` and `load_state_dict`.
        path: the folder.
        index: its place among such objects.

    Raises:
        CheckpointError: the file is missing, broken, or holds objects that can run code.
    """
    apply_all([custom_part(index, obj).read(Load(Path(path)))], _raise)


def read_device(map_location: Any) -> Any:
    """Return the device that weights are read to: for "on_device" that of this process, for None the CPU."""
    if map_location == "on_device":
        return PartialState().device
    if map_location is None:
        return "cpu"
    try:
        torch.device(map_location)
    except (RuntimeError, TypeError) as error:
        fix = 'pass None, "cpu", "on_device" or a device'
        raise wrong_value("map_location", map_location, "it is no device", fix, TypeError) from error
    return map_location


def _raise(failure: str) -> None:
    """Agree alone: what went wrong here is wrong."""
    if failure:
        raise CheckpointError(failure)


def _save(parts: Iterable[Part], folder: Path, save_on_each_node: bool) -> None:
    state = PartialState()
    leads = state.is_local_main_process if save_on_each_node else state.is_main_process
    for part in parts:
        for payload in part.collect(leads):
            with replace_files([folder / payload.name]) as (temporary,):
                payload.write(payload.content, temporary)
