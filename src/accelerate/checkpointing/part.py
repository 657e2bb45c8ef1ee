"""Part: one object that is saved and loaded, and the name of its file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from accelerate.base import AccelerateError, CheckpointError, as_builtin, describe, like
from accelerate.checkpointing.changes import Change
from accelerate.weights import read_torch, write_torch


def nothing() -> None:
    """The state of something that has none in this checkpoint."""


@dataclass(frozen=True)
class Load:
    """How a checkpoint is read.

    Attributes:
        folder: the checkpoint.
        names: its files; others in the folder are none of its own. None where nothing tells.
        wanted: names that were asked for.
        device: where weights and states of optimizers are read to.
        reading: arguments of `torch.load`.
        model: arguments of `load_state_dict` of models.
        confirm: raises a CheckpointError when a save has replaced the folder; for what reads it only while
            objects are changed.
    """

    folder: Path
    device: str | torch.device = "cpu"
    reading: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    names: Collection[str] | None = None
    wanted: set[str] = field(default_factory=set)
    confirm: Callable[[], None] = nothing

    @property
    def is_foreign(self) -> bool:
        """Whether nothing tells which files the checkpoint has: other software wrote it."""
        return self.names is None

    def has(self, name: str) -> bool:
        """Whether a file is part of the checkpoint."""
        self.wanted.add(name)
        return (self.names is None or name in self.names) and (self.folder / name).is_file()

    def read(self, name: str, device: str | torch.device = "cpu") -> Any:
        """Read one of torch's files."""
        return read_torch(self.existing(name), device, **self.reading)

    def existing(self, name: str) -> Path:
        """Return the path of a file.

        Raises:
            CheckpointError: it is not there.
        """
        if not self.has(name):
            error = CheckpointError(
                f"{self.folder} holds no {name}. It was saved by a run that had prepared other objects: "
                "prepare the same ones in the same order, or choose another checkpoint."
            )
            raise as_builtin(error, FileNotFoundError)
        return self.folder / name

    @contextmanager
    def fitting(self, name: str, kind: str) -> Iterator[None]:
        """Name the file, and what kind of object it does not fit, when it does not.

        Raises:
            CheckpointError: whatever was raised inside, but for errors that name the file themselves, and
                those of a wrong configuration.
        """
        try:
            yield
        except CheckpointError as error:
            if name in str(error):
                raise
            text = f"{self.folder / name} does not fit this {kind}: {error}"
            raise like(CheckpointError(text), error) from error
        except AccelerateError:
            raise
        except Exception as error:  # an object of the user's own may raise anything
            text = f"{self.folder / name} does not fit this {kind}: {describe(error)}"
            raise like(CheckpointError(text), error) from error


@dataclass(frozen=True)
class Payload:
    """The content of one file, taken from a live object.

    Attributes:
        name: the file.
        content: nested lists, tuples and dictionaries of tensors and other values.
        write: writes such content to a path; returns what `finish` needs to know of it.
        finish: for files that several processes write to one folder: takes that folder and what `write` has
            returned on each process, when all are written, and adds what they have in common.
    """

    name: str
    content: Any
    write: Callable[[Any, Path], Any] = write_torch
    finish: Callable[[Path, Sequence[Any]], None] | None = None


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

    def read(self, options: Load) -> Change:
        """Read its files; what is returned brings the object to that state.

        Raises:
            CheckpointError: a file is missing or broken, or is known not to fit the object.
        """
        ...


class Stateful(Protocol):
    """What has a state that can be taken and given back."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...
