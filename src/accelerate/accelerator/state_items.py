"""Stateful objects of a run, from which checkpoints, the fast tier, replica groups and local SGD take states.

A new kind of object is one more row of `KINDS`. `collect` returns the files that `Accelerator.save_state`
writes, and `read` the changes that `load_state` applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from accelerate import accelerator, checkpointing, rng, strategies
from accelerate.accelerator.runtime import Runtime
from accelerate.base import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME, CheckpointError
from accelerate.checkpointing import (
    MODEL,
    OPTIMIZER,
    Change,
    CheckpointReader,
    CheckpointSource,
    GeneratorsPart,
    ModelPart,
    Payload,
    ShardsOrFilePart,
    Staging,
    StateItem,
    StatePart,
    folder_of,
    number,
    object_item,
)
from accelerate.ops import current_transport


class Source(NamedTuple):
    """Prepared objects of a run, with the options of the checkpoint that is saved or loaded."""

    strategy: strategies.Strategy
    prepared: strategies.Prepared
    models: Sequence[nn.Module]  # that are saved or loaded
    folder: Path | None  # to which engines write their files
    resized: bool  # whether the checkpoint is of another world size


def list_items(
    strategy: strategies.Strategy,
    *,
    models: Sequence[nn.Module] | None = None,
    folder: Path | None = None,
    resized: bool = False,
) -> list[StateItem]:
    """Returns the stateful objects of a run, in the order in which their states are loaded.

    Args:
        models: Prepared models that are saved or loaded, by default all.
        folder: Folder to which engines write their files, to save.
        resized: Whether the checkpoint to load is of another world size.
    """
    prepared = strategy.session.prepared
    source = Source(strategy, prepared, prepared.models if models is None else models, folder, resized)
    return [item for kind in KINDS for item in kind(source)]


def _own(objects: Sequence[Any]) -> list[Any]:
    """Returns the optimizers or schedulers that no engine saves."""
    return [obj for obj in objects if not getattr(obj, "belongs_to_engine", False)]


def _custom(source: Source) -> Iterator[StateItem]:
    whole = source.strategy.holds_whole_models
    distribute = None if whole else strategies.dtensors.distribute_like
    for index, obj in enumerate(source.prepared.custom):
        yield object_item("custom", obj, checkpointing.custom_part(index, obj, distribute))


def _schedulers(source: Source) -> Iterator[StateItem]:
    for index, scheduler in enumerate(_own(source.prepared.schedulers)):
        part = StatePart(number(SCHEDULER_NAME, index, ".bin"), scheduler)
        yield object_item("schedulers", scheduler, part)


def _scaler(source: Source) -> Iterator[StateItem]:
    precision = source.strategy.precision
    if (scaler := precision.scaler) is not None:
        precision.finish_updates()
        yield object_item("scalers", scaler, StatePart(SCALER_NAME, scaler, may_lack=True))


def _loaders(source: Source) -> Iterator[StateItem]:
    rank = source.strategy.context.topology.rank
    for index, loader in source.prepared.numbered_loaders():
        part = checkpointing.LoaderPart(index, loader, rank, source.resized)
        yield StateItem("loaders", loader, part, "rank")


def _engines_and_models(source: Source) -> Iterator[StateItem]:
    state, plain, num_engines = source.strategy.state, [], 0
    for model in source.models:
        if (part := state.engine_part(num_engines, model, source.folder)) is None:
            plain.append(model)
        else:
            num_engines += 1
            yield StateItem("engines", model, part, "rank")
    for index, model in enumerate(plain):
        whole = checkpointing.ModelPart(
            index, model=model, load=state.load_weights, live=partial(state.live_weights, model)
        )
        shards = partial(state.model_shards, model)
        yield checkpointing.model_item(model, ShardsOrFilePart(folder_of(MODEL, index), shards, whole))


def _optimizers(source: Source) -> Iterator[StateItem]:
    state, models = source.strategy.state, source.prepared.models
    for index, optimizer in enumerate(_own(source.prepared.optimizers)):
        whole = checkpointing.OptimizerPart(
            number(OPTIMIZER_NAME, index, ".bin"),
            state.optimizer_owners([optimizer], gather=False)[0],
            partial(state.parameter_names, optimizer, models),
            partial(_gathered, state, optimizer),
        )
        folder, shards = folder_of(OPTIMIZER, index), partial(state.optimizer_shards, optimizer, models)
        yield checkpointing.optimizer_item(optimizer, ShardsOrFilePart(folder, shards, whole))


def _gathered(state: Any, optimizer: Any) -> Any:
    return state.optimizer_owners([optimizer], gather=True)[0]


def _averages(source: Source) -> Iterator[StateItem]:
    for index, average in enumerate(source.prepared.averages):
        part = accelerator.average_files.part(index, average)
        yield StateItem("averages", average, part, "shards", average.tensors, partial(_fill, average))


def _fill(average: Any, values: Sequence[Tensor]) -> None:
    for own, value in zip(average.tensors(), values, strict=True):
        own.copy_(value)


def _local_sgd(source: Source) -> Iterator[StateItem]:
    for index, local_sgd in enumerate(source.prepared.local_sgd):
        for part in local_sgd.parts(index):
            yield StateItem("local_sgd", local_sgd, part, "rank")


def _counters(source: Source) -> Iterator[StateItem]:
    prepared = source.prepared
    get, put = partial(counters_of, prepared), partial(set_counters, prepared)
    yield StateItem("counters", prepared, capture=get, apply=put)


def counters_of(prepared: strategies.Prepared) -> dict[str, list[Any]]:
    """Returns the numbers of updates of optimizers and at calls of schedulers, as a manifest has them."""
    return {
        "updates": [optimizer.num_updates for optimizer in prepared.optimizers],
        "updates_at_call": [scheduler.updates_at_call for scheduler in prepared.schedulers],
    }


def set_counters(prepared: strategies.Prepared, counters: Mapping[str, list[Any]]) -> None:
    """Sets the numbers that `counters_of` returned."""
    for optimizer, updates in zip(prepared.optimizers, counters["updates"], strict=False):
        optimizer.num_updates = updates
    for scheduler, calls in zip_longest(prepared.schedulers, counters["updates_at_call"]):
        if scheduler is not None:
            scheduler.record_call(calls)


def _iteration(source: Source) -> Iterator[StateItem]:
    """Yields the number of the next checkpoint, which the name of a checkpoint has."""
    project = source.strategy.context.request.project
    get, put = partial(getattr, project, "iteration"), partial(setattr, project, "iteration")
    yield StateItem("iteration", project, capture=get, apply=put)


KINDS: tuple[Callable[[Source], Iterator[StateItem]], ...] = (
    _custom,  # first, because objects of the user may refuse their states
    _schedulers,
    _scaler,
    _loaders,
    _engines_and_models,  # a model of FSDP 2 gets its shards
    _optimizers,
    _averages,
    _local_sgd,  # the weights of this rank, after those of the model
    _counters,
    _iteration,
)
"""Functions that yield the items of each kind."""


# Files of a checkpoint


def collect(runtime: Runtime, staging: Staging, step: int, safe: bool) -> list[Payload]:
    """Returns the contents of the files of this rank, after the hooks of the user have run.

    Args:
        step: Number of micro-batches since the end of the last pass over a loader.
        safe: Whether whole weights are written to safetensors files.
    """
    for layer in runtime.strategy.layers:
        layer.follow_parameters()
    in_shards = runtime.strategy.state.saves_shards
    if in_shards and not all(current_transport().gather_object(staging.is_common)):
        raise CheckpointError(
            f"{staging.request.target} is another folder on each node, and sharded states need a folder that "
            "all ranks can access. Choose a folder on a common disk, or FSDP_STATE_DICT_TYPE=FULL_STATE_DICT"
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
