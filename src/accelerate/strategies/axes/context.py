"""Context parallelism by torch, in which the ranks of an axis have shards of each sequence.

Source: https://docs.pytorch.org/tutorials/unstable/context_parallel.html
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from time import perf_counter_ns
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from accelerate import ops, torch_private
from accelerate.base import ConfigurationError, StateError, wrong_value
from accelerate.devices import of_device
from accelerate.nested import recursively_apply
from accelerate.parallelism_config import MeshAxis
from accelerate.planning import Layout
from accelerate.state import services
from accelerate.strategies.axes.masks import (
    LatestShards,
    ShardedSequences,
    attend,
    check_masks,
    checks_enabled,
    refuse_own_attention,
)
from accelerate.strategies.axes.partial_sums import PartialSums
from accelerate.strategies.axes.ring_kernels import register_cpu_kernels
from accelerate.strategies.axes.sequence_check import (
    CHUNKS,
    check_forward,
    dim_of_shard,
    gather_shards,
    unshard,
)
from accelerate.strategies.axes.sequence_shards import SequenceRanks, checked_buffers, consecutive
from accelerate.strategies.axes.whole_losses import block_losses
from accelerate.strategies.layer import Layer
from accelerate.strategies.tolerances import must_compare

T = TypeVar("T")

_SOFTMAX = (torch.softmax, Tensor.softmax, torch.nn.functional.softmax)


class ContextAxis(Layer):
    """Axis along which sequences are sharded, with attention over all of its ranks."""

    splits_buffers = True
    masks_documents = False

    def __init__(self, strategy: Any) -> None:
        context = strategy.context
        self._mesh, self._handler = context.mesh, context.request.parallelism.cp_handler
        self._precision: str = context.mixed_precision
        self._models: WeakSet[nn.Module] = WeakSet()
        self._sums = PartialSums()

    def transform_model(self, model: nn.Module, micro_batch_size: int = 1) -> nn.Module:
        """Adds hooks that check the attention of a model while sequences are sharded."""
        if model in self._models:
            return model
        self._models.add(model)
        check_masks(model)
        model.register_forward_pre_hook(_Forwards(self._precision), with_kwargs=True)
        self._sums.add_model(model)
        return model

    def backward_done(self) -> None:
        """Compares what ranks divide sums over positions by."""
        group = self._mesh[MeshAxis.CP.value].get_group()
        self._sums.compare(SequenceRanks(group, group))

    def split_batch(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Returns torch's context, in which buffers are sharded and attention is over all ranks."""
        from torch.distributed.tensor.experimental import context_parallel

        tensors, dims = checked_buffers(buffers, buffer_seq_dims)
        mesh = self._mesh[MeshAxis.CP.value]
        _check_lengths(tensors, dims, mesh.size())
        if of_device(torch.device(mesh.device_type)).is_host:
            register_cpu_kernels()
        torch_private.set_rotate_method(self._handler.cp_comm_strategy)
        context = context_parallel(
            mesh, buffers=tensors, buffer_seq_dims=dims, no_restore_buffers=set(no_restore_buffers or ())
        )
        return _with_checked_attention(context, tensors, dims, mesh, self._sums)

    def memory_layout(self, layout: Layout) -> Layout:
        """Returns a layout in which activations are those of a part of each sequence."""
        return replace(layout, context_parallel=self._mesh[MeshAxis.CP.value].size())


def _check_lengths(buffers: list[Tensor], dims: list[int], size: int) -> None:
    """Raises an error for sequences that `size` ranks cannot divide into chunks of one length."""
    chunks = CHUNKS * size
    for buffer, dim in zip(buffers, dims, strict=True):
        if buffer.shape[dim] % chunks:
            reason = (
                f"a sequence of {buffer.shape[dim]} is not divisible into {chunks} chunks, {CHUNKS} for each"
            )
            reason += f" of the {size} ranks of the axis"
            raise wrong_value(
                "buffers", list(buffer.shape), reason, f"Pad sequences to a multiple of {chunks}"
            )


class _ImportedAttention(TorchFunctionMode):
    """Mode that replaces `scaled_dot_product_attention` also where a model has imported it by its name.

    torch replaces the attribute of `torch.nn.functional` inside its context. Code that has imported the
    function by its name would attend to the shard of this rank only, without an error.
    """

    calls = 0

    def __init__(self, lengths: set[int]) -> None:
        super().__init__()
        self._lengths = lengths  # of the shards of sequences

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _SOFTMAX and args and args[0].ndim > 2:
            *_, queries, keys = args[0].shape
            if queries == keys and keys in self._lengths:
                raise refuse_own_attention(f"softmax of scores of shape {list(args[0].shape)}")
        if func is torch_private.scaled_dot_product_attention:
            self.calls += 1
            if not any(isinstance(arg, DTensor) for arg in args):
                func = torch.nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


@contextmanager
def _with_checked_attention(
    context: AbstractContextManager[Any],
    buffers: list[Tensor],
    dims: list[int],
    mesh: Any,
    sums: PartialSums,
) -> Iterator[None]:
    sizes = frozenset(
        (dim % buffer.ndim, buffer.shape[dim] // mesh.size())
        for buffer, dim in zip(buffers, dims, strict=True)
    )
    attention = _ImportedAttention({size for _, size in sizes})
    services.of_process(ShardedSequences).shards = LatestShards(perf_counter_ns(), sizes, mesh)
    group, size = mesh.get_group(), next(iter(sizes))[1]
    shards = consecutive(SequenceRanks(group, group), mesh.get_local_rank(), (size,) * mesh.size())
    with checks_enabled(buffers, dims) as sequences, context, torch_private.attention_replaced(attend):
        with attention, block_losses(shards, sums):
            yield
        if sequences.model is not None and not attention.calls:
            raise ConfigurationError(
                f"The forward of {sequences.model} inside accelerator.maybe_context_parallel has not called "
                "torch's scaled_dot_product_attention, so each rank would attend to its own shard of the "
                "sequences only. Choose attention by that function, for transformers' models with "
                "attn_implementation='sdpa', or set cp_size=1."
            )


class _Forwards:
    """Hook that records the forward of a model, and compares some of those with sharded sequences."""

    def __init__(self, precision: str) -> None:
        self._precision = precision
        self._calls: Counter[bool] = Counter()  # by the mode of the model

    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        sequences = services.of_process(ShardedSequences)
        sequences.model = type(model).__name__
        is_sharded = sequences.length is not None and sequences.shards is not None
        if not is_sharded or torch.compiler.is_compiling():
            return
        self._calls[model.training] += 1
        if must_compare(self._calls[model.training]):
            check_forward(model, args, kwargs, sequences, self._precision)


def merge_shards(data: T, batch_at: int) -> T:
    """Returns the outputs for a batch as one rank with whole sequences computes them.

    Shards of sequences become whole sequences, in their order. A floating-point value that is repeated for
    each sample, such as a loss, becomes its mean over the ranks of the axis. Called on all ranks.

    Args:
        data: Tensors in any nesting whose dimension 0 is the batch. Other values are returned unchanged.
        batch_at: When the batch was read. Outputs are unchanged if no sequence was sharded since then.

    Raises:
        StateError: A value for each sample differs between the ranks, and is not a shard of a sequence.
    """
    shards = services.of_process(ShardedSequences).shards
    if shards is None or shards.began_at < batch_at:
        return data
    leaves: list[Tensor] = []
    recursively_apply(leaves.append, data)
    forms = ops.gather_object([[(leaf.shape, leaf.dtype) for leaf in leaves]])
    if any(form != forms[0] for form in forms):  # objects of any shape
        return data
    merged: T = recursively_apply(lambda leaf: _merge_leaf(leaf, shards), data)
    return merged


def _merge_leaf(leaf: Tensor, shards: LatestShards) -> Tensor:
    if leaf.ndim == 0:
        return leaf
    tensors = gather_shards(leaf, shards)
    is_equal = all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    if is_equal and leaf.is_floating_point():
        return leaf
    if (dim := dim_of_shard(leaf, shards)) is not None:
        return unshard(tensors, dim)
    if is_equal:
        return leaf
    if leaf.ndim > 1 or not leaf.is_floating_point() or any((t != t[0]).any() for t in tensors):
        raise StateError(
            f"gather_for_metrics got a value of shape {list(leaf.shape)} that differs between the "
            f"{len(tensors)} ranks of context parallelism, which have shards of the same sequences. Pass "
            f"outputs with the dimension of the sequence, or combine the values of these ranks first: "
            f"accelerator.gather(value) returns those of all ranks."
        )
    return torch.stack(tensors).mean(0)
