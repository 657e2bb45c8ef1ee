"""Batches become tokens, labels, masks and positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from accelerate.strategies.megatron.steps import GPTTrainStep, causal_mask, document_starts

from .conftest import accelerator, arguments

TOKENS = torch.tensor([[1, 2, 9, 3, 4]])


def read(
    batch: dict[str, torch.Tensor], plugin: dict[str, Any] | None = None, **args: Any
) -> tuple[Any, ...]:
    step = GPTTrainStep(accelerator(**(plugin or {})), arguments(**args))
    found: tuple[Any, ...] = step.get_batch(iter([batch]))
    return found


def test_labels_are_what_follows() -> None:
    tokens, labels, loss_mask, mask, positions = read({"input_ids": TOKENS, "labels": TOKENS})
    assert tokens.equal(TOKENS)
    assert labels.tolist() == [[2, 9, 3, 4, 0]]
    assert loss_mask.tolist() == [[1, 1, 1, 1, 0]]
    assert mask.equal(causal_mask(5, torch.device("cpu")))
    assert positions.tolist() == [[0, 1, 2, 3, 4]]


def test_ignored_labels_do_not_count() -> None:
    labels = torch.tensor([[1, -100, 9, -100, 4]])
    _, following, loss_mask, *_ = read({"input_ids": TOKENS, "labels": labels})
    assert loss_mask.tolist() == [[0, 1, 0, 1, 0]]
    assert following.min() >= 0


def test_filler_does_not_count_and_is_hidden() -> None:
    kept = torch.tensor([[1, 1, 1, 0, 0]])
    _, _, loss_mask, mask, _ = read({"input_ids": TOKENS, "attention_mask": kept})
    assert loss_mask.tolist() == [[1, 1, 0, 0, 0]]
    assert mask[0, 0, 4].tolist() == [False, False, False, True, True]


def test_ends_of_documents() -> None:
    tokens, _, loss_mask, mask, positions = read(
        {"input_ids": TOKENS, "labels": TOKENS},
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    assert loss_mask.tolist() == [[1, 1, 0, 1, 0]]
    assert positions.tolist() == [[0, 1, 2, 0, 1]]
    assert mask[0, 0, 4].tolist() == [True, True, True, False, False]
    assert mask[0, 0, 2].tolist() == [False, False, False, True, True]


def test_each_token_has_the_start_of_its_document() -> None:
    assert document_starts(torch.tensor([[0, 0, 1, 2, 2]])).tolist() == [[0, 0, 2, 3, 3]]


def test_megatrons_own_batches() -> None:
    flag = {"megatron_dataset_flag": True}
    tokens, labels, loss_mask, *_ = read({"text": torch.tensor([[1, 2, 3]])}, flag)
    assert (tokens.tolist(), labels.tolist(), loss_mask.tolist()) == ([[1, 2]], [[2, 3]], [[1, 1]])
    batch = {"tokens": TOKENS, "labels": TOKENS + 1, "loss_mask": torch.zeros(1, 5)}
    tokens, labels, loss_mask, *_ = read(batch, flag)
    assert (tokens.tolist(), labels.tolist()) == (TOKENS.tolist(), (TOKENS + 1).tolist())
    assert loss_mask.sum() == 0


def model(
    tokens: torch.Tensor, positions: Any, mask: Any, labels: torch.Tensor | None = None
) -> torch.Tensor:
    logits = F.one_hot(tokens, 10).float()
    return logits if labels is None else F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


@pytest.mark.parametrize("logits", [False, True])
def test_losses_are_the_same_with_and_without_logits(logits: bool) -> None:
    step = GPTTrainStep(accelerator(), arguments(return_logits=logits))
    output, loss_func = step.forward_step(iter([{"input_ids": TOKENS, "labels": TOKENS}]), model)
    total, number, report = loss_func(output)
    expected = F.cross_entropy(
        F.one_hot(TOKENS[:, :-1], 10).float().transpose(1, 2), TOKENS[:, 1:], reduction="sum"
    )
    assert float(total) == pytest.approx(float(expected), rel=1e-5)
    assert int(number) == 4
    assert ("logits" in report) is logits
