"""Stateful objects of a run as data, from which checkpoints and copies in memory are made.

Here are also the parts of objects that each rank has, random number generators and the position in the data,
and the part of a model or an optimizer that is saved in shards or in one file.

`accelerator/state_items.py` lists the items of a run. Checkpoints and the fast tier use their parts. Replica
groups, and ranks that train separately, use `capture` and `apply`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from accelerate import rng
from accelerate.base import FSDP_MODEL_NAME, OPTIMIZER_NAME, RNG_STATE_NAME, SAMPLER_NAME, CheckpointError
from accelerate.checkpointing import shard_index
from accelerate.checkpointing.changes import Change, Stage, no_change
from accelerate.checkpointing.compatibility import GROUPS, PARAMETERS, STATE
from accelerate.checkpointing.local_shards import LocalShards, copy_shards, to_local_shards, to_tensor
from accelerate.checkpointing.manifest import checksum_of
from accelerate.checkpointing.parts import CheckpointReader, Part, Payload, map_like, number, write_state
from accelerate.checkpointing.sharded import MODEL, OPTIMIZER, ShardedState, plan_shards, read_shards
from accelerate.data_loader import resume
from accelerate.logging import get_logger
from accelerate.nested import recursively_apply
from accelerate.ops import is_dtensor
from accelerate.weights import is_extra

if TYPE_CHECKING:
    from accelerate.optimizer import AcceleratedOptimizer


@dataclass(frozen=True)
class StateItem:
    """Stateful object of a run.

    Attributes:
        part: Its part of a checkpoint. None if the manifest has its state, or no file.
        held_by: The ranks that have the state: "all" if it is equal on all ranks, "shards" if it may be
            sharded over them, "rank" if each rank has its own.
        capture: Returns the state on this rank, with references to live tensors and with local shards in
            place of distributed tensors. None if only checkpoints have the state.
        apply: Loads a state that `capture` returned on this rank, also in another replica group.
    """

    kind: str
    owner: Any
    part: Part | None = None
    held_by: Literal["all", "shards", "rank"] = "all"
    capture: Callable[[], Any] | None = None
    apply: Callable[[Any], None] | None = None


def object_item(kind: str, owner: Any, part: Part | None = None) -> StateItem:
    """Returns the item of an object with `state_dict` and `load_state_dict`, which all ranks have."""

    def capture() -> Any:
        return take_shards(owner.state_dict())

    def apply(state: dict[str, Any]) -> None:
        owner.load_state_dict(map_like(to_tensor, state, owner.state_dict()))

    return StateItem(kind, owner, part, capture=capture, apply=apply)


def optimizer_item(optimizer: AcceleratedOptimizer, part: Part | None = None) -> StateItem:

    def capture() -> Any:
        return take_shards(optimizer.optimizer.state_dict())

    def apply(state: Mapping[str, Any]) -> None:
        parameters = (parameter for group in optimizer.param_groups for parameter in group[PARAMETERS])
        numbers = (number for group in state[GROUPS] for number in group[PARAMETERS])
        live = dict(zip(numbers, parameters, strict=True))
        like = {
            number: dict.fromkeys(values, live.get(number))
            for number, values in state[STATE].items()
            if isinstance(values, Mapping)
        }
        own = map_like(to_tensor, state[STATE], like)
        optimizer.load_state_dict({**state, STATE: own})

    return StateItem("optimizers", optimizer, part, "shards", capture, apply)


def model_item(model: nn.Module, part: Part | None = None) -> StateItem:

    def capture() -> Any:
        def copy_buffer(value: Any) -> Any:  # the next forwards change it, while the state may still be sent
            is_buffer = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            return value.clone() if is_buffer else value

        state = model.state_dict(keep_vars=True)
        return take_shards({name: copy_buffer(value) for name, value in state.items()})

    def apply(state: Mapping[str, Any]) -> None:
        live = model.state_dict(keep_vars=True)
        if extra := {name: value for name, value in state.items() if is_extra(name)}:
            model.load_state_dict(extra, strict=False)
        for name, value in state.items():
            if name in extra:
                continue
            own = to_local_shards(live[name], 0, 0)
            if isinstance(value, LocalShards) and isinstance(own, LocalShards):
                copy_shards(own, value)
            elif isinstance(value, Tensor):
                live[name].copy_(value)

    return StateItem("models", model, part, "shards", capture, apply)


def take_shards(state: Mapping[str, Any]) -> Any:
    """Returns a nested state with local shards in place of distributed tensors, and detached tensors."""

    def take(tensor: Tensor) -> Any:
        return to_local_shards(tensor, 0, 0) if is_dtensor(tensor) else tensor.detach()

    return recursively_apply(take, state)


@torch.no_grad()
def capture_items(items: Iterable[StateItem]) -> dict[str, list[Any]]:
    """Returns the states of items on this rank, by kind, without items that have none in memory."""
    states: dict[str, list[Any]] = {}
    for item in items:
        if item.capture is not None:
            states.setdefault(item.kind, []).append(item.capture())
    return states


def check_items(items: Iterable[StateItem], states: Mapping[str, Sequence[Any]]) -> None:
    """Raises an error for states of other numbers of objects than those of items."""
    counts = Counter(item.kind for item in items if item.capture is not None)
    for kind in counts.keys() | states.keys():
        if (number := len(states.get(kind, ()))) != counts[kind]:
            raise CheckpointError(f"the state has {number} {kind}, and this run has {counts[kind]}")


@torch.no_grad()
def apply_items(items: Iterable[StateItem], states: Mapping[str, Sequence[Any]]) -> None:
    """Loads states that `capture_items` returned for the same items."""
    left: dict[str, Iterator[Any]] = {}
    for item in items:
        if item.apply is not None:
            item.apply(next(left.setdefault(item.kind, iter(states[item.kind]))))


logger = get_logger(__name__)

LOADER_NAME = "dl_state_dict"  # file of other software with the position of a loader


@dataclass(frozen=True)
class GeneratorsPart(Part):
    """Random number generators of one rank, with `Accelerator.step`, which is in the same file."""

    rank: int
    step: int = 0

    @property
    def name(self) -> str:
        return f"{RNG_STATE_NAME}_{self.rank}.pkl"

    def collect(self, writes_common: bool = True) -> list[Payload]:
        return [Payload(self.name, {"step": self.step, **capture_generators()})]

    def read(self, reader: CheckpointReader) -> Change:
        states = reader.read(self.name)
        with reader.error_context(self.name, "process"):
            own = check_generators(states)
        return self.change(partial(rng.restore, own))

    def change(self, apply: Callable[[], None]) -> Change:
        """Returns a change of the generators, which is applied last."""
        return Change(apply, f"random generators ({self.name})", Stage.GENERATORS)


_FILE_NAMES = {"python": "random_state", "numpy": "numpy_random_seed", "torch": "torch_manual_seed"}


def capture_generators() -> dict[str, Any]:
    """Returns the states of all generators of this process by their names in the file."""
    return {_name_in_file(name): state for name, state in rng.capture().items()}


def check_generators(states: object) -> dict[str, Any]:
    """Returns the states for the generators of this process, after setting other generators to them.

    Raises:
        CheckpointError: A state is missing, or does not fit its generator.
    """
    if not isinstance(states, Mapping):
        raise CheckpointError(f"The file of the random generators holds a {type(states).__name__} instead.")
    current = rng.capture()
    missing = [name for name in current if _name_in_file(name) not in states]
    if missing:
        raise CheckpointError(
            f"The checkpoint holds no state for the random generators {', '.join(missing)}: it was saved on "
            'other hardware. Load it with world_size_policy="reseed" or "ignore".'
        )
    own = {name: _of_this_device(states[_name_in_file(name)]) for name in current}
    try_on_cpu(own)
    for name in current.keys() - _FILE_NAMES.keys():
        _check_device(name, current[name], own[name])
    return own


def try_on_cpu(states: Mapping[str, Any]) -> None:
    """Sets new generators to states, by the names of `rng.capture_on_cpu`, and raises if one fails."""
    random.Random().setstate(states["python"])
    np.random.RandomState(0).set_state(states["numpy"])
    torch.Generator().set_state(states["torch"])


def _check_device(name: str, current: Any, state: Any) -> None:
    is_like = type(state) is type(current)
    if is_like and isinstance(current, Tensor):
        is_like = (state.dtype, state.shape) == (current.dtype, current.shape)
    if not is_like:
        raise CheckpointError(f"The checkpoint holds no state that the random generator of {name} takes.")


def seed_of(states: object, rank: int) -> int:
    """Returns a seed for a rank, derived from the states that rank 0 has saved."""
    state = states.get(_FILE_NAMES["torch"]) if isinstance(states, Mapping) else None
    origin = state.numpy().tobytes() if isinstance(state, Tensor) else repr(state).encode()
    return int(checksum_of(origin + rank.to_bytes(8, "little")), 16) % rng.SEEDS


def _name_in_file(name: str) -> str:
    return _FILE_NAMES.get(name, f"torch_{name}_manual_seed")


def _of_this_device(state: Any) -> Any:
    is_list = isinstance(state, list) and state and isinstance(state[0], Tensor)
    if not is_list:
        return state
    index = torch.accelerator.current_device_index()
    return state[index] if index < len(state) else state[0]


@dataclass(frozen=True)
class LoaderPart(Part):
    """Order and position of one prepared loader, and the state of an iterable dataset on each rank."""

    index: int
    loader: Any
    rank: int = 0
    resized: bool = False  # whether the checkpoint has another world size

    @property
    def name(self) -> str:
        return number(SAMPLER_NAME, self.index, ".bin")

    def _stream_file(self, rank: int) -> str:
        return f"stream_{self.index}_{rank}.bin"

    def collect(self, writes_common: bool = True) -> list[Payload]:
        state = resume.capture(self.loader) if writes_common else None
        stream = resume.capture_stream(self.loader)
        files = [(self.name, state), (self._stream_file(self.rank), stream or None)]
        write = partial(write_state, type(self.loader).__name__)
        return [Payload(name, content, write) for name, content in files if content is not None]

    def read(self, reader: CheckpointReader) -> Change:
        if not resume.is_tracked(self.loader):
            return no_change
        if not (self._is_known(reader) if reader.is_foreign else reader.has(self.name)):
            return no_change
        streams = map(self._stream_file, [0] if self.resized else [self.rank, 0])
        stream: Any = next((reader.read(file) for file in streams if reader.has(file)), {})
        state, kind = reader.read(self.name), type(self.loader).__name__
        with reader.error_context(self.name, kind):
            _check_position(state, stream)

        def apply() -> None:
            with reader.error_context(self.name, kind):
                resume.restore(self.loader, {**state, **stream.get("order", {})}, stream)

        return Change(apply, f"{kind} ({self.name})")

    def _is_known(self, reader: CheckpointReader) -> bool:
        """Returns whether a position that other software has saved can be loaded, and warns if not."""
        names = [self.name, number(LOADER_NAME, self.index, ".bin")]
        name = next((name for name in names if reader.has(name)), None)
        if name is None:
            return False
        try:
            if resume.is_state(reader.read(name)):
                return True
        except CheckpointError as error:
            logger.debug(f"{error}")
        logger.warning(
            f"{reader.folder / name} stores the order and position of a loader in an unknown format: "
            "the loader begins a new epoch. Skip the batches that were used: skip_first_batches(loader, n)."
        )
        return False


def _check_position(state: Any, stream: object) -> None:
    """Raises for a position that would fail when the next epoch begins."""
    if not resume.is_state(state) or not isinstance(stream, Mapping):
        raise CheckpointError("this is not the position of a loader")
    if state["version"] != resume.VERSION:
        raise CheckpointError(
            f"the position has version {state['version']}, and this one reads {resume.VERSION}"
        )
    start = state.get("start")
    if start is not None:
        try_on_cpu(start["global"])
    if "read" in stream:
        try_on_cpu(stream["read"])
    at_start = [] if start is None else [state for state in start["generators"] if state is not None]
    drawn = [*state["generators"], *at_start]
    if not all(isinstance(state, Tensor) and state.dtype == torch.uint8 for state in drawn):
        raise CheckpointError("it holds states of random generators that are none")


# Models and optimizers in shards or in one file

FOLDERS = {MODEL: FSDP_MODEL_NAME, OPTIMIZER: OPTIMIZER_NAME}


def folder_of(root: str, index: int) -> str:
    """Returns the name of the folder of shards of a model or an optimizer."""
    return f"{FOLDERS[root]}_{index}"


@dataclass(frozen=True)
class ShardsOrFilePart(Part):
    """Model or optimizer that is loaded from shards or from one file, depending on the checkpoint."""

    folder: str
    make_sharded: Callable[[], ShardedState]
    whole: Part

    def collect(self, writes_common: bool = True) -> list[Payload]:
        return self.whole.collect(writes_common)

    def read(self, reader: CheckpointReader) -> Change:
        if not reader.has(f"{self.folder}/{shard_index.NAME}"):
            return self.whole.read(reader)
        return read_shards(self.folder, self.make_sharded(), reader)

    def files_of_rank(self, reader: CheckpointReader) -> set[str]:
        if not reader.has(f"{self.folder}/{shard_index.NAME}"):
            return set()
        reader.plans[self.folder] = plan = plan_shards(self.folder, self.make_sharded(), reader)
        return {f"{self.folder}/{name}" for name in plan.items}
