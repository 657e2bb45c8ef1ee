"""Know the last batch before it is given, place each batch, and say what the last one holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch

from accelerate.data_loader.validity import Counts, Fillers
from accelerate.devices import of_device
from accelerate.display import track
from accelerate.nested import find_device, ignorant_find_batch_size, send_to_device

_END = object()


def give(
    loader: Any,
    batches: Iterator[tuple[Any, bool]],
    fillers: Fillers,
    number: int,
    place: Callable[[Any], Any] | None,
) -> Iterator[Any]:
    """Yield batches, and let the loader say of each what it knows.

    Args:
        loader: The prepared loader, told of the end and of fillers.
        batches: The batches, each with whether it is the last one.
        fillers: Number of the batch -> real samples on each rank; may grow while batches are read.
        number: Number of the first batch.
        place: What brings a batch to its device, or None where it stays.
    """
    position, take = loader.position, loader.batches_in_round
    for current, is_last in batches:
        if fillers or loader.deals_ready_batches or loader.shares_batches:
            loader.note_counts(weigh(fillers.get(number), loader, current), current)
        if is_last:
            loader.end_of_dataloader = position.is_over = True
            loader.remainder = last_remainder(loader)
        position.seen += 1
        position.consumed += take
        yield current if place is None else place(current)
        number += 1


def mark_last(loader: Any, source: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
    """Give each batch with whether it is the last one, which is known when one more was asked for.

    Args:
        loader: The prepared loader; the states it keeps are taken before one more is read.
        source: The batches.
    """
    note = loader.choose_note()
    current = next(source, _END)
    while current is not _END:
        noted = note() if note else None
        upcoming = next(source, _END)
        if note:
            loader.keep_note(noted if upcoming is not _END else note())
        yield current, upcoming is _END
        current = upcoming


class IndexAhead:
    """The indices of the batches, drawn one ahead: whether there is one more is known without reading it.

    Nothing is read before it is needed, so random numbers that a dataset draws come in the order in which
    training takes the batches.

    Args:
        indices: what torch's iterator reads by.
    """

    def __init__(self, indices: Iterator[Any]) -> None:
        self._indices = indices
        self._upcoming = next(indices, _END)

    def __iter__(self) -> IndexAhead:
        return self

    def __next__(self) -> Any:
        current = self._upcoming
        if current is _END:
            raise StopIteration
        self._upcoming = next(self._indices, _END)
        return current

    def mark_last(self, source: Iterator[Any]) -> Iterator[tuple[Any, bool]]:
        """Give each batch with whether it is the last one.

        Args:
            source: the batches that are read by these indices.
        """
        return ((batch, self._upcoming is _END) for batch in source)


def read_past(source: Iterator[Any], count: int, kept: int = 0) -> Iterator[Any]:
    """Read batches and throw them away, for data that can only be read in order; shows how far it is.

    Args:
        source: the batches.
        count: how many.
        kept: how many of them, at the beginning, are given on all the same.
    """
    yield from islice(source, kept)
    message = (
        f"{count} batches of an iterable dataset are read and thrown away, to go on where the run was. A "
        "dataset with `state_dict` and `load_state_dict` goes on at once."
    )
    for _ in track(range(count - kept), "Skipping batches", message):
        if next(source, _END) is _END:
            return
    yield from source


def choose_placement(device: Any, non_blocking: bool) -> Callable[[Any], Any] | None:
    """What brings each batch of a pass to `device`; decided once for the pass.

    Args:
        device: Where batches go; None leaves them.
        non_blocking: Don't wait for copies from pinned memory.
    """
    if device is None:
        return None
    if of_device(torch.device(device)).is_host:
        return _CpuPlacement()
    return lambda batch: send_to_device(batch, device, non_blocking=non_blocking)


class _CpuPlacement:
    """Batches come from CPU memory as a rule: the first one is looked at, the rest of the pass follows it."""

    def __init__(self) -> None:
        self.elsewhere: bool | None = None

    def __call__(self, batch: Any) -> Any:
        if self.elsewhere is None:
            found = find_device(batch)
            self.elsewhere = found is not None and not of_device(found).is_host
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
