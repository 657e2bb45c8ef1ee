"""Attention over the blocks of sequences of the ranks of context parallelism, inside an exchange of heads.

After the exchange of heads, a rank has some heads of the positions of its block. Causal attention without a
mask is the ring attention of torch. For other attention, each rank gathers the keys and values of its heads,
and computes the rows of the mask that belong to its positions.

Source: Fang and Zhao, Unified Sequence Parallelism, https://arxiv.org/abs/2405.07719
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import ConfigurationError
from accelerate.devices import of_device
from accelerate.strategies.axes import masks
from accelerate.strategies.axes.head_exchange import SEQUENCE, join
from accelerate.strategies.axes.sequence_shards import SequenceShards, chunk_of
from accelerate.strategies.axes.sharded_forwards import Attention, sequence_state


@contextmanager
def ring_enabled(mesh: Any, rotate: str) -> Iterator[Attention]:
    """Yields the attention of torch over the ranks of a device mesh, which is called inside the block.

    Args:
        mesh: Device mesh with one dimension.
        rotate: How keys and values are exchanged, "allgather" or "alltoall".
    """
    from torch.distributed.tensor.experimental import context_parallel

    from accelerate.strategies.axes.ring_kernels import register_cpu_kernels

    if of_device(torch.device(mesh.device_type)).is_host:
        register_cpu_kernels()
    torch_private.set_rotate_method(rotate)
    # torch chooses chunks from both ends of sequences by the length of a buffer.
    buffer = torch.zeros(2 * mesh.size(), device=mesh.device_type)
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}):
        yield nn.functional.scaled_dot_product_attention


def attend_over_blocks(
    attention: Attention,
    heads: tuple[Tensor, ...],
    arguments: Mapping[str, Any],
    shards: SequenceShards,
) -> Tensor:
    """Computes `scaled_dot_product_attention` over the blocks of all ranks of the ring.

    Called on all ranks of the ring.

    Args:
        attention: Function of torch for tensors of this rank.
        heads: Queries, keys and values of shape [batch, heads, positions of the block, size].
        arguments: Further arguments by name. A mask is that of whole sequences.
    """
    mask = arguments.get("attn_mask")
    if mask is None and arguments.get("is_causal"):
        return _attend_in_ring(heads, arguments, shards)
    query, key, value = heads
    key, value = _gather_keys(key, value, shards)
    if mask is not None:
        arguments = {**arguments, "attn_mask": _rows_of_block(mask, shards)}
    return attention(query, key, value, **arguments)


def attend_by_layer(
    attention: Callable[..., Tensor],
    heads: tuple[Tensor, ...],
    mask: Any,
    kwargs: Mapping[str, Any],
    shards: SequenceShards,
) -> Tensor:
    """Computes an attention function of transformers over the blocks of all ranks of the ring.

    Called on all ranks of the ring.

    Args:
        attention: The function, which takes the tensors of the heads, the mask and keyword arguments.
        heads: Queries, keys and values of shape [batch, heads, positions of the block, size].
        mask: Mask of whole sequences for the heads of this rank, or None.
        kwargs: Keyword arguments. A bias of positions is that of whole sequences.

    Raises:
        ConfigurationError: The function computes attention by another function, or takes another mask.
    """
    bias = kwargs.get("position_bias")
    if isinstance(mask, Tensor) and mask.ndim > 2:
        query, key, value = heads
        key, value = _gather_keys(key, value, shards)
        if bias is not None:
            kwargs = {**kwargs, "position_bias": _rows_of_block(bias, shards)}
        return attention(query, key, value, _rows_of_block(mask, shards), **kwargs)
    if mask is not None or bias is not None:
        other = (
            "a bias of positions without a mask" if mask is None else f"a mask of type {type(mask).__name__}"
        )
        raise _refuse(f"An attention layer gets {other}")
    with sequence_state().over_blocks(shards):
        outputs = attention(*heads, None, **kwargs)
        if sequence_state().blocks_of is not None:
            raise _refuse("An attention layer without a mask has not called scaled_dot_product_attention")
    return outputs


def _attend_in_ring(
    heads: tuple[Tensor, ...], arguments: Mapping[str, Any], shards: SequenceShards
) -> Tensor:
    """Computes causal attention, whose ranks have two chunks of one size.

    Only the last positions of sequences are missing in a chunk, so no other position attends to padding.
    """
    ring = sequence_state().ring_attention
    assert ring is not None  # while a sharded forward runs
    size = heads[0].shape[SEQUENCE]
    missing = 2 * chunk_of(shards.length, shards.ranks) - size
    padded = [nn.functional.pad(each, (0, 0, 0, missing)) if missing else each for each in heads]
    return masks.attend(ring, tuple(padded), arguments).narrow(SEQUENCE, 0, size)


def _gather_keys(key: Tensor, value: Tensor, shards: SequenceShards) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of whole sequences for the heads of this rank.

    Called on all ranks of the ring, and communicates once.
    """
    blocks = shards.blocks
    assert blocks is not None
    both = join(torch.cat((key, value), -1), SEQUENCE, blocks)
    key, value = torch.split(both, [key.shape[-1], value.shape[-1]], -1)
    return key, value


def _rows_of_block(mask: Tensor, shards: SequenceShards) -> Tensor:
    """Returns the rows of a mask or bias of whole sequences that belong to the block of this rank."""
    blocks = shards.blocks
    assert blocks is not None
    if mask.ndim < 2 or mask.shape[-2] == 1:
        return mask
    return blocks.shard(mask, mask.ndim - 2)


def _refuse(problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"{problem}, and cp_size with sp_size computes attention by scaled_dot_product_attention, or with a "
        "mask of whole sequences. Choose attn_implementation='sdpa' for models of transformers, or set "
        "cp_size=1."
    )
