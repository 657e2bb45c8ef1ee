"""One sharded model or optimizer in a folder, and its state dict, under the signatures that others call.

A whole run is saved by `Accelerator.save_state`, which also verifies what it loads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from accelerate import checkpointing, torch_private
from accelerate.base import (
    FSDP_MODEL_NAME,
    OPTIMIZER_NAME,
    CheckpointError,
    replace_files,
    sync_file,
    wrong_value,
)
from accelerate.checkpointing import MODEL, OPTIMIZER, Change, Load, shard_files, shard_index, weights_change
from accelerate.ops import current_transport, run_on_all_ranks, run_on_rank_0
from accelerate.plugins import version_of
from accelerate.strategies.fsdp.strategies import saves_shards
from accelerate.weights import read_torch, write_torch
from accelerate.wrappers import extract_model_from_parallel, is_peft_model

Folder = str | os.PathLike[str]


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights of a prepared model to a folder, in the form that the plugin says; on all ranks.

    Args:
        fsdp_plugin: its `state_dict_type` is looked at: whole weights go to `pytorch_model_fsdp.bin`, shards
            to the folder `pytorch_model_fsdp_0`.
        accelerator: the run.
        model: prepared.
        output_dir: made where it does not exist.
        model_index: place of the model among those of the run.
        adapter_only: write the weights of the adapter of a PEFT model only.
        use_dcp: taken for compatibility: shards are written without plans that all processes make together.

    Raises:
        CheckpointError: something could not be written; on all ranks. What was there before is unchanged.
    """
    strategy, folder = accelerator._runtime.strategy, Path(output_dir)
    if saves_shards(fsdp_plugin):
        state = strategy.model_shards(model).state()
        chosen = chosen_names(model, [key[1] for key in state], adapter_only)
        content = {(MODEL, name): state[MODEL, own] for name, own in chosen.items()}
        _write_shards(folder / checkpointing.folder_of(MODEL, model_index), content)
        return
    whole = strategy.state_dict(model, unwrap=True)
    chosen = chosen_names(model, list(whole), adapter_only)
    path = folder / checkpointing.number(FSDP_MODEL_NAME, model_index, ".bin")
    _write_whole(path, {name: whole[own] for name, own in chosen.items()})


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: Folder,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load what `save_fsdp_model` wrote into a prepared model, of any layout; on all ranks.

    Args:
        fsdp_plugin: says which form is taken where a folder has both.
        accelerator: the run.
        model: prepared.
        input_dir: the folder, or that of the shards itself.
        model_index: place of the model among those of the run.
        adapter_only: the weights are those of the adapter of a PEFT model.
        use_dcp: taken for compatibility.

    Returns:
        `missing_keys` and `unexpected_keys`, as `load_state_dict` does.

    Raises:
        ConfigurationError: the folder holds no such weights.
        CheckpointError: they are damaged, or fit another model; on all ranks. Nothing was changed.
    """
    strategy = accelerator._runtime.strategy
    owner = strategy.model_shards(model)
    own = {str(key[1]) for key in owner.state()}
    names = chosen_names(model, list(own), adapter_only)
    options = Load(Path(input_dir), model={"strict": not adapter_only})
    path = _find(fsdp_plugin, Path(input_dir), MODEL, model_index)
    if path.is_dir():
        index = run_on_all_ranks(lambda: shard_index.read(path, MODEL))
        paths = {(MODEL, names.get(key[1], key[1])): file for key, file in index.paths.items()}
        _load_shards(replace(index, paths=paths), owner, options)
        stored = {str(name) for _, name in paths}
    else:
        state = run_on_all_ranks(lambda: _read_whole(path, names))

        def fill_module(module: nn.Module, weights: Mapping[str, Any]) -> None:
            checkpointing.fill(module, weights, path, options.model)

        load = partial(strategy.load_weights, model, state, fill_module)
        _apply(lambda: weights_change(load, model, strategy.live_weights(model), state, path, options))
        stored = set(state)
    wanted = set(names.values())
    return torch_private.IncompatibleKeys(sorted(wanted - stored), sorted(stored - own))


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: Folder,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of a prepared optimizer to a folder, in the form that the plugin says; on all ranks.

    States are written by the names of parameters: whole ones to `optimizer.bin`, shards to `optimizer_0`.

    Args:
        fsdp_plugin: its `state_dict_type` is looked at.
        accelerator: the run.
        optimizer: prepared.
        model: the prepared model that it steps.
        output_dir: made where it does not exist.
        optimizer_index: place of the optimizer among those of the run.
        use_dcp: taken for compatibility: shards are written without plans that all processes make together.

    Raises:
        CheckpointError: something could not be written; on all ranks. What was there before is unchanged.
    """
    strategy, folder = accelerator._runtime.strategy, Path(output_dir)
    if saves_shards(fsdp_plugin):
        state = strategy.optimizer_shards(optimizer, [model]).state()
        _write_shards(folder / checkpointing.folder_of(OPTIMIZER, optimizer_index), state)
        return
    (owner,) = strategy.optimizer_owners([optimizer], gather=True)
    names = strategy.parameter_names(optimizer, [model])
    content = checkpointing.by_name(owner.state_dict(), names)
    _write_whole(folder / checkpointing.number(OPTIMIZER_NAME, optimizer_index, ".bin"), content)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: Folder,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load what `save_fsdp_optimizer` wrote into a prepared optimizer, of any layout; on all ranks.

    Args:
        fsdp_plugin: says which form is taken where a folder has both.
        accelerator: the run.
        optimizer: prepared.
        model: the prepared model that it steps.
        input_dir: the folder, or that of the shards itself.
        optimizer_index: place of the optimizer among those of the run.
        adapter_only: taken for compatibility: an optimizer has states of what it steps only.
        use_dcp: taken for compatibility.

    Raises:
        ConfigurationError: the folder holds no such state.
        CheckpointError: it is damaged, or that of another optimizer; on all ranks. Nothing was changed.
    """
    strategy, folder = accelerator._runtime.strategy, Path(input_dir)
    path = _find(fsdp_plugin, folder, OPTIMIZER, optimizer_index)
    if path.is_dir():
        owner = strategy.optimizer_shards(optimizer, [model])
        _load_shards(run_on_all_ranks(lambda: shard_index.read(path, OPTIMIZER)), owner, Load(folder))
        return
    (whole,) = strategy.optimizer_owners([optimizer], gather=False)
    names = strategy.parameter_names(optimizer, [model])
    part = checkpointing.OptimizerPart(path.name, whole, lambda: names)
    _apply(lambda: part.read(Load(path.parent)))


def _find(plugin: Any, folder: Path, kind: str, index: int) -> Path:
    """Return the folder of shards or the file; the form that the plugin says, where there are both."""
    if (folder / shard_index.NAME).is_file():
        return folder
    name = {MODEL: FSDP_MODEL_NAME, OPTIMIZER: OPTIMIZER_NAME}[kind]
    shards, whole = checkpointing.folder_of(kind, index), checkpointing.number(name, index, ".bin")
    markers = {f"{shards}/{shard_index.NAME}": shards, whole: whole}
    paths = [folder / path for marker, path in markers.items() if (folder / marker).is_file()]
    if not paths:
        reason = f"it holds neither {' nor '.join(markers)}"
        raise wrong_value("input_dir", str(folder), reason, "pass another", FileNotFoundError)
    return paths[0] if saves_shards(plugin) else paths[-1]


def _write_whole(path: Path, content: Any) -> None:
    """Write one file with `torch.save` on the first rank; called on all ranks."""

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_files([path]) as (temporary,):
            write_torch(content, temporary)

    run_on_rank_0(write)


def _write_shards(target: Path, state: shard_files.State) -> None:
    """Write a folder of shards under a hidden name, and rename it when all ranks have written theirs."""
    transport = current_transport()
    payload = shard_files.payload(target.name, transport.rank, state)
    own = run_on_rank_0(partial(checkpointing.plan_staging_folder, target))
    staging: checkpointing.StagingFolder = transport.broadcast_object(own, 0)

    def write() -> Any:
        path = staging.folder / Path(payload.name).name
        report = payload.write(payload.content, path)
        sync_file(path)
        return report

    def publish(reports: Sequence[Any]) -> None:
        assert payload.finish is not None
        payload.finish(staging.folder, reports)
        written = {path.name for path in staging.folder.iterdir()}
        staging.publish()
        for path in staging.target.glob("__*_0.distcp"):
            if path.name not in written:  # of a run with more processes
                path.unlink()

    try:
        run_on_rank_0(staging.open)
        reports = transport.gather_object(run_on_all_ranks(write))
        run_on_rank_0(partial(publish, reports))
    finally:
        if own is not None:
            own.discard()


def _load_shards(index: checkpointing.ShardIndex, owner: checkpointing.ShardOwner, options: Load) -> None:
    def plan() -> Change:
        return owner.plan(shard_files.read(index, owner.targets(index, options), options.reading), options)

    _apply(plan)


def _apply(plan: Callable[[], Change]) -> None:
    """Plan a change and apply it, unless a rank fails; called on all ranks."""

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
    """Return the state of a model, or that of its adapter; on all ranks.

    Args:
        model: prepared or not.
        adapter_only: leave out everything but the adapter of a PEFT model.
        sd_options: torch's `StateDictOptions`; None takes `model.state_dict()`.
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
    """Load a state into a model, or into its adapter; on all ranks.

    Args:
        model: prepared or not.
        state_dict: as `_get_model_state_dict` returns it.
        adapter_only: it is that of the adapter of a PEFT model.
        sd_options: torch's `StateDictOptions`; None calls `model.load_state_dict`.

    Returns:
        `missing_keys` and `unexpected_keys`.
    """
    names = chosen_names(model, list(model.state_dict()), adapter_only)
    state = {names.get(name, name): value for name, value in state_dict.items()}
    if sd_options is None:
        return model.load_state_dict(state, strict=not adapter_only)
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    options = replace(sd_options, strict=False) if adapter_only else sd_options
    return set_model_state_dict(model, state, options=options)


def _prepare_sd_options(fsdp_plugin: Any) -> Any:
    """Return torch's `StateDictOptions` that suit a plugin; None for FSDP 1, whose modules have their own."""
    if not version_of(fsdp_plugin).takes_state_dict_options:
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    whole = not saves_shards(fsdp_plugin)
    offload = bool(getattr(fsdp_plugin.state_dict_config, "offload_to_cpu", False))
    return StateDictOptions(full_state_dict=whole, cpu_offload=offload, broadcast_from_rank0=whole)


def chosen_names(model: nn.Module, names: Sequence[str], adapter_only: bool) -> dict[str, str]:
    """Return name in a file -> name in the model, of what is saved or loaded."""
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
