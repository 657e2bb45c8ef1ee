"""Accumulation of gradients without an Accelerator."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from torch import nn

from accelerate.accelerator import Accumulation
from accelerate.base import ConfigurationError, StateError
from accelerate.plugins import GradientAccumulationPlugin
from accelerate.recovery import ReplicaGroups
from accelerate.state import GradientState, PartialState
from accelerate.strategies import Prepared

pytestmark = pytest.mark.usefixtures("states")


class RecordingStrategy:
    """Strategy that records the models whose gradients stay local, and those reduced early."""

    replicas = 2
    holds_gradients = True
    loader_mesh = None

    def __init__(self) -> None:
        self.local: list[nn.Module] = []
        self.early: list[nn.Module] = []

    def no_sync(self, model: nn.Module, *, early: bool) -> AbstractContextManager[None]:
        (self.early if early else self.local).append(model)
        return nullcontext()


def accumulation_of(steps: int, **fields: Any) -> Accumulation:
    PartialState(cpu=True)
    gradients = GradientState(GradientAccumulationPlugin(num_steps=steps, **fields))
    strategy: Any = RecordingStrategy()
    prepared = Prepared()
    return Accumulation(strategy, gradients, prepared, ReplicaGroups(prepared))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"is_joined": True}, ConfigurationError, "join_uneven_inputs"),
        ({"weighting": object()}, StateError, "inside a window of windows"),
    ],
)
def test_a_micro_batch_that_does_not_fit_raises_an_error(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    accumulation = accumulation_of(2)
    vars(accumulation).update(change)
    with pytest.raises(error, match=message):
        accumulation.accumulate((), num_items=1)
