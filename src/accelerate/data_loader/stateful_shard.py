"""The shard of a dataset with a state of its own, which torchdata saves and restores."""

from __future__ import annotations

from copy import copy
from typing import Any

from torch.utils.data import IterableDataset

from accelerate.data_loader.samplers import IterableDatasetShard

_WHOLE, _FIRST = "accelerate_dataset", "accelerate_first"


def has_state(dataset: Any) -> bool:
    """Whether a dataset can save and restore where it is."""
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))


class StatefulDatasetShard(IterableDatasetShard):
    """A shard whose state is that of the whole dataset between two global batches.

    A class of its own, because torchdata recognizes a dataset with a state by the methods of its class, and
    reads and drops the first batches of one without them.
    """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the dataset, and the first global batch, which fills the end of the epoch."""
        fills = self.even_batches and not self.drop_last
        return {_WHOLE: self.dataset.state_dict(), _FIRST: self.first_round.items if fills else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the state of the dataset with which the next pass begins."""
        self.dataset.load_state_dict(state[_WHOLE])
        self.first_round.restored = state[_FIRST]


def with_state(shard: IterableDatasetShard) -> IterableDatasetShard:
    """Return a shard with the state of its dataset, if that has one and is read in whole global batches."""
    if type(shard) is not IterableDatasetShard or not shard.tagged or not has_state(shard.dataset):
        return shard
    stateful = copy(shard)
    stateful.__class__ = StatefulDatasetShard
    return stateful


def state_of_whole(state: Any) -> Any:
    """Return the state of a dataset from its own or from that of a shard of it."""
    return state[_WHOLE] if isinstance(state, dict) and _WHOLE in state else state


def stream_with_state(dataset: Any) -> Any:
    """Return the iterable dataset that has a state: the one of a shard, or this one; None without one."""
    if not isinstance(dataset, IterableDataset):
        return None
    inner = getattr(dataset, "dataset", None)
    return next((stream for stream in (inner, dataset) if has_state(stream)), None)
