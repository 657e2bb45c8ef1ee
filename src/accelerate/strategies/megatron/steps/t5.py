"""T5TrainStep: models with an encoder and a decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from accelerate.strategies.megatron.steps.base import (
    IGNORED,
    AbstractTrainStep,
    Batch,
    Loss,
    losses_from_logits,
    output_class,
    sum_over_tokens,
    whole_logits,
)
from accelerate.strategies.megatron.steps.gpt import hide_later


class T5TrainStep(AbstractTrainStep):
    """The step of T5.

    Batches have `input_ids` and `labels` (-100 where a token does not count), and may have `attention_mask`
    and `decoder_input_ids`; those of Megatron-LM's datasets have `text_enc`, `text_dec`, `labels`,
    `loss_mask`, `enc_mask` and `dec_mask`.

    Args:
        accelerator: has `state.megatron_lm_plugin`.
        args: Megatron-LM's.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        super().__init__("T5TrainStep")
        self.start_token = int(getattr(args, "pad_token_id", None) or 0)
        self.uses_engine = args.transformer_impl == "transformer_engine"
        self.returns_logits: bool = args.return_logits
        self.get_batch = self.get_batch_func(
            accelerator, accelerator.state.megatron_lm_plugin.megatron_dataset_flag
        )
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()
        self.model_output_class = output_class("Seq2SeqLMOutput")

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """Return where tokens of an encoder must not look: at filler.

        Args:
            attention_mask: samples x tokens, 1 for tokens and 0 for filler.

        Returns:
            Samples x 1 x tokens x tokens, True where it is hidden.
        """
        kept = attention_mask != 0
        return ~(kept[:, None, :, None] & kept[:, None, None, :])

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device) -> torch.Tensor:
        """Return where tokens of a decoder must not look: at later ones.

        Args:
            seq_length: tokens of the decoder.
            device: of the result.

        Returns:
            1 x 1 x tokens x tokens, True where it is hidden.
        """
        return hide_later(seq_length, device)

    @staticmethod
    def get_enc_dec_mask(
        attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device
    ) -> torch.Tensor:
        """Return where tokens of a decoder must not look in the encoder: at filler.

        Args:
            attention_mask: samples x tokens of the encoder, 1 for tokens and 0 for filler.
            dec_seq_length: tokens of the decoder.
            device: of the result.

        Returns:
            Samples x 1 x tokens of the decoder x tokens of the encoder, True where it is hidden.
        """
        filler = (attention_mask == 0).to(device)[:, None, None, :]
        return filler.expand(-1, 1, dec_seq_length, -1)

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that gives tokens of both, loss mask, labels and three attention masks."""
        custom: Callable[..., Any] | None = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        if custom is not None:
            return custom
        read = _read_megatron if megatron_dataset_flag else self._read_labels

        def get_batch(data_iterator: Iterator[Batch]) -> tuple[Any, ...]:
            tokens, decoder_tokens, loss_mask, labels, kept = read(next(data_iterator))
            return tokens, decoder_tokens, loss_mask, labels, *self._masks(kept, decoder_tokens)

        return get_batch

    def get_loss_func(self, accelerator: Any) -> Callable[..., Loss]:
        """Return the function that gives the loss of a mask and the losses of tokens."""
        custom: Callable[..., Loss] | None = accelerator.state.megatron_lm_plugin.custom_loss_function
        if custom is not None:
            return custom
        return lambda loss_mask, output_tensor: sum_over_tokens(loss_mask, output_tensor, "lm loss")

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function that runs the model."""

        def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Loss]]:
            tokens, decoder_tokens, loss_mask, labels, *masks = self.get_batch(data_iterator)
            if self.returns_logits:
                logits = model(tokens, decoder_tokens, *masks)
                return logits, partial(self._loss_of_logits, loss_mask, labels)
            losses = model(tokens, decoder_tokens, *masks, lm_labels=labels)
            return losses, partial(self.loss_func, loss_mask)

        return forward_step

    def _loss_of_logits(self, loss_mask: torch.Tensor, labels: torch.Tensor, logits: torch.Tensor) -> Loss:
        *loss, report = self.loss_func(loss_mask, losses_from_logits(logits, labels))
        return (*loss, {**report, "logits": whole_logits(logits)})

    def _read_labels(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        tokens, labels = batch["input_ids"], batch["labels"]
        known = labels.clamp(min=0)
        decoder_tokens = batch.get("decoder_input_ids")
        if decoder_tokens is None:
            first = torch.full_like(known[:, :1], self.start_token)
            decoder_tokens = torch.cat([first, known[:, :-1]], dim=1)
        kept = batch.get("attention_mask", torch.ones_like(tokens))
        return tokens, decoder_tokens, (labels != IGNORED).float(), known, kept

    def _masks(self, kept: torch.Tensor, decoder_tokens: torch.Tensor) -> tuple[Any, Any, Any]:
        """Return the masks of encoder, decoder and of the way between; Transformer Engine has a form of its
        own, and hides later tokens by itself."""
        if self.uses_engine:
            hidden = (kept == 0)[:, None, None, :]
            nothing = torch.zeros_like(decoder_tokens, dtype=torch.bool)[:, None, None, :]
            return hidden, None, (nothing, hidden)
        length, device = decoder_tokens.shape[1], decoder_tokens.device
        return (
            self.attn_mask_postprocess(kept),
            self.get_decoder_mask(length, device),
            self.get_enc_dec_mask(kept, length, device),
        )


def _read_megatron(batch: Batch) -> tuple[torch.Tensor, ...]:
    return (
        batch["text_enc"].long(),
        batch["text_dec"].long(),
        batch["loss_mask"].float(),
        batch["labels"].long().clamp(min=0),
        batch["enc_mask"],
    )
