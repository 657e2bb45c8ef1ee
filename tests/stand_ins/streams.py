"""Datasets without indices, whose items are known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset


class Stream(IterableDataset[Any]):
    """Reads items in order, or the integers below a number."""

    def __init__(self, items: int | Sequence[Any]) -> None:
        self.items = range(items) if isinstance(items, int) else items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.items)
