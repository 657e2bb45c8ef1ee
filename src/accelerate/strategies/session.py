"""Prepared objects of a run, and the parameters that were replaced while they were prepared.

`Accelerator` creates the `PrepareSession` of a run. Strategies record replaced parameters in it, so that
optimizers step the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.strategies.dtensors import fsdp2_switch_optimizer_parameters


@dataclass(eq=False)
class Prepared:
    """Prepared objects of a run by kind, in the order of preparation."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    stepping_in_backward: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    loaders: list[DataLoader[Any]] = field(default_factory=list)
    custom: list[Any] = field(default_factory=list)
    averages: list[Any] = field(default_factory=list)
    local_sgd: list[Any] = field(default_factory=list)

    def clear(self) -> None:
        """Removes all objects from the lists."""
        for objects in vars(self).values():
            objects.clear()


class ReplacedParameters(WeakIdKeyDictionary):
    """Mapping from old parameters to the ones that replaced them, by identity, while the old ones are in use.

    A copy or a pickle has the same pairs. An old parameter stays in it if an object that is pickled with it,
    such as an optimizer, has a reference to the parameter.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        pairs = list(self.items())  # type: ignore[no-untyped-call]
        return ReplacedParameters, (), None, None, iter(pairs)


def update_singly(optimizer: torch.optim.Optimizer) -> bool:
    """Disables `foreach` and `fused` in groups with parameters on different meshes, or on one and on none.

    torch's implementations for lists of tensors, the default on accelerators, raise an error for such groups.
    Returns whether the optimizer had such a group.
    """
    has_changed = False
    for group in getattr(optimizer, "param_groups", ()):
        meshes = {getattr(p, "device_mesh", None) for p in group["params"] if p.requires_grad}
        for name in ("foreach", "fused"):
            if len(meshes) > 1 and group.get(name, False) is not False:
                group[name] = False
                has_changed = True
    return has_changed


class PrepareSession:
    """State that the `prepare` calls of a run have in common."""

    def __init__(self) -> None:
        self.prepared = Prepared()
        self.replaced = ReplacedParameters()
        self.dropped = ReplacedParameters()  # parameters that this rank does not have, as keys
        self.waiting: Sequence[Any] = ()  # optimizers of this call, which are updated after each replacement

    @contextmanager
    def following(self, optimizers: Iterable[Any]) -> Iterator[None]:
        """Updates optimizers when their parameters are replaced inside the block."""
        self.waiting = list(optimizers)
        try:
            yield
        finally:
            self.waiting = ()

    def replace(self, parameters: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Records pairs of an old parameter and the one that replaced it."""
        for old, new in parameters:
            if new is not old:
                self.replaced[old] = new

    def drop(self, parameters: Iterable[Tensor]) -> None:
        """Records parameters that this rank does not have, which its optimizers do not step."""
        for parameter in parameters:
            self.dropped[parameter] = torch.empty(0)

    def remap(self, optimizers: Iterable[Any]) -> None:
        """Replaces old parameters in optimizers and their states."""
        mapping: Mapping[Tensor, Tensor] = self.replaced
        for optimizer in optimizers:
            inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
            if len(self.replaced):
                fsdp2_switch_optimizer_parameters(inner, mapping)
                for old in [key for key in inner.state if isinstance(key, Tensor) and key in mapping]:
                    inner.state[mapping[old]] = inner.state.pop(old)
            if len(self.dropped):
                for group in getattr(inner, "param_groups", ()):
                    group["params"] = [p for p in group["params"] if p not in self.dropped]
                for old in [key for key in inner.state if isinstance(key, Tensor) and key in self.dropped]:
                    del inner.state[old]
            if update_singly(inner):
                inner.register_load_state_dict_post_hook(update_singly)  # type: ignore[arg-type]

    def change(self, model: nn.Module, change: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Returns the result of a function that changes a model, whose new parameters optimizers step."""
        before = dict(model.named_parameters())
        changed = change(model)
        after = dict(changed.named_parameters(remove_duplicate=False))
        replaced = [(old, after[name]) for name, old in before.items() if after.get(name, old) is not old]
        if replaced:
            self.replace(replaced)
            self.remap([*self.waiting, *self.prepared.optimizers])
        return changed

    def optimizers_of(self, scheduler: object) -> list[AcceleratedOptimizer]:
        """Returns the prepared optimizers of a scheduler."""
        inner = getattr(scheduler, "optimizer", None)
        return [optimizer for optimizer in self.prepared.optimizers if _is_or_wraps(optimizer, inner)]

    def assign_optimizers(self) -> None:
        """Sets the optimizers of schedulers that were prepared before their optimizers."""
        for scheduler in self.prepared.schedulers:
            own = self.optimizers_of(scheduler.scheduler)
            if own and own != scheduler.optimizers and not scheduler.belongs_to_engine:
                scheduler.optimizers = own
                scheduler.record_call()

    def clear(self) -> None:
        """Removes all objects and parameters."""
        self.prepared.clear()
        self.replaced.clear()
        self.dropped.clear()


def _is_or_wraps(optimizer: object, inner: object) -> bool:
    """Returns whether an optimizer is another one, or wraps it, in any number of wrappers."""
    while optimizer is not None and optimizer is not inner:
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer is not None
