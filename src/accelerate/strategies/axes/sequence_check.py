"""Comparison of a forward on shards of sequences with one on whole sequences.

Context parallelism replaces attention only. Other code may depend on several positions of a sequence, such as
a convolution, a recurrent layer, a sum over positions or a choice of the last one, and computes something
else on a shard. So before some forwards with sharded sequences, all ranks compute the outputs for the
beginning of the sequences in both ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import ConfigurationError
from accelerate.ops import gather_in_group
from accelerate.strategies.axes.compared_forwards import (
    comparable,
    different_buffer,
    draw_of_whole,
    explain_draw,
    state_of_generators,
)
from accelerate.strategies.axes.masks import LatestShards, ShardedSequences
from accelerate.strategies.tolerances import tolerance_of

CHUNKS = 2
"""Chunks of a sequence on each rank, one from each end, because later positions attend to more positions."""
CHUNK = 8
"""Positions of a chunk that are compared, unless the model needs longer sequences."""


def check_forward(
    model: nn.Module, args: Any, kwargs: Any, sequences: ShardedSequences, precision: str
) -> None:
    """Raises an error if a model computes other outputs on shards than on whole sequences.

    Called on all ranks inside the block in which sequences are sharded.

    Args:
        model: The model, of which only `forward` is called.
        args: Arguments of the forward, with shards of sequences.

    Raises:
        ConfigurationError: The outputs differ, or positions are counted on each rank.
    """
    name = type(model).__name__
    compared = _compare(model, args, kwargs, sequences, precision, CHUNK)
    if compared.own_error is not None or compared.whole_error is not None:
        # The model may need longer sequences.
        compared = _compare(model, args, kwargs, sequences, precision, None)
    if compared.own_error is not None:
        return  # The real forward raises it, too.
    if compared.whole_error is not None:
        raise ConfigurationError(
            f"{name} computes outputs on shards of sequences, and raises an error on whole sequences "
            f"({compared.whole_error}), so context parallelism cannot be compared with one rank. Train a "
            "model that takes whole sequences, or set cp_size=1."
        )
    if compared.difference > 2 * tolerance_of(model, precision).relative:  # of one position, and not of all
        raise ConfigurationError(
            f"{name} computes other outputs on shards of sequences than on whole sequences "
            f"(relative difference {compared.difference:.1e}), so context parallelism would train another "
            "model. Only attention by scaled_dot_product_attention may combine positions, and positions must "
            "be an argument of the model and one of the buffers. Labels must not be shifted by the model: "
            "shift them before, and pass them to models of transformers as shift_labels. Set cp_size=1 for "
            "convolutions, recurrent layers and means over a sequence."
        )
    if compared.buffer:
        raise ConfigurationError(
            f"{name} gives {compared.buffer} other values with shards of sequences than with "
            "whole sequences, so context parallelism would train another model. Set cp_size=1 for statistics "
            "over positions."
        )
    if compared.draw:
        raise ConfigurationError(explain_draw(name, compared.draw, "cp_size"))


class Comparison(NamedTuple):
    """Comparison on all ranks of the axis.

    Attributes:
        difference: Largest relative difference of the outputs.
        own_error: Error of the forward on shards, or None.
        whole_error: Error of the forward on whole sequences, or None.
        buffer: Name of a buffer with other values, or "".
        draw: Draw on which the outputs depend, and which ranks compute with different numbers, or "".
        numbers: Outputs without dimensions, such as losses, on shards and on whole sequences.
    """

    difference: float = 0.0
    own_error: str | None = None
    whole_error: str | None = None
    buffer: str = ""
    draw: str = ""
    numbers: tuple[tuple[float, float], ...] = ()


def _compare(
    model: nn.Module, args: Any, kwargs: Any, sequences: ShardedSequences, precision: str, chunk: int | None
) -> Comparison:
    """Compares the outputs for the beginning of sequences, or for whole sequences.

    Args:
        chunk: Positions of each chunk that are compared, or None for all.
    """
    shards = sequences.shards
    assert shards is not None  # since the block began
    tree_map = torch_private.pytree.tree_map_only
    whole = tree_map(Tensor, lambda leaf: _whole_prefix(leaf, shards, chunk), (args, kwargs))
    own = tree_map(Tensor, lambda leaf: _own_shard(leaf, shards, chunk), whole)
    result, tolerance, states = Comparison(), tolerance_of(model, precision).relative, state_of_generators()
    with torch.no_grad(), comparable(model) as compute, _of_prefix(sequences):
        try:
            found = compute(*own)
        except ConfigurationError:
            raise
        except Exception as error:
            result = result._replace(own_error=f"{type(error).__name__}: {error}")
        else:
            try:
                with torch_private.attention_replaced(_attend_as_before):
                    expected = compute(*whole)
                    draw = draw_of_whole(compute, whole, expected, found, tolerance)
            except Exception as error:
                result = result._replace(whole_error=f"{type(error).__name__}: {error}")
            else:
                pairs = list(zip(found.outputs, expected.outputs, strict=False))
                differences = [_difference(*pair, shards, chunk) for pair in pairs]
                numbers = tuple(
                    (float(own), float(right)) for own, right in pairs if own.ndim == right.ndim == 0
                )
                buffer = different_buffer(found, expected, tolerance)
                result = Comparison(max(differences, default=0.0), None, None, buffer, draw, numbers)
    gathered: list[tuple[Comparison, int]] = gather_in_group((result, states), shards.mesh.get_group())
    results = [each for each, _ in gathered]
    have_same_states = all(state == states for _, state in gathered)
    of_numbers = map(_difference_of_numbers, zip(*(each.numbers for each in results), strict=False))
    return Comparison(
        max(*(each.difference for each in results), *of_numbers),
        next((each.own_error for each in results if each.own_error is not None), None),
        next((each.whole_error for each in results if each.whole_error is not None), None),
        next((each.buffer for each in results if each.buffer), ""),
        "" if have_same_states else next((each.draw for each in results if each.draw), ""),
    )


def unshard(shards: list[Tensor], dim: int) -> Tensor:
    """Returns whole sequences, of which each rank has a chunk from each end."""
    pairs = [shard.chunk(CHUNKS, dim) for shard in shards]
    return torch.cat([first for first, _ in pairs] + [second for _, second in reversed(pairs)], dim)


def gather_shards(tensor: Tensor, shards: LatestShards) -> list[Tensor]:
    """Returns a tensor of each rank of the axis."""
    own = tensor.detach().contiguous()
    tensors = [torch.empty_like(own) for _ in range(shards.mesh.size())]
    dist.all_gather(tensors, own, group=shards.mesh.get_group())
    return tensors


def dim_of_shard(tensor: Tensor, shards: LatestShards) -> int | None:
    """Returns the dimension of a tensor that is sharded, or None."""
    dims = (dim for dim, size in shards.sizes if tensor.ndim > dim and tensor.shape[dim] == size)
    return next(dims, None)


def _whole_prefix(tensor: Tensor, shards: LatestShards, chunk: int | None) -> Tensor:
    dim = dim_of_shard(tensor, shards)
    if dim is None:
        return tensor
    parts = gather_shards(tensor, shards)
    if _are_positions(parts, dim):
        raise ConfigurationError(
            f"A forward gets positions of shape {list(tensor.shape)} that are counted on each rank, and each "
            "rank has a shard of the sequences. Create the positions of whole sequences before "
            "accelerator.maybe_context_parallel, and add them to its buffers."
        )
    whole = unshard(parts, dim)
    chunks = CHUNKS * shards.mesh.size()
    return whole.narrow(dim, 0, chunks * _length(whole.shape[dim] // chunks, chunk))


def _are_positions(parts: list[Tensor], dim: int) -> bool:
    """Returns whether ranks have the same consecutive numbers."""
    first = parts[0]
    if first.dtype not in (torch.int32, torch.int64) or any(not part.equal(first) for part in parts):
        return False
    return bool((first.diff(dim=dim) == 1).all())


def _length(size: int, chunk: int | None) -> int:
    return size if chunk is None else min(chunk, size)


def _own_shard(tensor: Tensor, shards: LatestShards, chunk: int | None) -> Tensor:
    """Returns the shard of this rank of the beginning of whole sequences."""
    lengths = {(dim, CHUNKS * _length(size // CHUNKS, chunk)) for dim, size in shards.sizes}
    rank, size = shards.mesh.get_local_rank(), shards.mesh.size()
    for dim, length in lengths:
        if tensor.ndim > dim and tensor.shape[dim] == length * size:
            chunks = tensor.chunk(CHUNKS * size, dim)
            return torch.cat([chunks[rank], chunks[-1 - rank]], dim)
    return tensor


def _difference(own: Tensor, whole: Tensor, shards: LatestShards, chunk: int | None) -> float:
    """Returns the largest difference of a position, or 0 for outputs that cannot be compared."""
    own, whole = own.detach(), whole.detach()
    if own.ndim < 2 or not own.is_floating_point():
        return 0.0
    if own.shape != whole.shape:
        whole = _own_shard(whole, shards, chunk)
    if own.shape != whole.shape:
        return 0.0
    pair = (each.to("cpu", torch.float64) for each in (own, whole))
    own, whole = (each.flatten(2) if each.ndim > 2 else each.unsqueeze(-1) for each in pair)
    norm = float(whole.norm(dim=-1).square().mean().sqrt())
    difference = float((own - whole).norm(dim=-1).nan_to_num(0.0).max())
    return difference / norm if norm else difference


def _difference_of_numbers(pairs: tuple[tuple[float, float], ...]) -> float:
    """Returns the difference of the mean or the sum of the ranks' numbers from that of whole sequences.

    Args:
        pairs: Number of each rank on shards and on whole sequences.
    """
    own, right = [number for number, _ in pairs], pairs[0][1]
    size = max(map(abs, (*own, right)))
    if not size or not math.isfinite(sum(own) + right):
        return 0.0
    return min(abs(sum(own) / len(own) - right), abs(sum(own) - right)) / size


def _attend_as_before(attention: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    """Computes attention within this rank."""
    attend: Callable[..., Tensor] = torch_private.scaled_dot_product_attention
    return attend(*args, **kwargs)


@contextmanager
def _of_prefix(sequences: ShardedSequences) -> Iterator[None]:
    """Lets the checks of masks inside the block be those of other tensors."""
    kept = {name: getattr(sequences, name) for name in ("unsharded", "checked")}
    sequences.unsharded, sequences.checked = {}, {}
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(sequences, name, value)
