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
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from accelerate import torch_private
from accelerate.strategies.pipeline.microbatches import MicroBatch

IGNORED = (-100, 0)
"""Labels that losses ignore by default, and those that padding has by default."""
GROWTH = 1.5
"""Factor by which the differences of a batch exceed those of checked ones before it is checked."""
SMALLEST = 1e-3
"""Relative difference of the numbers of two micro-batches that is not checked."""
MOST_VALUES = 16
"""Number of ignored values that are counted."""
NUM_CHECKS = 4
"""Number of checks of a loss function. The first ones may prove nothing, such as with a head of zeros."""
_COMPARISONS = frozenset({"eq", "ne", "__eq__", "__ne__"})
_WITH_IGNORED = frozenset({F.cross_entropy, F.nll_loss})

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

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records the integers that losses ignore, or with which masks are computed, inside the block."""
        with _IgnoredValues(self._add):
            yield

    def _add(self, value: int) -> None:
        if value not in self._ignored and len(self._ignored) < MOST_VALUES:
            self._ignored.append(value)

    def differing(self, parts: Sequence[MicroBatch], has_loss: bool) -> tuple[set[int], bool]:
        """Returns the indices of micro-batches with the fewest and the most values, and whether that is new.

        The host waits once for the device.

        Args:
            parts: The micro-batches.
            has_loss: Whether a loss function gets their targets. Otherwise the model computes the loss.
        """
        found = self._differences(parts, has_loss)
        new = [each for each in found if each.spread > GROWTH * self._checked.get(each.key, 0.0)]
        pairs = [each.pair for each in new or found]
        return set().union(*pairs), bool(new)

    def accept(self, parts: Sequence[MicroBatch], has_loss: bool) -> None:
        """Notes that the loss of a batch has been checked."""
        for key, spread, _ in self._differences(parts, has_loss):
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
                for ignored, count in self._counters(several[0]):
                    keys.append((position, ignored))
                    counts.append(torch.stack([count(leaf) for leaf in several]))
        if not counts:
            return []
        device = counts[0].device
        numbers = torch.stack([each.to(device, torch.float32) for each in counts]).tolist()
        sizes = [part.size for part in parts]
        return [
            difference
            for key, row in zip(keys, numbers, strict=True)
            if (difference := _difference_of(key, row, sizes)).spread > SMALLEST
        ]

    def _counters(self, leaf: Tensor) -> Iterator[tuple[int | None, Callable[[Tensor], Tensor]]]:
        """Yields functions that count values of tensors of one kind."""
        if leaf.dtype == torch.bool:
            yield None, torch.count_nonzero
        elif leaf.is_floating_point():
            yield None, _sum_of_weights
        elif not leaf.is_complex() and leaf.ndim:
            for value in self._ignored:
                yield value, partial(_count_others, value)


def _has_values(leaf: object) -> bool:
    return (
        isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested and leaf.numel() > 0
    )


def _count_others(value: int, leaf: Tensor) -> Tensor:
    return torch.count_nonzero(leaf != value)


def _sum_of_weights(leaf: Tensor) -> Tensor:
    """Returns the sum of a tensor, or 0 if it has negative values and so is no mask."""
    weights = leaf.detach().float()
    return torch.where(weights.amin() < 0, 0.0, weights.sum())


def _difference_of(key: Key, counts: Sequence[float], sizes: Sequence[int]) -> _Difference:
    shares = [count / size for count, size in zip(counts, sizes, strict=True)]
    indices = range(len(shares))
    fewest, most = min(indices, key=shares.__getitem__), max(indices, key=shares.__getitem__)
    spread = (shares[most] - shares[fewest]) / shares[most] if shares[most] > 0 else 0.0
    return _Difference(key, spread, {fewest, most})


class _IgnoredValues(TorchFunctionMode):
    """Context in which a function gets the integers that losses ignore, or that are compared with tensors."""

    def __init__(self, add: Callable[[int], None]) -> None:
        super().__init__()
        self._add = add

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _WITH_IGNORED:
            self._add(int(kwargs.get("ignore_index", -100)))
        elif getattr(func, "__name__", "") in _COMPARISONS:
            operands = (*args, *kwargs.values())
            numbers = [each for each in operands if type(each) is int]
            if any(isinstance(each, Tensor) and not each.is_floating_point() for each in operands):
                for number in numbers:
                    self._add(number)
        return func(*args, **kwargs)
