"""Objects of one `prepare` call, and the mark of objects that are prepared.

`Accelerator.prepare` creates a `Bundle`, and replaces its objects one kind after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

T = TypeVar("T")

PREPARED_MARK = "_is_accelerate_prepared"
WHOLE_MATRICES = "whole_matrices"
"""Attribute of optimizers that need whole matrices, and option of groups whose parameters are exempt."""


class Kind(Enum):
    """Kinds of objects that `prepare` distinguishes."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    LOADER = "loader"
    OTHER = "other"


_SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler)
_OPTIMIZER_METHODS = ("param_groups", "add_param_group", "zero_grad", "step", "state_dict")


def _is_scheduler(obj: object) -> bool:
    methods = (getattr(obj, name, None) for name in ("step", "get_last_lr"))
    return isinstance(obj, _SCHEDULERS) or all(map(callable, methods))


def _is_optimizer(obj: object) -> bool:
    # The schedule-free wrapper of an optimizer has no base class.
    return isinstance(obj, torch.optim.Optimizer) or all(hasattr(obj, name) for name in _OPTIMIZER_METHODS)


KINDS: tuple[tuple[Kind, Callable[[Any], bool]], ...] = (
    (Kind.LOADER, lambda obj: isinstance(obj, DataLoader)),
    (Kind.MODEL, lambda obj: isinstance(obj, nn.Module)),
    (Kind.OPTIMIZER, _is_optimizer),
    (Kind.SCHEDULER, _is_scheduler),
)
"""Condition of each kind, of which the first that is true counts."""


def placeholder_kind(obj: object) -> Kind | None:
    """Returns the kind of the object that an engine builds in place of `obj`, or None for other objects."""
    kind = getattr(type(obj), "placeholder_for", None)
    return kind if isinstance(kind, Kind) else None


def kind_of(obj: object) -> Kind:
    """Returns the kind of an object, `Kind.OTHER` for objects that `prepare` returns unchanged."""
    return placeholder_kind(obj) or next((kind for kind, holds in KINDS if holds(obj)), Kind.OTHER)


def is_prepared(obj: object) -> bool:
    """Returns whether an object is the result of a `prepare` call."""
    return (
        isinstance(obj, (AcceleratedOptimizer, AcceleratedScheduler))
        or getattr(obj, PREPARED_MARK, False) is True
    )


def mark_prepared(obj: T) -> T:
    """Marks an object as the result of a `prepare` call, and returns it."""
    setattr(obj, PREPARED_MARK, True)
    return obj


class Bundle:
    """Objects of one `prepare` call, by position.

    Args:
        placement: For each object whether it is moved to the device. None is the default of the run.
    """

    def __init__(self, objects: Sequence[Any], placement: Sequence[bool | None] | None = None) -> None:
        self.objects = list(objects)
        self.placement = list(placement) if placement is not None else [None] * len(self.objects)
        self.kinds = [kind_of(obj) for obj in self.objects]

    def of(self, kind: Kind) -> list[Any]:
        """Returns the objects of one kind, in order."""
        return [obj for obj, its_kind in zip(self.objects, self.kinds, strict=True) if its_kind is kind]

    def new(self, kind: Kind) -> list[Any]:
        """Returns the objects of one kind that are not prepared yet, in order."""
        return [obj for obj in self.of(kind) if not is_prepared(obj)]

    @property
    def models(self) -> list[nn.Module]:
        """Models, in order."""
        return self.of(Kind.MODEL)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers, in order."""
        return self.of(Kind.OPTIMIZER)

    def replace(self, kind: Kind, prepare: Callable[[Any, bool | None], Any]) -> None:
        """Replaces each object of a kind by `prepare(object, placement)`."""
        for index, its_kind in enumerate(self.kinds):
            if its_kind is kind:
                self.objects[index] = prepare(self.objects[index], self.placement[index])

    def result(self) -> Any:
        """Returns the objects as a tuple, or the object itself if there is one."""
        return self.objects[0] if len(self.objects) == 1 else tuple(self.objects)


def parameter_ids(optimizers: Iterable[Any]) -> set[int]:
    """Returns the ids of all parameters of optimizers."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def needs_whole_matrices(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer is torch's Muon, or declares that it needs whole matrices."""
    return getattr(optimizer, WHOLE_MATRICES, isinstance(optimizer, torch.optim.Muon)) is True
