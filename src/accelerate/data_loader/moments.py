"""What a loader said of a batch when it gave it, kept for batches that are used later than they are read."""

from __future__ import annotations

from typing import Any

MOMENT = ("end_of_dataloader", "remainder", "valid_counts", "batch_rows", "dl_state_dict", "place")
"""Attributes that tell of the batch just yielded."""

Moment = dict[str, Any]


def note_moment(loader: Any) -> Moment:
    """Return what `loader` says of the batch it has just given; nothing for None.

    Args:
        loader: a prepared loader that is being read, or None.
    """
    return {name: getattr(loader, name) for name in MOMENT if hasattr(loader, name)}


def recall_moment(loader: Any, moment: Moment) -> None:
    """Let `loader` say what it said at a moment.

    Args:
        loader: the prepared loader that the moment is of, or None.
        moment: what `note_moment` returned.
    """
    for name, value in moment.items():
        setattr(loader, name, value)
