"""Functions that save and load one FSDP model or optimizer, which Trainer and other libraries call.

`Accelerator.save_state` saves a whole run, and verifies checksums when it is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from accelerate import checkpointing, torch_private
from accelerate.base import FSDP_MODEL_NAME, OPTIMIZER_NAME, CheckpointError, replace_files, wrong_value
from accelerate.checkpointing import (
    MODEL,
    OPTIMIZER,
    Change,
    CheckpointReader,
    Request,
    folder_of,
    shard_files,
    shard_index,
    weights_change,
)
from accelerate.ops import run_on_all_ranks, run_on_rank_0
from accelerate.plugins import version_of
from accelerate.strategies.fsdp.strategies import saves_shards
from accelerate.weights import read_torch, write_torch
from accelerate.wrappers import extract_model_from_parallel, is_peft_model

if TYPE_CHECKING:
    import torch

    from accelerate.plugins import FullyShardedDataParallelPlugin

Folder = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: object,
    accelerator: Any,
    model: nn.Module,
    output_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Writes the weights of a prepared model to a folder, in the state dict type of the plugin.

    Called on all ranks.

    Args:
        fsdp_plugin: Plugin with the `state_dict_type`. Full weights are written to `pytorch_model_fsdp.bin`,
            and shards to the folder `pytorch_model_fsdp_0`.
        accelerator: Accelerator of the run.
        model: Prepared model.
        output_dir: Folder, which is created if necessary.
        model_index: Index of the model.
        adapter_only: Whether only the adapter of a PEFT model is written.
        use_dcp: Not used.

    Raises:
        CheckpointError: A file could not be written, on any rank. Previous files are unchanged.
    """
    strategy, folder = accelerator._runtime.strategy.state, Path(output_dir)
    if saves_shards(fsdp_plugin):
        state = strategy.model_shards(model).state()
        chosen = chosen_names(model, [key[1] for key in state], adapter_only)
        content = {(MODEL, name): state[MODEL, own] for name, own in chosen.items()}
        _write_shards(accelerator, "save_fsdp_model", folder / folder_of(MODEL, model_index), content)
        return
    whole = strategy.state_dict(model, unwrap=True)
    chosen = chosen_names(model, list(whole), adapter_only)
    path = folder / checkpointing.number(FSDP_MODEL_NAME, model_index, ".bin")
    _write_whole(path, {name: whole[own] for name, own in chosen.items()})


def load_fsdp_model(
    fsdp_plugin: object,
    accelerator: Any,
    model: nn.Module,
    input_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Loads weights that `save_fsdp_model` wrote into a prepared model of any layout.

    Called on all ranks.

    Args:
        fsdp_plugin: Plugin whose `state_dict_type` selects the format if the folder has both.
        accelerator: Accelerator of the run.
        model: Prepared model.
        input_dir: Folder, or its folder of shards.
        model_index: Index of the model.
        adapter_only: Whether the weights are those of the adapter of a PEFT model.
        use_dcp: Not used.

    Returns:
        Result with `missing_keys` and `unexpected_keys`, as that of `load_state_dict`.

    Raises:
        ConfigurationError: The folder has no such weights.
        CheckpointError: They are damaged or do not fit the model, on any rank. The model is unchanged.
    """
    strategy = accelerator._runtime.strategy.state
    sharded = strategy.model_shards(model)
    live_names = {str(key[1]) for key in sharded.state()}
    names = chosen_names(model, list(live_names), adapter_only)
    options = CheckpointReader(Path(input_dir), model_kwargs={"strict": not adapter_only})
    path = _find(fsdp_plugin, Path(input_dir), MODEL, model_index)
    if path.is_dir():
        index = run_on_all_ranks(lambda: shard_index.read(path, MODEL))
        paths = {(MODEL, names.get(key[1], key[1])): file for key, file in index.paths.items()}
        _load_shards(replace(index, paths=paths), sharded, options)
        stored = {str(name) for _, name in paths}
    else:
        state = run_on_all_ranks(lambda: _read_whole(path, names))

        def fill_module(module: nn.Module, weights: Mapping[str, Any]) -> None:
            checkpointing.fill(module, weights, path, options.model_kwargs)

        load = partial(strategy.load_weights, model, state, fill_module)
        _apply(lambda: weights_change(load, model, strategy.live_weights(model), state, path, options))
        stored = set(state)
    wanted = set(names.values())
    return torch_private.IncompatibleKeys(sorted(wanted - stored), sorted(stored - live_names))


def save_fsdp_optimizer(
    fsdp_plugin: object,
    accelerator: Any,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    output_dir: Folder,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Writes the state of a prepared optimizer to a folder, in the state dict type of the plugin.

    Called on all ranks. The keys are names of parameters. Full states are written to `optimizer.bin`, and
    shards to the folder `optimizer_0`.

    Args:
        fsdp_plugin: Plugin with the `state_dict_type`.
        accelerator: Accelerator of the run.
        optimizer: Prepared optimizer.
        model: Prepared model with its parameters.
        output_dir: Folder, which is created if necessary.
        optimizer_index: Index of the optimizer.
        use_dcp: Not used.

    Raises:
        CheckpointError: A file could not be written, on any rank. Previous files are unchanged.
    """
    strategy, folder = accelerator._runtime.strategy.state, Path(output_dir)
    if saves_shards(fsdp_plugin):
        state = strategy.optimizer_shards(optimizer, [model]).state()
        name = folder_of(OPTIMIZER, optimizer_index)
        _write_shards(accelerator, "save_fsdp_optimizer", folder / name, state)
        return
    (owner,) = strategy.optimizer_owners([optimizer], gather=True)
    names = strategy.parameter_names(optimizer, [model])
    content = checkpointing.by_name(owner.state_dict(), names)
    _write_whole(folder / checkpointing.number(OPTIMIZER_NAME, optimizer_index, ".bin"), content)


def load_fsdp_optimizer(
    fsdp_plugin: object,
    accelerator: Any,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    input_dir: Folder,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Loads a state that `save_fsdp_optimizer` wrote into a prepared optimizer of any layout.

    Called on all ranks.

    Args:
        fsdp_plugin: Plugin whose `state_dict_type` selects the format if the folder has both.
        accelerator: Accelerator of the run.
        optimizer: Prepared optimizer.
        model: Prepared model with its parameters.
        input_dir: Folder, or its folder of shards.
        optimizer_index: Index of the optimizer.
        adapter_only: Not used, because an optimizer only has states of the parameters that it steps.
        use_dcp: Not used.

    Raises:
        ConfigurationError: The folder has no such state.
        CheckpointError: It is damaged or does not fit the optimizer, on any rank. The optimizer is unchanged.
    """
    strategy, folder = accelerator._runtime.strategy.state, Path(input_dir)
    path = _find(fsdp_plugin, folder, OPTIMIZER, optimizer_index)
    if path.is_dir():
        sharded = strategy.optimizer_shards(optimizer, [model])
        _load_shards(
            run_on_all_ranks(lambda: shard_index.read(path, OPTIMIZER)), sharded, CheckpointReader(folder)
        )
        return
    (whole,) = strategy.optimizer_owners([optimizer], gather=False)
    names = strategy.parameter_names(optimizer, [model])
    part = checkpointing.OptimizerPart(path.name, whole, lambda: names)
    _apply(lambda: part.read(CheckpointReader(path.parent)))


def _find(plugin: object, folder: Path, kind: str, index: int) -> Path:
    """Returns the folder of shards or the file, or the one that the plugin selects if there are both."""
    if (folder / shard_index.NAME).is_file():
        return folder
    name = {MODEL: FSDP_MODEL_NAME, OPTIMIZER: OPTIMIZER_NAME}[kind]
    shards, whole = folder_of(kind, index), checkpointing.number(name, index, ".bin")
    markers = {f"{shards}/{shard_index.NAME}": shards, whole: whole}
    paths = [folder / path for marker, path in markers.items() if (folder / marker).is_file()]
    if not paths:
        reason = f"it holds neither {' nor '.join(markers)}"
        raise wrong_value("input_dir", str(folder), reason, "pass another", FileNotFoundError)
    return paths[0] if saves_shards(plugin) else paths[-1]


def _write_whole(path: Path, content: object) -> None:
    """Writes one file with `torch.save` on rank 0, on which all ranks wait."""

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_files([path]) as (temporary,):
            write_torch(content, temporary)

    run_on_rank_0(write)


def _write_shards(accelerator: Any, operation: str, target: Path, state: shard_files.State) -> None:
    """Writes a folder of shards, which replaces an older one when all ranks have written their files."""
    checkpoints = accelerator._runtime.checkpoints
    checkpoints.background.wait()
    rank, size = accelerator.process_index, accelerator.num_processes
    payload = shard_files.payload("", rank, state)
    request = Request(target, checkpoints.timeout, operation=operation, has_manifest=False)
    saver = checkpoints.begin(request)
    saver.write([payload])
    folder = saver.commit()
    if rank == 0:
        current = {f"__{number}_0.distcp" for number in range(size)}
        for path in folder.glob("__*_0.distcp"):
            if path.name not in current:  # of a run with more ranks
                path.unlink()


def _load_shards(
    index: checkpointing.ShardIndex, sharded: checkpointing.ShardedState, options: CheckpointReader
) -> None:
    def plan() -> Change:
        values = shard_files.read(index, sharded.targets(index, options), options.load_kwargs)
        return sharded.plan(values, options)

    _apply(plan)


def _apply(plan: Callable[[], Change]) -> None:
    """Applies a change on all ranks if all ranks have planned it without an error."""

    def agree(failure: str) -> None:
        def fail() -> None:
            if failure:
                raise CheckpointError(failure)

        run_on_all_ranks(fail)

    checkpointing.apply_all([run_on_all_ranks(plan)], agree)


def _read_whole(path: Path, names: Mapping[str, str]) -> dict[str, Any]:
    state = read_torch(path, "cpu")
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{path} holds a {type(state).__name__} instead of weights by name.")
    return {names.get(name, name): value for name, value in state.items()}


def _get_model_state_dict(model: nn.Module, adapter_only: bool = False, sd_options: Any = None) -> Any:
    """Returns the state dict of a model, or of its adapter.

    Called on all ranks.

    Args:
        model: Prepared or plain model.
        adapter_only: Whether only the adapter of a PEFT model is returned.
        sd_options: `StateDictOptions` of torch, or None for `model.state_dict()`.
    """
    if sd_options is None:
        state = model.state_dict()
    else:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state = get_model_state_dict(model, options=sd_options)
    return {name: state[own] for name, own in chosen_names(model, list(state), adapter_only).items()}


def _set_model_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], adapter_only: bool = False, sd_options: Any = None
) -> Any:
    """Loads a state dict into a model, or into its adapter.

    Called on all ranks.

    Args:
        model: Prepared or plain model.
        state_dict: Result of `_get_model_state_dict`.
        adapter_only: Whether it is that of the adapter of a PEFT model.
        sd_options: `StateDictOptions` of torch, or None for `model.load_state_dict`.

    Returns:
        Result with `missing_keys` and `unexpected_keys`.
    """
    names = chosen_names(model, list(model.state_dict()), adapter_only)
    state = {names.get(name, name): value for name, value in state_dict.items()}
    if sd_options is None:
        return model.load_state_dict(state, strict=not adapter_only)
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    options = replace(sd_options, strict=False) if adapter_only else sd_options
    return set_model_state_dict(model, state, options=options)


def _prepare_sd_options(fsdp_plugin: FullyShardedDataParallelPlugin) -> Any:
    """Returns the `StateDictOptions` for a plugin, or None for FSDP 1, whose modules have their own."""
    if not version_of(fsdp_plugin).takes_state_dict_options:
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    whole = not saves_shards(fsdp_plugin)
    offload = bool(getattr(fsdp_plugin.state_dict_config, "offload_to_cpu", False))
    return StateDictOptions(full_state_dict=whole, cpu_offload=offload, broadcast_from_rank0=whole)


def chosen_names(model: nn.Module, names: Sequence[str], adapter_only: bool) -> dict[str, str]:
    """Returns the name in the model of each tensor that is saved or loaded, by its name in the file."""
    inner: Any = extract_model_from_parallel(model)
    if not adapter_only or not is_peft_model(inner):
        return {name: name for name in names}
    from peft import get_peft_model_state_dict

    names_in_file: dict[str, str] = get_peft_model_state_dict(
        inner,
        state_dict={name: name for name in names},
        adapter_name=inner.active_adapter,
        save_embedding_layers=False,
    )
    return names_in_file
