"""Files of a checkpoint of a run, which `Accelerator.save_state` writes and `load_state` reads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from accelerate import checkpointing, rng
from accelerate.accelerator.runtime import Runtime
from accelerate.accelerator.state_items import list_items
from accelerate.base import CheckpointError
from accelerate.checkpointing import (
    MODEL,
    Change,
    CheckpointReader,
    CheckpointSource,
    GeneratorsPart,
    ModelPart,
    Payload,
    ShardsOrFilePart,
    Staging,
)
from accelerate.ops import current_transport


def collect(runtime: Runtime, staging: Staging, step: int, safe: bool) -> list[Payload]:
    """Returns the contents of the files of this rank, after the hooks of the user have run.

    Args:
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
    items = list_items(runtime.strategy, folder=staging.folder)
    weights = [_weights_of(runtime, item.owner) for item in items if item.kind == "models"]
    files: list[Payload] = []
    for part in (item.part for item in items if item.held_by == "shards" and item.kind != "models"):
        assert isinstance(part, ShardsOrFilePart)
        if in_shards:
            files += _take_shards(runtime, staging, part.folder, part.make_sharded().state())
        else:
            files += part.collect(staging.is_owner)
    models = list(runtime.prepared.models)  # after these collectives, since a hook may fail on one rank
    for hook in runtime.checkpoints.save_hooks.values():
        hook(models, weights, str(staging.folder))
    of_models: list[Payload] = []
    for index, state in enumerate(weights):
        if in_shards:
            values = {(MODEL, name): value for name, value in state.items()}
            of_models += _take_shards(runtime, staging, checkpointing.folder_of(MODEL, index), values)
        else:
            of_models += ModelPart(index, state, safe=safe).collect(staging.is_owner)
    others = [item.part for item in items if item.held_by != "shards" and item.part is not None]
    others.append(GeneratorsPart(runtime.state.process_index, step))
    return [*of_models, *files, *(file for part in others for file in part.collect(staging.is_owner))]


def read(runtime: Runtime, source: CheckpointSource, reader: CheckpointReader, policy: str) -> list[Change]:
    """Reads all files of a checkpoint, and returns the changes to the objects of the run."""
    for layer in runtime.strategy.layers:
        layer.follow_parameters()
    models = list(runtime.prepared.models)
    for hook in runtime.checkpoints.load_hooks.values():
        hook(models, str(source.folder))  # which removes the models that it loads
    registered = [type(obj).__name__ for obj in runtime.prepared.custom]
    checkpointing.loading.check_registered(reader, registered)
    items = list_items(runtime.strategy, models=models, resized=source.resized)
    changes = [item.part.read(reader) for item in items if item.part is not None]
    if not runtime.checkpoints.load_hooks:  # a hook may have taken whatever is left
        checkpointing.loading.announce_surplus(reader)
    return [*changes, _read_generators(runtime, source, reader, policy)]


def files_of_rank(runtime: Runtime, reader: CheckpointReader) -> set[str]:
    """Returns the names of files of shards and ranks that this rank reads, before they are in the folder."""
    parts = (item.part for item in list_items(runtime.strategy) if item.part is not None)
    return {name for part in parts for name in part.files_of_rank(reader)}


def _weights_of(runtime: Runtime, model: nn.Module) -> Mapping[str, Any]:
    """Returns the weights of a model in a checkpoint, as shards or whole, on all ranks."""
    strategy = runtime.strategy.state
    if strategy.saves_shards:
        return {key[1]: value for key, value in strategy.model_shards(model).state().items()}
    weights: Mapping[str, Any] = strategy.state_dict(model, unwrap=True)
    for each in runtime.prepared.local_sgd:
        weights = each.saved_weights(weights) if each.model is model else weights
    return weights


def _take_shards(runtime: Runtime, staging: Staging, folder: str, state: Mapping[Any, Any]) -> list[Payload]:
    from accelerate.checkpointing import shard_files  # and with it DCP, which takes long to import

    rank = runtime.state.process_index
    if staging.request.is_generation:  # nodes hold the files of some ranks
        return shard_files.payloads(folder, rank, state)
    return [shard_files.payload(folder, rank, state)]


def _read_generators(
    runtime: Runtime, source: CheckpointSource, reader: CheckpointReader, policy: str
) -> Change:
    part = GeneratorsPart(runtime.state.process_index)
    if not source.resized or policy == "strict":
        return part.read(reader)
    if policy == "reseed":
        seed = checkpointing.seed_of(reader.read(GeneratorsPart(0).name), part.rank)
        return part.change(partial(rng.set_seed, seed))
    return part.read(reader) if reader.has(part.name) else checkpointing.no_change
