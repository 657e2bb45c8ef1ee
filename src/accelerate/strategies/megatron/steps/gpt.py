"""GPTTrainStep and T5TrainStep: models that predict the next token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from accelerate.strategies.megatron.steps.base import (
    IGNORED,
    AbstractTrainStep,
    Batch,
    Loss,
    cut_for_context,
    losses_from_logits,
    output_class,
    sum_over_tokens,
    whole_logits,
)

_NAMES = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


class _TokenTrainStep(AbstractTrainStep):
    """What the steps of models that predict tokens have in common."""

    label_argument: str
    """The argument by which the model takes labels."""

    def __init__(self, name: str, accelerator: Any, args: Any, output: str) -> None:
        super().__init__(name)
        self.returns_logits: bool = args.return_logits
        self.get_batch = self.get_batch_func(
            accelerator, accelerator.state.megatron_lm_plugin.megatron_dataset_flag
        )
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()
        self.model_output_class = output_class(output)

    # Subclasses: read the parts of a batch, complete them, and bring them into the order of the model.
    @abstractmethod
    def _read_labels(self, batch: Batch) -> tuple[Any, ...]: ...
    @abstractmethod
    def _read_megatron(self, batch: Batch) -> tuple[Any, ...]: ...
    @abstractmethod
    def _complete(self, *parts: Any) -> tuple[Any, ...]: ...
    @abstractmethod
    def _arrange(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], torch.Tensor, torch.Tensor]: ...

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that takes a micro-batch from an iterator, as the model wants it."""
        custom: Callable[..., Any] | None = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        if custom is not None:
            return custom
        read = self._read_megatron if megatron_dataset_flag else self._read_labels
        return lambda data_iterator: self._complete(*read(next(data_iterator)))

    def get_loss_func(self, accelerator: Any) -> Callable[..., Loss]:
        """Return the function that gives the loss of a mask and the losses of tokens."""
        custom: Callable[..., Loss] | None = accelerator.state.megatron_lm_plugin.custom_loss_function
        if custom is not None:
            return custom
        return lambda loss_mask, output_tensor: sum_over_tokens(loss_mask, output_tensor, "lm loss")

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function that runs the model."""

        def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Loss]]:
            inputs, labels, loss_mask = self._arrange(self.get_batch(data_iterator))
            if self.returns_logits:
                return model(*inputs), partial(self._loss_of_logits, loss_mask, labels)
            losses = model(*inputs, **{self.label_argument: labels})
            return losses, partial(self.loss_func, loss_mask)

        return forward_step

    def _loss_of_logits(self, loss_mask: torch.Tensor, labels: torch.Tensor, logits: torch.Tensor) -> Loss:
        *loss, report = self.loss_func(loss_mask, losses_from_logits(logits, labels))
        return (*loss, {**report, "logits": whole_logits(logits)})


class GPTTrainStep(_TokenTrainStep):
    """The step of GPT, Llama, and others of their kind.

    Batches have `input_ids`, and may have `labels` (not shifted, -100 where a token does not count) and
    `attention_mask`; those of Megatron-LM's datasets have `tokens`, `labels` and `loss_mask`.

    Args:
        accelerator: has `state.megatron_lm_plugin`.
        args: Megatron-LM's.
    """

    label_argument = "labels"

    def __init__(self, accelerator: Any, args: Any) -> None:
        self.pad_token: int | None = getattr(args, "pad_token_id", None)
        self.eod_token: int | None = getattr(args, "eos_token_id", None)
        self.reset_position_ids: bool = args.reset_position_ids
        self.reset_attention_mask: bool = args.reset_attention_mask
        self.eod_mask_loss: bool = args.eod_mask_loss
        super().__init__("GPTTrainStep", accelerator, args, "CausalLMOutputWithCrossAttentions")

    def _arrange(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], torch.Tensor, torch.Tensor]:
        tokens, labels, loss_mask, attention_mask, position_ids = batch
        return (tokens, position_ids, attention_mask), labels, loss_mask

    def _read_labels(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        """Return tokens, what follows each of them, where that counts, and which tokens are no filler."""
        tokens, kept = batch["input_ids"], batch.get("attention_mask")
        labels = batch.get("labels")
        if labels is None:
            labels = tokens if kept is None else tokens.masked_fill(kept == 0, IGNORED)
        last = torch.full_like(labels[:, :1], IGNORED)
        following = torch.cat([labels[:, 1:], last], dim=1)
        return tokens, following.clamp(min=0), (following != IGNORED).float(), kept

    def _read_megatron(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
        if "text" in batch:  # one token more than a sequence has
            text = batch["text"].long()
            return (
                text[:, :-1].contiguous(),
                text[:, 1:].contiguous(),
                torch.ones_like(text[:, 1:]).float(),
                None,
            )
        return batch["tokens"].long(), batch["labels"].long(), batch["loss_mask"].float(), None

    def _complete(
        self, tokens: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, kept: torch.Tensor | None
    ) -> tuple[Any, ...]:
        """Return tokens, labels, loss mask, attention mask and positions; tokens that end a document are
        known by their number."""
        ends = torch.zeros_like(tokens) if self.eod_token is None else (tokens == self.eod_token).long()
        if self.eod_mask_loss:
            loss_mask = loss_mask * (ends == 0)
        hidden = hide_later(tokens.shape[1], tokens.device)
        if kept is not None:
            hidden = hidden | (kept == 0)[:, None, None, :]
        document = ends.cumsum(1) - ends
        if self.reset_attention_mask:
            hidden = hidden | (document[:, None, :, None] != document[:, None, None, :])
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if self.reset_position_ids:
            positions = positions - begin_of_documents(document)
        parts = (tokens, labels, loss_mask, hidden, positions)
        batch = cut_for_context(dict(zip(_NAMES, parts, strict=True)))
        return tuple(batch[name] for name in _NAMES)


def hide_later(length: int, device: torch.device) -> torch.Tensor:
    """Return where a token must not look: at those after it.

    Returns:
        1 x 1 x tokens x tokens, True where it is hidden.
    """
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)


def begin_of_documents(document: torch.Tensor) -> torch.Tensor:
    """Return for each token the place at which its document begins.

    Args:
        document: samples x tokens, the number of the document of each token, rising.
    """
    places = torch.arange(document.shape[1], device=document.device).expand_as(document)
    is_first = torch.ones_like(document, dtype=torch.bool)
    is_first[:, 1:] = document[:, 1:] != document[:, :-1]
    return torch.where(is_first, places, 0).cummax(1).values


class T5TrainStep(_TokenTrainStep):
    """The step of T5.

    Batches have `input_ids` and `labels` (-100 where a token does not count), and may have `attention_mask`
    and `decoder_input_ids`; those of Megatron-LM's datasets have `text_enc`, `text_dec`, `labels`,
    `loss_mask`, `enc_mask` and `dec_mask`.

    Args:
        accelerator: has `state.megatron_lm_plugin`.
        args: Megatron-LM's.
    """

    label_argument = "lm_labels"

    def __init__(self, accelerator: Any, args: Any) -> None:
        self.start_token = int(getattr(args, "pad_token_id", None) or 0)
        self.uses_engine = args.transformer_impl == "transformer_engine"
        super().__init__("T5TrainStep", accelerator, args, "Seq2SeqLMOutput")

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

    def _arrange(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], torch.Tensor, torch.Tensor]:
        tokens, decoder_tokens, loss_mask, labels, *masks = batch
        return (tokens, decoder_tokens, *masks), labels, loss_mask

    def _read_labels(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        tokens, labels = batch["input_ids"], batch["labels"]
        known = labels.clamp(min=0)
        decoder_tokens = batch.get("decoder_input_ids")
        if decoder_tokens is None:
            first = torch.full_like(known[:, :1], self.start_token)
            decoder_tokens = torch.cat([first, known[:, :-1]], dim=1)
        kept = batch.get("attention_mask", torch.ones_like(tokens))
        return tokens, decoder_tokens, (labels != IGNORED).float(), known, kept

    def _read_megatron(self, batch: Batch) -> tuple[torch.Tensor, ...]:
        return (
            batch["text_enc"].long(),
            batch["text_dec"].long(),
            batch["loss_mask"].float(),
            batch["labels"].long().clamp(min=0),
            batch["enc_mask"],
        )

    def _complete(
        self,
        tokens: torch.Tensor,
        decoder_tokens: torch.Tensor,
        loss_mask: torch.Tensor,
        labels: torch.Tensor,
        kept: torch.Tensor,
    ) -> tuple[Any, ...]:
        return tokens, decoder_tokens, loss_mask, labels, *self._masks(kept, decoder_tokens)

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
