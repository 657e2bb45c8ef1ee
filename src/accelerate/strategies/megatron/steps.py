"""Train steps of all families of models: from batches to losses, as Megatron-LM's schedules call them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from accelerate.base import is_transformers_available
from accelerate.strategies.megatron import library

IGNORED = -100
"""The label of tokens that do not count."""

_NAMES = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")

Batch = Mapping[str, Tensor]
Loss = tuple[Any, ...]


class AbstractTrainStep(ABC):
    """Turns batches into losses, as Megatron-LM's schedules call it.

    A subclass sets `get_batch`, `loss_func` and `forward_step` to what the three methods return, and
    `model_output_class`.

    Args:
        name: of the family.
    """

    get_batch: Callable[[Iterator[Batch]], Any]
    loss_func: Callable[..., Loss]
    forward_step: Callable[..., tuple[Any, Callable[..., Loss]]]
    model_output_class: Callable[..., Any]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @abstractmethod
    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return the function that takes a micro-batch from an iterator, as the model wants it.

        Args:
            accelerator: has `state.megatron_lm_plugin`.
            megatron_dataset_flag: whether batches are those of Megatron-LM's datasets.
        """

    @abstractmethod
    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return the function that runs the model on the next micro-batch.

        It takes an iterator and the model, and returns the output and the function of it that gives the loss.
        """

    @abstractmethod
    def get_loss_func(self, accelerator: Any) -> Callable[..., Loss]:
        """Return the function that computes the loss of an output on the last stage of the pipeline.

        It returns the loss summed over tokens, their number, and tensors to report by name: pairs of sum and
        number, or means.
        """


class Output(dict[str, Any]):
    """What a step returns: values by name, also as attributes and by number."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, (int, slice)) else super().__getitem__(key)


def output_class(name: str) -> Callable[..., Any]:
    """Return the class of outputs by its name in transformers; without transformers, a class of our own."""
    if not is_transformers_available():
        return Output
    kind: Callable[..., Any] = getattr(import_module("transformers.modeling_outputs"), name)
    return kind


def sum_over_tokens(loss_mask: Tensor, losses: Tensor, name: str) -> Loss:
    """Return the loss of a micro-batch as Megatron-LM takes it: the sum over tokens whose mask is 1, their
    number, and both to report."""
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    number = mask.sum().detach().to(torch.int)
    report = torch.stack([total.detach(), number.to(total.dtype)])
    return total, number, {name: report}


def _losses_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of each token from logits, samples x tokens x this rank's part of the vocabulary."""
    entropy = library.core("tensor_parallel").vocab_parallel_cross_entropy
    by_token = logits.transpose(0, 1).float().contiguous()
    losses: Tensor = entropy(by_token, labels.transpose(0, 1).contiguous())
    return losses.transpose(0, 1).contiguous()


def _with_logits(loss: Loss, logits: Tensor) -> Loss:
    """Report logits over the whole vocabulary, without gradients; called on all ranks that share it."""
    *values, report = loss
    gather = library.core("tensor_parallel").gather_from_tensor_model_parallel_region
    return (*values, {**report, "logits": gather(logits.detach())})


def _cut_for_context(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the part of each sequence for this process, where several share them."""
    group = library.core("parallel_state").get_context_parallel_group()
    if torch.distributed.get_world_size(group) == 1:
        return batch
    divide = library.core("utils").get_batch_on_this_cp_rank
    arguments = {"cp_group": group, "is_hybrid_cp": False}  # versions differ in what they take
    known = signature(divide).parameters
    cut: dict[str, Any] = divide(batch, **{name: value for name, value in arguments.items() if name in known})
    return cut


class _FamilyTrainStep(AbstractTrainStep):
    def __init__(self, name: str, accelerator: Any, args: Any, output: str) -> None:
        super().__init__(name)
        self.returns_logits: bool = args.return_logits
        plugin = accelerator.state.megatron_lm_plugin
        self.get_batch = self.get_batch_func(accelerator, plugin.megatron_dataset_flag)
        self.model_output_class = output_class(output)

    # Subclasses: return the parts of a batch in the order of the model.
    @abstractmethod
    def _read_labels(self, batch: Batch) -> tuple[Any, ...]: ...
    @abstractmethod
    def _read_megatron(self, batch: Batch) -> tuple[Any, ...]: ...

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        read = self._read_megatron if megatron_dataset_flag else self._read_labels
        custom: Callable[..., Any] | None = accelerator.state.megatron_lm_plugin.custom_get_batch_function
        return custom or (lambda data_iterator: read(next(data_iterator)))


class _TokenTrainStep(_FamilyTrainStep):
    """What the steps of models that predict tokens have in common."""

    label_argument: str
    """The argument by which the model takes labels."""

    def __init__(self, name: str, accelerator: Any, args: Any, output: str) -> None:
        super().__init__(name, accelerator, args, output)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()

    @abstractmethod
    def _arrange(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor, Tensor]: ...

    def get_loss_func(self, accelerator: Any) -> Callable[..., Loss]:
        """Return the function that gives the loss of a mask and the losses of tokens."""
        custom: Callable[..., Loss] | None = accelerator.state.megatron_lm_plugin.custom_loss_function
        return custom or partial(sum_over_tokens, name="lm loss")

    def get_forward_step_func(self) -> Callable[..., Any]:

        def forward_step(data_iterator: Iterator[Batch], model: Any) -> tuple[Any, Callable[..., Loss]]:
            inputs, labels, loss_mask = self._arrange(self.get_batch(data_iterator))
            if self.returns_logits:
                return model(*inputs), partial(self._loss_of_logits, loss_mask, labels)
            losses = model(*inputs, **{self.label_argument: labels})
            return losses, partial(self.loss_func, loss_mask)

        return forward_step

    def _loss_of_logits(self, loss_mask: Tensor, labels: Tensor, logits: Tensor) -> Loss:
        return _with_logits(self.loss_func(loss_mask, _losses_from_logits(logits, labels)), logits)


class GPTTrainStep(_TokenTrainStep):
    """The step of GPT, Llama, and others of their kind.

    Batches have `input_ids`, and may have `labels` (not shifted, -100 where a token does not count) and
    `attention_mask`; those of Megatron-LM's datasets have `tokens`, `labels` and `loss_mask`.
    """

    label_argument = "labels"

    def __init__(self, accelerator: Any, args: Any) -> None:
        self.pad_token: int | None = getattr(args, "pad_token_id", None)
        self.eod_token: int | None = getattr(args, "eos_token_id", None)
        self.reset_position_ids: bool = args.reset_position_ids
        self.reset_attention_mask: bool = args.reset_attention_mask
        self.eod_mask_loss: bool = args.eod_mask_loss
        super().__init__("GPTTrainStep", accelerator, args, "CausalLMOutputWithCrossAttentions")

    def _arrange(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor, Tensor]:
        tokens, labels, loss_mask, attention_mask, position_ids = batch
        return (tokens, position_ids, attention_mask), labels, loss_mask

    def _read_labels(self, batch: Batch) -> tuple[Any, ...]:
        tokens, kept = batch["input_ids"], batch.get("attention_mask")
        labels = batch.get("labels")
        if labels is None:
            labels = tokens if kept is None else tokens.masked_fill(kept == 0, IGNORED)
        last = torch.full_like(labels[:, :1], IGNORED)
        following = torch.cat([labels[:, 1:], last], dim=1)
        return self._complete(tokens, following.clamp(min=0), (following != IGNORED).float(), kept)

    def _read_megatron(self, batch: Batch) -> tuple[Any, ...]:
        if "text" in batch:  # one token more than a sequence has
            text = batch["text"].long()
            tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
            return self._complete(tokens, labels, torch.ones_like(labels).float())
        return self._complete(batch["tokens"].long(), batch["labels"].long(), batch["loss_mask"].float())

    def _complete(
        self, tokens: Tensor, labels: Tensor, loss_mask: Tensor, kept: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Return tokens, labels, loss mask, attention mask and positions; `kept` is 0 for filler."""
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
        batch = _cut_for_context(dict(zip(_NAMES, parts, strict=True)))
        return tuple(batch[name] for name in _NAMES)


def hide_later(length: int, device: torch.device) -> Tensor:
    """Return 1 x 1 x tokens x tokens, True where a token must not attend: to those after it."""
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).triu(1)


def begin_of_documents(document: Tensor) -> Tensor:
    """Return the position at which each token's document begins, from rising numbers of the documents."""
    positions = torch.arange(document.shape[1], device=document.device).expand_as(document)
    is_first = torch.ones_like(document, dtype=torch.bool)
    is_first[:, 1:] = document[:, 1:] != document[:, :-1]
    return torch.where(is_first, positions, 0).cummax(1).values


class T5TrainStep(_TokenTrainStep):
    """The step of T5.

    Batches have `input_ids` and `labels` (-100 where a token does not count), and may have `attention_mask`
    and `decoder_input_ids`; those of Megatron-LM's datasets have `text_enc`, `text_dec`, `labels`,
    `loss_mask`, `enc_mask` and `dec_mask`.
    """

    label_argument = "lm_labels"

    def __init__(self, accelerator: Any, args: Any) -> None:
        self.start_token = int(getattr(args, "pad_token_id", None) or 0)
        self.uses_engine = args.transformer_impl == "transformer_engine"
        super().__init__("T5TrainStep", accelerator, args, "Seq2SeqLMOutput")

    @staticmethod
    def attn_mask_postprocess(attention_mask: Tensor) -> Tensor:
        """Return where tokens of an encoder must not attend: to filler.

        Args:
            attention_mask: samples x tokens, 1 for tokens and 0 for filler.

        Returns:
            Samples x 1 x tokens x tokens, True where it is hidden.
        """
        kept = attention_mask != 0
        return ~(kept[:, None, :, None] & kept[:, None, None, :])

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device) -> Tensor:
        """Return where tokens of a decoder must not attend: to later ones.

        Args:
            seq_length: tokens of the decoder.
            device: of the result.

        Returns:
            1 x 1 x tokens x tokens, True where it is hidden.
        """
        return hide_later(seq_length, device)

    @staticmethod
    def get_enc_dec_mask(attention_mask: Tensor, dec_seq_length: int, device: torch.device) -> Tensor:
        """Return where tokens of a decoder must not attend in the encoder: to filler.

        Args:
            attention_mask: samples x tokens of the encoder, 1 for tokens and 0 for filler.
            dec_seq_length: tokens of the decoder.
            device: of the result.

        Returns:
            Samples x 1 x tokens of the decoder x tokens of the encoder, True where it is hidden.
        """
        filler = (attention_mask == 0).to(device)[:, None, None, :]
        return filler.expand(-1, 1, dec_seq_length, -1)

    def _arrange(self, batch: tuple[Any, ...]) -> tuple[tuple[Any, ...], Tensor, Tensor]:
        tokens, decoder_tokens, loss_mask, labels, *masks = batch
        return (tokens, decoder_tokens, *masks), labels, loss_mask

    def _read_labels(self, batch: Batch) -> tuple[Any, ...]:
        tokens, labels = batch["input_ids"], batch["labels"]
        known = labels.clamp(min=0)
        decoder_tokens = batch.get("decoder_input_ids")
        if decoder_tokens is None:
            first = torch.full_like(known[:, :1], self.start_token)
            decoder_tokens = torch.cat([first, known[:, :-1]], dim=1)
        masks = self._masks(batch.get("attention_mask", torch.ones_like(tokens)), decoder_tokens)
        return tokens, decoder_tokens, (labels != IGNORED).float(), known, *masks

    def _read_megatron(self, batch: Batch) -> tuple[Any, ...]:
        decoder_tokens = batch["text_dec"].long()
        return (
            batch["text_enc"].long(),
            decoder_tokens,
            batch["loss_mask"].float(),
            batch["labels"].long().clamp(min=0),
            *self._masks(batch["enc_mask"], decoder_tokens),
        )

    def _masks(self, kept: Tensor, decoder_tokens: Tensor) -> tuple[Any, Any, Any]:
        """Return the masks of encoder, decoder and cross attention."""
        if self.uses_engine:  # it has a form of its own, and hides later tokens by itself
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
    """The step of BERT: pretraining with masked tokens and pairs of sentences, or classification.

    Batches have `input_ids`, and may have `attention_mask`, `token_type_ids`, `labels` (-100 where a token is
    not predicted) and `next_sentence_label`; those of Megatron-LM's datasets have `text`, `types`, `labels`,
    `is_random`, `loss_mask` and `padding_mask`. Classification needs a model of the user's own.
    """

    def __init__(self, accelerator: Any, args: Any) -> None:
        output = "MaskedLMOutput" if args.pretraining_flag else "SequenceClassifierOutput"
        super().__init__("BertTrainStep", accelerator, args, output)
        self.loss_func = self.get_loss_func(accelerator, args.pretraining_flag, args.num_labels)
        self.forward_step = self.get_forward_step_func(args.pretraining_flag, args.bert_binary_head)

    # Both return tokens, types, order, loss mask, labels and padding mask.

    def _read_labels(self, batch: Batch) -> tuple[Any, ...]:
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

    def _read_megatron(self, batch: Batch) -> tuple[Any, ...]:
        return (
            batch["text"].long(),
            batch["types"].long(),
            batch["is_random"].long().reshape(-1),
            batch["loss_mask"].float(),
            batch["labels"].long().clamp(min=0),
            batch["padding_mask"].long(),
        )

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
        return custom or (
            _pretraining_loss if pretraining_flag else partial(_classification_loss, num_labels)
        )

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
    """Return the mean over masked tokens plus that over pairs of sentences, weighted by the tokens."""
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
    """Return the sum of means, weighted by the number of the first; each part is a sum and its number."""
    number = next(iter(parts.values()))[1].clamp(min=1.0)
    means = [total / count.clamp(min=1.0) for total, count in parts.values()]
    report = {name: torch.stack([total.detach(), count]) for name, (total, count) in parts.items()}
    return torch.stack(means).sum() * number, number.detach().to(torch.int), report
