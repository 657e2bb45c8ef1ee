"""Changes that a load makes to objects, and what restores an object if a load fails.

What replaces attributes of an object is undone by references. What changes tensors in place is undone where
these are small; large ones are not copied, and an error says that they were changed.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import AccelerateError, CheckpointError, describe, like
from accelerate.data_loader import resume
from accelerate.nested import iterate_tensors

Apply = Callable[[], None]  # changes an object

Agree = Callable[[str], None]
"""Takes what went wrong on this rank, or an empty text; raises `CheckpointError` if something did on any."""

LARGEST = 64 * 2**20  # bytes of tensors of one object that are copied, at most

_IMMUTABLE = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_WRAPPED = ("optimizer", "owner", "base_optimizer")  # attributes under which an optimizer is wrapped


class Stage(IntEnum):
    """When a change comes: one that may fail before one that cannot be undone."""

    ALONE = 0  # it needs no other rank, and is undone when another one fails
    TOGETHER = 1  # all ranks take part, and it is undone when another one fails
    LAST = 2  # it is too large to be undone, and was compared with the object before: weights


@dataclass(frozen=True)
class Change:
    """Brings an object to a state that was read."""

    apply: Apply
    name: str = ""
    keep: Callable[[], Apply] | None = None  # returns what restores the present state; None: nothing can
    stage: Stage = Stage.ALONE
    first: tuple[Change, ...] = ()  # changes that come before, in their own stages

    def __call__(self) -> None:
        """Apply it, without a way back."""
        for change in self.first:
            change()
        self.apply()


nothing = Change(lambda: None, keep=lambda: lambda: None)
"""For an object that has no state in this checkpoint."""


def apply_all(changes: Sequence[Change], agree: Agree) -> None:
    """Change all objects on all ranks, or restore those that were changed; called on all ranks. Where a
    change failed on any, a CheckpointError on all says what was not restored."""
    flat = [single for change in changes for single in (*change.first, change)]
    undo: list[tuple[str, Apply]] = []
    for stage in Stage:
        failure = _apply([change for change in flat if change.stage == stage], undo)
        try:
            agree("" if failure is None else describe(failure))
        except AccelerateError as error:
            lost = _restore(undo)
            if not isinstance(error, CheckpointError):  # a rank is gone: nothing more can be agreed upon
                raise
            text = f"A checkpoint was not loaded, and nothing was changed: {error}"
            try:
                agree(", ".join(reversed(lost)))
            except CheckpointError as unrestored:
                text = (
                    f"A checkpoint was not loaded: {error}. All is as it was before, but for {unrestored}. "
                    "Load another one, or start again."
                )
            explained = CheckpointError(text)
            raise explained if failure is None else like(explained, failure) from failure


def _apply(changes: Iterable[Change], undo: list[tuple[str, Apply]]) -> Exception | None:
    for change in changes:
        try:
            undo.append((change.name, _refuse_to_restore if change.keep is None else change.keep()))
            change.apply()
        except Exception as error:  # of any kind: the other ranks have to know
            return error
    return None


def _refuse_to_restore() -> None:
    raise CheckpointError("it has the loaded state, or a part of it")


def _restore(undo: Sequence[tuple[str, Apply]]) -> list[str]:
    """Undo changes, the last one first; return what was not restored."""
    lost = []
    for name, restore in reversed(undo):
        try:
            restore()
        except Exception as error:  # the others are restored, and the message names this one
            lost.append(f"{name} ({describe(error)})")
    return lost


# The state before a load


def _keep_tensors(tensors: Iterable[Tensor], largest: float) -> Apply:
    """Keep values of live tensors: copies, or their versions where they have more bytes than `largest`."""
    unique = list({id(tensor): tensor for tensor in tensors}.values())
    is_small = _size_of(unique) <= largest
    kept = [
        (tensor, torch_private.version(tensor), tensor.detach().clone() if is_small else None)
        for tensor in unique
        if not tensor.is_meta
    ]

    @torch.no_grad()
    def restore() -> None:
        for tensor, _, values in kept:
            if values is not None and not torch.equal(tensor, values):
                tensor.copy_(values)
        large = ((tensor, version) for tensor, version, values in kept if values is None)
        if any(torch_private.version(tensor) != version for tensor, version in large):
            raise CheckpointError("its tensors were changed before it failed")

    return restore


def _size_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)  # sparse ones have no `nbytes`


def _attributes_of(owners: Iterable[Any]) -> list[tuple[Any, dict[str, Any]]]:
    return [(owner, dict(vars(owner))) for owner in owners]


def _restore_attributes(
    kept: Iterable[tuple[Any, Mapping[str, Any]]], only: type | tuple[type, ...] = object
) -> None:
    """Give objects the attributes that they had; those with values of other kinds than `only` stay."""
    for owner, attributes in kept:
        for name in vars(owner).keys() - attributes.keys():
            del vars(owner)[name]
        vars(owner).update({name: value for name, value in attributes.items() if isinstance(value, only)})


def _reachable(owner: Any, inside: Callable[[Mapping[str, Any]], list[Any]]) -> list[Any]:
    """Return an object and those inside it, once; `inside` chooses them by the attributes of one."""
    objects: list[Any] = []
    queue = [owner]
    while queue:
        candidate = queue.pop()
        if any(candidate is known for known in objects) or not hasattr(candidate, "__dict__"):
            continue
        objects.append(candidate)
        queue += inside(vars(candidate))
    return objects


def inner_optimizers(owner: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers of torch that an object wraps, maybe several times, or is."""
    objects = _reachable(owner, lambda values: [values[name] for name in _WRAPPED if name in values])
    return [inner for inner in objects if isinstance(inner, torch.optim.Optimizer) and "state" in vars(inner)]


def keep_optimizer(owner: Any) -> Apply:
    """Keep the state of what wraps optimizers, or is one: nothing large is copied."""
    optimizers = inner_optimizers(owner)
    attributes = _attributes_of(optimizers)
    states = [
        (inner.state, [(key, value, _entries(value)) for key, value in inner.state.items()])
        for inner in optimizers
    ]
    groups = [
        (inner.param_groups, [(group, dict(group)) for group in inner.param_groups]) for inner in optimizers
    ]
    is_plain = all(
        type(inner).load_state_dict is torch.optim.Optimizer.load_state_dict for inner in optimizers
    )
    live = iterate_tensors([list(inner.state.values()) for inner in optimizers])
    restore_tensors = _keep_tensors(live, 0 if is_plain else LARGEST)  # torch replaces tensors

    def restore() -> None:
        _restore_attributes(attributes)
        for state, entries in states:
            state.clear()
            for key, values, content in entries:
                if content is not None:
                    values.clear()
                    values.update(content)
                state[key] = values
        for live_groups, kept_groups in groups:
            live_groups[:] = [group for group, _ in kept_groups]
            for group, content in kept_groups:
                group.clear()
                group.update(content)
        restore_tensors()

    return restore


def _entries(value: Any) -> dict[str, Any] | None:
    return dict(value) if isinstance(value, dict) else None


def keep_weights(model: nn.Module) -> Apply:
    """Keep copies of the tensors of a model: as much memory as it has."""
    modules = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]
    named = [values for _, parameters, buffers in modules for values in (parameters, buffers)]
    tensors = [tensor for values in named for tensor in values.values() if tensor is not None]
    restore_tensors = _keep_tensors(tensors, math.inf)

    def restore() -> None:
        for module, parameters, buffers in modules:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        restore_tensors()

    return restore


def keep_object(owner: Any) -> Apply:
    """Keep the state of an object with `state_dict` and `load_state_dict`: scheduler, scaler, a user's."""
    attributes = _attributes_of(_stateful(owner))
    state, restore_tensors = _state_of(owner)

    def restore() -> None:
        _restore_attributes(attributes)
        if state is not None and not _is_same(owner.state_dict(), state):  # changed in place
            try:
                owner.load_state_dict(state)
            except Exception:  # what refuses every state may have taken it all the same
                if not _is_same(owner.state_dict(), state):
                    raise
            _restore_attributes(attributes, only=_IMMUTABLE)
        restore_tensors()

    return restore


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
    return isinstance(first, _IMMUTABLE) and bool(first == second)


def _stateful(owner: Any) -> list[Any]:
    """Return an object and those with states that are its attributes, or are in lists that are."""
    skipped = (type, nn.Module, torch.optim.Optimizer, Tensor, *_IMMUTABLE)

    def inside(attributes: Mapping[str, Any]) -> list[Any]:
        lists = [value for value in attributes.values() if isinstance(value, (list, tuple))]
        values = [value for value in chain(attributes.values(), *lists) if not isinstance(value, skipped)]
        return [value for value in values if callable(getattr(value, "load_state_dict", None))]

    return _reachable(owner, inside)


def _state_of(owner: Any) -> tuple[Any, Apply]:
    """Return a copy of a state, which shares large tensors with the object; None where there is none yet."""
    try:
        state = owner.state_dict()
        tensors = list(iterate_tensors(state))
        is_large = _size_of(tensors) > LARGEST
        shared: dict[int, Any] = {id(tensor): tensor for tensor in tensors} if is_large else {}
        return copy.deepcopy(state, shared), _keep_tensors(tensors, LARGEST)
    except Exception:  # of the user's own: what has no state before it is loaded has none to restore
        return None, lambda: None


def keep_loader(loader: Any) -> Apply:
    owners = [loader, loader.base_dataloader, loader.position, loader.padding_source]
    owners += [loader.get_sampler(), loader._index_sampler, loader.dataset]
    attributes = _attributes_of(owner for owner in owners if hasattr(owner, "__dict__"))
    states = [(generator, generator.get_state()) for generator in resume.generators_of(loader)]
    epoch = loader.iteration

    def restore() -> None:
        _restore_attributes(attributes)
        loader.set_epoch(epoch)
        _restore_attributes(attributes)
        for generator, state in states:
            generator.set_state(state)

    return restore
