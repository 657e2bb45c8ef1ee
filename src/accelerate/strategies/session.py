"""State that the `prepare` calls of one run share: prepared objects, and parameters that were replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.strategies.fsdp import fsdp2_switch_optimizer_parameters


class Preparer(Protocol):
    """Prepares one object at a time and remembers it; `Accelerator` is one.

    Strategies call these methods of the accelerator instead of their own, so a client that replaces one of
    them on the accelerator takes effect.
    """

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None) -> nn.Module: ...
    def prepare_optimizer(
        self, optimizer: Any, device_placement: bool | None = None
    ) -> AcceleratedOptimizer: ...
    def prepare_scheduler(self, scheduler: Any) -> Any: ...
    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None) -> Any: ...


class ReplaceableFunctions(Protocol):
    """Functions that clients replace in the module `accelerate.accelerator`: looked up at each call."""

    @property
    def fsdp2_prepare_model(self) -> Any: ...
    @property
    def convert_model_to_fp8_ao(self) -> Any: ...


class Prepared:
    """Everything a run has prepared so far, by kind, in the order of preparation."""

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[AcceleratedOptimizer] = []
        self.schedulers: list[Any] = []
        self.loaders: list[DataLoader[Any]] = []
        self.custom: list[Any] = []

    def clear(self) -> None:
        """Forget all objects; the lists stay the same objects."""
        for objects in (self.models, self.optimizers, self.schedulers, self.loaders, self.custom):
            objects.clear()


class ReplacedParameters(WeakIdKeyDictionary):
    """Maps an old parameter, while it is in use, to the one that has taken its place: found by identity.

    A copy or a pickle holds the same pairs; an old parameter stays in it where something else that is pickled
    with it, such as an optimizer, holds that too.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (list(self.items()),)  # type: ignore[no-untyped-call]


def _rebuild(pairs: list[tuple[Tensor, Tensor]]) -> ReplacedParameters:
    replaced = ReplacedParameters()
    for old, new in pairs:
        replaced[old] = new
    return replaced


class PrepareSession:
    """What the `prepare` calls of one run share, and what is known only while one of them runs.

    Attributes:
        replaced: old parameter -> the one that has taken its place, for as long as the old one is in use.
        waiting: during a call, the optimizers that follow when parameters of models are replaced.
    """

    def __init__(self, preparer: Preparer, functions: Callable[[], ReplaceableFunctions]) -> None:
        self.preparer = preparer
        self.functions = functions
        self.prepared = Prepared()
        self.replaced = ReplacedParameters()
        self.waiting: Sequence[Any] = ()

    @contextmanager
    def following(self, optimizers: Iterable[Any]) -> Iterator[None]:
        """Let optimizers follow parameters that are replaced inside the block."""
        self.waiting = list(optimizers)
        try:
            yield
        finally:
            self.waiting = ()

    def replace(self, parameters: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Record which parameters have taken the places of others."""
        for old, new in parameters:
            if new is not old:
                self.replaced[old] = new

    def remap(self, optimizers: Iterable[Any]) -> None:
        """Let optimizers step the parameters that have taken the places of those they were built on."""
        if not len(self.replaced):
            return
        mapping: Mapping[Tensor, Tensor] = self.replaced
        for optimizer in optimizers:
            inner: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
            fsdp2_switch_optimizer_parameters(inner, mapping)

    def clear(self) -> None:
        """Forget all objects and parameters."""
        self.prepared.clear()
        self.replaced.clear()
