"""Numbers of labels that a loss ignores in micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from accelerate.strategies.pipeline.counted_values import CountedValues
from accelerate.strategies.pipeline.microbatches import MicroBatch


@pytest.mark.parametrize("is_positional", [True, False])
def test_micro_batches_differ_in_labels_that_a_loss_ignores(is_positional: bool) -> None:
    values, logits = CountedValues(), torch.zeros(4, 3)
    targets = [torch.tensor([1, 2, 1, 2]), torch.tensor([1, 2, -1, -1])]
    parts = [MicroBatch((), {}, target, 4, 1.0) for target in targets]
    assert values.differing(parts, has_loss=True) == (set(), False)
    with values.recording():
        if is_positional:
            F.cross_entropy(logits, targets[1], None, None, -1)
        else:
            F.cross_entropy(logits, targets[1], ignore_index=-1)
    assert values.differing(parts, has_loss=True) == ({0, 1}, True)
