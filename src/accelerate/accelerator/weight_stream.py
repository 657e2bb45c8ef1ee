"""Whole weights of a prepared model, one after another, for an inference engine or an evaluator.

`Accelerator.stream_weights` calls `stream`. Weights are gathered in buckets of limited size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelerate import accelerator
from accelerate.accelerator.persistence import check_values
from accelerate.accelerator.runtime import Runtime
from accelerate.base import wrong_value
from accelerate.checkpointing import read_size
from accelerate.devices import of_device
from accelerate.ops import is_dtensor
from accelerate.weights import check_storable, identity_of

Bucket = list["Item"]


class Item(NamedTuple):
    """One tensor of a stream.

    Attributes:
        inputs: Names of the weights from which it is computed.
        compute: Returns the tensor from the whole weights, or None for the one weight itself.
    """

    name: str
    inputs: tuple[str, ...]
    compute: Callable[[Mapping[str, Tensor]], Tensor] | None = None


def stream(
    runtime: Runtime, model: nn.Module, bucket_size: int | str, all_ranks: bool, merge_adapters: bool
) -> Iterator[tuple[str, Tensor]]:
    """Returns an iterator over the names and whole tensors of a prepared model.

    Called on all ranks. Arguments are checked before weights are gathered.
    """
    check_values(model, "streamed")
    limit = read_size("bucket_size", bucket_size)
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise wrong_value("bucket_size", bucket_size, "not a size", 'pass bytes or text such as "1GB"')
    weights, whole = runtime.strategy.state.whole_weights(model)
    first = first_names(weights)
    if merge_adapters:
        inner = runtime.strategy.unwrap(model, keep_compiled=False)
        items = [Item(*merged) for merged in accelerator.merged_adapters.plan(inner, weights, first)]
    else:
        items = [Item(name, (name,)) for name in dict.fromkeys(first.values())]
    sizes = {name: weights[name].shape.numel() * weights[name].dtype.itemsize for name in first.values()}
    buckets = assign_to_buckets(items, sizes, limit, bucket_size)
    is_kept = all_ranks or runtime.state.is_main_process
    return _read(buckets, lambda name: whole(weights[name]), is_kept, runtime.state.num_processes)


def first_names(weights: Mapping[str, Any]) -> dict[str, str]:
    """Returns for each name of a weight the first name of the same weight."""
    first: dict[Any, str] = {}
    return {name: first.setdefault(_identity(name, weight), name) for name, weight in weights.items()}


def _identity(name: str, weight: Any) -> object:
    """Returns a key that tied weights have in common, or raises for a value that is not a dense tensor."""
    if isinstance(weight, Tensor) or not hasattr(weight, "shape"):
        check_storable(name, weight)
    is_local = (
        isinstance(weight, Tensor) and not is_dtensor(weight) and of_device(weight.device).is_addressable
    )
    return identity_of(weight) if is_local and weight.numel() else id(weight)


def assign_to_buckets(
    items: Sequence[Item], sizes: Mapping[str, int], limit: int, bucket_size: int | str
) -> list[Bucket]:
    """Returns consecutive items in buckets of at most `limit` bytes.

    Args:
        sizes: Bytes of each weight by name.
        bucket_size: The limit as the user passed it.

    Raises:
        ConfigurationError: An item is larger than a bucket.
    """
    num_bytes = {item.name: sum(sizes[name] for name in item.inputs) for item in items}
    largest = max(num_bytes, key=lambda name: num_bytes[name], default="")
    if items and num_bytes[largest] > limit:
        adapters = " with its adapters" if any(i.name == largest and i.compute for i in items) else ""
        reason = f"smaller than {largest}{adapters}, which has {num_bytes[largest]} bytes"
        fix = f"pass bucket_size={num_bytes[largest]} or more"
        raise wrong_value("bucket_size", bucket_size, reason, fix)
    buckets: list[Bucket] = []
    free = 0
    for item in items:
        if not buckets or num_bytes[item.name] > free:
            buckets.append([])
            free = limit
        buckets[-1].append(item)
        free -= num_bytes[item.name]
    return buckets


def _read(
    buckets: list[Bucket], whole: Callable[[str], Tensor], is_kept: bool, num_processes: int
) -> Iterator[tuple[str, Tensor]]:
    """Gathers one bucket at a time, and yields its tensors on the ranks that keep them."""
    remaining = iter(buckets)
    for bucket in remaining:
        gathered = [_gather(item, whole, is_kept) for item in bucket]
        for item in bucket if is_kept else ():
            try:
                yield item.name, _finish(item, gathered.pop(0))
            except GeneratorExit:  # the loop was left early, and other ranks may continue
                gathered.clear()
                for later in (later for bucket in remaining for later in bucket if num_processes > 1):
                    _gather(later, whole, is_kept=False)
                raise


def _gather(item: Item, whole: Callable[[str], Tensor], is_kept: bool) -> dict[str, Tensor]:
    """Returns the whole weights of an item on a rank that keeps them.

    Called on all ranks.
    """
    tensors: dict[str, Tensor] = {}
    for name in item.inputs:
        tensor = whole(name)
        if is_kept:
            tensors[name] = tensor
        del tensor  # before the next one is gathered
    return tensors


@torch.no_grad()
def _finish(item: Item, tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the tensor of an item as `save_model` writes it."""
    tensor = tensors[item.inputs[0]] if item.compute is None else item.compute(tensors)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
