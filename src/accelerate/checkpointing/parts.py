"""Parts of a checkpoint, each of which saves and loads one object of a run.

`collect` returns the files of this rank, which `Saver.write` writes. `read` reads and verifies files, and
returns the change of the object, which `apply_all` applies when all ranks have read. There are parts for
models, optimizers and other objects with a state dict; those of generators and loaders are in
`items.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from accelerate.base import (
    FSDP_MODEL_NAME,
    MODEL_NAME,
    OPTIMIZER_NAME,
    SAFE_MODEL_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    AccelerateError,
    CheckpointError,
    as_builtin,
    describe,
    like,
    listed,
    wrong_value,
)
from accelerate.checkpointing import compatibility
from accelerate.checkpointing.changes import Change, Stage, fill_states, fill_weights, no_change
from accelerate.checkpointing.manifest import MapFile
from accelerate.checkpointing.state_layouts import LAYOUTS
from accelerate.logging import get_logger
from accelerate.nested import honor_mapping, honor_type, recursively_apply
from accelerate.ops import is_dtensor, run_on_all_ranks, to_full_tensor
from accelerate.state import PartialState
from accelerate.weights import (
    drop_shared,
    missing_names,
    read_safetensors,
    read_torch,
    refused_values,
    write_torch,
    write_whole_tensors,
)

logger = get_logger(__name__)

Fill = Callable[[nn.Module, Mapping[str, Tensor]], None]
Distribute = Callable[[Any, Tensor], Any]
"""Function that returns a tensor distributed like another one."""


@dataclass(frozen=True)
class CheckpointReader:
    """Folder and options with which the parts of a checkpoint are read."""

    folder: Path
    device: str | torch.device = "cpu"  # of weights and states of optimizers
    load_kwargs: Mapping[str, Any] = field(default_factory=dict)  # arguments of `torch.load`
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)  # arguments of `load_state_dict` of models
    names: Collection[str] | None = None  # files of its manifest; None for a checkpoint without one
    is_fast: bool = False  # whether it is in the fast tier, with the files that the ranks of this node read
    map_file: MapFile | None = None  # returns the memory map of a file of the fast tier
    plans: dict[str, Any] = field(default_factory=dict)  # `ShardPlan` of each folder, from `files_of_rank`
    requested: set[str] = field(default_factory=set)  # names that parts have searched for
    confirm: Callable[[], None] = lambda: None  # raises if another save has replaced the folder

    @property
    def is_foreign(self) -> bool:
        """True if other software wrote the checkpoint, which has no manifest then."""
        return self.names is None

    def has(self, name: str) -> bool:
        self.requested.add(name)
        return (self.names is None or name in self.names) and (self.folder / name).is_file()

    def read(self, name: str, device: str | torch.device = "cpu") -> Any:
        # The files of the fast tier are in memory, and never change.
        return read_torch(self.path_of(name), device, **{"mmap": self.is_fast, **self.load_kwargs})

    def path_of(self, name: str) -> Path:
        """Returns the path of a file, and raises if the checkpoint does not have it."""
        if not self.has(name):
            error = CheckpointError(
                f"{self.folder} holds no {name}. It was saved by a run that had prepared other objects: "
                "prepare the same ones in the same order, or choose another checkpoint."
            )
            raise as_builtin(error, FileNotFoundError)
        return self.folder / name

    @contextmanager
    def error_context(self, name: str, kind: str) -> Iterator[None]:
        """Adds the names of a file and of the class that it does not fit to errors.

        Errors of a wrong configuration, and those with the name of the file, are unchanged.
        """
        try:
            yield
        except Exception as error:  # an object of the user may raise any exception
            is_own = isinstance(error, AccelerateError)
            if is_own and (not isinstance(error, CheckpointError) or name in str(error)):
                raise
            reason = str(error) if is_own else describe(error)
            text = f"{self.folder / name} does not fit this {kind}: {reason}"
            raise like(CheckpointError(text), error) from error


@dataclass(frozen=True)
class Payload:
    """Content of one file, with references to live tensors.

    If several ranks write to one folder, `finish` is called with the folder and the results of `write` on all
    ranks, and writes the files that they have in common.
    """

    name: str
    content: Any  # nested lists, tuples and dictionaries of tensors and other values
    write: Callable[[Any, Path], Any] = write_torch
    finish: Callable[[Path, Sequence[Any]], None] | None = None


def write_state(kind: str, content: object, path: Path) -> None:
    """Writes the state of an object, and warns of values that `load_state` refuses to read."""
    write_torch(content, path)
    warn_of_refused(f"{kind} ({path.name})", refused_values(content))


def warn_of_refused(owner: str, refused: Mapping[str, str]) -> None:
    """Warns of values in the state of an object by their types, with their positions."""
    if refused:
        values = [f"a `{kind}` at {position}" for kind, position in refused.items()]
        logger.warning_once(
            f"The state of {owner} holds {listed(values)}. It is saved, but only "
            'load_state(load_kwargs={"weights_only": False}) will read it, because such objects can run code '
            "when they are loaded: let `state_dict` return tensors, numbers, text and plain containers."
        )


class Part(Protocol):
    """Object of a run that is saved to files and loaded from them."""

    def collect(self, writes_common: bool = True) -> list[Payload]:
        """Returns the files of this rank.

        Args:
            writes_common: Whether this rank also writes the files that all ranks have in common.
        """

    def read(self, reader: CheckpointReader) -> Change:
        """Reads and verifies its files, and returns the change of the object."""

    def files_of_rank(self, reader: CheckpointReader) -> set[str]:
        """Returns the files that this rank reads and others need not, which may not be in the folder yet."""
        return set()


@dataclass(frozen=True)
class StatePart(Part):
    """State of a scheduler, a gradient scaler or an object of the user."""

    name: str
    owner: Any  # has `state_dict` and `load_state_dict`
    may_lack: bool = False  # whether a checkpoint of other software may be without it
    distribute: Distribute | None = None  # for an object that may have DTensors

    def collect(self, writes_common: bool = True) -> list[Payload]:
        if self.distribute is not None:
            state = _gather_shards(run_on_all_ranks(self.owner.state_dict), keep=writes_common)
        else:
            state = self.owner.state_dict()  # on all ranks, because the user's method may communicate
        write = partial(write_state, type(self.owner).__name__)
        return [Payload(self.name, state, write)] if writes_common else []

    def read(self, reader: CheckpointReader) -> Change:
        kind = type(self.owner).__name__
        if self.may_lack and reader.is_foreign and not reader.has(self.name):
            logger.warning(f"{reader.folder} holds no {self.name}: this {kind} keeps its initial state.")
            return no_change
        state = reader.read(self.name)
        with reader.error_context(self.name, kind):
            self._verify(state, reader)

        def apply() -> None:
            with reader.error_context(self.name, kind):
                own = state
                if self.distribute is not None:
                    own = map_like(partial(_distribute, self.distribute), state, self.owner.state_dict())
                self.owner.load_state_dict(own)

        return Change(apply, f"{kind} ({self.name})")

    def _verify(self, state: Mapping[str, Any], reader: CheckpointReader) -> None:
        """Verifies the state of objects of torch, while others verify it when they load it."""
        owner = getattr(self.owner, "scheduler", self.owner)
        if isinstance(owner, nn.Module) and not compatibility.loads_its_own_way(owner):
            own = owner.state_dict(keep_vars=True)
            compatibility.check_weights(own, state, reader.folder / self.name, owner, strict=True)
        elif isinstance(owner, torch.amp.GradScaler):
            compatibility.check_keys(state, owner.state_dict().keys())
        elif isinstance(owner, torch.optim.lr_scheduler.LRScheduler):
            compatibility.check_keys(state, ())


def _gather_shards(state: Mapping[str, Any], *, keep: bool) -> Any:
    """Returns a state with whole tensors on the CPU, or without values if `keep` is False.

    Called on all ranks.
    """

    def gather(value: object) -> Any:
        whole = to_full_tensor(value)
        return whole.cpu() if keep else None

    return recursively_apply(gather, state, test_type=is_dtensor)


def _distribute(distribute: Distribute, value: object, own: torch.Tensor) -> Any:
    return distribute(value, own) if is_dtensor(own) else value


def map_like(convert: Callable[[Any, Any], Any], state: object, own: Any) -> Any:
    """Returns a nested state with converted values.

    Args:
        convert: Function of a value and the one at the same position of the other state, or None.
        own: Another state of the same object.
    """
    if isinstance(state, Mapping) and isinstance(own, Mapping):
        items = {key: map_like(convert, value, own.get(key)) for key, value in state.items()}
        return honor_mapping(state, items)
    if isinstance(state, (list, tuple)) and isinstance(own, (list, tuple)) and len(own) == len(state):
        pairs = zip(state, own, strict=True)
        return honor_type(state, (map_like(convert, *pair) for pair in pairs))
    return convert(state, own)


@dataclass(frozen=True)
class OptimizerPart(Part):
    """State of an optimizer, with whole tensors.

    `names` returns the names of the parameters, for states that have these as keys. `gather` is called on all
    ranks, and returns an object with the state to save, by default the optimizer.
    """

    name: str
    owner: Any
    names: Callable[[], compatibility.Names] | None = None
    gather: Callable[[], Any] | None = None

    def collect(self, writes_common: bool = True) -> list[Payload]:
        owner = self.owner if self.gather is None else self.gather()
        return [Payload(self.name, owner.state_dict(), self._write)] if writes_common else []

    def _write(self, content: object, path: Path) -> None:
        write_state(compatibility.class_name(self.owner), content, path)

    def read(self, reader: CheckpointReader) -> Change:
        kind = compatibility.class_name(self.owner)
        state = reader.read(self.name, reader.device)
        with reader.error_context(self.name, kind):
            compatibility.check_form(state, self.owner)
            is_plain = compatibility.has_form(state)
            if is_plain:
                if not getattr(self.owner, "takes_layouts", False):
                    state = {key: value for key, value in state.items() if key != LAYOUTS}
                state = compatibility.in_order(state, self.names)
                getattr(self.owner, "check_state", partial(compatibility.check_optimizer, self.owner))(state)

        def apply() -> None:
            own = state
            # Not an optimizer whose states have another layout or form.
            if is_plain and isinstance(self.owner, torch.optim.Optimizer):
                own = _fill_whole_states(self.owner, state, is_mapped=reader.is_fast)
            with reader.error_context(self.name, kind):
                self.owner.load_state_dict(own)

        needs_all_ranks = getattr(self.owner, "needs_all_ranks", False)
        stage = Stage.COLLECTIVE if needs_all_ranks else Stage.LOCAL
        return Change(apply, f"{kind} ({self.name})", stage)


def _fill_whole_states(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, is_mapped: bool
) -> dict[str, Any]:
    """Returns a state dict with the tensors of the optimizer, into which its values are copied."""
    numbers = (number for group in state[compatibility.GROUPS] for number in group[compatibility.PARAMETERS])
    live = (parameter for group in optimizer.param_groups for parameter in group["params"])
    parameters = dict(zip(numbers, live, strict=False))  # `load_state_dict` refuses other numbers
    states = fill_states(optimizer, state[compatibility.STATE], parameters, {}, is_mapped=is_mapped)
    return {**state, compatibility.STATE: states}


@dataclass(frozen=True)
class ModelPart(Part):
    """Weights of one model.

    `load` loads weights into a prepared model with a function for its module. `live` returns the tensors of
    the prepared model by name. If they are None, the model is plain.
    """

    index: int
    state: Mapping[str, Tensor] | None = None  # weights by name, or None to load only
    model: nn.Module | None = None  # None to save only
    safe: bool = True  # whether the file is one of safetensors
    load: Callable[[nn.Module, Mapping[str, Tensor], Fill], None] | None = None
    live: Callable[[], Mapping[str, Any]] | None = None

    def collect(self, writes_common: bool = True) -> list[Payload]:
        if self.state is None or not writes_common:
            return []
        if not self.safe:
            return [Payload(number(MODEL_NAME, self.index, ".bin"), dict(self.state))]
        kept, aliases = drop_shared(self.state)
        name = number(SAFE_MODEL_NAME, self.index, ".safetensors")
        return [Payload(name, kept, lambda content, path: write_whole_tensors(content, aliases, path))]

    def read(self, reader: CheckpointReader) -> Change:
        if self.model is None:
            return no_change
        safe = number(SAFE_MODEL_NAME, self.index, ".safetensors")
        pickled = [number(stem, self.index, ".bin") for stem in (MODEL_NAME, FSDP_MODEL_NAME)]
        name = next((name for name in (safe, *pickled) if reader.has(name)), safe)
        path = reader.path_of(name)
        if name == safe:
            state = read_safetensors(path, reader.device)
        else:  # mostly of other software
            state = read_torch(path, reader.device, **reader.load_kwargs)
        own = self.model.state_dict(keep_vars=True) if self.live is None else self.live()
        model = self.model

        def fill_module(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
            if not reader.model_kwargs.get("assign"):
                live = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
                weights = fill_weights(module, dict(live), weights)
            fill(module, weights, path, reader.model_kwargs)

        def apply() -> None:
            with reader.error_context(name, type(model).__name__):
                if self.load is None:
                    fill_module(model, state)
                else:
                    self.load(model, state, fill_module)

        return weights_change(apply, model, own, state, path, reader)


def weights_change(
    apply: Callable[[], None],
    model: nn.Module,
    own: Mapping[str, Any],
    state: Mapping[str, Any],
    path: Path,
    reader: CheckpointReader,
) -> Change:
    """Verifies that weights fit a model, and returns the change of the model."""
    try:
        compatibility.check_weights(own, state, path, model, strict=reader.model_kwargs.get("strict", True))
    except CheckpointError:
        if not isinstance(state, Mapping) or not compatibility.loads_its_own_way(model):
            raise
        compatibility.check_dtypes(own, state, path, model)  # of which torch only warns, once in a process
    return Change(apply, f"{type(model).__name__} ({path.name})", Stage.COLLECTIVE)


def fill(model: nn.Module, state: Mapping[str, Tensor], path: Path, options: Mapping[str, Any]) -> None:
    """Loads weights into a module, strictly by default, with shared tensors under any of their names."""
    outcome = model.load_state_dict(state, **{**options, "strict": False})
    if options.get("strict", True):
        missing = missing_names(model.state_dict(), state) if getattr(outcome, "missing_keys", []) else []
        compatibility.refuse_names(path, model, missing, list(getattr(outcome, "unexpected_keys", [])))


def number(stem: str, index: int, suffix: str) -> str:
    """Returns the file name of an object by its index, which is left out if it is 0."""
    return f"{stem}{suffix}" if index == 0 else f"{stem}_{index}{suffix}"


def state_parts(schedulers: Sequence[Any], scaler: torch.amp.GradScaler | None) -> list[StatePart]:
    """Returns the parts of schedulers and scaler."""
    return [
        *(StatePart(number(SCHEDULER_NAME, index, ".bin"), owner) for index, owner in enumerate(schedulers)),
        *([] if scaler is None else [StatePart(SCALER_NAME, scaler, may_lack=True)]),
    ]


def optimizer_parts(optimizers: Sequence[Any]) -> list[OptimizerPart]:
    """Returns the parts of optimizers with whole states."""
    return [
        OptimizerPart(number(OPTIMIZER_NAME, index, ".bin"), optimizer)
        for index, optimizer in enumerate(optimizers)
    ]


def custom_part(index: int, owner: object, distribute: Distribute | None = None) -> StatePart:
    """Returns the part of an object of the user, by its index.

    Args:
        distribute: Function for states with DTensors, which are then gathered on all ranks, or None.
    """
    return StatePart(f"custom_checkpoint_{index}.pkl", owner, distribute=distribute)


def read_device(map_location: Any) -> Any:
    """Returns the device of `map_location`, which may be "on_device" or None."""
    if map_location == "on_device":
        return PartialState().device
    if map_location is None:
        return "cpu"
    try:
        torch.device(map_location)
    except (RuntimeError, TypeError) as error:
        fix = 'pass None, "cpu", "on_device" or a device'
        raise wrong_value("map_location", map_location, "it is not a device", fix, TypeError) from error
    return map_location
