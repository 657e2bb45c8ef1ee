"""Comparison of a forward on shards of sequences with one on whole sequences.

Context parallelism replaces attention only. Other code may depend on several positions of a sequence, such as
a convolution, a recurrent layer, a sum over positions or a choice of the last one, and computes something
else on a shard. So before the first forward of a model with sharded sequences, all ranks compute the outputs
for the beginning of the sequences in both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import ConfigurationError
from accelerate.logging import get_logger
from accelerate.nested import iterate_tensors
from accelerate.strategies.axes.masks import LatestShards, ShardedSequences
from accelerate.strategies.module_state import ModuleState
from accelerate.strategies.pipeline import restored_generators
from accelerate.strategies.tolerances import tolerance_of

logger = get_logger(__name__)

CHUNKS = 2
"""Chunks of a sequence on each rank, one from each end, because later positions attend to more positions."""
CHUNK = 8  # positions of a chunk that are compared


def check_forward(
    model: nn.Module, args: Any, kwargs: Any, sequences: ShardedSequences, precision: str
) -> None:
    """Raises an error if a model computes other outputs on shards than on whole sequences.

    Called on all ranks inside the block in which sequences are sharded.

    Args:
        model: The model, of which only `forward` is called.
        args: Arguments of the forward, with shards of sequences.
        kwargs: Keyword arguments.
        sequences: The shards.
        precision: Mixed precision of the run by name.

    Raises:
        ConfigurationError: The outputs differ, or positions are counted on each rank.
    """
    shards = sequences.shards
    assert shards is not None  # since the block began
    whole = torch_private.pytree.tree_map_only(
        Tensor, lambda leaf: _whole_prefix(leaf, shards), (args, kwargs)
    )
    own = torch_private.pytree.tree_map_only(Tensor, lambda leaf: _own_shard(leaf, shards), whole)
    differences, failed = [0.0], False
    try:
        with torch.no_grad(), _in_evaluation(model), _of_prefix(sequences):
            found = _outputs(model, own[0], own[1])
            with torch_private.attention_replaced(_attend_as_before):
                expected = _outputs(model, whole[0], whole[1])
        differences += [_difference(*pair, shards) for pair in zip(found, expected, strict=False)]
    except Exception as error:
        # The real forward raises it, too, unless the model takes no short sequences.
        logger.debug(f"{type(model).__name__} was not compared with whole sequences: {error}")
        failed = True
    shared = torch.tensor([max(differences), float(failed)], device=_device_of(model))
    dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=shards.mesh.get_group())
    largest, failed = float(shared[0]), bool(shared[1])
    if failed:
        return
    if largest > 2 * tolerance_of(model, precision).relative:  # single positions differ more than all
        raise ConfigurationError(
            f"{type(model).__name__} computes other outputs on shards of sequences than on whole sequences "
            f"(relative difference {largest:.1e}), so context parallelism would train another model. "
            "Only attention by scaled_dot_product_attention may combine positions, and positions must be an "
            "argument of the model and one of the buffers. Set cp_size=1 for convolutions, recurrent layers "
            "and means over a sequence."
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


def _whole_prefix(tensor: Tensor, shards: LatestShards) -> Tensor:
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
    return whole.narrow(dim, 0, chunks * min(CHUNK, whole.shape[dim] // chunks))


def _are_positions(parts: list[Tensor], dim: int) -> bool:
    """Returns whether ranks have the same consecutive numbers."""
    first = parts[0]
    if first.dtype not in (torch.int32, torch.int64) or any(not part.equal(first) for part in parts):
        return False
    return bool((first.diff(dim=dim) == 1).all())


def _own_shard(tensor: Tensor, shards: LatestShards) -> Tensor:
    """Returns the shard of this rank of the beginning of whole sequences."""
    lengths = {(dim, CHUNKS * min(CHUNK, size // CHUNKS)) for dim, size in shards.sizes}
    rank, size = shards.mesh.get_local_rank(), shards.mesh.size()
    for dim, length in lengths:
        if tensor.ndim > dim and tensor.shape[dim] == length * size:
            chunks = tensor.chunk(CHUNKS * size, dim)
            return torch.cat([chunks[rank], chunks[-1 - rank]], dim)
    return tensor


def _difference(own: Tensor, whole: Tensor, shards: LatestShards) -> float:
    """Returns the largest difference of a position, or 0 for outputs that cannot be compared."""
    own, whole = own.detach(), whole.detach()
    if own.ndim < 2 or not own.is_floating_point():
        return 0.0
    if own.shape != whole.shape:
        whole = _own_shard(whole, shards)
    if own.shape != whole.shape:
        return 0.0
    pair = (each.to("cpu", torch.float64) for each in (own, whole))
    own, whole = (each.flatten(2) if each.ndim > 2 else each.unsqueeze(-1) for each in pair)
    norm = float(whole.norm(dim=-1).square().mean().sqrt())
    difference = float((own - whole).norm(dim=-1).nan_to_num(0.0).max())
    return difference / norm if norm else difference


def _outputs(model: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
    return list(iterate_tensors(model.forward(*args, **kwargs)))


def _attend_as_before(attention: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    """Computes attention within this rank."""
    attend: Callable[..., Tensor] = torch_private.scaled_dot_product_attention
    return attend(*args, **kwargs)


def _device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


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


@contextmanager
def _in_evaluation(model: nn.Module) -> Iterator[None]:
    """Restores the modes, the state and the random generators of a model at its end."""
    state, training = ModuleState(model), [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with restored_generators(_device_of(model)):
            yield
    finally:
        state.restore_values()
        for module in training:
            module.training = True
        torch.clear_autocast_cache()
