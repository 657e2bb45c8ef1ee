"""Train steps of GPT, BERT and T5 for the schedules of Megatron-LM.

The schedules of Megatron-LM call the `forward_step` of a train step for each micro-batch. It reads the
micro-batch, runs the model, and returns the output and its loss function. Scripts may pass a train step of
their own to the plugin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from accelerate.base import is_transformers_available
from accelerate.strategies.megatron import library

if TYPE_CHECKING:
    from torch import nn

IGNORED = -100
"""Label of tokens that are not part of the loss."""

_NAMES = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")

Batch = Mapping[str, Tensor]
Loss = tuple[Any, ...]


class AbstractTrainStep(ABC):
    """Interface of the train steps that the schedules of Megatron-LM call.

    A subclass sets `get_batch`, `loss_func` and `forward_step` to the results of the three methods, and
    `model_output_class`.

    Args:
        name: Name of the train step.
    """

    get_batch: Callable[[Iterator[Batch]], Any]
    loss_func: Callable[..., Loss]
    forward_step: Callable[..., tuple[Any, Callable[..., Loss]]]
    model_output_class: Callable[..., Any]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: object, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Returns the function that reads the next micro-batch of an iterator.

        Args:
            accelerator: Has `state.megatron_lm_plugin`.
            megatron_dataset_flag: Whether the batches are those of datasets of Megatron-LM.
        """

    @abstractmethod
    def get_forward_step_func(self) -> Callable[..., Any]:
        """Returns the function that runs the model on the next micro-batch.

        Its arguments are an iterator and the model. It returns the output of the model and the function that
        computes the loss of that output.
        """

    @abstractmethod
    def get_loss_func(self, accelerator: object) -> Callable[..., Loss]:
        """Returns the function that computes the loss of an output on the last pipeline stage.

        It returns the loss summed over tokens, the number of tokens, and a report: tensors by name, which are
        pairs of a sum and a count, or means.
        """


class StepOutput(dict[str, Any]):
    """Output of a step, with values by name, attribute and index, for use without transformers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, (int, slice)) else super().__getitem__(key)


def output_class(name: str) -> Callable[..., Any]:
    """Returns an output class of transformers, or `StepOutput` if transformers is not installed."""
    if not is_transformers_available():
        return StepOutput
    cls: Callable[..., Any] = getattr(import_module("transformers.modeling_outputs"), name)
    return cls


def sum_over_tokens(loss_mask: Tensor, losses: Tensor, name: str) -> Loss:
    """Returns the summed loss of tokens with mask 1, the number of these tokens, and a report of both."""
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    number = mask.sum().detach().to(torch.int)
    report = torch.stack([total.detach(), number.to(total.dtype)])
    return total, number, {name: report}


def _losses_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss of each token from logits of shape (samples, tokens, vocabulary shard)."""
    entropy = library.core("tensor_parallel").vocab_parallel_cross_entropy
    by_token = logits.transpose(0, 1).float().contiguous()
    losses: Tensor = entropy(by_token, labels.transpose(0, 1).contiguous())
    return losses.transpose(0, 1).contiguous()


def _with_logits(loss: Loss, logits: Tensor) -> Loss:
    """Adds the logits, gathered over the vocabulary shards and detached, to the report of a loss."""
    *values, report = loss
    gather = library.core("tensor_parallel").gather_from_tensor_model_parallel_region
    return (*values, {**report, "logits": gather(logits.detach())})


def _shard_sequences(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the shard of each sequence for this context-parallel rank."""
    group = library.core("parallel_state").get_context_parallel_group()
    if torch.distributed.get_world_size(group) == 1:
        return batch
    shard = library.core("utils").get_batch_on_this_cp_rank
    options = {"cp_group": group, "is_hybrid_cp": False}
    known = signature(shard).parameters  # versions have different parameters
    return shard(batch, **{name: value for name, value in options.items() if name in known})  # type: ignore[no-any-return]


class _FamilyTrainStep(AbstractTrainStep):
    """Base class of the train steps of the model families."""

    def __init__(self, name: str, accelerator: Any, args: Namespace, output: str) -> None:
        super().__init__(name)
        self.returns_logits: bool = args.return_logits
        plugin = accelerator.state.megatron_lm_plugin
        self.get_batch = self.get_batch_func(accelerator, plugin.megatron_dataset_flag)
        self.model_output_class = output_class(output)

    @abstractmethod
    def _read_batch(self, batch: Batch) -> tuple[Any, ...]:
        """Returns the tensors for the step from a batch with the names of transformers."""

    @abstractmethod
    def _read_megatron_batch(self, batch: Batch) -> tuple[Any, ...]:
        """Returns the tensors for the step from a batch of a dataset of Megatron-LM."""

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        read = self._read_megatron_batch if megatron_dataset_flag else self._read_batch
        custom: Callable[..., Any] | None = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        return custom or (lambda data_iterator: read(next(data_iterator)))


class _TokenTrainStep(_FamilyTrainStep):
    """Base class of the train steps of models that predict tokens."""

    label_argument: str  # the argument of the model for labels

    def __init__(self, name: str, accelerator: object, args: Namespace, output: str) -> None:
        super().__init__(name, accelerator, args, output)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    @abstractmethod
    def _split_inputs(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor, Tensor]:
        """Returns the arguments of the model, the labels and the loss mask."""

    def get_loss_func(self, accelerator: Any) -> Callable[..., Loss]:
        """Returns the function that computes the loss from a mask and the losses of tokens."""
        custom: Callable[..., Loss] | None = accelerator.state.megatron_lm_plugin.custom_loss_function
        return custom or partial(sum_over_tokens, name="lm loss")

    def get_forward_step_func(self) -> Callable[..., Any]:

        def forward_step(data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Any, Callable[..., Loss]]:
            inputs, labels, loss_mask = self._split_inputs(self.get_batch(data_iterator))
            if self.returns_logits:
                return model(*inputs), partial(self._loss_of_logits, loss_mask, labels)
            losses = model(*inputs, **{self.label_argument: labels})
            return losses, partial(self.loss_func, loss_mask)

        return forward_step

    def _loss_of_logits(self, loss_mask: Tensor, labels: Tensor, logits: Tensor) -> Loss:
        return _with_logits(self.loss_func(loss_mask, _losses_from_logits(logits, labels)), logits)


class GPTTrainStep(_TokenTrainStep):
    """Train step of GPT, Llama and other decoder models.

    Batches have `input_ids`, and may have `labels` (not shifted, -100 for tokens that are ignored) and
    `attention_mask`. Batches of datasets of Megatron-LM have `tokens`, `labels` and `loss_mask`.
    """

    label_argument = "labels"

    def __init__(self, accelerator: object, args: Namespace) -> None:
        self.pad_token: int | None = getattr(args, "pad_token_id", None)
        self.eod_token: int | None = getattr(args, "eos_token_id", None)
        self.reset_position_ids: bool = args.reset_position_ids
        self.reset_attention_mask: bool = args.reset_attention_mask
        self.eod_mask_loss: bool = args.eod_mask_loss
        super().__init__("GPTTrainStep", accelerator, args, "CausalLMOutputWithCrossAttentions")

    def _split_inputs(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor, Tensor]:
        tokens, labels, loss_mask, attention_mask, position_ids = batch
        return (tokens, position_ids, attention_mask), labels, loss_mask

    def _read_batch(self, batch: Batch) -> tuple[Any, ...]:
        tokens, kept = batch["input_ids"], batch.get("attention_mask")
        labels = batch.get("labels")
        if labels is None:
            labels = tokens if kept is None else tokens.masked_fill(kept == 0, IGNORED)
        last = torch.full_like(labels[:, :1], IGNORED)
        following = torch.cat([labels[:, 1:], last], dim=1)
        return self._with_masks(tokens, following.clamp(min=0), (following != IGNORED).float(), kept)

    def _read_megatron_batch(self, batch: Batch) -> tuple[Any, ...]:
        if "text" in batch:  # has one token more than a sequence
            text = batch["text"].long()
            tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
            return self._with_masks(tokens, labels, torch.ones_like(labels).float())
        return self._with_masks(batch["tokens"].long(), batch["labels"].long(), batch["loss_mask"].float())

    def _with_masks(
        self, tokens: Tensor, labels: Tensor, loss_mask: Tensor, kept: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Returns tokens, labels, loss mask, attention mask and positions, with `kept` 0 for padding."""
        ends = torch.zeros_like(tokens) if self.eod_token is None else (tokens == self.eod_token).long()
        if self.eod_mask_loss:
            loss_mask = loss_mask * (ends == 0)
        hidden = causal_mask(tokens.shape[1], tokens.device)
        if kept is not None:
            hidden = hidden | (kept == 0)[:, None, None, :]
        document = ends.cumsum(1) - ends
        if self.reset_attention_mask:
            hidden = hidden | (document[:, None, :, None] != document[:, None, None, :])
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if self.reset_position_ids:
            positions = positions - document_starts(document)
        parts = (tokens, labels, loss_mask, hidden, positions)
        batch = _shard_sequences(dict(zip(_NAMES, parts, strict=True)))
        return tuple(batch[name] for name in _NAMES)


def causal_mask(length: int, device: torch.device) -> Tensor:
    """Returns a mask of shape (1, 1, tokens, tokens) that is True for later tokens, which are masked."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)


def document_starts(document: Tensor) -> Tensor:
    """Returns the position of the first token of each token's document, from ascending document numbers."""
    positions = torch.arange(document.shape[1], device=document.device).expand_as(document)
    is_first = torch.ones_like(document, dtype=torch.bool)
    is_first[:, 1:] = document[:, 1:] != document[:, :-1]
    return torch.where(is_first, positions, 0).cummax(1).values


class T5TrainStep(_TokenTrainStep):
    """Train step of T5.

    Batches have `input_ids` and `labels` (-100 for tokens that are ignored), and may have `attention_mask`
    and `decoder_input_ids`. Batches of datasets of Megatron-LM have `text_enc`, `text_dec`, `labels`,
    `loss_mask`, `enc_mask` and `dec_mask`.
    """

    label_argument = "lm_labels"

    def __init__(self, accelerator: object, args: Namespace) -> None:
        self.start_token = int(getattr(args, "pad_token_id", None) or 0)
        self.uses_engine = args.transformer_impl == "transformer_engine"
        super().__init__("T5TrainStep", accelerator, args, "Seq2SeqLMOutput")

    @staticmethod
    def attn_mask_postprocess(attention_mask: Tensor) -> Tensor:
        """Returns the self-attention mask of the encoder.

        Args:
            attention_mask: Tensor of shape (samples, tokens), with 1 for tokens and 0 for padding.

        Returns:
            A tensor of shape (samples, 1, tokens, tokens) that is True for padding, which is masked.
        """
        kept = attention_mask != 0
        return ~(kept[:, None, :, None] & kept[:, None, None, :])

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device) -> Tensor:
        """Returns the self-attention mask of the decoder.

        Args:
            seq_length: Number of tokens of the decoder.
            device: Device of the result.

        Returns:
            A tensor of shape (1, 1, tokens, tokens) that is True for later tokens, which are masked.
        """
        return causal_mask(seq_length, device)

    @staticmethod
    def get_enc_dec_mask(attention_mask: Tensor, dec_seq_length: int, device: torch.device) -> Tensor:
        """Returns the cross-attention mask of the decoder.

        Args:
            attention_mask: Tensor of shape (samples, encoder tokens), with 1 for tokens and 0 for padding.
            dec_seq_length: Number of tokens of the decoder.
            device: Device of the result.

        Returns:
            A tensor of shape (samples, 1, decoder tokens, encoder tokens) that is True for padding, which is
            masked.
        """
        padding = (attention_mask == 0).to(device)[:, None, None, :]
        return padding.expand(-1, 1, dec_seq_length, -1)

    def _split_inputs(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor, Tensor]:
        tokens, decoder_tokens, loss_mask, labels, *masks = batch
        return (tokens, decoder_tokens, *masks), labels, loss_mask

    def _read_batch(self, batch: Batch) -> tuple[Any, ...]:
        tokens, labels = batch["input_ids"], batch["labels"]
        known = labels.clamp(min=0)
        decoder_tokens = batch.get("decoder_input_ids")
        if decoder_tokens is None:
            first = torch.full_like(known[:, :1], self.start_token)
            decoder_tokens = torch.cat([first, known[:, :-1]], dim=1)
        masks = self._masks(batch.get("attention_mask", torch.ones_like(tokens)), decoder_tokens)
        return tokens, decoder_tokens, (labels != IGNORED).float(), known, *masks

    def _read_megatron_batch(self, batch: Batch) -> tuple[Any, ...]:
        decoder_tokens = batch["text_dec"].long()
        return (
            batch["text_enc"].long(),
            decoder_tokens,
            batch["loss_mask"].float(),
            batch["labels"].long().clamp(min=0),
            *self._masks(batch["enc_mask"], decoder_tokens),
        )

    def _masks(self, kept: Tensor, decoder_tokens: Tensor) -> tuple[Any, Any, Any]:
        """Returns the masks of encoder, decoder and cross attention."""
        if self.uses_engine:  # it has other shapes, and masks later tokens by itself
            hidden = (kept == 0)[:, None, None, :]
            nothing = torch.zeros_like(decoder_tokens, dtype=torch.bool)[:, None, None, :]
            return hidden, None, (nothing, hidden)
        length, device = decoder_tokens.shape[1], decoder_tokens.device
        return (
            self.attn_mask_postprocess(kept),
            self.get_decoder_mask(length, device),
            self.get_enc_dec_mask(kept, length, device),
        )


class BertTrainStep(_FamilyTrainStep):
    """Train step of BERT, for pretraining with masked tokens and sentence pairs or for classification.

    Batches have `input_ids`, and may have `attention_mask`, `token_type_ids`, `labels` (-100 for tokens that
    are not predicted) and `next_sentence_label`. Batches of datasets of Megatron-LM have `text`, `types`,
    `labels`, `is_random`, `loss_mask` and `padding_mask`. Classification needs a custom model.
    """

    def __init__(self, accelerator: object, args: Namespace) -> None:
        output = "MaskedLMOutput" if args.pretraining_flag else "SequenceClassifierOutput"
        super().__init__("BertTrainStep", accelerator, args, output)
        self.loss_func = self.get_loss_func(accelerator, args.pretraining_flag, args.num_labels)
        self.forward_step = self.get_forward_step_func(args.pretraining_flag, args.bert_binary_head)

    # Both methods return tokens, types, sentence order, loss mask, labels and padding mask.

    def _read_batch(self, batch: Batch) -> tuple[Any, ...]:
        tokens = batch["input_ids"]
        labels = batch.get("labels", torch.full_like(tokens, IGNORED))
        return (
            tokens,
            batch.get("token_type_ids", torch.zeros_like(tokens)),
            batch.get("next_sentence_label", torch.full_like(tokens[:, 0], IGNORED)),
            (labels != IGNORED).float(),
            labels.clamp(min=0) if labels.ndim > 1 else labels,
            batch.get("attention_mask", torch.ones_like(tokens)),
        )

    def _read_megatron_batch(self, batch: Batch) -> tuple[Any, ...]:
        return (
            batch["text"].long(),
            batch["types"].long(),
            batch["is_random"].long().reshape(-1),
            batch["loss_mask"].float(),
            batch["labels"].long().clamp(min=0),
            batch["padding_mask"].long(),
        )

    def get_loss_func(  # type: ignore[override]  # scripts call it with these arguments
        self, accelerator: Any, pretraining_flag: bool, num_labels: int
    ) -> Callable[..., Loss]:
        """Returns the function that computes the loss.

        Args:
            accelerator: Has `state.megatron_lm_plugin`.
            pretraining_flag: True for pretraining, False for classification.
            num_labels: Number of classes, 1 for a regression.
        """
        custom: Callable[..., Loss] | None = accelerator.state.megatron_lm_plugin.custom_loss_function
        return custom or (
            _pretraining_loss if pretraining_flag else partial(_classification_loss, num_labels)
        )

    def get_forward_step_func(  # type: ignore[override]  # scripts call it with these arguments
        self, pretraining_flag: bool, bert_binary_head: bool
    ) -> Callable[..., Any]:
        """Returns the function that runs the model.

        Args:
            pretraining_flag: True for pretraining, False for classification.
            bert_binary_head: Whether the model predicts the order of sentence pairs.
        """

        def forward_step(data_iterator: Iterator[Batch], model: nn.Module) -> tuple[Any, Callable[..., Loss]]:
            tokens, types, order, loss_mask, labels, padding_mask = self.get_batch(data_iterator)
            types = types if bert_binary_head or not pretraining_flag else None
            takes_labels = pretraining_flag and not self.returns_logits
            lm_labels = {"lm_labels": labels} if takes_labels else {}
            output = model(tokens, padding_mask, tokentype_ids=types, **lm_labels)
            if not pretraining_flag:
                return output, partial(self.loss_func, labels)
            if self.returns_logits:
                return output, partial(self._loss_of_logits, loss_mask, order, labels)
            return output, partial(self.loss_func, loss_mask, order)

        return forward_step

    def _loss_of_logits(self, loss_mask: Tensor, order: Tensor, labels: Tensor, output: Any) -> Loss:
        logits, order_logits = output
        losses = _losses_from_logits(logits, labels)
        return _with_logits(self.loss_func(loss_mask, order, (losses, order_logits)), logits)


def _pretraining_loss(loss_mask: Tensor, sentence_order: Tensor, output: Any) -> Loss:
    """Returns the mean loss of masked tokens plus that of sentence pairs, scaled by the number of tokens."""
    losses, order_logits = output
    mask = loss_mask.reshape(-1).float()
    parts = {"lm loss": (torch.sum(losses.reshape(-1).float() * mask), mask.sum())}
    if order_logits is not None:
        order = sentence_order.reshape(-1)
        total = F.cross_entropy(
            order_logits.reshape(-1, 2).float(), order, ignore_index=IGNORED, reduction="sum"
        )
        parts["sop loss"] = (total, (order != IGNORED).sum().float())
    return _weighted(parts)


def _classification_loss(num_labels: int, labels: Tensor, logits: Tensor) -> Loss:
    if num_labels == 1:
        loss = F.mse_loss(logits.reshape(-1).float(), labels.reshape(-1).float())
    elif labels.is_floating_point():
        loss = F.binary_cross_entropy_with_logits(logits.float(), labels)
    else:
        loss = F.cross_entropy(logits.reshape(-1, num_labels).float(), labels.reshape(-1))
    rows = torch.tensor(float(logits.shape[0]), device=logits.device)
    total, count, report = _weighted({"loss": (loss * rows, rows)})
    return total, count, {**report, "logits": logits.detach()}


def _weighted(parts: dict[str, tuple[Tensor, Tensor]]) -> Loss:
    """Returns the sum of the mean losses, scaled by the first count, from pairs of a sum and a count."""
    number = next(iter(parts.values()))[1].clamp(min=1.0)
    means = [total / count.clamp(min=1.0) for total, count in parts.values()]
    report = {name: torch.stack([total.detach(), count]) for name, (total, count) in parts.items()}
    return torch.stack(means).sum() * number, number.detach().to(torch.int), report
