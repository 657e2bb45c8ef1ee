"""BertTrainStep: models that see whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from accelerate.strategies.megatron.steps.base import (
    IGNORED,
    AbstractTrainStep,
    Batch,
    Loss,
    losses_from_logits,
    output_class,
    whole_logits,
)


class BertTrainStep(AbstractTrainStep):
    """The step of BERT: pretraining with masked tokens and pairs of sentences, or classification.

    Batches have `input_ids`, and may have `attention_mask`, `token_type_ids`, `labels` (-100 where a token is
    not predicted) and `next_sentence_label`; those of Megatron-LM's datasets have `text`, `types`, `labels`,
    `is_random`, `loss_mask` and `padding_mask`. Classification needs a model of the user's own.

    Args:
        accelerator: has `state.megatron_lm_plugin`.
        args: Megatron-LM's.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("BertTrainStep")
        self.returns_logits: bool = args.return_logits
        self.get_batch = self.get_batch_func(
            accelerator, accelerator.state.megatron_lm_plugin.megatron_dataset_flag
        )
        self.loss_func = self.get_loss_func(accelerator, args.pretraining_flag, args.num_labels)
        self.forward_step = self.get_forward_step_func(args.pretraining_flag, args.bert_binary_head)
        self.model_output_class = output_class(
            "MaskedLMOutput" if args.pretraining_flag else "SequenceClassifierOutput"
        )

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that gives tokens, types, order, loss mask, labels and padding mask."""
        custom: Callable[..., Any] | None = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        if custom is not None:
            return custom
        read = _read_megatron if megatron_dataset_flag else _read_labels
        return lambda data_iterator: read(next(data_iterator))

    def get_loss_func(  # type: ignore[override]  # as scripts call it
        self, accelerator: Any, pretraining_flag: bool, num_labels: int
    ) -> Callable[..., Loss]:
        """Return the function that gives the loss.

        Args:
            accelerator: has `state.megatron_lm_plugin`.
            pretraining_flag: whether tokens are predicted, and not classes.
            num_labels: number of classes; 1 for a regression.
        """
        custom: Callable[..., Loss] | None = accelerator.state.megatron_lm_plugin.custom_loss_function
        if custom is not None:
            return custom
        return _pretraining_loss if pretraining_flag else partial(_classification_loss, num_labels)

    def get_forward_step_func(  # type: ignore[override]  # as scripts call it
        self, pretraining_flag: bool, bert_binary_head: bool
    ) -> Callable[..., Any]:
        """Return the function that runs the model.

        Args:
            pretraining_flag: whether tokens are predicted, and not classes.
            bert_binary_head: whether the model tells if one sentence follows the other.
        """

        def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Loss]]:
            tokens, types, order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            types = types if bert_binary_head or not pretraining_flag else None
            if not pretraining_flag:
                logits = model(tokens, padding_mask, tokentype_ids=types)
                return logits, partial(self.loss_func, labels)
            if self.returns_logits:
                output = model(tokens, padding_mask, tokentype_ids=types)
                return output, partial(self._loss_of_logits, loss_mask, order, labels)
            output = model(tokens, padding_mask, tokentype_ids=types, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask, order)

        return forward_step

    def _loss_of_logits(
        self, loss_mask: torch.Tensor, order: torch.Tensor, labels: torch.Tensor, output: Any
    ) -> Loss:
        logits, order_logits = output
        losses = losses_from_logits(logits, labels)
        *loss, report = self.loss_func(loss_mask, order, (losses, order_logits))
        return (*loss, {**report, "logits": whole_logits(logits)})


def _read_labels(batch: Batch) -> tuple[torch.Tensor, ...]:
    tokens = batch["input_ids"]
    labels = batch.get("labels", torch.full_like(tokens, IGNORED))
    nothing = torch.zeros_like(tokens)
    return (
        tokens,
        batch.get("token_type_ids", nothing),
        batch.get("next_sentence_label", torch.full_like(tokens[:, 0], IGNORED)),
        (labels != IGNORED).float(),
        labels.clamp(min=0) if labels.ndim > 1 else labels,
        batch.get("attention_mask", torch.ones_like(tokens)),
    )


def _read_megatron(batch: Batch) -> tuple[torch.Tensor, ...]:
    return (
        batch["text"].long(),
        batch["types"].long(),
        batch["is_random"].long().reshape(-1),
        batch["loss_mask"].float(),
        batch["labels"].long().clamp(min=0),
        batch["padding_mask"].long(),
    )


def _pretraining_loss(loss_mask: torch.Tensor, sentence_order: torch.Tensor, output: Any) -> Loss:
    """Return the mean over masked tokens plus that over pairs of sentences, weighed by the tokens."""
    losses, order_logits = output
    mask = loss_mask.reshape(-1).float()
    parts = {"lm loss": (torch.sum(losses.reshape(-1).float() * mask), mask.sum())}
    if order_logits is not None:
        order = sentence_order.reshape(-1)
        total = F.cross_entropy(
            order_logits.reshape(-1, 2).float(), order, ignore_index=IGNORED, reduction="sum"
        )
        parts["sop loss"] = (total, (order != IGNORED).sum().float())
    return _weighed(parts)


def _classification_loss(num_labels: int, labels: torch.Tensor, logits: torch.Tensor) -> Loss:
    if num_labels == 1:
        loss = F.mse_loss(logits.reshape(-1).float(), labels.reshape(-1).float())
    elif labels.is_floating_point():
        loss = F.binary_cross_entropy_with_logits(logits.float(), labels)
    else:
        loss = F.cross_entropy(logits.reshape(-1, num_labels).float(), labels.reshape(-1))
    rows = torch.tensor(float(logits.shape[0]), device=logits.device)
    total, count, report = _weighed({"loss": (loss * rows, rows)})
    return total, count, {**report, "logits": logits.detach()}


def _weighed(parts: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Loss:
    """Return the sum of means, weighed by the number of the first; each part is a sum and its number."""
    number = next(iter(parts.values()))[1].clamp(min=1.0)
    means = [total / count.clamp(min=1.0) for total, count in parts.values()]
    report = {name: torch.stack([total.detach(), count]) for name, (total, count) in parts.items()}
    return torch.stack(means).sum() * number, number.detach().to(torch.int), report
