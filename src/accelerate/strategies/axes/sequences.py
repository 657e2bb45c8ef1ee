"""Ulysses sequence parallelism by torch, in which attention exchanges heads for sequences.

The ranks of the axis have shards of each sequence. A model is called with whole sequences, or in a block with
shards. All of its layers compute the positions of their rank, except for attention, which computes whole
sequences for a part of the heads. With context parallelism, too, the ranks of both axes divide sequences, and
attention of the heads of a rank is computed over the ranks of the other axis.

Sources: Jacobs et al., DeepSpeed Ulysses, https://arxiv.org/abs/2309.14509, and Fang and Zhao, Unified
Sequence Parallelism, https://arxiv.org/abs/2405.07719
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cached_property, partial
from time import perf_counter_ns
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn

from accelerate import ops, torch_private
from accelerate.base import ConfigurationError, wrong_value
from accelerate.nested import iterate_tensors, recursively_apply
from accelerate.parallelism_config import MeshAxis, ParallelismConfig
from accelerate.planning import Layout
from accelerate.strategies.axes.counted_positions import scale_by_whole_length, scales_by_length
from accelerate.strategies.axes.exchanged_attention import replacement_of, whole_positions
from accelerate.strategies.axes.head_exchange import join
from accelerate.strategies.axes.partial_sums import PartialSums
from accelerate.strategies.axes.ring_attention import ring_enabled
from accelerate.strategies.axes.sequence_inputs import (
    Inputs,
    completed,
    inputs_of,
    is_ambiguous,
    length_of,
    sharded,
    transformers_part,
    whole,
    whole_masks,
    without_cache,
)
from accelerate.strategies.axes.sequence_models import check_model
from accelerate.strategies.axes.sequence_shards import (
    SequenceRanks,
    SequenceShards,
    checked_buffers,
    consecutive,
    divide,
)
from accelerate.strategies.axes.sharded_forwards import (
    LatestSequences,
    ShardedForward,
    bindings_of,
    resumed_in_backward,
    sequence_state,
)
from accelerate.strategies.axes.trainer_batches import count_whole_batches
from accelerate.strategies.axes.whole_check import Checked, OutputDims, check_forward
from accelerate.strategies.axes.whole_losses import block_losses
from accelerate.strategies.layer import Layer
from accelerate.strategies.tolerances import must_compare

T = TypeVar("T")


class SequenceAxis(Layer):
    """Axis along which sequences are sharded, and attention exchanges heads for them."""

    splits_buffers = True

    def __init__(self, strategy: Any) -> None:
        context = strategy.context
        self._mesh, self._parallelism = context.mesh, context.request.parallelism
        self._precision: str = context.mixed_precision
        self._models: WeakSet[nn.Module] = WeakSet()
        self._sums = PartialSums()
        count_whole_batches()

    @cached_property
    def _ranks(self) -> SequenceRanks:
        exchange = self._mesh[MeshAxis.SP.value].get_group()
        if not self._parallelism.cp_enabled:
            return SequenceRanks(exchange, exchange)
        axes = MeshAxis.CP.value, MeshAxis.SP.value
        both = torch_private.flatten_mesh(self._mesh[axes], "_".join(axes))
        return SequenceRanks(both.get_group(), exchange, self._mesh[MeshAxis.CP.value])

    def check_model(self, model: nn.Module) -> None:
        """Raises an error for layers that combine positions by other means than attention."""
        check_model(model, self._parallelism.sp_size, self._parallelism.tp_size, self._parallelism.cp_size)

    def transform_model(self, model: nn.Module, micro_batch_size: int = 1) -> nn.Module:
        """Adds hooks that give a model the positions of this rank, and join its outputs."""
        if model in self._models:
            return model
        self._models.add(model)
        ranks, state = self._ranks, sequence_state()
        bindings = bindings_of(model, replacement_of)
        state.bindings.update({(id(b.namespace), b.name): b for b in bindings})
        for part in filter(scales_by_length, model.modules()):
            scale_by_whole_length(part, whole_positions)
        handler = self._parallelism.cp_handler
        has_ring = ranks.ring is not None
        state.ring = partial(ring_enabled, ranks.ring, handler.cp_comm_strategy) if has_ring else None
        forwards = _Forwards(ranks, self._parallelism.sp_handler.sequence_dims, self._precision)
        model.register_forward_pre_hook(forwards.begin, with_kwargs=True)
        model.register_forward_hook(forwards.end, always_call=True)
        self._sums.add_model(model)
        return model

    def backward_done(self) -> None:
        """Compares what ranks divide sums over positions by."""
        self._sums.compare(self._ranks)

    def split_batch(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Returns a context in which buffers are the positions of this rank."""
        tensors, dims = checked_buffers(buffers, buffer_seq_dims)
        ranks = self._ranks
        shards = divide(_length_of_buffers(tensors, dims), ranks)
        if not min(shards.sizes):
            reason = f"{ranks.sizes} divides sequences of {shards.length} positions"
            shapes = [list(each.shape) for each in tensors]
            raise wrong_value("buffers", shapes, reason, "Pass longer sequences, or choose smaller sizes")
        not_restored = {id(each) for each in no_restore_buffers or ()}
        return _in_shards(block_losses(shards, self._sums), shards, tensors, dims, not_restored)

    def joined(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Returns inputs with whole sequences, if they are those of this rank in a block."""
        shards, dims = sequence_state().block, self._parallelism.sp_handler.sequence_dims
        return inputs if shards is None else whole(Inputs((), inputs, ()), shards, dims).kwargs

    @contextmanager
    def unsharded(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Lets each rank compute whole sequences inside the block."""
        state = sequence_state()
        before, state.is_off = state.is_off, True
        try:
            yield
        finally:
            state.is_off = before

    def memory_layout(self, layout: Layout) -> Layout:
        """Returns a layout in which activations are those of a part of each sequence."""
        sizes = self._parallelism
        return replace(layout, sequence_parallel=sizes.sp_size, context_parallel=sizes.cp_size)

    def release(self) -> None:
        """Forgets the models of the run."""
        state = sequence_state()
        state.bindings.clear()
        state.ring = None


class _Forwards:
    """Hooks of a model that computes the positions of this rank.

    Args:
        dims: Dimensions of sequences by the names of arguments.
    """

    def __init__(self, ranks: SequenceRanks, dims: dict[str, int | None], precision: str) -> None:
        self._ranks, self._dims, self._precision = ranks, dims, precision
        self._has_trained = False
        self._others: set[int] = set()  # lengths of queries and keys besides sequences
        self._calls: Counter[Any] = Counter()  # by the mode of the model and the kind of its arguments
        self._checked: dict[Any, Checked] = {}
        self._open: list[tuple[ShardedForward | None, OutputDims | None, ShardedForward | None] | None] = []

    def __reduce__(self) -> tuple[type[_Undivided], tuple[()]]:
        return _Undivided, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Forwards:
        """Returns the object itself, because a copy of a model has the same process group."""
        return self

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Replaces the arguments by those of this rank."""
        if torch.compiler.is_compiling():
            _refuse_compilation(type(model).__name__, self._ranks)
        state = sequence_state()
        state.forget_errors()
        if state.depth:  # a part of a model that is in its forward
            self._open.append(None)
            return None
        inputs = inputs_of(model, args, kwargs)
        forward, dims = None, None
        # A forward with a cache continues a generation, which each rank computes on its own.
        has_cache = inputs.has("past_key_values") or bool(inputs.get("use_cache"))
        if not (state.is_off or has_cache or _is_traced(inputs)):
            inputs, forward, dims = self._divided(model, inputs)
        self._open.append((forward, dims, state.set(forward)))
        state.depth += 1
        return inputs.args, inputs.kwargs

    def _divided(
        self, model: nn.Module, inputs: Inputs
    ) -> tuple[Inputs, ShardedForward | None, OutputDims | None]:
        """Returns the arguments of this rank, and the dimensions of outputs to join, or None in a block."""
        state, part, name = sequence_state(), transformers_part(model), type(model).__name__
        shards, length = state.block, length_of(inputs, name)
        in_block = shards is not None and length == shards.own
        if not in_block:
            shards = _divide(length, self._ranks, name)
            if is_ambiguous(inputs, shards, self._dims) or self._others & set(shards.sizes):
                return inputs, None, None  # each rank computes whole sequences
        assert shards is not None
        entire = inputs
        if in_block:
            inputs = whole_masks(inputs, shards)
        kind = model.training, inputs.signature(length, self._dims)
        checked = self._checked.get(kind)
        self._calls[kind] += 1
        if must_compare(self._calls[kind]):
            checked = None
        if in_block and (checked is None or part is not None):
            entire = whole(inputs, shards, self._dims)
        complete = partial(_completed, model, part)
        if checked is None:
            checked = check_forward(model, entire, complete, shards, self._dims, self._precision)
            self._others |= checked.others
            if checked.is_complete:
                self._checked[kind] = checked
        if self._others & set(shards.sizes):
            if in_block:
                raise ConfigurationError(
                    f"{name} attends to a tensor of {shards.sizes} positions, as many as a rank of "
                    f"{self._ranks.sizes} has of these sequences. Call it without maybe_context_parallel, so "
                    "that each rank computes whole sequences, or choose another length."
                )
            return inputs, None, None
        entire, positions = complete(entire, shards.length), None
        if not in_block or part is not None:
            inputs, positions = sharded(entire, shards, self._dims), entire.get("position_ids")
        positions = positions if isinstance(positions, Tensor) else None
        expected = checked.counts if model.training else ()
        forward = ShardedForward(shards, positions, checked.sites, expected)
        return inputs, forward, None if in_block else checked.dims

    def end(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        """Returns the outputs with whole sequences, or with the positions of this rank beside a loss."""
        state = sequence_state()
        opened = self._open.pop() if self._open else None
        if opened is None:
            return None
        forward, dims, before = opened
        state.depth -= 1
        state.set(before)
        if forward is None or outputs is None:
            return None
        forward.count_layers()
        outputs, untrained = without_cache(outputs), OutputDims()
        losses = list(filter(_is_loss, iterate_tensors(outputs))) if torch.is_grad_enabled() else []
        if dims is not None and losses:
            self._check_losses(model, losses, forward.shards)
            state.latest = LatestSequences(perf_counter_ns(), forward.shards)
            dims, untrained = _beside_loss(list(iterate_tensors(outputs)), dims, forward.shards)
        if dims is not None:
            outputs = join_outputs(outputs, dims, forward.shards)
        outputs = recursively_apply(lambda leaf: resumed_in_backward(leaf, forward), outputs)
        for leaf, dim in zip(iterate_tensors(outputs), untrained, strict=False):
            if dim is not None and leaf.requires_grad:
                refuse = partial(_refuse_gradient, type(model).__name__, forward.shards.ranks)
                leaf.register_hook(refuse)  # type: ignore[no-untyped-call]
        return outputs

    def _check_losses(self, model: nn.Module, losses: list[Tensor], shards: SequenceShards) -> None:
        """Raises an error if the first losses to train are those of the positions of each rank."""
        if self._has_trained:
            return
        self._has_trained = True
        own = torch.stack([loss.detach().float() for loss in losses]).unsqueeze(0)
        values = join(own, 0, consecutive(shards.ranks, shards.rank, (1,) * len(shards.sizes)))
        rounding = 8 * max(torch.finfo(loss.dtype).eps for loss in losses)
        if not torch.allclose(values, values[:1].expand_as(values), rtol=rounding, atol=0, equal_nan=True):
            raise ConfigurationError(
                f"The loss of {type(model).__name__} in training is {values[:, 0].tolist()} on the ranks of "
                f"{shards.ranks.sizes}, and that of whole sequences is equal on all. Compute it by "
                "cross_entropy, or from the outputs, outside of the model."
            )


class _Undivided:
    """Hooks of a model that was pickled, which has no process group."""

    def begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Changes no argument."""

    def end(self, model: nn.Module, args: Any, outputs: Any) -> None:
        """Changes no output."""


def _completed(model: nn.Module, part: nn.Module | None, inputs: Inputs, length: int) -> Inputs:
    """Returns the arguments with those that a model of transformers derives from whole sequences."""
    return inputs if part is None else completed(inputs, model, part, length)


def _is_traced(inputs: Inputs) -> bool:
    """Returns whether a memory plan traces the model, which is that of one rank."""
    return any(tensor.is_meta or torch_private.is_fake(tensor) for _, tensor in inputs.tensors())


def _is_loss(tensor: Tensor) -> bool:
    return tensor.ndim == 0 and tensor.requires_grad


def _beside_loss(
    leaves: list[Tensor], dims: OutputDims, shards: SequenceShards
) -> tuple[OutputDims, OutputDims]:
    """Returns the dimensions of positions of outputs beside a loss to join, and of those that stay shards.

    Numbers for each position, such as log-probabilities, are joined. Outputs with features, such as logits,
    stay shards, which saves the memory of whole ones.

    Args:
        dims: Dimensions of positions in an evaluation, which may have other outputs.
    """
    if len(leaves) != len(dims):
        return [None] * len(leaves), [_dim_of_shard(leaf, shards) for leaf in leaves]
    pairs = list(zip(leaves, dims, strict=True))
    return [d if leaf.ndim == 2 else None for leaf, d in pairs], [
        d if leaf.ndim > 2 else None for leaf, d in pairs
    ]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # so that compiled code calls it
def _refuse_compilation(name: str, ranks: SequenceRanks) -> None:
    raise ConfigurationError(
        f"{name} is compiled after prepare, and {ranks.sizes} exchanges heads between the ranks inside of "
        "attention, which is not compiled. Do not call torch.compile."
    )


def _refuse_gradient(name: str, ranks: SequenceRanks, gradient: Tensor | None) -> None:
    """Raises an error if a loss that the program computes depends on an output of the positions of a rank."""
    if gradient is not None:
        raise ConfigurationError(
            f"A loss depends on an output of {name} of shape {list(gradient.shape)} beside its own loss. The "
            f"output has the positions of this rank of {ranks.sizes}, whose sum or mean is not that of whole "
            "sequences. Call the model without labels, so that outputs are whole, and compute all losses "
            "from them, or return numbers for each position, of shape [batch, sequence], from its forward."
        )


def _divide(length: int, ranks: SequenceRanks, name: str) -> SequenceShards:
    shards = divide(length, ranks)
    if not min(shards.sizes):
        raise ConfigurationError(
            f"{name} gets sequences of {length} positions, and {ranks.sizes} divides each sequence into "
            f"{len(shards.sizes)} parts. Pass longer sequences. For generation, call the model inside of "
            "accelerator.unsharded(model)."
        )
    return shards


def join_outputs(outputs: T, dims: OutputDims, shards: SequenceShards) -> T:
    """Returns outputs with whole sequences.

    Called on all ranks of the group.

    Args:
        outputs: Tensors in any nesting.
        dims: Dimension of the positions of each tensor, or None.
    """
    order = iter(dims)

    def joined(leaf: Tensor) -> Tensor:
        dim = next(order, None)
        return leaf if dim is None else join(leaf, dim, shards)

    result: T = recursively_apply(joined, outputs)
    return result


# Blocks


def _length_of_buffers(buffers: list[Tensor], dims: list[int]) -> int:
    """Returns the length of the sequences in buffers, or raises an error for different lengths."""
    lengths = {buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True)}
    if len(lengths) > 1:
        reason = f"their sequences have different lengths ({', '.join(map(str, sorted(lengths)))})"
        shapes = [list(buffer.shape) for buffer in buffers]
        raise wrong_value("buffers", shapes, reason, "Pass sequences of one length")
    (length,) = lengths
    return int(length)


@contextmanager
def _in_shards(
    losses: AbstractContextManager[object],
    shards: SequenceShards,
    buffers: list[Tensor],
    dims: list[int],
    not_restored: set[int],
) -> Iterator[None]:
    state, entire = sequence_state(), [buffer.data for buffer in buffers]
    before, state.block = state.block, shards
    state.latest = LatestSequences(perf_counter_ns(), shards)
    for buffer, dim in zip(buffers, dims, strict=True):
        buffer.data = shards.shard(buffer.data, dim % buffer.ndim).clone()
    try:
        with losses:
            yield
    finally:
        state.block = before
        for buffer, data in zip(buffers, entire, strict=True):
            if id(buffer) not in not_restored:
                buffer.data = data


# Losses and metrics


def outputs_are_whole(parallelism: ParallelismConfig | None) -> bool:
    """Returns whether models of a run return whole sequences although ranks divide them."""
    is_torch = parallelism is not None and parallelism.sequence_backend == "torch"
    return is_torch and sequence_state().block is None


def merge_sequences(data: T, batch_at: int) -> T:
    """Returns outputs for a batch with whole sequences, from the positions of each rank.

    Called on all ranks.

    Args:
        data: Tensors in any nesting whose dimension 0 is the batch. Other values are returned unchanged.
        batch_at: When the batch was read. Outputs are unchanged if no output since then has been a shard.
    """
    latest = sequence_state().latest
    if latest is None or latest.began_at < batch_at:
        return data
    shards, leaves = latest.shards, list(iterate_tensors(data))
    dims = [_dim_of_shard(leaf, shards) for leaf in leaves]
    own = [
        (leaf.dtype, [-1 if i == dim else size for i, size in enumerate(leaf.shape)])
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    forms = ops.gather_object([own])
    if any(form != forms[0] for form in forms):  # objects of any shape
        return data
    narrowed: T = recursively_apply(lambda leaf: _without_padding(leaf, shards), data)
    return join_outputs(narrowed, dims, shards)


def _dim_of_shard(leaf: Tensor, shards: SequenceShards) -> int | None:
    """Returns the dimension of positions of this rank, also if they are padded for the longest shard."""
    sizes = {shards.own, max(shards.sizes)}
    return next((dim for dim in range(1, leaf.ndim) if leaf.shape[dim] in sizes), None)


def _without_padding(leaf: Tensor, shards: SequenceShards) -> Tensor:
    dim = _dim_of_shard(leaf, shards)
    return leaf if dim is None else leaf.narrow(dim, 0, shards.own)
