"""Whole states under FSDP 1, whose optimizers step flat parts: the same files as for every other layout."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    StateDictType,
)

from accelerate.checkpointing import check_shapes
from accelerate.strategies.fsdp.flat_shards import whole_shapes

Names = Sequence[Sequence[str]]
"""For each group of an optimizer the names of its parameters, in the order that they had."""


@contextmanager
def whole_states(root: FSDP, offload: bool, first_only: bool = False) -> Iterator[None]:
    """Let the states of a model, and of optimizers that step it, be whole inside the block.

    Args:
        offload: whether they come to the CPU; on a CPU torch crashes when there is nothing to offload.
        first_only: whether only rank 0 of all machines gets them.
    """
    options = {"offload_to_cpu": offload, "rank0_only": first_only}
    with warnings.catch_warnings():
        # what torch recommends instead leaves a state on one rank of all machines
        warnings.filterwarnings("ignore", r"FSDP\.state_dict_type", FutureWarning)
        warnings.filterwarnings("ignore", "When using ``NO_SHARD``", UserWarning)
        for text in (
            "`_get_pg_default_device` will be",
            "Multiple backends are registered",
        ):  # torch's own use
            warnings.filterwarnings("ignore", text, UserWarning)
        with FSDP.state_dict_type(
            root,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(**options),
            FullOptimStateDictConfig(**options),
        ):
            yield


class WholeFlatOptimizer:
    """Saves and loads an optimizer of one model as one process would: by the order of its parameters."""

    needs_all_ranks = True

    def __init__(
        self, optimizer: Any, root: FSDP, names: Names, offload: bool, state: Mapping[str, Any] | None
    ) -> None:
        self.optimizer = optimizer
        self._root = root
        self._names = names
        self._offload = offload
        self._state = state

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state that was gathered."""
        assert self._state is not None
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over this rank's part of a whole state; called on all ranks."""
        flat = [name for group in self._names for name in group]
        shapes = whole_shapes(self._root)  # torch cuts a tensor of any shape
        for index, values in state["state"].items():
            check_shapes(f"The state of {flat[index]}", values, tuple(shapes[flat[index]].shape))
        named = {
            "state": {flat[index]: dict(values) for index, values in state["state"].items()},
            "param_groups": [
                {**group, "params": list(names)}
                for group, names in zip(state["param_groups"], self._names, strict=True)
            ],
        }
        with whole_states(self._root, self._offload):
            own = FSDP.optim_state_dict_to_load(self._root, self.optimizer.optimizer, named)
        self.optimizer.load_state_dict(own)


def gather_flat_state(optimizer: Any, root: FSDP, names: Names, offload: bool, keep: bool) -> dict[str, Any]:
    """Return the whole state of an optimizer, by the order of its parameters; called on all ranks.

    Args:
        keep: whether this rank keeps it; others get an empty state.
    """
    with whole_states(root, offload):
        named = FSDP.optim_state_dict(root, optimizer.optimizer)
    flat = [name for group in names for name in group]
    places = iter(range(len(flat)))
    groups = [
        {**group, "params": [next(places) for _ in inside]}
        for group, inside in zip(named["param_groups"], names, strict=True)
    ]
    states = {
        index: {key: _own(value) for key, value in named["state"][name].items()}
        for index, name in enumerate(flat)
        if name in named["state"]
    }
    return {"state": states if keep else {}, "param_groups": groups}


def _own(value: Any) -> Any:
    """Return a number as a tensor of its own: torch gives all parameters of a unit one count of steps."""
    return value.clone() if isinstance(value, torch.Tensor) and value.ndim == 0 else value
