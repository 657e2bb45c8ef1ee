"""Stateful objects of a run, from which checkpoints, the fast tier, replica groups and local SGD take states.

A new kind of object is one more row of `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from accelerate import accelerator, checkpointing, strategies
from accelerate.base import OPTIMIZER_NAME, SCALER_NAME, SCHEDULER_NAME
from accelerate.checkpointing import (
    MODEL,
    OPTIMIZER,
    ShardsOrFilePart,
    StateItem,
    StatePart,
    folder_of,
    number,
    object_item,
)


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
    if (scaler := source.strategy.precision.scaler) is not None:
        yield object_item("scalers", scaler, StatePart(SCALER_NAME, scaler, may_lack=True))


def _loaders(source: Source) -> Iterator[StateItem]:
    rank = source.strategy.context.topology.rank
    for index, loader in enumerate(source.prepared.loaders):
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
