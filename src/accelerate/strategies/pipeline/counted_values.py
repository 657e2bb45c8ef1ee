"""Values in a batch of which micro-batches may have different numbers, such as labels that are not ignored.

A mean over them, such as over the tokens of a mask, is that of a batch only if its micro-batches have equally
many. The first such batch may come late in a run, so batches are counted, and the loss of one is checked if
its micro-batches differ more than those of batches that were checked before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerate import torch_private
from accelerate.strategies.axes import whole_losses
from accelerate.strategies.pipeline.microbatches import MicroBatch
from accelerate.wrappers import FunctionMode

IGNORED = (-100, 0)
"""Labels that losses ignore by default, and those that padding has by default."""
GROWTH = 1.5
"""Factor by which the differences of a batch exceed those of checked ones before it is checked."""
SMALLEST = 1e-3
"""Relative difference of the numbers of two micro-batches that is not checked."""
MOST_COMPARED = 4
"""Number of micro-batches whose outputs are kept for a check of their loss."""
MOST_VALUES = 16
"""Number of ignored values that are counted."""
NUM_CHECKS = 4
"""Number of checks of a loss function. The first ones may prove nothing, such as with a head of zeros."""
_COMPARISONS = frozenset({"eq", "ne", "__eq__", "__ne__"})

Key = tuple[int, int | None]
"""Position of a tensor in a batch, and the integer whose other values are counted."""


class _Difference(NamedTuple):
    key: Key
    spread: float
    pair: set[int]


class CountedValues:
    """Numbers of values in the micro-batches of the batches of a model.

    Counted are integers that are not ignored, booleans that are true, and the sums of floating-point tensors
    without negative values, which may be masks or weights.
    """

    def __init__(self) -> None:
        self._ignored = list(IGNORED)
        self._checked: dict[Key, float] = {}
        self._num_checks: dict[Key, int] = {}
        self._covered: list[_Difference] = []  # by the micro-batches of the last batch that are compared

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the integers that losses ignore, or with which masks are computed, inside the block."""
        with FunctionMode(partial(_call_and_note, self._add)):
            yield

    def _add(self, value: int) -> None:
        if value not in self._ignored and len(self._ignored) < MOST_VALUES:
            self._ignored.append(value)

    def differing(self, parts: Sequence[MicroBatch], has_loss: bool) -> tuple[set[int], bool]:
        """Returns the indices of micro-batches with the fewest and the most values, and whether that is new.

        The host waits once for the device.

        Args:
            has_loss: Whether a loss function gets their targets. Otherwise the model computes the loss.
        """
        found = sorted(self._differences(parts, has_loss), key=lambda each: -each.spread)
        new = [each for each in found if each.spread > GROWTH * self._checked.get(each.key, 0.0)]
        chosen, self._covered = set[int](), list[_Difference]()
        for each in new or found:
            if not has_loss or len(chosen | each.pair) <= MOST_COMPARED:
                chosen |= each.pair
                self._covered.append(each)
        return chosen, bool(new)

    def accept(self, has_loss: bool) -> None:
        """Notes that the loss of the last batch has been checked."""
        for key, spread, _ in self._covered:
            known = self._checked.get(key, 0.0)
            if spread > GROWTH * known:
                self._num_checks[key] = self._num_checks.get(key, 0) + 1
                if has_loss and self._num_checks[key] < NUM_CHECKS:
                    continue
                self._num_checks[key] = 0
            self._checked[key] = max(spread, known)

    def _differences(self, parts: Sequence[MicroBatch], has_loss: bool) -> list[_Difference]:
        values = [part.target if has_loss else (part.args, part.kwargs) for part in parts]
        leaves = [torch_private.pytree.tree_leaves(value) for value in values]
        keys: list[Key] = []
        counts: list[Tensor] = []
        for position, several in enumerate(zip(*leaves, strict=False)):
            if len(parts) > 1 and all(map(_has_values, several)):
                for ignored, numbers in self._count(several):
                    keys.append((position, ignored))
                    counts.append(numbers)
        if not counts:
            return []
        device = counts[0].device
        rows = torch.stack([each.to(device, torch.float32) for each in counts]).tolist()
        sizes = [part.size for part in parts]
        return [
            difference
            for key, row in zip(keys, rows, strict=True)
            if (difference := _difference_of(key, row, sizes)).spread > SMALLEST
        ]

    def _count(self, several: Sequence[Tensor]) -> Iterator[tuple[int | None, Tensor]]:
        """Yields the numbers of values of micro-batches, and the integer that is not counted."""
        first = several[0]
        if first.dtype == torch.bool:
            yield None, _of_rows(lambda rows: rows.sum(1), several)
        elif first.is_floating_point():
            smallest = _of_rows(lambda rows: rows.amin(1), several).amin()
            sums = _of_rows(lambda rows: rows.float().sum(1), several)
            yield None, torch.where(smallest < 0, 0.0, sums)  # masks and weights are not negative
        elif not first.is_complex() and first.ndim:
            for value in self._ignored:
                yield value, _of_rows(partial(_count_others, value), several)


def _of_rows(function: Callable[[Tensor], Tensor], several: Sequence[Tensor]) -> Tensor:
    """Returns the results of a function of rows, each of which has the values of a tensor."""
    flat = [each.detach().reshape(1, -1) for each in several]
    if len({each.shape for each in flat}) == 1:
        return function(torch.cat(flat))
    return torch.cat([function(each) for each in flat])


def _has_values(leaf: object) -> bool:
    return (
        isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested and leaf.numel() > 0
    )


def _count_others(value: int, rows: Tensor) -> Tensor:
    return (rows != value).sum(1)


def _difference_of(key: Key, counts: Sequence[float], sizes: Sequence[int]) -> _Difference:
    shares = [count / size for count, size in zip(counts, sizes, strict=True)]
    indices = range(len(shares))
    fewest, most = min(indices, key=shares.__getitem__), max(indices, key=shares.__getitem__)
    spread = (shares[most] - shares[fewest]) / shares[most] if shares[most] > 0 else 0.0
    return _Difference(key, spread, {fewest, most})


def _call_and_note(
    add: Callable[[int], None], func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Calls a function of torch, and adds integers that a loss ignores, or that are compared with tensors."""
    if func in whole_losses.LOSSES:
        add(int(whole_losses.named_arguments(args, kwargs).get("ignore_index", -100)))
    elif getattr(func, "__name__", "") in _COMPARISONS:
        operands = (*args, *kwargs.values())
        numbers = [each for each in operands if type(each) is int]
        if any(isinstance(each, Tensor) and not each.is_floating_point() for each in operands):
            for number in numbers:
                add(number)
    return func(*args, **kwargs)
