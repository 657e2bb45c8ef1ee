"""Parts of a checkpoint of a run, which `Accelerator.save_state` writes and `load_state` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from accelerate import accelerator, checkpointing, rng, strategies
from accelerate.accelerator.runtime import Runtime
from accelerate.base import CheckpointError
from accelerate.checkpointing import Change, CheckpointReader, CheckpointSource, Part, Payload, Staging
from accelerate.ops import current_transport


def collect(runtime: Runtime, staging: Staging, step: int, safe: bool) -> list[Payload]:
    """Returns the contents of the files of this rank, after the hooks of the user have run.

    Args:
        runtime: Runtime of the Accelerator.
        staging: Folder to which the files are written.
        step: Number of micro-batches since the end of the last pass over a loader.
        safe: Whether whole weights are written to safetensors files.
    """
    for layer in runtime.strategy.layers:
        layer.follow_parameters()
    in_shards = runtime.strategy.state.saves_shards
    if in_shards and not all(current_transport().gather_object(staging.is_common)):
        raise CheckpointError(
            f"{staging.request.target} is another folder on each node, and sharded states need one that "
            "all ranks see. Choose a folder on a common disk, or FSDP_STATE_DICT_TYPE=FULL_STATE_DICT"
        )
    shards = _take_shards(runtime, staging) if in_shards else []
    whole = [] if in_shards else _take_whole(runtime, staging, safe)
    if runtime.prepared.averages:
        shards += accelerator.average_files.take_shards(runtime) if in_shards else []
        whole += [] if in_shards else accelerator.average_files.parts(runtime)
    whole += _local_parts(runtime)
    parts = [*whole, *_others(runtime), checkpointing.GeneratorsPart(runtime.state.process_index, step)]
    return [*shards, *(payload for part in parts for payload in part.collect(staging.is_owner))]


def read(runtime: Runtime, source: CheckpointSource, reader: CheckpointReader, policy: str) -> list[Change]:
    """Reads all files of a checkpoint, and returns the changes to the objects of the run."""
    for layer in runtime.strategy.layers:
        layer.follow_parameters()
    models = list(runtime.prepared.models)
    for hook in runtime.checkpoints.load_hooks.values():
        hook(models, str(source.folder))
    registered = [type(obj).__name__ for obj in runtime.prepared.custom]
    checkpointing.loading.check_registered(reader, registered)
    plain, engines = _divide(runtime, models)
    parts: list[Part] = [
        *_others(runtime, resized=source.resized),  # objects of the user may refuse their states
        *engines,
        *(_model_part(runtime, index, model) for index, model in enumerate(plain)),  # reshards FSDP 2
        *_optimizer_parts(runtime),
        *_average_parts(runtime),
        *_local_parts(runtime),  # the weights of this rank, after those of the model
    ]
    changes = [part.read(reader) for part in parts]
    if not runtime.checkpoints.load_hooks:  # a hook may have taken whatever is left
        checkpointing.loading.announce_surplus(reader)
    return [*changes, _read_generators(runtime, source, reader, policy)]


def shards_read(runtime: Runtime, reader: CheckpointReader) -> set[str]:
    """Returns the names of files of shards and ranks that this rank reads, before they are in the folder."""
    models = enumerate(_divide(runtime, runtime.prepared.models)[0])
    parts: list[Part] = [
        *(_model_part(runtime, index, model) for index, model in models),
        *_optimizer_parts(runtime),
        *_average_parts(runtime),
    ]
    own = {name for part in _local_parts(runtime) if (name := part.file_read(reader)) is not None}
    return own | {name for part in parts for name in checkpointing.shards_read(part, reader)}


def _divide(
    runtime: Runtime, models: Sequence[nn.Module], folder: Path | None = None
) -> tuple[list[nn.Module], list[Part]]:
    """Returns the models without an engine, and the parts of the models that engines save."""
    plain: list[nn.Module] = []
    engines: list[Part] = []
    for model in models:
        part = runtime.strategy.state.engine_part(len(engines), model, folder)
        if part is None:
            plain.append(model)
        else:
            engines.append(part)
    return plain, engines


def _own(objects: Sequence[Any]) -> list[Any]:
    """Returns the optimizers or schedulers that no engine saves."""
    return [obj for obj in objects if not getattr(obj, "belongs_to_engine", False)]


def _take_whole(runtime: Runtime, staging: Staging, safe: bool) -> list[Part]:
    strategy, prepared = runtime.strategy.state, runtime.prepared
    plain, engines = _divide(runtime, prepared.models, staging.folder)
    weights = [strategy.state_dict(model, unwrap=True) for model in plain]
    optimizers = strategy.optimizer_owners(_own(prepared.optimizers), gather=True)
    for each in prepared.local_sgd:
        weights = [
            each.saved_weights(state) if model is each.model else state
            for model, state in zip(plain, weights, strict=True)
        ]
    _call_hooks(runtime, weights, staging)  # after all collectives, since a hook may fail on one rank
    return [
        *engines,
        *(checkpointing.ModelPart(index, state, safe=safe) for index, state in enumerate(weights)),
        *checkpointing.optimizer_parts(optimizers),
    ]


def _take_shards(runtime: Runtime, staging: Staging) -> list[Payload]:
    from accelerate.checkpointing import shard_files  # and with it DCP, which takes long to import

    strategy, prepared, rank = runtime.strategy.state, runtime.prepared, runtime.state.process_index
    owners = [strategy.model_shards(model) for model in prepared.models]
    weights = [{key[1]: value for key, value in owner.state().items()} for owner in owners]
    _call_hooks(runtime, weights, staging)
    models = [{(checkpointing.MODEL, name): value for name, value in state.items()} for state in weights]
    optimizers = [
        strategy.optimizer_shards(optimizer, prepared.models).state() for optimizer in prepared.optimizers
    ]
    files = [
        (checkpointing.folder_of(root, index), rank, state)
        for root, states in ((checkpointing.MODEL, models), (checkpointing.OPTIMIZER, optimizers))
        for index, state in enumerate(states)
    ]
    if staging.request.is_generation:  # nodes hold the files of some ranks
        return [payload for own in files for payload in shard_files.payloads(*own)]
    return [shard_files.payload(*own) for own in files]


def _call_hooks(runtime: Runtime, weights: list[dict[str, Any]], staging: Staging) -> None:
    models = list(runtime.prepared.models)
    for hook in runtime.checkpoints.save_hooks.values():
        hook(models, weights, str(staging.folder))


def _model_part(runtime: Runtime, index: int, model: nn.Module) -> Part:
    strategy = runtime.strategy.state
    live = partial(strategy.live_weights, model)
    whole = checkpointing.ModelPart(index, model=model, load=strategy.load_weights, live=live)
    folder = checkpointing.folder_of(checkpointing.MODEL, index)
    return checkpointing.ShardsOrFilePart(folder, partial(strategy.model_shards, model), whole)


def _optimizer_parts(runtime: Runtime) -> list[Part]:
    strategy, prepared = runtime.strategy.state, runtime.prepared
    optimizers = _own(prepared.optimizers)
    parts: list[Part] = []
    for whole, optimizer in zip(
        checkpointing.optimizer_parts(strategy.optimizer_owners(optimizers, gather=False)),
        optimizers,
        strict=True,
    ):
        names = partial(strategy.parameter_names, optimizer, prepared.models)
        shards = partial(strategy.optimizer_shards, optimizer, prepared.models)
        folder = checkpointing.folder_of(checkpointing.OPTIMIZER, len(parts))
        parts.append(checkpointing.ShardsOrFilePart(folder, shards, replace(whole, names=names)))
    return parts


def _average_parts(runtime: Runtime) -> list[Part]:
    return accelerator.average_files.parts(runtime) if runtime.prepared.averages else []


def _local_parts(runtime: Runtime) -> list[Any]:
    """Returns the parts of models whose ranks train separately (local SGD)."""
    return [part for index, each in enumerate(runtime.prepared.local_sgd) for part in each.parts(index)]


def _others(runtime: Runtime, *, resized: bool = False) -> list[Part]:
    """Returns the parts of schedulers, the scaler, registered objects and loaders."""
    prepared, rank, scaler = runtime.prepared, runtime.state.process_index, runtime.strategy.precision.scaler
    loaders = enumerate(prepared.loaders)
    distribute = None if runtime.strategy.holds_whole_models else strategies.dtensors.distribute_like
    return [
        *checkpointing.state_parts(_own(prepared.schedulers), scaler, prepared.custom, distribute),
        *(checkpointing.LoaderPart(index, loader, rank, resized) for index, loader in loaders),
    ]


def _read_generators(
    runtime: Runtime, source: CheckpointSource, reader: CheckpointReader, policy: str
) -> Change:
    part = checkpointing.GeneratorsPart(runtime.state.process_index)
    if not source.resized or policy == "strict":
        return part.read(reader)
    if policy == "reseed":
        seed = checkpointing.seed_of(reader.read(checkpointing.GeneratorsPart(0).name), part.rank)
        return part.change(partial(rng.set_seed, seed))
    return part.read(reader) if reader.has(part.name) else checkpointing.no_change
