"""What a loader said of a batch when it gave it, kept for batches that are used later than they are read."""

from __future__ import annotations

from typing import Any

MOMENT = ("end_of_dataloader", "remainder", "valid_counts", "batch_rows", "dl_state_dict", "place")
"""Attributes that tell of the batch just yielded."""

_IS_OVER = "is_over"  # of the position: the attribute of that name of a loader says something else

Moment = dict[str, Any]


def note_moment(loader: Any) -> Moment:
    """Return what `loader` says of the batch it has just given; nothing for None.

    Args:
        loader: a prepared loader that is being read, or None.
    """
    moment = {name: getattr(loader, name) for name in MOMENT if hasattr(loader, name)}
    position = getattr(loader, "position", None)
    return moment if position is None else {**moment, _IS_OVER: position.is_over}


def recall_moment(loader: Any, moment: Moment) -> None:
    """Let `loader` say what it said at a moment.

    Args:
        loader: the prepared loader that the moment is of, or None.
        moment: what `note_moment` returned.
    """
    for name, value in moment.items():
        setattr(loader.position if name == _IS_OVER else loader, name, value)
