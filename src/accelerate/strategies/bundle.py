"""The objects of one `prepare` call by kind, and mistakes in them: parameters that no optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelerate.base import listed
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler

PREPARED_MARK = "_is_accelerate_prepared"
T = TypeVar("T")


class Kind(Enum):
    """What an object is to `prepare`."""

    MODEL = "model"
    OPTIMIZER = "optimizer"
    SCHEDULER = "scheduler"
    LOADER = "loader"
    OTHER = "other"


_SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler, AcceleratedScheduler)
_OF_OPTIMIZERS = ("param_groups", "add_param_group", "zero_grad", "step", "state_dict")


def _is_scheduler(obj: Any) -> bool:
    methods = (getattr(obj, name, None) for name in ("step", "get_last_lr"))
    return isinstance(obj, _SCHEDULERS) or all(map(callable, methods))


def _is_optimizer(obj: Any) -> bool:
    """Whether this is torch's optimizer, or one around another that derives from nothing (schedule-free)."""
    return isinstance(obj, torch.optim.Optimizer) or all(hasattr(obj, name) for name in _OF_OPTIMIZERS)


KINDS: tuple[tuple[Kind, Callable[[Any], bool]], ...] = (
    (Kind.LOADER, lambda obj: isinstance(obj, DataLoader)),
    (Kind.MODEL, lambda obj: isinstance(obj, nn.Module)),
    (Kind.OPTIMIZER, _is_optimizer),
    (Kind.SCHEDULER, _is_scheduler),
)
"""Each kind with its condition; the first that holds counts."""


def placeholder_kind(obj: Any) -> Kind | None:
    """Return what `obj` takes the place of until an engine has built it; None for most objects."""
    kind = getattr(type(obj), "placeholder_for", None)
    return kind if isinstance(kind, Kind) else None


def kind_of(obj: Any) -> Kind:
    """Return what `obj` is to `prepare`; `Kind.OTHER` is handed back untouched."""
    return placeholder_kind(obj) or next((kind for kind, holds in KINDS if holds(obj)), Kind.OTHER)


def is_prepared(obj: Any) -> bool:
    """Whether `obj` came out of a `prepare` call."""
    return (
        isinstance(obj, (AcceleratedOptimizer, AcceleratedScheduler))
        or getattr(obj, PREPARED_MARK, False) is True
    )


def mark_prepared(obj: T) -> T:
    """Note on `obj` that it came out of a `prepare` call, and return it."""
    setattr(obj, PREPARED_MARK, True)
    return obj


class Bundle:
    """The objects of one `prepare` call, with whether each is moved to the device; `None` leaves it to the
    run."""

    def __init__(self, objects: Sequence[Any], placement: Sequence[bool | None] | None = None) -> None:
        self.objects = list(objects)
        self.placement = list(placement) if placement is not None else [None] * len(self.objects)
        self.kinds = [kind_of(obj) for obj in self.objects]

    def of(self, kind: Kind) -> list[Any]:
        """Return the objects of one kind, in order."""
        return [obj for obj, its_kind in zip(self.objects, self.kinds, strict=True) if its_kind is kind]

    def new(self, kind: Kind) -> list[Any]:
        """Return the objects of one kind that no earlier call has prepared, in order."""
        return [obj for obj in self.of(kind) if not is_prepared(obj)]

    @property
    def models(self) -> list[nn.Module]:
        return self.of(Kind.MODEL)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return self.of(Kind.OPTIMIZER)

    def replace(self, kind: Kind, prepare: Callable[[Any, bool | None], Any]) -> None:
        """Replace each object of `kind` by `prepare(object, placement)`."""
        for index, its_kind in enumerate(self.kinds):
            if its_kind is kind:
                self.objects[index] = prepare(self.objects[index], self.placement[index])

    def result(self) -> Any:
        """Return what `prepare` returns: the objects as a tuple, or the one object."""
        return self.objects[0] if len(self.objects) == 1 else tuple(self.objects)


def as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Return one parameter or many as a list."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def parameter_ids(optimizers: Iterable[Any]) -> set[int]:
    """Return the identities of all parameters that `optimizers` own."""
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def find_unstepped_models(models: Iterable[nn.Module], optimizers: Sequence[Any]) -> list[str]:
    """Return one warning for each model with trainable parameters that no optimizer steps."""
    owned = parameter_ids(optimizers)
    warnings = []
    for model in models:
        names = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in owned]
        if names:
            warnings.append(
                f"{len(names)} trainable parameters of {type(model).__name__} belong to no prepared "
                f"optimizer and will not change: {listed(names)}. Pass them to the optimizer before "
                "`prepare`, or freeze them with requires_grad_(False) if that is meant."
            )
    return warnings


def find_unrelated_optimizers(optimizers: Iterable[Any], models: Sequence[nn.Module]) -> list[str]:
    """Return one warning for each optimizer that steps no parameter of any prepared model."""
    known = {id(p) for model in models for p in model.parameters()}
    return [
        f"{type(optimizer).__name__} steps no parameter of any prepared model: was it built before "
        "the model was copied or replaced, or for a model that was not prepared? Build it from the "
        "parameters of the model that you pass to `prepare`, and pass that model too."
        for optimizer in optimizers
        if not parameter_ids([optimizer]) & known
    ]
