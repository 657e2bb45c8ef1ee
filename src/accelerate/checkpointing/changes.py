"""Changes of objects to the states of a checkpoint.

Each part reads its files, verifies them and returns a `Change`. When all ranks have done so, `apply_all`
applies the changes. An error before that leaves every object as it was, apart from changes by load hooks. An
error after that names the objects that may have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from accelerate.base import CheckpointError, describe, like

Agree = Callable[[str], None]
"""Function that takes the error of this rank, or an empty string.

It raises a `CheckpointError` on all ranks if any rank has an error."""


class Stage(IntEnum):
    """Order of changes, between which the ranks agree that none has failed."""

    LOCAL = 0  # needs no other rank
    COLLECTIVE = 1  # all ranks take part
    GENERATORS = 2  # random number generators, from which the other changes may draw


@dataclass(frozen=True)
class Change:
    """Change of one object to a state that has been read and verified."""

    apply: Callable[[], None]
    name: str  # in error messages
    stage: Stage = Stage.LOCAL


no_change = Change(lambda: None, "")
"""Change for an object without state in the checkpoint."""


def apply_all(changes: Sequence[Change], agree: Agree) -> None:
    """Applies all changes on all ranks.

    Called on all ranks. A change that fails on any rank raises a `CheckpointError` on all, which names the
    objects that this rank has changed.
    """
    changed: list[str] = []
    for stage in Stage:
        failure = _apply([change for change in changes if change.stage == stage], changed)
        try:
            agree("" if failure is None else describe(failure))
        except CheckpointError as error:
            names = ", ".join(name for name in changed if name)
            text = f"A checkpoint was not loaded, and nothing was changed: {error}"
            if names:
                text = (
                    f"A checkpoint was not loaded: {error}. These objects have its state, or a part of it: "
                    f"{names}. The others are unchanged. Load another checkpoint, or start again."
                )
            explained = CheckpointError(text)
            raise explained if failure is None else like(explained, failure) from failure


def _apply(changes: Sequence[Change], changed: list[str]) -> Exception | None:
    """Applies changes until one fails, records their names, and returns the error."""
    for change in changes:
        changed.append(change.name)
        try:
            change.apply()
        except Exception as error:  # of any class, since the other ranks have to know it
            return error
    return None
