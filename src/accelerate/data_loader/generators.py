"""Random generators of torch, Python and numpy in objects of the user, and their states."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

_DEPTH = 12
"""Nested objects that are searched for random generators."""


class _Access(NamedTuple):
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], Any]


_ACCESS: dict[type, _Access] = {
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
        if isinstance(value, tuple(_ACCESS)):
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
    return type(value).__module__.partition(".")[0]


def state_of(generator: Any) -> Any:
    """Returns the state of a random generator of torch, Python or numpy."""
    return _access_to(generator).get(generator)


def set_state(generator: Any, state: Any) -> None:
    _access_to(generator).set(generator, state)


def _access_to(generator: Any) -> _Access:
    return next(access for kind, access in _ACCESS.items() if isinstance(generator, kind))
