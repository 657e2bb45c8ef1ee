"""Averages of weights in checkpoints, in shards or in one file of whole tensors.

The values are those of the averages, mostly in float32, by the names of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelerate import checkpointing
from accelerate.accelerator.averaging import WeightAverage
from accelerate.base import CheckpointError, listed
from accelerate.checkpointing import (
    Change,
    CheckpointReader,
    KeyPath,
    LocalShards,
    Part,
    Payload,
    ShardIndex,
    ShardsOrFilePart,
    box_of,
    copy_shards,
)
from accelerate.ops import current_transport
from accelerate.weights import drop_shared, read_safetensors, write_whole_tensors

ROOT = "averages"
"""Name of files and folders of averages, and first key of the paths in shards."""


def part(index: int, average: WeightAverage) -> ShardsOrFilePart:
    """Returns the part of a checkpoint with an average, by its index."""
    return ShardsOrFilePart(f"{ROOT}_{index}", partial(AverageShards, average), WholeAverage(index, average))


@dataclass(frozen=True)
class AverageShards:
    """Shards of one average on this rank."""

    average: WeightAverage
    root: str = ROOT

    def state(self) -> dict[KeyPath, Any]:
        self.average.check_saved()
        self.average.refresh()
        shards = self.average.shards()
        return {(ROOT, name): shards[name] for name in self.average.aliases if name in shards}

    def targets(self, index: ShardIndex, reader: CheckpointReader) -> dict[KeyPath, LocalShards | None]:
        self.average.check_saved()
        stored = {str(path[1]): index.stored(path) for path in index.paths}
        names = _saved_names(self.average, stored, index.folder)
        shards = self.average.shards()
        return {(ROOT, names[name]): shards[name].without_memory() for name in names if name in shards}

    def plan(self, values: Mapping[KeyPath, Any], reader: CheckpointReader) -> Change:
        return Change(partial(self._load, values), f"average of {type(self.average.model).__name__}")

    @torch.no_grad()
    def _load(self, values: Mapping[KeyPath, Any]) -> None:
        shards = self.average.shards()
        for path, value in values.items():
            own = next(shards[name] for name in self._names_of(str(path[1])) if name in shards)
            copy_shards(own, value)

    def _names_of(self, name: str) -> list[str]:
        return next(names for names in self.average.aliases.values() if name in names)


@dataclass(frozen=True)
class WholeAverage(Part):
    """Whole tensors of one average in a file."""

    index: int
    average: WeightAverage

    @property
    def name(self) -> str:
        return checkpointing.number(ROOT, self.index, ".safetensors")

    def collect(self, writes_common: bool = True) -> list[Payload]:
        self.average.check_saved()
        self.average.refresh()
        whole = gather_whole(self.average, keep=writes_common)
        if not writes_common:
            return []
        kept, aliases = drop_shared(whole)
        others = {
            name: first for first, names in self.average.aliases.items() for name in names if name != first
        }
        known = {**others, **aliases}
        return [Payload(self.name, kept, lambda content, path: write_whole_tensors(content, known, path))]

    def read(self, reader: CheckpointReader) -> Change:
        self.average.check_saved()
        if not reader.has(self.name):
            kind = type(self.average.model).__name__
            raise CheckpointError(
                f"{reader.folder} holds no {self.name}: it was saved without this average of {kind}. To "
                "begin a new average from its weights, call accelerator.average() after load_state()."
            )
        path = reader.path_of(self.name)
        state = read_safetensors(path)
        names = _saved_names(self.average, state, path)

        @torch.no_grad()
        def apply() -> None:
            for name, own in self.average.shards().items():
                for shard in own.shards if name in names else ():
                    whole = state[names[name]]
                    shard.tensor.copy_(box_of(whole, shard.offsets, shard.tensor.shape))

        return Change(apply, f"average of {type(self.average.model).__name__} ({self.name})")


def gather_whole(average: WeightAverage, *, keep: bool) -> dict[str, Tensor]:
    """Returns the whole tensors of an average on the CPU, or none if `keep` is False.

    Called on all ranks. The ranks send their shards one after another, so that no rank needs more memory
    than the result.
    """
    shards, transport = average.shards(), current_transport()
    if transport.size == 1 or average.holds_whole:
        return {name: shards[name].shards[0].tensor for name in average.aliases} if keep else {}
    own = {
        name: [(shard.offsets, tuple(shard.tensor.shape)) for shard in shards[name].shards]
        for name in average.aliases
        if name in shards and shards[name].owned
    }
    shapes = {name: (shards[name].shape, shards[name].dtype) for name in own}
    plans = transport.gather_object((own, shapes))
    whole: dict[str, Tensor] = {}
    for name in average.aliases:
        shape, dtype = next(known[name] for _, known in plans if name in known)
        target = torch.empty(shape, dtype=dtype) if keep else None
        for source, (boxes, _) in enumerate(plans):
            for index, (offsets, sizes) in enumerate(boxes.get(name, ())):
                part = torch.empty(sizes, dtype=dtype)
                if source == transport.rank:
                    part.copy_(shards[name].shards[index].tensor)
                transport.broadcast(part, source)
                if target is not None:
                    box_of(target, offsets, sizes).copy_(part)
        if target is not None:
            whole[name] = target
    return whole


def _saved_names(average: WeightAverage, stored: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Returns the name in a file for each name of an averaged weight, after verification.

    Raises:
        CheckpointError: The file has other weights, or a weight with another shape.
    """
    found = {
        first: next((name for name in names if name in stored), None)
        for first, names in average.aliases.items()
    }
    missing = [first for first, name in found.items() if name is None]
    surplus = set(stored) - {name for names in average.aliases.values() for name in names}
    if missing or surplus:
        text = f"it lacks {listed(missing)}" if missing else f"it has {listed(sorted(surplus))}"
        raise CheckpointError(
            f"{path} does not fit this average of {type(average.model).__name__}: {text}. Train the same "
            "parameters as the run that saved it, or call accelerator.average() after load_state()."
        )
    shapes = {name: local.shape for name, local in average.shards().items()}
    names = {alias: str(found[first]) for first, aliases in average.aliases.items() for alias in aliases}
    for name, shape in shapes.items():
        value = stored[names[name]]
        if value is None or tuple(value.shape) != tuple(shape):
            raise CheckpointError(f"{path} has {name} with another shape than {tuple(shape)}.")
    return names
