"""Pretraining and classification with BERT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from accelerate.strategies.megatron.steps import BertTrainStep

from .conftest import accelerator, arguments

TOKENS = torch.tensor([[1, 2, 3], [4, 5, 6]])
LABELS = torch.tensor([[-100, 7, -100], [8, -100, 1]])
BATCH = {"input_ids": TOKENS, "labels": LABELS, "next_sentence_label": torch.tensor([1, 0])}


def mean(pair: torch.Tensor) -> float:
    """The mean of a pair of sum and number."""
    return float(pair[0] / pair[1])


class Model:
    def __init__(self) -> None:
        self.types: Any = "not called"

    def __call__(
        self,
        tokens: torch.Tensor,
        mask: Any,
        tokentype_ids: Any = None,
        lm_labels: torch.Tensor | None = None,
    ) -> Any:
        self.types = tokentype_ids
        logits, order = F.one_hot(tokens, 10).float(), torch.tensor([[0.0, 2.0], [3.0, 0.0]])
        if lm_labels is None:
            return logits, order
        return F.cross_entropy(logits.transpose(1, 2), lm_labels, reduction="none"), order


def expected() -> tuple[float, float]:
    logits, order = Model()(TOKENS, None)
    return (
        float(F.cross_entropy(logits.transpose(1, 2), LABELS, ignore_index=-100)),
        float(F.cross_entropy(order, torch.tensor([1, 0]))),
    )


@pytest.mark.parametrize("logits", [False, True])
def test_bert_has_a_token_loss_and_an_order_loss(logits: bool) -> None:
    step = BertTrainStep(accelerator(), arguments(return_logits=logits))
    output, loss_func = step.forward_step(iter([BATCH]), Model())
    total, number, report = loss_func(output)
    tokens, order = expected()
    assert (mean(report["lm loss"]), mean(report["sop loss"])) == pytest.approx((tokens, order))
    assert int(number) == 3
    assert float(total) == pytest.approx((tokens + order) * 3)
    assert ("logits" in report) is logits


def test_masked_tokens_alone() -> None:
    model = Model()
    step = BertTrainStep(accelerator(), arguments(bert_binary_head=False))
    output, loss_func = step.forward_step(iter([{"input_ids": TOKENS, "labels": LABELS}]), model)
    _, _, report = loss_func(output)
    assert float(report["sop loss"][1]) == 0  # the head is there, and nothing to tell
    assert model.types is None


def test_a_batch_without_masked_tokens_has_loss_zero() -> None:
    step = BertTrainStep(accelerator(), arguments(bert_binary_head=False))
    output, loss_func = step.forward_step(iter([{"input_ids": TOKENS}]), Model())
    total, number, report = loss_func(output)
    assert (float(total), int(number)) == (0.0, 1)
    assert report["lm loss"].tolist() == [0.0, 0.0]


def test_megatrons_own_batches() -> None:
    batch = {
        "text": TOKENS,
        "types": TOKENS * 0,
        "labels": LABELS,
        "is_random": torch.tensor([[1], [0]]),
        "loss_mask": (LABELS != -100).float(),
        "padding_mask": torch.ones_like(TOKENS),
    }
    step = BertTrainStep(accelerator(megatron_dataset_flag=True), arguments())
    output, loss_func = step.forward_step(iter([batch]), Model())
    report = loss_func(output)[2]
    assert (mean(report["lm loss"]), mean(report["sop loss"])) == pytest.approx(expected())


@pytest.mark.parametrize(
    ("number", "labels", "logits", "loss"),
    [
        (2, torch.tensor([0, 1]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 0.313262),
        (1, torch.tensor([0.5, 1.0]), torch.tensor([[1.0], [1.0]]), 0.125),
        (2, torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 0.0]]), 0.693147),
    ],
)
def test_classification(number: int, labels: torch.Tensor, logits: torch.Tensor, loss: float) -> None:
    step = BertTrainStep(accelerator(), arguments(pretraining_flag=False, num_labels=number))
    batch = {"input_ids": torch.ones(len(labels), 3, dtype=torch.long), "labels": labels}
    output, loss_func = step.forward_step(iter([batch]), lambda *args, **kwargs: logits)
    total, rows, report = loss_func(output)
    assert mean(report["loss"]) == pytest.approx(loss, rel=1e-4)
    assert float(total) == pytest.approx(loss * int(rows), rel=1e-4)
    assert report["logits"].equal(logits)
