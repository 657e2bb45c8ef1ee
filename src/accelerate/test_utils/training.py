"""Regression model with two parameters and small data sets, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate.logging import get_logger

logger = get_logger(__name__)

VOCABULARY_SIZE = 100
SEQUENCE_LENGTH = 16


class RegressionDataset(Dataset[dict[str, Any]]):
    """Dataset of points near the line `a * x + b`, as `{"x": ..., "y": ...}` in float32.

    Args:
        a: Slope of the line.
        b: Intercept of the line.
        length: Number of points.
        seed: Seed of the points. None draws different points each time.
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
    """Model of the line `a * x + b`, which logs its dtypes in the first forward.

    Args:
        a: Initial slope.
        b: Initial intercept.
        double_output: Not used. Clients pass it.
    """

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(float(a)))
        self.b = nn.Parameter(torch.tensor(float(b)))
        self.first_batch = True

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor:
        """Returns `a * x + b`."""
        if x is None:
            raise ValueError("x=None: the model has no input. Pass a tensor.")
        if self.first_batch:
            logger.debug("Parameters are %s, inputs %s", self.a.dtype, x.dtype)
            self.first_batch = False
        return x * self.a + self.b


def mocked_dataloaders(accelerator: object, batch_size: int = 16) -> tuple[Any, Any]:
    """Returns a loader for training and one for evaluation, with the same samples in each call.

    Batches have `input_ids` and `attention_mask` of shape (batch, 16) and `labels` of shape (batch,), all
    int64.

    Args:
        accelerator: Not used. Clients pass it.
        batch_size: Samples in a batch for training. A batch for evaluation has twice as many.
    """
    return _loaders(batch_size, labels_are_inputs=False)


def mocked_dataloaders_for_autoregressive_models(
    accelerator: object, batch_size: int = 16
) -> tuple[Any, Any]:
    """Returns loaders like `mocked_dataloaders`, with the input IDs as labels.

    Args:
        accelerator: Not used. Clients pass it.
        batch_size: Samples in a batch for training. A batch for evaluation has twice as many.
    """
    return _loaders(batch_size, labels_are_inputs=True)


def _loaders(batch_size: int, labels_are_inputs: bool) -> tuple[Any, Any]:
    train, evaluation = (_samples(count, seed, labels_are_inputs) for count, seed in ((64, 0), (32, 1)))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(
        evaluation, batch_size=2 * batch_size
    )


def _samples(count: int, seed: int, labels_are_inputs: bool) -> Any:
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(VOCABULARY_SIZE, (count, SEQUENCE_LENGTH), generator=generator)
    labels = input_ids if labels_are_inputs else torch.randint(2, (count,), generator=generator)
    mask = torch.ones_like(input_ids)
    return [
        {"input_ids": input_ids[i], "attention_mask": mask[i], "labels": labels[i].clone()}
        for i in range(count)
    ]
