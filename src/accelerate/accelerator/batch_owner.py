"""The prepared loader whose batch some data belongs to, if several loaders are being read.

`gather_for_metrics` removes the padding of this loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from accelerate import ops
from accelerate.base import StateError
from accelerate.logging import get_logger
from accelerate.state import GradientState

logger = get_logger(__name__)

_FIX = (
    "Gather the outputs of each loader in a call of its own, together with the labels of its batch, such as "
    "gather_for_metrics((outputs, labels)): the labels show which loader they are from."
)


def find_loader(gradients: GradientState, data: object) -> Any:
    """Returns the loader whose latest batch the data belongs to, or None if no loader is being read.

    Called on all ranks.

    Raises:
        StateError: The data belongs to batches of several loaders, with different padding.
    """
    references = gradients.dataloader_references
    if len(references) <= 2:  # no loader, and the only one
        return gradients.active_dataloader
    loaders = list({id(loader): loader for loader in references if loader is not None}.values())
    if len(loaders) < 2:  # two passes over one loader
        return gradients.active_dataloader
    owners = [loader for loader in loaders if shares_memory(data, getattr(loader, "latest_batch", None))]
    latest = max(loaders, key=_read_at)
    # A loader that waits while another one is read from its start, such as for an evaluation, is not meant.
    candidates = owners or [
        each for each in loaders if each is latest or _read_at(each) > getattr(latest, "began_at", 0)
    ]
    return candidates[0] if len(candidates) == 1 else _choose(candidates, latest, data, bool(owners))


def num_real_rows(loader: Any) -> int:
    """Returns the number of samples of the latest batch on one process, that of a full batch by default."""
    if loader.valid_counts is not None:
        return sum(loader.valid_counts)
    # The batch may have other rows than samples.
    is_short = loader.end_of_dataloader and loader.remainder > 0
    return int(loader.remainder if is_short else loader.full_rows)


def shares_memory(data: object, batch: object) -> bool:
    """Returns whether two structures have an object, or memory of a tensor, in common."""
    items = list(_items(batch))
    identities, spans = set(map(id, items)), list(filter(None, map(_memory, items)))
    for item in _items(data):
        memory = _memory(item)
        if id(item) in identities or (memory and any(_overlap(memory, span) for span in spans)):
            return True
    return False


def _choose(candidates: list[Any], latest: Any, data: object, is_owned: bool) -> Any:
    """Returns the loader with as many rows as the data, or the latest one, which is the same on all ranks."""
    lengths = {length for item in _items(data) if (length := _length(item)) is not None}
    paddings = [_padding_of(loader, lengths) for loader in candidates]
    is_uniform = all(padding == paddings[0] for padding in paddings)
    # A value may also be repeated for each sample of a full batch.
    fits = [(loader.batch_rows in lengths, loader.full_rows in lengths) for loader in candidates]
    votes = ops.gather_object([(is_uniform, fits)])
    default = latest if latest in candidates else candidates[-1]
    if all(is_uniform for is_uniform, _ in votes):
        return default
    if is_owned:
        raise StateError(
            "gather_for_metrics: the data has samples of several loaders that are being read, whose last "
            f"batches have different padding. {_FIX}"
        )
    of_loaders = list(zip(*(fits for _, fits in votes), strict=True))
    for kind in (0, 1):
        fitting = [
            each for each, fit in zip(candidates, of_loaders, strict=True) if all(f[kind] for f in fit)
        ]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            logger.warning_once(
                f"gather_for_metrics: {len(fitting)} loaders are being read whose batches have as many rows "
                "as the data, but different padding. The padding of the loader that was read last is "
                f"removed. {_FIX}"
            )
            return latest if latest in fitting else fitting[-1]
    return default


def _padding_of(loader: Any, lengths: set[int]) -> Any:
    """Returns a value that is equal for loaders whose padding of data with these lengths is the same."""
    if loader.shards_whole_batches or loader.replicates_batches:
        return id(loader)
    if ops.current_transport().size > 1:
        return loader.valid_counts
    full = loader.full_rows
    if full not in lengths or num_real_rows(loader) == full:
        return None
    return num_real_rows(loader), full


def _length(item: object) -> int | None:
    if isinstance(item, torch.Tensor):
        return item.shape[0] if item.ndim else None
    is_of_tensors = isinstance(item, list) and any(isinstance(each, torch.Tensor) for each in item)
    return len(item) if isinstance(item, list) and not is_of_tensors else None


def _read_at(loader: object) -> int:
    return getattr(loader, "read_at", 0)


def _items(data: object) -> Iterator[Any]:
    """Yields a structure and all in it, without numbers and strings, of which there are equal objects."""
    if data is None or isinstance(data, (bool, int, float, complex, str, bytes)):
        return
    if isinstance(data, (list, tuple, Mapping)):
        if data:
            yield data
        for item in data.values() if isinstance(data, Mapping) else data:
            yield from _items(item)
    else:
        yield data


def _memory(item: object) -> tuple[torch.device, int, int] | None:
    """Returns the device, the first and the last address of a tensor, or None if it has none."""
    if not isinstance(item, torch.Tensor) or item.layout is not torch.strided or item.is_nested:
        return None
    try:
        start = item.data_ptr()
    except RuntimeError:  # a tensor without storage
        return None
    span = sum((size - 1) * stride for size, stride in zip(item.shape, item.stride(), strict=True))
    return (item.device, start, start + span * item.element_size()) if start and item.numel() else None


def _overlap(a: tuple[torch.device, int, int], b: tuple[torch.device, int, int]) -> bool:
    return a[0] == b[0] and a[1] <= b[2] and b[1] <= a[2]
