"""Several Accelerators of one process, each with its own accumulation of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.plugins import GradientAccumulationPlugin
from accelerate.state import AcceleratorState, GradientState

pytestmark = pytest.mark.usefixtures("states")


def new_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def new_loader(samples: int = 14) -> DataLoader[Any]:
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(samples, 4), torch.randn(samples, 2)), batch_size=2)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def print_with_another(model: nn.Module) -> None:
    Accelerator().print("")


def evaluate_with_another(model: nn.Module) -> None:
    other = Accelerator()
    loader = other.prepare(new_loader())
    for inputs, _ in loader:
        other.gather_for_metrics(model(inputs))


def train_with_another(model: nn.Module) -> None:
    other = Accelerator(gradient_accumulation_steps=3)
    trained, optimizer, loader = other.prepare(second := new_model(), sgd(second), new_loader())
    for inputs, targets in loader:
        with other.accumulate(trained):
            other.backward(mse_loss(trained(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    assert other.gradient_accumulation_steps == 3


@pytest.mark.parametrize("use_another", [print_with_another, evaluate_with_another, train_with_another])
@pytest.mark.parametrize("with_windows", [False, True])
def test_another_accelerator_does_not_change_the_windows(
    use_another: Callable[[nn.Module], None], with_windows: bool
) -> None:
    results = []
    for is_alone in (True, False):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        model, optimizer, loader = accelerator.prepare(first := new_model(), sgd(first), new_loader(16))
        if not is_alone:
            use_another(model)
        batches = itertools.chain.from_iterable(accelerator.windows(loader)) if with_windows else loader
        synchronized = []
        for number, (inputs, targets) in enumerate(batches):
            with nullcontext() if with_windows else accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            synchronized.append(accelerator.sync_gradients)
            if number in (1, 5) and not is_alone:
                use_another(model)
        assert accelerator.gradient_accumulation_steps == accelerator.gradient_state.num_steps == 4
        results.append((synchronized, weights(model)))
    (expected, alone), (synchronized, trained) = results
    assert synchronized == expected
    assert torch.equal(trained, alone)


def test_a_later_accelerator_has_its_own_accumulation() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, skip_nonfinite_updates=True)
    first = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    second = Accelerator(gradient_accumulation_steps=4)
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (2, 4)
    first.gradient_accumulation_steps = 3
    second.gradient_state.plugin_kwargs["num_steps"] = 5
    third = Accelerator()
    found = [each.gradient_accumulation_steps for each in (first, second, third)]
    assert found == [3, 5, 1]
    assert GradientState().num_steps == 1
    optimizers = [each.prepare(sgd(new_model())) for each in (first, third)]
    assert [optimizer.skips_nonfinite for optimizer in optimizers] == [True, False]
