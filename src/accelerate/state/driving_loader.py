"""Loader that drives a training loop, among all loaders that are being read."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import takewhile
from typing import Any


class DrivingLoader:
    """Loader that delivers a batch before each micro-batch of a set of models.

    A loop may read several loaders: `zip` of two, a short one that is started again, one for an evaluation
    whose iterator is kept. Those that do not deliver a batch before each micro-batch do not drive the loop.
    Of several that do, the one that has driven it before is kept, and otherwise the outermost is chosen.

    Args:
        prefers_unfinished: Whether the outermost is chosen among those whose pass continues after this batch.

    Attributes:
        is_uncertain: Whether an outer loader, whose pass ended with the batch before, drives the loop, too.
        reads_ahead: Whether the last batch of a pass was read in the micro-batch of the batch before, so that
            its own micro-batch follows after the pass.
    """

    def __init__(self, prefers_unfinished: bool = False) -> None:
        self.prefers_unfinished = prefers_unfinished
        self.is_uncertain = self.reads_ahead = False
        self._began_at_second = False  # two batches were read before the first micro-batch of the pass
        self._reference: weakref.ref[Any] | None = None
        self._others: set[int] = set()  # outer ones, whose passes ended with the batch before
        self._positions: dict[int, tuple[Any, Any]] = {}  # of all loaders in the micro-batch before
        self._batch: tuple[Any, ...] = ()
        self._calls = self._calls_before = 0  # micro-batches of this batch, and of the batch before

    def __reduce__(self) -> tuple[Any, ...]:
        return DrivingLoader, (self.prefers_unfinished,)  # a copy finds its loader anew

    @property
    def loader(self) -> Any:
        """The loader, or None if no loader is read."""
        return None if self._reference is None else self._reference()

    def begin_micro_batch(self, loaders: Sequence[Any]) -> bool:
        """Finds the loader, and returns whether the micro-batch that begins is the last one of its pass.

        A batch may be divided into several micro-batches. The last batch has as many as the one before.

        Args:
            loaders: The loaders that are being read, the outermost first.
        """
        if not loaders:
            if self._reference is not None:
                self._reference, self._others, self.is_uncertain = None, set(), False
            return False
        loader = self._find(loaders)
        self._reference = None if loader is None else weakref.ref(loader)
        if loader is None:
            return False
        batch = (id(loader), *_position(loader))
        if batch[:2] != self._batch[:2]:
            self._began_at_second = batch[2] == 2
        self.reads_ahead = self._began_at_second and bool(loader.end_of_dataloader)
        if batch != self._batch:
            self._batch, self._calls_before, self._calls = batch, self._calls, 0
        self._calls += 1
        return bool(loader.end_of_dataloader) and self._calls >= self._calls_before

    def _find(self, loaders: Sequence[Any]) -> Any:
        others, self._others = self._others, set()
        self.is_uncertain = False
        if len(loaders) == 1:
            return loaders[0]
        before, self._positions = self._positions, {id(loader): _position(loader) for loader in loaders}
        delivered = [loader for loader in loaders if self._positions[id(loader)] != before.get(id(loader))]
        self.is_uncertain = not others.isdisjoint(map(id, delivered))
        candidates = delivered or loaders
        if any(loader is self.loader for loader in candidates):
            return self.loader
        unfinished = [loader for loader in candidates if not loader.end_of_dataloader]
        if self.prefers_unfinished and unfinished:
            self._others = {
                id(loader) for loader in takewhile(lambda each: each.end_of_dataloader, candidates)
            }
            return unfinished[0]
        return candidates[0]


def _position(loader: object) -> tuple[Any, Any]:
    """Returns the pass of a loader and the number of batches that it has delivered in it."""
    return getattr(loader, "iteration", None), getattr(loader, "seen", None)
