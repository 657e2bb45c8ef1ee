"""Random generators and values in the attributes of the samplers, the dataset and the collate function.

A sampler, or an iterable dataset that is read again from its beginning, determines the order of an epoch by
its state at the start of the pass. A map-style dataset and a collate function draw while batches are read, so
they continue with their state after the latest batch. `generators_of` lists the torch generators that loaders
have by convention; the others are found here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset

from accelerate.data_loader.iterable_shard import has_state
from accelerate.data_loader.samplers import batch_samplers_of
from accelerate.rng import find_generators, set_state, state_of

_ENTRIES = 100
"""Largest container that is searched for random generators of samplers and map-style datasets."""
_VALUES = (int, float, str, type(None))
_OWN_PACKAGES = ("torch.utils.data.", "torchdata.", "accelerate.data_loader.")


# The order of an epoch


def capture_order(loader: Any, known: Sequence[torch.Generator]) -> list[Any]:
    """Returns the states of the samplers of the user, and of an iterable dataset without a state dict.

    Args:
        known: Generators whose states are saved as those of the loader.
    """
    return [
        {"generators": [state_of(generator) for generator in generators], "values": _changed(loader, owner)}
        for owner, generators in _order_sources(loader, known)
    ]


def restore_order(loader: Any, known: Sequence[torch.Generator], states: Sequence[Any]) -> None:
    """Sets the states that `capture_order` returned, if the loader has the same samplers."""
    sources = _order_sources(loader, known)
    counts = [len(generators) for _, generators in sources]
    if counts != [len(state["generators"]) for state in states]:
        return
    for (owner, generators), state in zip(sources, states, strict=True):
        for generator, value in zip(generators, state["generators"], strict=True):
            set_state(generator, value)
        vars(owner).update({**_initial_values(loader, owner), **state["values"]})


def _order_sources(loader: Any, known: Sequence[torch.Generator]) -> list[tuple[Any, list[Any]]]:
    """Returns the objects of the user that determine the order, each with its random generators."""
    dataset = loader.dataset
    if type(dataset).__module__.startswith("accelerate.data_loader."):
        dataset = dataset.dataset  # of the user
    chain = [*batch_samplers_of(loader._index_sampler), loader.get_sampler()]
    if isinstance(dataset, IterableDataset) and not has_state(dataset):
        chain.append(dataset)
    owners = {id(owner): owner for owner in chain if _is_of_user(owner)}
    apart = [*known, dataset, loader.collate_fn]
    return [
        (owner, find_generators(owner, _ENTRIES, [other for other in apart if other is not owner]))
        for owner in owners.values()
    ]


def _is_of_user(owner: object) -> bool:
    is_plain = owner is None or isinstance(owner, (list, tuple, range)) or not hasattr(owner, "__dict__")
    return not is_plain and not f"{type(owner).__module__}.".startswith(_OWN_PACKAGES)


def _changed(loader: Any, owner: Any) -> dict[str, Any]:
    """Returns the values that have changed since the first pass, such as a number of passes."""
    initial = _initial_values(loader, owner)
    return {name: value for name, value in _values(owner).items() if value != initial.get(name, loader)}


def _initial_values(loader: Any, owner: Any) -> dict[str, Any]:
    known: dict[int, tuple[Any, dict[str, Any]]] = loader.tracker.initial_values
    return known.setdefault(id(owner), (owner, _values(owner)))[1]


def _values(owner: Any) -> dict[str, Any]:
    """Returns the numbers and strings of an object."""
    if hasattr(owner, "set_epoch"):  # they depend on the epoch, which is set in each pass
        return {}
    return {name: value for name, value in vars(owner).items() if isinstance(value, _VALUES)}


# Samples


def capture_samples(loader: Any) -> list[Any]:
    """Returns the states of the random generators with which this process reads and collates samples."""
    return [state_of(generator) for generator in _sample_generators(loader)]


def restore_samples(loader: Any, states: Sequence[Any]) -> None:
    """Sets the states that `capture_samples` returned, if the loader has the same generators."""
    generators = _sample_generators(loader)
    if len(generators) == len(states):
        for generator, state in zip(generators, states, strict=True):
            set_state(generator, state)


def _sample_generators(loader: Any) -> list[Any]:
    """Returns the generators of a map-style dataset, of the datasets in it, and of the collate function."""
    if loader.num_workers:
        return []
    collate = loader.collate_fn
    owners, dataset = [getattr(collate, "__self__", collate)], loader.dataset
    while dataset is not None and not isinstance(dataset, IterableDataset):
        owners.append(dataset)
        dataset = getattr(dataset, "dataset", None)
    found = [generator for owner in owners for generator in find_generators(owner, _ENTRIES)]
    return list({id(generator): generator for generator in found}.values())
