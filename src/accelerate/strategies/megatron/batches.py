"""The batch of one step on the ranks that share it: made equal, filled up, and cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional as F

from accelerate.base import wrong_value
from accelerate.strategies.megatron import library

_FILLERS = {"labels": -100}
"""What stands at places that do not count; 0 in all other tensors."""

_DECODER = ("labels", "decoder_input_ids", "decoder_attention_mask")
"""Tensors as long as the decoder's sequences, in models that have an encoder too."""

Batch = dict[str, torch.Tensor]


class Shape:
    """Rows and columns of the batches of a run.

    Args:
        micro_batch_size: rows of a micro-batch.
        num_micro_batches: micro-batches of a step.
        is_fixed: whether all batches must be of that shape: stages of a pipeline, and ranks that share
            sequences, agree on it beforehand.
        lengths: columns by name of the tensor; others have those of "input_ids".
    """

    def __init__(
        self, micro_batch_size: int, num_micro_batches: int, is_fixed: bool, lengths: Mapping[str, int | None]
    ) -> None:
        self.micro_batch_size = micro_batch_size
        self.rows = micro_batch_size * num_micro_batches
        self.is_fixed = is_fixed
        self.lengths = lengths

    @classmethod
    def of(cls, args: Any) -> Shape:
        """Return what Megatron-LM's arguments say.

        Args:
            args: the namespace.
        """
        shares = args.sequence_parallel or args.context_parallel_size > 1
        decoder = getattr(args, "decoder_seq_length", None)
        first = getattr(args, "encoder_seq_length", None) or args.seq_length
        lengths: dict[str, int | None] = {"input_ids": first}
        if args.model_type_name == "t5":
            lengths.update(dict.fromkeys(_DECODER, decoder))
        return cls(
            args.micro_batch_size,
            args.num_micro_batches,
            bool(shares or args.pipeline_model_parallel_size > 1),
            lengths,
        )

    def fill(self, batch: Batch) -> Batch:
        """Return a batch filled up to its shape, where the shape is fixed.

        Args:
            batch: tensors with one row per sample.

        Raises:
            ConfigurationError: it is larger than the shape.
        """
        if not self.is_fixed:
            return batch
        return {name: self._fill(name, tensor, batch) for name, tensor in batch.items()}

    def _fill(self, name: str, tensor: torch.Tensor, batch: Batch) -> torch.Tensor:
        filler = _FILLERS.get(name, 0)
        if tensor.ndim > 1:
            wanted = self.lengths.get(name, self.lengths["input_ids"])
            tensor = _filled(name, tensor, 1, wanted, filler)
        return _filled(name, tensor, 0, self.rows, filler)

    def cut(self, batch: Batch) -> list[Batch]:
        """Return the micro-batches of a batch; the last one may be smaller where the shape is not fixed."""
        rows = next(iter(batch.values())).shape[0]
        starts = range(0, rows, self.micro_batch_size)
        return [{k: v[start : start + self.micro_batch_size] for k, v in batch.items()} for start in starts]


def _filled(name: str, tensor: torch.Tensor, dim: int, wanted: int | None, filler: int) -> torch.Tensor:
    if wanted is None or tensor.shape[dim] == wanted:
        return tensor
    if tensor.shape[dim] > wanted:
        what = "sequences are longer" if dim else "it has more samples"
        raise wrong_value(
            name,
            list(tensor.shape),
            f"{what} than the {wanted} that all ranks have agreed on",
            "Set seq_length (encoder_seq_length, decoder_seq_length) of MegatronLMPlugin to the longest one"
            if dim
            else "Prepare the loader that gives these batches",
        )
    missing = wanted - tensor.shape[dim]
    pads = [0, 0] * (tensor.ndim - dim - 1) + [0, missing]
    return F.pad(tensor, pads, value=filler)


def share(batch: Batch, device: torch.device) -> Batch:
    """Return one batch on all ranks that make up a copy of the model: that of their first one.

    Collators that draw random numbers would otherwise give each of them another one, and of Megatron-LM's own
    data only some of them read any.

    Args:
        batch: tensors by name; empty where there is nothing to read.
        device: where the tensors go.
    """
    groups = library.core("parallel_state")
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    for group in (groups.get_context_parallel_group(), groups.get_model_parallel_group()):
        if torch.distributed.get_world_size(group) > 1:
            batch = _broadcast(batch, group, device)
    return batch


def _broadcast(batch: Batch, group: Any, device: torch.device) -> Batch:
    first = torch.distributed.get_process_group_ranks(group)[0]
    outline: list[Any] = [{name: (tensor.shape, tensor.dtype) for name, tensor in batch.items()}]
    torch.distributed.broadcast_object_list(outline, first, group=group)
    shared: Batch = {}
    for name, (shape, dtype) in outline[0].items():
        is_here = torch.distributed.get_rank() == first
        tensor = batch[name].contiguous() if is_here else torch.empty(shape, dtype=dtype, device=device)
        torch.distributed.broadcast(tensor, first, group=group)
        shared[name] = tensor
    return shared


def iterators(batches: list[Batch], parts: int) -> Iterator[Batch] | list[Iterator[Batch]]:
    """Return what the schedules of Megatron-LM read: one iterator for each part of the model here.

    Args:
        batches: the micro-batches of a step.
        parts: how many parts of the model lie on this process.
    """
    return iter(batches) if parts == 1 else [iter(batches) for _ in range(parts)]
