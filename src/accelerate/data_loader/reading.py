"""Read one batch ahead, place each batch, and say what the last one holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from accelerate.data_loader.validity import Counts, Fillers
from accelerate.nested import find_device, ignorant_find_batch_size, send_to_device

_END = object()


def look_ahead(
    loader: Any, source: Iterator[Any], fillers: Fillers, number: int, place: Callable[[Any], Any] | None
) -> Iterator[Any]:
    """Yield batches while one more is already read, so that the last one is known to be the last.

    Args:
        loader: The prepared loader, told of the end and of fillers.
        source: The batches.
        fillers: Number of the batch -> real samples on each rank; may grow while `source` is read.
        number: Number of the first batch.
        place: What brings a batch to its device, or None where it stays.
    """
    stateful = loader.use_stateful_dataloader
    current = next(source, _END)
    while current is not _END:
        if stateful:
            loader._update_state_dict()
        upcoming = next(source, _END)
        if fillers:
            loader.note_counts(weigh(fillers.get(number), loader, current), current)
        if upcoming is _END:
            if stateful:
                loader._update_state_dict()
            loader.end_of_dataloader = True
            loader.remainder = last_remainder(loader)
        yield current if place is None else place(current)
        current = upcoming
        number += 1


def choose_placement(device: Any, non_blocking: bool) -> Callable[[Any], Any] | None:
    """What brings each batch of a pass to `device`; decided once for the pass.

    Args:
        device: Where batches go; None leaves them.
        non_blocking: Don't wait for copies from pinned memory.
    """
    if device is None:
        return None
    if torch.device(device).type == "cpu":
        return _CpuPlacement()
    return lambda batch: send_to_device(batch, device, non_blocking=non_blocking)


class _CpuPlacement:
    """Batches come from CPU memory as a rule: the first one is looked at, the rest of the pass follows it."""

    def __init__(self) -> None:
        self.elsewhere: bool | None = None

    def __call__(self, batch: Any) -> Any:
        if self.elsewhere is None:
            found = find_device(batch)
            self.elsewhere = found is not None and found.type != "cpu"
        return send_to_device(batch, "cpu") if self.elsewhere else batch


def weigh(counts: Counts | None, loader: Any, batch: Any) -> Counts | None:
    """Turn the counts of a batch into samples, where they count whole batches."""
    if counts is None or not loader._counts_batches:
        return counts
    size = ignorant_find_batch_size(batch) or 1
    return tuple(count * size for count in counts)


def last_remainder(loader: Any) -> int:
    """How many samples of the last global batch are real; 0: nothing is to be cut, -1: nobody knows."""
    if loader._drop_last:
        return -1
    if loader.valid_counts is not None:
        return sum(loader.valid_counts)
    whole, length = loader.total_batch_size, length_of(loader.get_sampler())
    if length is None:
        length = length_of(loader.dataset)
    return -1 if not whole or length is None else length % whole


def length_of(sized: Any) -> int | None:
    """The length of something, None where it has none."""
    if not hasattr(sized, "__len__"):
        return None
    try:
        return len(sized)
    except (TypeError, NotImplementedError):  # a wrapper around something without a length
        return None
