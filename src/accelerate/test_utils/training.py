"""A model of two numbers, and data for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate.logging import get_logger

logger = get_logger(__name__)

VOCABULARY = 100
WORDS = 16


class RegressionDataset(Dataset[dict[str, Any]]):
    """Points near the line `a * x + b`, as `{"x": ..., "y": ...}` in float32.

    Without a seed the points are others each time.
    """

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        generator = np.random.default_rng(seed)
        self.length = length
        self.x = generator.normal(size=(length,)).astype(np.float32)
        noise = generator.normal(scale=0.1, size=(length,)).astype(np.float32)
        self.y = a * self.x + b + noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "y": self.y[i]}


class RegressionModel(nn.Module):
    """The line `a * x + b`; says once which dtypes it computes with. Clients pass `double_output`, unused."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(float(a)))
        self.b = nn.Parameter(torch.tensor(float(b)))
        self.first_batch = True

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """Return the points of the line."""
        if x is None:
            raise ValueError("x=None: the model has no input. Pass a tensor.")
        if self.first_batch:
            logger.debug("Parameters are %s, inputs %s", self.a.dtype, x.dtype)
            self.first_batch = False
        return x * self.a + self.b


def mocked_dataloaders(accelerator: Any, batch_size: int = 16) -> tuple[Any, Any]:
    """Return loaders for training and evaluation (of twice the batch size), the same each time.

    Batches have `input_ids`, `attention_mask` and `labels` (int64). Clients pass `accelerator`, unused.
    """
    return _loaders(batch_size, labels_of_words=False)


def mocked_dataloaders_for_autoregressive_models(accelerator: Any, batch_size: int = 16) -> tuple[Any, Any]:
    """Return loaders like those of `mocked_dataloaders`, of texts whose labels are their own words."""
    return _loaders(batch_size, labels_of_words=True)


def _loaders(batch_size: int, labels_of_words: bool) -> tuple[Any, Any]:
    train, evaluation = (_texts(count, seed, labels_of_words) for count, seed in ((64, 0), (32, 1)))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(
        evaluation, batch_size=2 * batch_size
    )


def _texts(count: int, seed: int, labels_of_words: bool) -> Any:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCABULARY, (count, WORDS), generator=generator)
    labels = words if labels_of_words else torch.randint(2, (count,), generator=generator)
    mask = torch.ones_like(words)
    return [
        {"input_ids": words[i], "attention_mask": mask[i], "labels": labels[i].clone()} for i in range(count)
    ]
