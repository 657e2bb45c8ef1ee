"""States of random generators in a file: read them, set them, derive new ones."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from accelerate import rng
from accelerate.base import CheckpointError
from accelerate.checkpointing.manifest import checksum_of

_FILE_NAMES = {"python": "random_state", "numpy": "numpy_random_seed", "torch": "torch_manual_seed"}


def capture() -> dict[str, Any]:
    """Return the states of all generators of this process, under the names they have in the file."""
    return {_name_in_file(name): state for name, state in rng.capture().items()}


def check(states: Any) -> dict[str, Any]:
    """Return the states that the generators of this process take, tried on others of their kind; of a list
    with one state for each device, that of this process."""
    if not isinstance(states, Mapping):
        raise CheckpointError(f"The file of the random generators holds a {type(states).__name__} instead.")
    current = rng.capture()
    missing = [name for name in current if _name_in_file(name) not in states]
    if missing:
        raise CheckpointError(
            f"The checkpoint holds no state for the random generators {', '.join(missing)}: it was saved on "
            'other hardware. Load it with world_size_policy="reseed" or "ignore".'
        )
    own = {name: _own(states[_name_in_file(name)]) for name in current}
    try_on_cpu(own)
    for name in current.keys() - _FILE_NAMES.keys():
        _check_device(name, current[name], own[name])
    return own


def try_on_cpu(states: Mapping[str, Any]) -> None:
    """Set generators that nobody uses to states, by the names of `rng.capture_on_cpu`; raise where one
    fails."""
    random.Random().setstate(states["python"])
    np.random.RandomState(0).set_state(states["numpy"])
    torch.Generator().set_state(states["torch"])


def _check_device(name: str, current: Any, state: Any) -> None:
    is_like = type(state) is type(current)
    if is_like and isinstance(current, torch.Tensor):
        is_like = (state.dtype, state.shape) == (current.dtype, current.shape)
    if not is_like:
        raise CheckpointError(f"The checkpoint holds no state that the random generator of {name} takes.")


def seed_of(states: Any, rank: int) -> int:
    """Return the seed of a process that follows from the states that rank 0 has saved."""
    state = states.get(_FILE_NAMES["torch"]) if isinstance(states, Mapping) else None
    origin = state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state).encode()
    return int(checksum_of(origin + rank.to_bytes(8, "little")), 16) % rng.SEEDS


def _name_in_file(name: str) -> str:
    return _FILE_NAMES.get(name, f"torch_{name}_manual_seed")


def _own(state: Any) -> Any:
    is_list = isinstance(state, list) and state and isinstance(state[0], torch.Tensor)
    if not is_list:
        return state
    index = torch.accelerator.current_device_index()
    return state[index] if index < len(state) else state[0]
