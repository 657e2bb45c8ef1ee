"""Weights of the losses of micro-batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from accelerate.base import PreparationError
from accelerate.strategies.pipeline.microbatches import (
    MicroBatch,
    WholeSizes,
    shares_of_labels,
    split_batch,
    weight_of_labels,
)


def weigh(logits: Tensor, num_skipped: int) -> tuple[float, int | None]:
    """Returns the weight of the first micro-batch of a loss that skips labels, and their number."""
    labels = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]])
    labels[1, 1:] = -100
    used, own = (logits[:, :-1], labels[:1, 1:]) if num_skipped else (logits, labels[:1])
    outputs: Any = SimpleNamespace(
        loss=cross_entropy(used.flatten(0, 1).float(), own.flatten()), logits=logits
    )
    parts = [MicroBatch((), {"labels": each}, None, 1, 0.5) for each in labels.split(1)]
    return weight_of_labels(parts, 0, lambda: shares_of_labels(parts), outputs, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_skipped", [0, 1])
def test_labels_are_counted_for_logits_of_random_weights(dtype: torch.dtype, num_skipped: int) -> None:
    """All tokens have almost the same loss."""
    logits = (torch.randn(1, 6, 7, generator=torch.Generator().manual_seed(0)) * 1e-4).to(dtype)
    assert weigh(logits, num_skipped) == ((6 / 7, 0), (1.0, 1))[num_skipped]


def test_equal_losses_of_all_tokens_leave_the_labels_that_count_unknown() -> None:
    with pytest.raises(PreparationError, match="different numbers of labels"):
        weigh(torch.zeros(1, 6, 7), 1)


def test_tensors_of_a_batch_are_split_unless_their_rows_are_not_samples() -> None:
    sizes: WholeSizes = {}

    def split(num_rows: int, *shape: int) -> list[int]:
        batch = {"samples": torch.zeros(4, 2), "other": torch.zeros(num_rows, *shape)}
        return [len(part["other"]) for part in split_batch(batch, lambda num_samples: 2, sizes)[0]]

    assert [split(1), split(4)] == [[1, 1], [2, 2]]  # one mask for all samples, or one for each
    assert [split(3), split(4)] == [[3, 3], [4, 4]]  # numbers of positions
    assert split(4, 3) == [2, 2]  # another tensor
