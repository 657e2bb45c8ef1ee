"""Batches with a list of samples, such as images of different sizes next to a tensor of their labels.

A list of tensors may be a list of samples, or of several inputs that have one row for each sample. Joining
and cutting batches treats samples that `hide_samples` has wrapped as objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate.nested import honor_mapping, honor_type


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample of a list, which is an object for functions that cut and join tensors."""

    value: Any


def listed_samples(batch: object, nominal: int | None = None) -> int | None:
    """Returns the number of samples of a batch that has a list of samples first, and None for other batches.

    All parts of the batch have this length, and its tensors do not have one number of rows. If they have, the
    length is the declared batch size, and another part is a list of plain values.

    Args:
        nominal: The declared batch size, or None.
    """
    parts = list(batch.values()) if isinstance(batch, Mapping) else batch
    if not isinstance(parts, (list, tuple)) or len(parts) < 2 or not _is_list_of_nested(parts[0]):
        return None
    num_samples = len(parts[0])
    if {_length(part) for part in parts} - {None} != {num_samples}:
        return None
    rows = [tensor.size(0) for tensor in _tensors(parts) if tensor.ndim]
    if not rows or (nominal is not None and rows[0] == nominal != num_samples):
        return None
    if len(set(rows)) > 1:
        return num_samples
    has_values = any(isinstance(part, (list, tuple)) and not _is_list_of_nested(part) for part in parts)
    return num_samples if has_values and num_samples == nominal != rows[0] else None


def hide_samples(batches: Sequence[Any], nominal: int | None = None) -> list[Any] | None:
    """Returns batches with wrapped samples if any of them has a list of samples, and None otherwise.

    A batch that occurs several times is the same object in the result, too.
    """
    if all(listed_samples(batch, nominal) is None for batch in batches):
        return None
    hidden = {id(batch): _map_lists(batch, wraps=True) for batch in batches}
    return [hidden[id(batch)] for batch in batches]


def show_samples(batch: Any) -> Any:
    """Returns a batch of `hide_samples` with its samples."""
    return _map_lists(batch, wraps=False)


def _map_lists(batch: Any, *, wraps: bool) -> Any:
    def convert(part: Any) -> Any:
        if wraps:
            return honor_type(part, map(Sample, part)) if _is_list_of_nested(part) else part
        is_hidden = isinstance(part, (list, tuple)) and any(isinstance(item, Sample) for item in part)
        return honor_type(part, (item.value for item in part)) if is_hidden else part

    if isinstance(batch, Mapping):
        return honor_mapping(batch, {key: convert(part) for key, part in batch.items()})
    return honor_type(batch, map(convert, batch))


def _is_list_of_nested(part: object) -> bool:
    return (
        isinstance(part, (list, tuple))
        and len(part) > 0
        and all(isinstance(item, (torch.Tensor, Mapping, list, tuple)) for item in part)
    )


def _length(part: object) -> int | None:
    if isinstance(part, torch.Tensor):
        return part.size(0) if part.ndim else None
    return len(part) if isinstance(part, (list, tuple)) else None


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)
