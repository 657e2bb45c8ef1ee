"""Samplers and datasets that draw from random generators of their own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler


class Noisy(Dataset[Any]):
    """Draws from a generator of its own for each sample."""

    def __init__(self, size: int) -> None:
        self.size, self.noise = size, random.Random(5)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([float(index)]), torch.ones(3) * self.noise.random()


class Passes(Sampler[int]):
    """Draws from a generator of its own in each pass, and counts the passes."""

    def __init__(self, size: int) -> None:
        self.size, self.passes, self.drawn = size, 0, np.random.default_rng(5)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(np.roll(self.drawn.permutation(self.size), self.passes).tolist())
