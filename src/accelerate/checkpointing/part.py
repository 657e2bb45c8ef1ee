"""Part: one object that is saved and loaded, with its file, and the change that a load makes to it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

import torch

from accelerate.base import AccelerateError, CheckpointError, as_builtin, describe, like
from accelerate.weights import read_torch, write_torch

Apply = Callable[[], None]
"""Changes an object."""

Agree = Callable[[str], None]
"""Takes what went wrong on this rank, or an empty text; raises `CheckpointError` if something did on any."""


class Stage(IntEnum):
    """When a change comes: one that may fail before one that cannot be undone."""

    ALONE = 0
    """It needs no other rank, and is undone when another one fails."""
    TOGETHER = 1
    """All ranks take part, and it is undone when another one fails."""
    LAST = 2
    """It is too large to be undone, and was compared with the object before: weights."""


@dataclass(frozen=True)
class Change:
    """Brings an object to a state that was read.

    Attributes:
        keep: takes what is needed of the state that the object has, and returns what brings it back, which
            raises where it cannot; None: it cannot be brought back.
        first: changes that come before, in their own stages.
    """

    apply: Apply
    name: str = ""
    keep: Callable[[], Apply] | None = None
    stage: Stage = Stage.ALONE
    first: tuple[Change, ...] = ()

    def __call__(self) -> None:
        """Do it, without a way back."""
        for change in self.first:
            change()
        self.apply()


def _do_nothing() -> None:
    """The state of something that has none in this checkpoint."""


nothing = Change(_do_nothing, keep=lambda: _do_nothing)
"""For an object that has no state in this checkpoint."""


def apply_all(changes: Sequence[Change], agree: Agree) -> None:
    """Change all objects on all ranks, or bring back what was changed; called on all ranks.

    Raises:
        CheckpointError: a change failed on any rank; on all ranks, and says what did not come back.
    """
    flat = [each for change in changes for each in (*change.first, change)]
    undo: list[tuple[str, Apply]] = []
    for stage in Stage:
        failure = _apply([change for change in flat if change.stage == stage], undo)
        try:
            agree("" if failure is None else describe(failure))
        except AccelerateError as error:
            lost = _bring_back(undo)
            if not isinstance(error, CheckpointError):  # a rank is gone: nothing more can be agreed upon
                raise
            explained = CheckpointError(_explain(error, lost, agree))
            raise explained if failure is None else like(explained, failure) from failure


def _apply(changes: Iterable[Change], undo: list[tuple[str, Apply]]) -> Exception | None:
    for change in changes:
        try:
            undo.append((change.name, _has_no_way_back if change.keep is None else change.keep()))
            change.apply()
        except Exception as error:  # of any kind: the other ranks have to know
            return error
    return None


def _has_no_way_back() -> None:
    raise CheckpointError("it has the loaded state, or a part of it")


def _bring_back(undo: Sequence[tuple[str, Apply]]) -> list[str]:
    """Undo changes, the last one first; return what did not come back."""
    lost = []
    for name, bring_back in reversed(undo):
        try:
            bring_back()
        except Exception as error:  # the others are restored, and the message names this one
            lost.append(f"{name} ({describe(error)})")
    return lost


def _explain(error: CheckpointError, lost: Sequence[str], agree: Agree) -> str:
    try:
        agree(", ".join(reversed(lost)))
    except CheckpointError as unrestored:
        return (
            f"A checkpoint was not loaded: {error}. All is as it was before, but for {unrestored}. Load "
            "another one, or start again."
        )
    return f"A checkpoint was not loaded, and nothing was changed: {error}"


@dataclass(frozen=True)
class Load:
    """How a checkpoint is read.

    Attributes:
        names: its files; others in the folder are none of its own. None where nothing tells.
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
    confirm: Callable[[], None] = _do_nothing

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
        """Return the path of a file."""
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
    """One thing that is saved and loaded."""

    def collect(self, leads: bool = True) -> list[Payload]:
        """Take the content of the files that this process writes, without copying it.

        Args:
            leads: whether this process writes what all processes have in common.
        """
        ...

    def read(self, options: Load) -> Change:
        """Read its files; what is returned brings the object to that state."""
        ...


class Stateful(Protocol):
    """What has a state that can be taken and given back."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...
