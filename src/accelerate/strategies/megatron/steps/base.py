"""What train steps have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from accelerate.base import is_transformers_available
from accelerate.strategies.megatron import library

IGNORED = -100
"""The label of tokens that do not count."""

Batch = Mapping[str, torch.Tensor]
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

        Args:
            accelerator: has `state.megatron_lm_plugin`.
        """


class Output(dict[str, Any]):
    """What a step returns: values by name, also as attributes and by place."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, (int, slice)) else super().__getitem__(key)


def output_class(name: str) -> Callable[..., Any]:
    """Return the class of outputs that scripts know for a family of models.

    Args:
        name: that of transformers; without transformers the class of our own.
    """
    if not is_transformers_available():
        return Output
    found: Callable[..., Any] = getattr(import_module("transformers.modeling_outputs"), name)
    return found


def sum_over_tokens(loss_mask: torch.Tensor, losses: torch.Tensor, name: str) -> Loss:
    """Return the loss of a micro-batch as Megatron-LM takes it.

    Args:
        loss_mask: 1 where a token counts, of the shape of `losses`.

    Returns:
        The sum, the number of tokens, and both to report.
    """
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(losses.reshape(-1).float() * mask)
    number = mask.sum().detach().to(torch.int)
    report = torch.stack([total.detach(), number.to(total.dtype)])
    return total, number, {name: report}


def losses_from_logits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss of each token where ranks share the vocabulary.

    Args:
        logits: samples x tokens x the part of the vocabulary on this rank.
    """
    entropy = library.core("tensor_parallel").vocab_parallel_cross_entropy
    along = logits.transpose(0, 1).float().contiguous()
    losses: torch.Tensor = entropy(along, labels.transpose(0, 1).contiguous())
    return losses.transpose(0, 1).contiguous()


def whole_logits(logits: torch.Tensor) -> torch.Tensor:
    """Return logits over the whole vocabulary, without gradients; called on all ranks that share it.

    Args:
        logits: samples x tokens x the part of the vocabulary on this rank.
    """
    gather = library.core("tensor_parallel").gather_from_tensor_model_parallel_region
    whole: torch.Tensor = gather(logits.detach())
    return whole


def cut_for_context(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the part of each sequence for this process, where several share them."""
    group = library.core("parallel_state").get_context_parallel_group()
    if torch.distributed.get_world_size(group) == 1:
        return batch
    divide = library.core("utils").get_batch_on_this_cp_rank
    arguments = {"cp_group": group, "is_hybrid_cp": False}  # versions differ in what they take
    known = signature(divide).parameters
    cut: dict[str, Any] = divide(batch, **{name: value for name, value in arguments.items() if name in known})
    return cut
