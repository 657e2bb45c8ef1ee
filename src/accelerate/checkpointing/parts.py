"""The kinds of parts that a run has: models, states, random generators, loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import (
    FSDP_MODEL_NAME,
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    CheckpointError,
)
from accelerate.checkpointing import generators
from accelerate.checkpointing.fit import (
    check_dtypes,
    check_optimizer,
    check_weights,
    loads_its_own_way,
    refuse_names,
)
from accelerate.checkpointing.kept import (
    inner_optimizers,
    keep_extra,
    keep_generators,
    keep_loader,
    keep_object,
    keep_optimizer,
    keep_weights,
)
from accelerate.checkpointing.part import Change, Load, Payload, Stage, Stateful, nothing
from accelerate.data_loader import resume
from accelerate.logging import get_logger
from accelerate.weights import (
    drop_shared,
    missing_names,
    read_safetensors,
    read_torch,
    refused_globals,
    write_torch,
    write_whole_tensors,
)

logger = get_logger(__name__)

CUSTOM_NAME = "custom_checkpoint"
LOADER_NAME = "dl_state_dict"
"""Where other software keeps the position of a loader."""

Fill = Callable[[nn.Module, Mapping[str, Tensor]], None]


@dataclass(frozen=True)
class StatePart:
    """An object with `state_dict` and `load_state_dict`: optimizer, scheduler, scaler, or the user's own.

    Attributes:
        on_device: whether its state is read to the device of the run.
        may_lack: whether a checkpoint of other software may be without it; the object stays as it is then.
    """

    name: str
    owner: Stateful
    on_device: bool = False
    is_optimizer: bool = False
    write: Callable[[Any, Path], None] = write_torch
    may_lack: bool = False

    def collect(self, leads: bool = True) -> list[Payload]:
        return [Payload(self.name, self.owner.state_dict(), self.write)] if leads else []

    def read(self, options: Load) -> Change:
        if self.may_lack and options.is_foreign and not options.has(self.name):
            logger.warning(
                f"{options.folder} holds no {self.name}: this {type(self.owner).__name__} starts anew."
            )
            return nothing
        state = options.read(self.name, options.device if self.on_device else "cpu")
        if isinstance(self.owner, nn.Module) and not loads_its_own_way(self.owner):
            own = self.owner.state_dict(keep_vars=True)
            check_weights(own, state, options.folder / self.name, self.owner, strict=True)
        keep = keep_optimizer if self._optimizers() else keep_object
        stage = Stage.TOGETHER if getattr(self.owner, "needs_all_ranks", False) else Stage.ALONE
        name = f"{self._kind} ({self.name})"
        return Change(partial(self._apply, state, options), name, partial(keep, self.owner), stage)

    @property
    def _kind(self) -> str:
        return str(getattr(self.owner, "kind", type(self.owner).__name__))

    def _apply(self, state: Any, options: Load) -> None:
        with options.fitting(self.name, self._kind):
            self.owner.load_state_dict(state)
            for optimizer in self._optimizers():
                check_optimizer(optimizer)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return inner_optimizers(self.owner) if self.is_optimizer else []


def write_custom(content: Any, path: Path) -> None:
    """Write the state of an object of the user's own, and say so if `load_state` would refuse to read it."""
    write_torch(content, path)
    if strange := refused_globals(path):
        logger.warning_once(
            f"The state of a registered object ({path.name}) holds {', '.join(strange)}. It is saved, but "
            'only load_state(load_kwargs={"weights_only": False}) will read it: let `state_dict` return '
            "tensors, numbers, text and plain containers."
        )


@dataclass(frozen=True)
class ModelPart:
    """The weights of one model.

    Attributes:
        state: its weights by name; None where only loading is meant.
        model: the module that is filled; None where only saving is meant.
        load: brings weights into a prepared model, with what fills a module; None fills the model itself.
        live: returns what the prepared model has by name; None asks the model itself.
    """

    index: int
    state: Mapping[str, Tensor] | None = None
    model: nn.Module | None = None
    safe: bool = True
    load: Callable[[nn.Module, Mapping[str, Tensor], Fill], None] | None = None
    live: Callable[[], Mapping[str, Any]] | None = None

    def collect(self, leads: bool = True) -> list[Payload]:
        if self.state is None or not leads:
            return []
        if not self.safe:
            return [Payload(number(MODEL_NAME, self.index, ".bin"), dict(self.state))]
        kept, aliases = drop_shared(self.state)
        return [
            Payload(
                number(SAFE_MODEL_NAME, self.index, ".safetensors"),
                kept,
                lambda content, path: write_whole_tensors(content, aliases, path),
            )
        ]

    def read(self, options: Load) -> Change:
        if self.model is None:
            return nothing
        safe, other = (
            number(SAFE_MODEL_NAME, self.index, ".safetensors"),
            number(MODEL_NAME, self.index, ".bin"),
        )
        foreign = number(FSDP_MODEL_NAME, self.index, ".bin")  # of other software, as is `other` mostly
        name = next((each for each in (safe, other, foreign) if options.has(each)), safe)
        path = options.existing(name)
        if name != safe:
            state = read_torch(path, options.device, **options.reading)
        else:
            state = read_safetensors(path, options.device)
        own = self.model.state_dict(keep_vars=True) if self.live is None else self.live()
        return weights_change(
            partial(self._apply, self.model, state, options, name), self.model, own, state, path, options
        )

    def _apply(self, model: nn.Module, state: Any, options: Load, name: str) -> None:
        def fill_module(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
            fill(module, weights, options.folder / name, options.model)

        with options.fitting(name, type(model).__name__):
            if self.load is None:
                fill_module(model, state)
            else:
                self.load(model, state, fill_module)


def weights_change(
    apply: Callable[[], None],
    model: nn.Module,
    own: Mapping[str, Any],
    state: Mapping[str, Any],
    path: Path,
    options: Load,
) -> Change:
    """Compare weights with a model, and return what fills it."""
    keep = None
    try:
        check_weights(own, state, path, model, strict=options.model.get("strict", True))
    except CheckpointError:
        if not isinstance(state, Mapping) or not loads_its_own_way(model):
            raise
        check_dtypes(own, state, path, model)  # torch only warns of it, and once in a process
        keep = partial(keep_weights, model)  # its own code may know the names, or fail
    name = f"{type(model).__name__} ({path.name})"
    return Change(apply, name, keep, Stage.LAST, first=extra_changes(model, state, options, name))


def extra_changes(model: nn.Module, state: Mapping[str, Any], options: Load, name: str) -> tuple[Change, ...]:
    """Return what brings what modules keep beside their tensors to a state, before tensors are changed."""
    modules = {path: module for path, module in model.named_modules() if _has_extra(module)}
    pairs = [(modules[path], value) for key, value in state.items() if (path := _path_of(key)) in modules]
    if not pairs:
        return ()

    def apply() -> None:
        for module, value in pairs:
            with options.fitting(name, type(module).__name__):
                module.set_extra_state(value)

    return (Change(apply, name, partial(keep_extra, [module for module, _ in pairs])),)


def _has_extra(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def _path_of(key: str) -> str | None:
    """Return the module to which an entry belongs that is no tensor."""
    path, _, name = key.rpartition(".")
    return path if name == "_extra_state" else None


def fill(model: nn.Module, state: Mapping[str, Tensor], path: Path, options: Mapping[str, Any]) -> None:
    """Load weights into a module, where names that share a tensor need be there once.

    Args:
        options: arguments of `load_state_dict`; `strict` is True unless given.
    """
    outcome = model.load_state_dict(state, **{**options, "strict": False})
    if options.get("strict", True):
        missing = missing_names(model, state) if getattr(outcome, "missing_keys", []) else []
        refuse_names(path, model, missing, list(getattr(outcome, "unexpected_keys", [])))


@dataclass(frozen=True)
class GeneratorsPart:
    """The random generators of one process.

    Attributes:
        step: `Accelerator.step`, which is in the same file.
    """

    rank: int
    step: int = 0

    @property
    def name(self) -> str:
        """The file of this process."""
        return f"{RNG_STATE_NAME}_{self.rank}.pkl"

    def collect(self, leads: bool = True) -> list[Payload]:
        return [Payload(self.name, {"step": self.step, **generators.capture()})]

    def read(self, options: Load) -> Change:
        states = options.read(self.name)
        with options.fitting(self.name, "process"):
            generators.check(states)
        return self.change(partial(generators.restore, states))

    def change(self, apply: Callable[[], None]) -> Change:
        """Return a change of the generators, which comes last: others may draw from them."""
        return Change(apply, f"random generators ({self.name})", keep_generators, Stage.LAST)


@dataclass(frozen=True)
class LoaderPart:
    """The order and position of one prepared loader, and the state of an iterable dataset on each process.

    Attributes:
        resized: whether another number of processes saved it.
    """

    index: int
    loader: Any
    rank: int = 0
    resized: bool = False

    def collect(self, leads: bool = True) -> list[Payload]:
        state = resume.capture(self.loader) if leads else None
        stream = resume.capture_stream(self.loader)
        return [
            *([] if state is None else [Payload(sampler_file(self.index), state)]),
            *([Payload(stream_file(self.index, self.rank), stream)] if stream else []),
        ]

    def read(self, options: Load) -> Change:
        name = sampler_file(self.index)
        if not resume.is_tracked(self.loader):
            return nothing
        if not (self._is_known(options) if options.is_foreign else options.has(name)):
            return nothing
        streams = (stream_file(self.index, rank) for rank in ([] if self.resized else [self.rank]) + [0])
        stream: Any = next((options.read(each) for each in streams if options.has(each)), {})
        state = options.read(name)
        with options.fitting(name, type(self.loader).__name__):
            _check_position(state, stream)
        return Change(
            partial(self._apply, state, stream, options),
            f"{type(self.loader).__name__} ({name})",
            partial(keep_loader, self.loader),
        )

    def _is_known(self, options: Load) -> bool:
        """Whether what other software says of order and position can be taken over; a line says if not."""
        names = [sampler_file(self.index), number(LOADER_NAME, self.index, ".bin")]
        name = next((name for name in names if options.has(name)), None)
        if name is None:
            return False
        try:
            if resume.is_state(options.read(name)):
                return True
        except CheckpointError as error:
            logger.debug(f"{error}")
        logger.warning(
            f"{options.folder / name} stores the order and position of a loader in an unknown format: "
            "the loader begins a new epoch. Skip the batches that were used: skip_first_batches(loader, n)."
        )
        return False

    def _apply(self, state: Any, stream: Any, options: Load) -> None:
        with options.fitting(sampler_file(self.index), type(self.loader).__name__):
            resume.restore(self.loader, state, stream.get("dataset"))
            if "torchdata" in stream and state["seen"] and not state["is_over"]:
                self.loader.go_on_by_torchdata(stream)


def _check_position(state: Any, stream: Any) -> None:
    """Refuse what a loader would notice when its next pass begins."""
    if not resume.is_state(state) or not isinstance(stream, Mapping):
        raise CheckpointError("this is no position of a loader")
    start = state.get("start")
    if start is not None:
        generators.try_on_cpu(start["global"])
    drawn = [*state["generators"], *([] if start is None else start["generators"])]
    if not all(isinstance(each, Tensor) and each.dtype == torch.uint8 for each in drawn):
        raise CheckpointError("it holds states of random generators that are none")


def number(stem: str, index: int, suffix: str) -> str:
    """Return the file name of the object at a place: the first one has no number."""
    return f"{stem}{suffix}" if index == 0 else f"{stem}_{index}{suffix}"


def state_parts(
    optimizers: Sequence[Any], schedulers: Sequence[Any], scaler: Any, custom: Sequence[Any] = ()
) -> list[StatePart]:
    """Return the parts of everything that has a `state_dict`, models and loaders left out."""
    return [
        *(
            StatePart(number(OPTIMIZER_NAME, index, ".bin"), each, on_device=True, is_optimizer=True)
            for index, each in enumerate(optimizers)
        ),
        *(StatePart(number(SCHEDULER_NAME, index, ".bin"), each) for index, each in enumerate(schedulers)),
        *([] if scaler is None else [StatePart(SCALER_NAME, scaler, may_lack=True)]),
        *(custom_part(index, each) for index, each in enumerate(custom)),
    ]


def custom_part(index: int, owner: Stateful) -> StatePart:
    """Return the part of an object of the user's own, by its place among such objects."""
    return StatePart(f"{CUSTOM_NAME}_{index}.pkl", owner, write=write_custom)


def sampler_file(index: int) -> str:
    """Return the file name of the order and position of a loader."""
    return number(SAMPLER_NAME, index, ".bin")


def stream_file(index: int, rank: int) -> str:
    """Return the file name of the state of a loader's dataset, as one process reads it."""
    return f"stream_{index}_{rank}.bin"
