"""Accumulation of gradients without an Accelerator."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
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


def test_only_the_last_micro_batch_synchronizes() -> None:
    accumulation, model, found = accumulation_of(3), nn.Linear(1, 1), []
    for _ in range(6):
        with accumulation.accumulate([model]):
            found.append((accumulation.step, accumulation.gradients.sync_gradients))
    assert found == [(1, False), (2, False), (3, True), (4, False), (5, False), (6, True)]
    assert accumulation.strategy.local == [model] * 4  # type: ignore[attr-defined]


def test_each_micro_batch_synchronizes_on_request() -> None:
    accumulation, model = accumulation_of(2, sync_each_batch=True), nn.Linear(1, 1)
    for _ in range(2):
        with accumulation.accumulate([model]):
            pass
    strategy: Any = accumulation.strategy
    assert (strategy.local, strategy.early) == ([], [model])


def test_losses_have_equal_weights_without_items() -> None:
    assert accumulation_of(4).scale(torch.tensor(2.0)) == 0.5
    loss = torch.tensor(2.0)
    assert accumulation_of(1).scale(loss) is loss


def test_losses_are_weighted_by_items_until_the_window_ends() -> None:
    accumulation = accumulation_of(1)
    with accumulation.accumulate([], num_items=4):
        assert accumulation.scale(torch.tensor(8.0)) == 8.0 * 2 / 4  # two replicas are averaged
    assert accumulation.weighting is None


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
        accumulation.accumulate([], num_items=1)


def test_items_are_passed_in_all_micro_batches_of_a_window_or_in_none() -> None:
    accumulation = accumulation_of(2)
    with accumulation.accumulate([], num_items=1):
        pass
    with pytest.raises(StateError, match="in some micro-batches"):
        accumulation.accumulate([])
    accumulation.reset()
    assert (accumulation.step, accumulation.weighting) == (0, None)
