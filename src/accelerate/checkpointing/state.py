"""Functions that save and load the states of objects without an Accelerator.

Each file is replaced when it is complete. `Accelerator.save_state` also commits all files together.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.base import CheckpointError, replace_files
from accelerate.checkpointing.changes import apply_all
from accelerate.checkpointing.items import GeneratorsPart, LoaderPart
from accelerate.checkpointing.parts import (
    CheckpointReader,
    ModelPart,
    Part,
    custom_part,
    optimizer_parts,
    read_device,
    state_parts,
)
from accelerate.state import PartialState

if TYPE_CHECKING:
    from torch.serialization import MAP_LOCATION

Folder = str | os.PathLike[str]


def save_accelerator_state(
    output_dir: Folder,
    model_states: Sequence[Mapping[str, Any]],
    optimizers: Sequence[Any],
    schedulers: Sequence[Any],
    dataloaders: Sequence[Any],
    process_index: int,
    step: int,
    scaler: torch.amp.GradScaler | None = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Writes the states of objects to a folder.

    Called on all ranks. `Accelerator.save_state` also commits the folder.

    Args:
        output_dir: Existing folder.
        model_states: Weights by name, for each model.
        optimizers: Prepared or plain optimizers.
        schedulers: Learning rate schedulers.
        dataloaders: Prepared loaders, whose order and position are saved.
        process_index: Rank of this process.
        step: `Accelerator.step`.
        scaler: Gradient scaler, or None.
        save_on_each_node: Whether local rank 0 of each node writes the files that all ranks have in common.
        safe_serialization: Whether models are written as safetensors.

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
    scaler: torch.amp.GradScaler | None = None,
    map_location: MAP_LOCATION = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Loads the states of objects from a folder.

    Called on all ranks. All files are read and verified before an object is changed.

    Args:
        input_dir: Folder.
        models: In the order in which they were saved, as are the others.
        optimizers: Prepared or plain optimizers.
        schedulers: Learning rate schedulers.
        dataloaders: Prepared loaders.
        process_index: Rank of this process.
        scaler: Gradient scaler, or None.
        map_location: Device of the weights. "on_device" is the device of this process, and None the CPU.
        load_kwargs: Arguments of `torch.load`.
        **load_model_func_kwargs: Arguments of `load_state_dict` of the models, such as `strict`.

    Returns:
        Dictionary with the `step` of the run.

    Raises:
        CheckpointError: A file is missing, damaged, or does not fit its object.
    """
    reader = CheckpointReader(
        Path(input_dir), read_device(map_location), dict(load_kwargs or {}), load_model_func_kwargs
    )
    parts: list[Part] = [
        *(ModelPart(index, model=model) for index, model in enumerate(models)),
        *optimizer_parts(optimizers),
        *state_parts(schedulers, scaler),
        *(LoaderPart(index, loader, process_index) for index, loader in enumerate(dataloaders)),
    ]
    generators = GeneratorsPart(process_index)
    step = reader.read(generators.name).get("step", 0) if reader.has(generators.name) else 0
    apply_all([part.read(reader) for part in [*parts, generators]], _raise)
    return {"step": step if isinstance(step, int) else 0}


def save_custom_state(obj: object, path: Folder, index: int = 0, save_on_each_node: bool = False) -> None:
    """Writes the state of an object of the user to its file.

    Called on all ranks.

    Args:
        obj: Object with `state_dict` and `load_state_dict`.
        path: Folder.
        index: Its position among such objects.
        save_on_each_node: Whether local rank 0 of each node writes it.
    """
    _save([custom_part(index, obj)], Path(path), save_on_each_node)


def load_custom_state(obj: object, path: Folder, index: int = 0) -> None:
    """Loads the state of an object of the user from its file.

    Args:
        obj: Object with `state_dict` and `load_state_dict`.
        path: Folder.
        index: Its position among such objects.

    Raises:
        CheckpointError: The file is missing, damaged, or contains objects that can run code.
    """
    apply_all([custom_part(index, obj).read(CheckpointReader(Path(path)))], _raise)


def _raise(failure: str) -> None:
    """Raises an error of this process, which does not consult other ranks."""
    if failure:
        raise CheckpointError(failure)


def _save(parts: Iterable[Part], folder: Path, save_on_each_node: bool) -> None:
    state = PartialState()
    writes_common = state.is_local_main_process if save_on_each_node else state.is_main_process
    for part in parts:
        for payload in part.collect(writes_common):
            with replace_files([folder / payload.name]) as (temporary,):
                payload.write(payload.content, temporary)
