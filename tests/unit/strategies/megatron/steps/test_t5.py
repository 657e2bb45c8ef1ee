"""Inputs and masks of encoder and decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from accelerate.strategies.megatron.steps import T5TrainStep

from .conftest import accelerator, arguments

BATCH = {
    "input_ids": torch.tensor([[1, 2, 0]]),
    "attention_mask": torch.tensor([[1, 1, 0]]),
    "labels": torch.tensor([[5, 6, -100, -100]]),
}


def read(
    batch: dict[str, torch.Tensor], plugin: dict[str, Any] | None = None, **args: Any
) -> tuple[Any, ...]:
    step = T5TrainStep(accelerator(**(plugin or {})), arguments(**args))
    found: tuple[Any, ...] = step.get_batch(iter([batch]))
    return found


def test_decoders_begin_with_a_filler() -> None:
    tokens, decoder_tokens, loss_mask, labels, *_ = read(BATCH)
    assert tokens.equal(BATCH["input_ids"])
    assert decoder_tokens.tolist() == [[0, 5, 6, 0]]
    assert loss_mask.tolist() == [[1, 1, 0, 0]]
    assert labels.tolist() == [[5, 6, 0, 0]]


def test_decoder_tokens_of_the_user() -> None:
    decoder_tokens = torch.tensor([[3, 5, 6, 0]])
    assert read({**BATCH, "decoder_input_ids": decoder_tokens})[1] is decoder_tokens


def test_masks_hide_padding_and_later_tokens() -> None:
    *_, encoder, decoder, between = read(BATCH)
    assert encoder.shape == (1, 1, 3, 3)
    assert encoder[0, 0].tolist() == [[False, False, True], [False, False, True], [True, True, True]]
    assert decoder.shape == (1, 1, 4, 4)
    assert decoder[0, 0, 1].tolist() == [False, False, True, True]
    assert between.shape == (1, 1, 4, 3)
    assert between[0, 0, 3].tolist() == [False, False, True]


def test_masks_of_transformer_engine() -> None:
    *_, encoder, decoder, between = read(BATCH, transformer_impl="transformer_engine")
    assert encoder.tolist() == [[[[False, False, True]]]]
    assert decoder is None
    assert [tuple(mask.shape) for mask in between] == [(1, 1, 1, 4), (1, 1, 1, 3)]


def test_megatrons_own_batches() -> None:
    batch = {
        "text_enc": torch.tensor([[1, 2]]),
        "text_dec": torch.tensor([[3, 4]]),
        "labels": torch.tensor([[4, -1]]),
        "loss_mask": torch.tensor([[1, 0]]),
        "enc_mask": torch.tensor([[1, 0]]),
    }
    tokens, decoder_tokens, loss_mask, labels, encoder, *_ = read(batch, {"megatron_dataset_flag": True})
    assert (tokens.tolist(), decoder_tokens.tolist(), labels.tolist()) == ([[1, 2]], [[3, 4]], [[4, 0]])
    assert loss_mask.tolist() == [[1.0, 0.0]]
    assert encoder[0, 0, 0].tolist() == [False, True]


def model(
    tokens: Any, decoder: torch.Tensor, *masks: Any, lm_labels: torch.Tensor | None = None
) -> torch.Tensor:
    logits = F.one_hot(decoder, 10).float()
    return (
        logits if lm_labels is None else F.cross_entropy(logits.transpose(1, 2), lm_labels, reduction="none")
    )


@pytest.mark.parametrize("logits", [False, True])
def test_losses_are_the_same_with_and_without_logits(logits: bool) -> None:
    step = T5TrainStep(accelerator(), arguments(return_logits=logits))
    output, loss_func = step.forward_step(iter([BATCH]), model)
    total, number, report = loss_func(output)
    decoder = F.one_hot(torch.tensor([[0, 5]]), 10).float()
    expected = F.cross_entropy(decoder.transpose(1, 2), torch.tensor([[5, 6]]), reduction="sum")
    assert float(total) == pytest.approx(float(expected), rel=1e-5)
    assert int(number) == 2
    assert ("logits" in report) is logits
