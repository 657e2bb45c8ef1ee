"""Part: one thing that is saved and loaded, with the file it lies in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from accelerate.base.constants import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)
from accelerate.base.errors import CheckpointError
from accelerate.base.text import listed
from accelerate.checkpointing import generators
from accelerate.data_loader import position
from accelerate.weights.files import read_safetensors, read_torch, write_torch, write_whole_tensors
from accelerate.weights.shared import drop_shared, missing_names

CUSTOM_NAME = "custom_checkpoint"


@dataclass(frozen=True)
class Load:
    """How a checkpoint is read.

    Attributes:
        folder: the checkpoint.
        device: where weights and states of optimizers are read to.
        reading: arguments of `torch.load`.
        model: arguments of `load_state_dict` of models.
    """

    folder: Path
    device: str | torch.device = "cpu"
    reading: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    def read(self, name: str, device: str | torch.device = "cpu") -> Any:
        """Read one of torch's files."""
        return read_torch(self.existing(name), device, **self.reading)

    def existing(self, name: str) -> Path:
        """Return the path of a file.

        Raises:
            CheckpointError: it is not there.
        """
        path = self.folder / name
        if not path.is_file():
            raise CheckpointError(
                f"{self.folder} holds no {name}. It was saved by a run that had prepared other objects: "
                "prepare the same ones in the same order, or choose another checkpoint."
            )
        return path


@dataclass(frozen=True)
class Payload:
    """The content of one file, taken from a live object.

    Attributes:
        name: the file.
        content: nested lists, tuples and dictionaries of tensors and other values.
        write: writes such content to a path.
    """

    name: str
    content: Any
    write: Callable[[Any, Path], None] = write_torch


Apply = Callable[[], None]
"""Changes an object to a state that was read."""


class Part(Protocol):
    """One thing that is saved and loaded.

    Attributes:
        everywhere: whether each process has one of its own; otherwise all have the same, and one writes it.
    """

    @property
    def everywhere(self) -> bool: ...
    def collect(self) -> list[Payload]:
        """Take the content of its files, without copying it."""
        ...

    def read(self, options: Load) -> Apply:
        """Read its files; what is returned brings the object to that state.

        Raises:
            CheckpointError: a file is missing or broken.
        """
        ...


class Stateful(Protocol):
    """What has a state that can be taken and given back."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


@dataclass(frozen=True)
class StatePart:
    """An object with `state_dict` and `load_state_dict`: optimizer, scheduler, scaler, or the user's own.

    Attributes:
        name: its file.
        owner: the object.
        on_device: whether its state is read to the device of the run.
    """

    name: str
    owner: Stateful
    on_device: bool = False
    everywhere: bool = False

    def collect(self) -> list[Payload]:
        return [Payload(self.name, self.owner.state_dict())]

    def read(self, options: Load) -> Apply:
        state = options.read(self.name, options.device if self.on_device else "cpu")
        return partial(self._apply, state, options.folder / self.name)

    def _apply(self, state: Any, path: Path) -> None:
        try:
            self.owner.load_state_dict(state)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} does not fit this {type(self.owner).__name__}: {error}") from error


@dataclass(frozen=True)
class ModelPart:
    """The weights of one model.

    Attributes:
        index: its place among the models of the run.
        state: its weights by name; None where only loading is meant.
        model: the module that is filled; None where only saving is meant.
        safe: whether safetensors is written.
    """

    index: int
    state: Mapping[str, Tensor] | None = None
    model: nn.Module | None = None
    safe: bool = True
    everywhere: bool = False

    def collect(self) -> list[Payload]:
        if self.state is None:
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

    def read(self, options: Load) -> Apply:
        if self.model is None:
            return nothing
        safe, other = (
            number(SAFE_MODEL_NAME, self.index, ".safetensors"),
            number(MODEL_NAME, self.index, ".bin"),
        )
        if (options.folder / other).is_file() and not (options.folder / safe).is_file():
            path = options.folder / other
            state = read_torch(path, options.device, **options.reading)
        else:
            path = options.existing(safe)
            state = read_safetensors(path, options.device)
        return partial(fill, self.model, state, path, options.model)


def fill(model: nn.Module, state: dict[str, Tensor], path: Path, options: Mapping[str, Any]) -> None:
    """Load weights into a module, where names that share a tensor need be there once.

    Args:
        model: the module.
        state: tensors by name.
        path: where they come from, for messages.
        options: arguments of `load_state_dict`; `strict` is True unless given.

    Raises:
        CheckpointError: names or shapes do not fit.
    """
    strict = options.get("strict", True)
    try:
        outcome = model.load_state_dict(state, **{**options, "strict": False})
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit this {type(model).__name__}: {error}") from error
    unexpected = list(getattr(outcome, "unexpected_keys", []))
    missing = missing_names(model, state) if getattr(outcome, "missing_keys", []) else []
    if strict and (missing or unexpected):
        lacks = f" It lacks {listed(missing)}." if missing else ""
        strange = f" The model does not have {listed(unexpected)}." if unexpected else ""
        raise CheckpointError(
            f"{path} does not fit this {type(model).__name__}.{lacks}{strange} Prepare the models "
            "in the order in which they were saved; strict=False loads what fits."
        )


@dataclass(frozen=True)
class GeneratorsPart:
    """The random generators of one process.

    Attributes:
        rank: the process.
        step: `Accelerator.step`, which lies in the same file.
    """

    rank: int
    step: int = 0
    everywhere: bool = True

    @property
    def name(self) -> str:
        """The file of this process."""
        return f"{RNG_STATE_NAME}_{self.rank}.pkl"

    def collect(self) -> list[Payload]:
        return [Payload(self.name, {"step": self.step, **generators.capture()})]

    def read(self, options: Load) -> Apply:
        return partial(generators.restore, options.read(self.name))


@dataclass(frozen=True)
class LoaderPart:
    """The order and position of one prepared loader.

    Attributes:
        index: its place among the loaders of the run.
        loader: the loader; a plain torch loader has neither.
        rank: of this process.
        resized: whether another number of processes saved it.
    """

    index: int
    loader: Any
    rank: int = 0
    resized: bool = False
    everywhere: bool = False

    def collect(self) -> list[Payload]:
        state = position.capture(self.loader)
        return [] if state is None else [Payload(sampler_file(self.index), state)]

    def read(self, options: Load) -> Apply:
        name = sampler_file(self.index)
        if not position.is_tracked(self.loader) or not (options.folder / name).is_file():
            return nothing
        streams = (stream_file(self.index, rank) for rank in ([] if self.resized else [self.rank]) + [0])
        found: Any = next((options.read(each) for each in streams if (options.folder / each).is_file()), {})
        return partial(self._apply, options.read(name), found)

    def _apply(self, state: Any, found: Any) -> None:
        position.restore(self.loader, state, found.get("dataset"))
        if "torchdata" in found and not state["is_over"]:
            self.loader.load_state_dict(found["torchdata"])


@dataclass(frozen=True)
class StreamPart:
    """The state of an iterable dataset, as this process reads it; `LoaderPart` reads it back.

    Attributes:
        index: place of its loader among those of the run.
        loader: the loader.
        rank: of this process.
    """

    index: int
    loader: Any
    rank: int
    everywhere: bool = True

    def collect(self) -> list[Payload]:
        state = position.capture_stream(self.loader)
        return [Payload(stream_file(self.index, self.rank), state)] if state else []

    def read(self, options: Load) -> Apply:
        return nothing


def nothing() -> None:
    """The state of something that has none in this checkpoint."""


def number(stem: str, index: int, suffix: str) -> str:
    """Return the file name of the object at a place: the first one has no number."""
    return f"{stem}{suffix}" if index == 0 else f"{stem}_{index}{suffix}"


def state_parts(
    optimizers: Sequence[Any], schedulers: Sequence[Any], scaler: Any, custom: Sequence[Any] = ()
) -> list[StatePart]:
    """Return the parts of everything that has a `state_dict`, models and loaders left out.

    Args:
        optimizers: in the order of preparation, as are the others.
        schedulers: learning-rate schedulers.
        scaler: the gradient scaler; None without one.
        custom: the user's own objects.
    """
    return [
        *(
            StatePart(number(OPTIMIZER_NAME, index, ".bin"), each, on_device=True)
            for index, each in enumerate(optimizers)
        ),
        *(StatePart(number(SCHEDULER_NAME, index, ".bin"), each) for index, each in enumerate(schedulers)),
        *([] if scaler is None else [StatePart(SCALER_NAME, scaler)]),
        *(StatePart(f"{CUSTOM_NAME}_{index}.pkl", each) for index, each in enumerate(custom)),
    ]


def sampler_file(index: int) -> str:
    """Return the file name of the order and position of a loader."""
    return number(SAMPLER_NAME, index, ".bin")


def stream_file(index: int, rank: int) -> str:
    """Return the file name of the state of a loader's dataset, as one process reads it."""
    return f"stream_{index}_{rank}.bin"
