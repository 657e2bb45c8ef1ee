"""The state that an object has before a checkpoint is loaded: kept, and brought back if that fails.

What replaces attributes of an object is undone by references. What changes tensors in their places is undone
where these are small; of large ones no copies are made, and it is noticed that they were changed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import rng, torch_private
from accelerate.base import CheckpointError
from accelerate.checkpointing.part import Apply
from accelerate.data_loader import resume
from accelerate.nested import iterate_tensors

LARGEST = 64 * 2**20
"""Bytes of tensors of one object that are copied, at most."""

_FIXED = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
"""Values that nothing changes in their places."""


class _Tensors:
    """Tensors whose values are kept, or watched where there are too many.

    Args:
        largest: bytes of them that are copied, at most.
    """

    def __init__(self, tensors: Iterable[Tensor], largest: float) -> None:
        unique = list({id(each): each for each in tensors}.values())
        is_small = _size_of(unique) <= largest
        self._kept = [
            (each, torch_private.version(each), each.detach().clone() if is_small else None)
            for each in unique
            if not each.is_meta
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Bring back the values."""
        for each, _, kept in self._kept:
            if kept is not None and not torch.equal(each, kept):
                each.copy_(kept)
        if any(kept is None and torch_private.version(each) != version for each, version, kept in self._kept):
            raise CheckpointError("its tensors were changed before it failed")


def _size_of(tensors: Iterable[Tensor]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)  # sparse ones have no `nbytes`


def _restore_attributes(
    kept: Iterable[tuple[Any, Mapping[str, Any]]], only: type | tuple[type, ...] = object
) -> None:
    """Give objects the attributes that they had.

    Args:
        only: kinds of values; attributes with others stay as they are.
    """
    for owner, attributes in kept:
        for name in vars(owner).keys() - attributes.keys():
            del vars(owner)[name]
        vars(owner).update({name: value for name, value in attributes.items() if isinstance(value, only)})


def _reachable(owner: Any, inside: Callable[[Mapping[str, Any]], list[Any]]) -> list[Any]:
    """Return an object and those inside it, each once; `inside` chooses them by the attributes of one."""
    objects: list[Any] = []
    queue = [owner]
    while queue:
        each = queue.pop()
        if any(each is known for known in objects) or not hasattr(each, "__dict__"):
            continue
        objects.append(each)
        queue += inside(vars(each))
    return objects


# Optimizers


_WRAPPED = ("optimizer", "owner", "base_optimizer")
"""Attributes under which an optimizer is wrapped."""


def inner_optimizers(owner: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of torch that an object wraps, maybe several times, or is."""
    objects = _reachable(owner, lambda values: [values[name] for name in _WRAPPED if name in values])
    return [each for each in objects if isinstance(each, torch.optim.Optimizer) and "state" in vars(each)]


def keep_optimizer(owner: Any) -> Apply:
    """Keep the state of what wraps optimizers, or is one: nothing large is copied."""
    optimizers = inner_optimizers(owner)
    attributes = [(each, dict(vars(each))) for each in optimizers]
    states = [(each.state, _contents(each.state)) for each in optimizers]
    groups = [
        (each.param_groups, [(group, dict(group)) for group in each.param_groups]) for each in optimizers
    ]
    is_plain = all(type(each).load_state_dict is torch.optim.Optimizer.load_state_dict for each in optimizers)
    live = iterate_tensors([list(each.state.values()) for each in optimizers])
    tensors = _Tensors(live, 0 if is_plain else LARGEST)  # torch replaces tensors, and changes none

    def bring_back() -> None:
        _restore_attributes(attributes)
        for state, entries in states:
            state.clear()
            for key, (values, content) in entries.items():
                if isinstance(values, dict):
                    values.clear()
                    values.update(content)
                state[key] = values
        for own, kept in groups:
            own[:] = [group for group, _ in kept]
            for group, content in kept:
                group.clear()
                group.update(content)
        tensors.restore()

    return bring_back


def _contents(state: Mapping[Any, Any]) -> dict[Any, tuple[Any, Any]]:
    return {key: (value, dict(value) if isinstance(value, dict) else value) for key, value in state.items()}


# Models


def keep_weights(model: nn.Module) -> Apply:
    """Keep copies of the tensors of a model: as much memory as it has."""
    places = [(each, dict(each._parameters), dict(each._buffers)) for each in model.modules()]
    both = [named for _, parameters, buffers in places for named in (parameters, buffers)]
    tensors = _Tensors([each for named in both for each in named.values() if each is not None], math.inf)

    def bring_back() -> None:
        for module, parameters, buffers in places:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        tensors.restore()

    return bring_back


def keep_extra(modules: Sequence[nn.Module]) -> Apply:
    """Keep what modules have beside their tensors."""
    states = [(module, copy.deepcopy(module.get_extra_state())) for module in modules]

    def bring_back() -> None:
        for module, state in states:
            module.set_extra_state(state)

    return bring_back


# Objects with a state


def keep_object(owner: Any) -> Apply:
    """Keep the state of an object with `state_dict` and `load_state_dict`: scheduler, scaler, a user's."""
    attributes = [(each, dict(vars(each))) for each in _stateful(owner)]
    state, tensors = _state_of(owner)

    def bring_back() -> None:
        _restore_attributes(attributes)
        if state is not None and not _is_same(owner.state_dict(), state):  # changed in its place
            _load_again(owner, state)
            _restore_attributes(attributes, only=_FIXED)
        tensors.restore()

    return bring_back


def _load_again(owner: Any, state: Any) -> None:
    try:
        owner.load_state_dict(state)
    except Exception:  # what refuses every state may have taken it all the same
        if not _is_same(owner.state_dict(), state):
            raise


def _is_same(first: Any, second: Any) -> bool:
    """Whether two states have the same values; other objects than plain ones are taken to differ."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return first.shape == second.shape and bool(torch.equal(first, second))
    if isinstance(first, Mapping):
        return list(first) == list(second) and all(_is_same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_is_same, first, second))
    return isinstance(first, _FIXED) and bool(first == second)


def _stateful(owner: Any) -> list[Any]:
    """Return an object and those with states that are its attributes, or are in lists that are."""

    def inside(attributes: Mapping[str, Any]) -> list[Any]:
        lists = [value for value in attributes.values() if isinstance(value, (list, tuple))]
        values = [*attributes.values(), *(item for items in lists for item in items)]
        return [value for value in values if _has_state(value)]

    return _reachable(owner, inside)


def _has_state(value: Any) -> bool:
    skipped = isinstance(value, (type, nn.Module, torch.optim.Optimizer, Tensor, *_FIXED))
    return not skipped and callable(getattr(value, "load_state_dict", None))


def _state_of(owner: Any) -> tuple[Any, _Tensors]:
    """Return a copy of a state, which shares large tensors with the object; None where there is none yet."""
    try:
        state = owner.state_dict()
        tensors = list(iterate_tensors(state))
        is_large = _size_of(tensors) > LARGEST
        shared: dict[int, Any] = {id(each): each for each in tensors} if is_large else {}
        return copy.deepcopy(state, shared), _Tensors(tensors, LARGEST)
    except Exception:  # of the user's own: what has no state before it is loaded has none to bring back
        return None, _Tensors([], 0)


# Loaders and random generators


def keep_loader(loader: Any) -> Apply:
    """Keep the order and position of a prepared loader."""
    sampler = loader.get_sampler()
    first = loader.first_round
    owners = [loader, loader.base_dataloader, loader.position, first, sampler, loader._index_sampler]
    owners.append(loader.dataset)
    kept = [(each, dict(vars(each))) for each in owners if hasattr(each, "__dict__")]
    drawn = [(generator, generator.get_state()) for generator in resume.generators_of(loader)]
    epoch = loader.iteration

    def bring_back() -> None:
        _restore_attributes(kept)
        loader.set_epoch(epoch)
        _restore_attributes(kept)
        for generator, state in drawn:
            generator.set_state(state)

    return bring_back


def keep_generators() -> Apply:
    """Keep the states of the random generators of this process."""
    states = rng.capture()
    return lambda: rng.restore(states)
