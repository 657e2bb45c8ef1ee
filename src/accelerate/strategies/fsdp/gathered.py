"""Errors for forwards that change weights which units of FSDP have gathered."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import PreparationError, StateError, listed
from accelerate.strategies.replicas import digests
from accelerate.strategies.tolerances import must_compare


class UnitParameter(NamedTuple):
    """Parameter of a unit, with its module and its name in the model."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


def refuse_renormalized(model: nn.Module, ignored: Container[nn.Parameter]) -> None:
    """Raises an error for embeddings that normalize rows of their weights in the forward."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
        and module.max_norm is not None
        and module.weight not in ignored
    ]
    if names:
        raise PreparationError(
            f"{listed(names)} of {type(model).__name__} has max_norm, which changes weights in the forward, "
            "and FSDP drops the change. Normalize the rows after optimizer.step(), and set max_norm=None."
        )


class GatheredWeights:
    """Hooks of a unit that raise an error for a forward which changes gathered weights.

    Forwards whose number is a power of two are checked.

    Args:
        held: Parameters of the unit.
    """

    def __init__(self, held: Sequence[UnitParameter]) -> None:
        self._held = [(each.module, each.name) for each in held]
        self._num_forwards = 0
        self._before: dict[str, int] = {}

    def register(self, unit: nn.Module) -> None:
        """Registers the hooks before those of FSDP 2, which gathers before all hooks."""
        unit.register_forward_pre_hook(self._begin)
        unit.register_forward_hook(self._end)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, unit: nn.Module, args: object) -> None:
        self._num_forwards += 1
        self._before = self._digests() if must_compare(self._num_forwards) else {}

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, unit: nn.Module, args: object, outputs: object) -> None:
        if not self._before:
            return
        before, self._before = self._before, {}
        changed = [name for name, number in self._digests().items() if before.get(name, number) != number]
        if changed:
            raise StateError(
                f"A forward changes {listed(changed)}. FSDP gathers weights for a forward and drops the "
                "change. Change weights after optimizer.step(), keep such a value in a buffer, or train with "
                "DistributedDataParallel."
            )

    def _digests(self) -> dict[str, int]:
        """Returns a digest of each gathered weight that is a plain tensor."""
        plain: dict[str, Tensor] = {}
        for module, name in self._held:
            weight: Any = getattr(module, name.rpartition(".")[2], None)
            if type(weight) in (Tensor, nn.Parameter):
                plain[name] = weight
        with torch_private.dispatch_modes_disabled():
            return dict(zip(plain, digests(plain.values()), strict=True))
