"""One process's share of inputs that every process holds: plain slicing, nothing travels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import torch

from accelerate.base import ConfigurationError, wrong_value


class Share(NamedTuple):
    """Which elements one process takes: `start` up to `end`, then `padding` times the last one it has."""

    start: int
    end: int
    padding: int


def plan_share(length: int, size: int, rank: int, apply_padding: bool) -> Share:
    """Return which of `length` elements a process takes; the first ones take one more if need be.

    Args:
        length: number of elements.
        size: number of processes.
        rank: index of the process.
        apply_padding: whether short shares are filled up to the length of the longest.
    """
    each, extra = divmod(length, size)
    start = rank * each + min(rank, extra)
    end = start + each + (rank < extra)
    longest = each + (extra > 0)
    return Share(start, end, longest - (end - start) if apply_padding else 0)


def share_of(inputs: Any, size: int, rank: int, apply_padding: bool = False) -> Any:
    """Return one process's share of some inputs, in a container of the same kind.

    Args:
        inputs: a list, tuple, tensor, array or dataset, divided along its first dimension; or a mapping of
            such, all of one length, each of which is divided.
        size: number of processes.
        rank: index of the process.
        apply_padding: whether short shares are filled with their last element, or the last of all.

    Raises:
        ConfigurationError: the inputs have no length, or those of a mapping differ in it.
    """
    if isinstance(inputs, Mapping):
        return _share_mapping(inputs, size, rank, apply_padding)
    length = _length(inputs)
    share = plan_share(length, size, rank, apply_padding)
    taken = _slice_of(inputs)(share.start, share.end)
    if share.padding == 0:
        return taken
    last = share.end - 1 if share.end > share.start else length - 1
    return _join_of(inputs)(taken, _slice_of(inputs)(last, last + 1), share)


def _share_mapping(inputs: Mapping[Any, Any], size: int, rank: int, apply_padding: bool) -> Any:
    lengths = {name: _mapping_length(value) for name, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise wrong_value(
            "inputs",
            lengths,
            "the entries of a dictionary that is split must be of one length",
            "make them equally long, or split them one by one",
        )
    shares = {name: share_of(value, size, rank, apply_padding) for name, value in inputs.items()}
    if type(inputs) is dict or not isinstance(inputs, MutableMapping):
        return shares
    result = copy.copy(inputs)  # a subclass with what it carries besides its entries
    result.update(shares)
    return result


def _mapping_length(value: Any) -> int:
    if not isinstance(value, Mapping):
        return _length(value)
    return next((_mapping_length(entry) for entry in value.values()), 0)


def _length(inputs: Any) -> int:
    try:
        return len(inputs)
    except TypeError:
        raise ConfigurationError(
            f"A {type(inputs).__name__} cannot be split between processes: it has no length. Pass a list, "
            "tuple, dictionary, tensor, array or dataset; turn a generator into a list first."
        ) from None


def _is_dataset(inputs: Any) -> bool:
    return type(inputs).__module__.partition(".")[0] == "datasets" and hasattr(inputs, "select")


def _slice_of(inputs: Any) -> Callable[[int, int], Any]:
    if _is_dataset(inputs):
        return lambda start, end: inputs.select(range(start, end))
    return lambda start, end: inputs[start:end]


def _join_of(inputs: Any) -> Callable[[Any, Any, Share], Any]:
    """How a share and the element that fills it up become one, by the kind of the inputs."""
    if isinstance(inputs, torch.Tensor):
        return lambda taken, last, share: torch.cat([taken, *[last] * share.padding])
    if isinstance(inputs, np.ndarray):
        return lambda taken, last, share: np.concatenate([taken, *[last] * share.padding])
    if _is_dataset(inputs):
        return lambda taken, last, share: _padded_dataset(inputs, share)
    if isinstance(inputs, (tuple, str)):
        return lambda taken, last, share: taken + last * share.padding
    return lambda taken, last, share: [*taken, *list(last) * share.padding]


def _padded_dataset(inputs: Any, share: Share) -> Any:
    last = share.end - 1 if share.end > share.start else len(inputs) - 1
    return inputs.select([*range(share.start, share.end), *[last] * share.padding])
