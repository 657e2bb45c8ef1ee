"""Bring all objects of a run to states that were read, or none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from accelerate.base import AccelerateError, CheckpointError, describe, like

Apply = Callable[[], None]
"""Changes an object."""

Settle = Callable[[str], None]
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
        apply: does so.
        name: what messages call the object.
        keep: takes what is needed of the state that the object has, and returns what brings it back, which
            raises where it cannot; None: it cannot be brought back.
        stage: when it comes.
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


def apply_all(changes: Sequence[Change], settle: Settle) -> None:
    """Change all objects on all ranks, or bring back what was changed; called on all ranks.

    Args:
        changes: in the order in which those of one stage come.
        settle: agrees between the ranks.

    Raises:
        CheckpointError: a change failed on any rank; on all ranks, and says what did not come back.
    """
    flat = [each for change in changes for each in (*change.first, change)]
    undo: list[tuple[str, Apply]] = []
    for stage in Stage:
        failure = _apply([change for change in flat if change.stage == stage], undo)
        try:
            settle("" if failure is None else describe(failure))
        except AccelerateError as error:
            lost = _bring_back(undo)
            if not isinstance(error, CheckpointError):  # a rank is gone: nothing more can be agreed upon
                raise
            explained = CheckpointError(_explain(error, lost, settle))
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
        except Exception as error:  # the others shall come back, and it is said of this one
            lost.append(f"{name} ({describe(error)})")
    return lost


def _explain(error: CheckpointError, lost: Sequence[str], settle: Settle) -> str:
    try:
        settle(", ".join(reversed(lost)))
    except CheckpointError as said:
        return (
            f"A checkpoint was not loaded: {error}. All is as it was before, but for {said}. Load another "
            "one, or start again."
        )
    return f"A checkpoint was not loaded, and nothing was changed: {error}"
