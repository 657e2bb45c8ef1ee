"""Functions that seed, synchronize, capture and restore random number generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from accelerate.base import ConfigurationError, RNGName, RNGType, as_builtin, environ, wrong_value
from accelerate.devices import DeviceBackend, hardware_table, of_device
from accelerate.ops import current_transport
from accelerate.state import PartialState

SEEDS = 2**32  # numpy does not accept larger seeds

# Workspace sizes of cuBLAS with which matrix products are deterministic.
REPRODUCIBLE_WORKSPACE = ":4096:8"


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seeds the generators of Python, numpy, torch and the device.

    Args:
        seed: the seed, from 0 to 2**32 - 1.
        device_specific: whether each rank uses a different seed, `seed` plus its rank.
        deterministic: whether torch uses only deterministic algorithms, and raises an error where it has
            none.

    Raises:
        ConfigurationError: the seed is out of range.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < SEEDS:
        fix = "choose one, such as 42"
        raise wrong_value("seed", seed, "not a whole number from 0 to 2**32 - 1", fix, TypeError)
    seed = int(seed)
    if device_specific:
        seed = (seed + PartialState().process_index) % SEEDS
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    _device_backend().seed(seed)
    if not deterministic:
        return
    if not environ.current().get("CUBLAS_WORKSPACE_CONFIG"):
        environ.assign({"CUBLAS_WORKSPACE_CONFIG": REPRODUCIBLE_WORKSPACE})
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _device_backend() -> DeviceBackend:
    """Returns the backend of this process, also before a state is created."""
    backend: DeviceBackend | None = PartialState._shared_state.get("device_backend")
    return hardware_table.detect() if backend is None else backend


StateAccess = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Functions that get and set the state of a generator."""

_HOST_GENERATORS: dict[str, StateAccess] = {
    "python": (random.getstate, random.setstate),
    "numpy": (np.random.get_state, np.random.set_state),
    "torch": (torch.get_rng_state, torch.set_rng_state),
}


def _state_access(rng_type: RNGType, generator: torch.Generator | None) -> StateAccess | None:
    if rng_type == RNGType.TORCH:
        return _HOST_GENERATORS["torch"]
    if rng_type == RNGType.GENERATOR:
        if generator is None:
            error = ConfigurationError(
                'rng_type="generator" needs the generator whose state is synchronized: pass generator=, '
                'or choose "torch".'
            )
            raise as_builtin(error, AssertionError)
        return generator.get_state, generator.set_state
    backend = _device_backend()
    return (backend.rng_state, backend.set_rng_state) if backend.rng_type == rng_type else None


def synchronize_rng_state(
    rng_type: RNGType | RNGName | None = None, generator: torch.Generator | None = None
) -> None:
    """Sets one generator to its state on rank 0.

    Called on all ranks.

    Args:
        rng_type: type of the generator. None is `generator`. A generator of hardware that this process does
            not use is ignored.
        generator: generator of the type "generator".

    Raises:
        ConfigurationError: there is no such generator, or `generator` is missing.
    """
    kind = RNGType.GENERATOR if rng_type is None else rng_type
    if kind not in RNGType:
        fix = f"choose one of {', '.join(RNGType.list())}"
        raise wrong_value("rng_type", kind, "no such generator", fix)
    access = _state_access(RNGType(kind), generator)
    transport = current_transport()
    if access is not None and transport.size > 1:
        get_state, set_state = access
        set_state(transport.broadcast(get_state(), 0))


def synchronize_rng_states(
    rng_types: Iterable[RNGType | RNGName], generator: torch.Generator | None = None
) -> None:
    """Sets several generators to their states on rank 0.

    Called on all ranks.

    Args:
        rng_types: types of the generators.
        generator: generator of the type "generator".

    Raises:
        ConfigurationError: there is no such generator, or `generator` is missing.
    """
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def capture_on_cpu() -> dict[str, Any]:
    """Returns the states of the generators of Python, numpy and torch by name."""
    return {name: get_state() for name, (get_state, _) in _HOST_GENERATORS.items()}


def advance() -> None:
    """Draws a number from each of the generators of Python, numpy and torch."""
    random.random(), np.random.random(), torch.rand(())


def capture() -> dict[str, Any]:
    """Returns the states of the generators of Python, numpy, torch and the device by name."""
    states = capture_on_cpu()
    backend = _device_backend()
    if not backend.is_host:
        states[backend.name] = backend.rng_state()
    return states


def restore(states: dict[str, Any]) -> None:
    """Sets the generators of this process to states that `capture` returned.

    Generators without a state are not changed.
    """
    setters = {name: set_state for name, (_, set_state) in _HOST_GENERATORS.items()}
    backend = _device_backend()
    setters.setdefault(backend.name, backend.set_rng_state)
    unknown = sorted(set(states) - set(setters))
    if unknown:
        reason = f"this process, which computes on {backend.label}, has no generator of that name"
        fix = "restore on the hardware it was captured on, or leave these out"
        raise wrong_value("states", unknown, reason, fix)
    for name, state in states.items():
        setters[name](state)


def restored_generators(device: torch.device) -> AbstractContextManager[None]:
    """Returns a context manager that restores the random generators of the CPU and a device at its end."""
    devices = [] if of_device(device).is_host else [device]
    return torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")


# Generators in objects of the user


class _Access(NamedTuple):
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], Any]


GENERATORS: dict[type, _Access] = {
    torch.Generator: _Access(torch.Generator.get_state, torch.Generator.set_state),
    random.Random: _Access(random.Random.getstate, random.Random.setstate),
    np.random.RandomState: _Access(
        np.random.RandomState.get_state, lambda generator, state: generator.set_state(state)
    ),
    np.random.Generator: _Access(
        lambda generator: generator.bit_generator.state,
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}
"""Class of random generators -> functions that return and set their states."""
_DEPTH = 12
"""Nested objects that are searched for random generators."""


def find_generators(owner: object, entries: float = float("inf"), apart: Iterable[object] = ()) -> list[Any]:
    """Returns the random generators in an object and in its objects of the same package, each once.

    Args:
        entries: Number of entries of the largest container that is searched.
        apart: Objects that are not searched.
    """
    package = package_of(owner)
    visited = {id(value) for value in apart}

    def walk(value: object, depth: int) -> Iterator[Any]:
        if depth > _DEPTH or id(value) in visited:
            return
        visited.add(id(value))
        parts: Iterable[Any] = ()
        if isinstance(value, random.SystemRandom):  # has no state
            return
        if isinstance(value, tuple(GENERATORS)):
            yield value
        elif isinstance(value, (Mapping, list, tuple)):
            is_searched = len(value) <= entries
            parts = () if not is_searched else value.values() if isinstance(value, Mapping) else value
        elif package_of(value) == package and hasattr(value, "__dict__"):
            parts = vars(value).values()
        for part in list(parts):
            yield from walk(part, depth + 1)

    return list(walk(owner, 0))


def package_of(value: object) -> str:
    """Returns the name of the package of the class of a value."""
    return type(value).__module__.partition(".")[0]


def state_of(generator: Any) -> Any:
    """Returns the state of a random generator of torch, Python or numpy."""
    return _access_to(generator).get(generator)


def set_state(generator: Any, state: Any) -> None:
    """Sets the state of a random generator of torch, Python or numpy."""
    _access_to(generator).set(generator, state)


def _access_to(generator: object) -> _Access:
    return next(access for kind, access in GENERATORS.items() if isinstance(generator, kind))
