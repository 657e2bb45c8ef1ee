"""Optimizers of sharded models continue after save and load as if they had not been interrupted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.base import CheckpointError
from accelerate.utils import GradScalerKwargs

Run = Callable[..., list[Any]]


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1),
}


def start(name: str, sharded_states: bool, precision: str = "no") -> tuple[Any, Any, Any]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT" if sharded_states else "FULL_STATE_DICT"
    )
    accelerator = Accelerator(
        fsdp_plugin=plugin,
        mixed_precision=precision,
        kwargs_handlers=[GradScalerKwargs(init_scale=64.0, growth_interval=3)],
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    model, optimizer = accelerator.prepare(model, OPTIMIZERS[name](model.parameters()))
    return accelerator, model, optimizer


def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> list[torch.Tensor]:
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + accelerator.process_index)
        accelerator.backward(model(torch.randn(4, 5, generator=generator)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor().detach().clone() for p in model.parameters()]


def interrupt(name: str, sharded_states: bool) -> bool:
    run = start(name, sharded_states)
    train(*run, range(3))
    run[0].save_state("saved")
    expected = train(*run, range(3, 6))
    run[0].free_memory()
    resumed = start(name, sharded_states)
    resumed[0].load_state("saved")
    got = train(*resumed, range(3, 6))
    return all(map(torch.equal, got, expected))


@pytest.mark.parametrize("sharded_states", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_sharded_models_resume(run: Run, name: str, sharded_states: bool) -> None:
    assert run(interrupt, name, sharded_states) == [True, True]


def interrupt_scaled(sharded_states: bool) -> Any:
    run = start("SGD with momentum", sharded_states, "fp16")
    train(*run, range(4))
    saved = run[0].scaler.state_dict()
    run[0].save_state("saved")
    expected = train(*run, range(4, 8)), run[0].scaler.state_dict()
    run[0].free_memory()
    accelerator, model, optimizer = start("SGD with momentum", sharded_states, "fp16")
    accelerator.load_state("saved")
    loaded = accelerator.scaler.state_dict()
    got = train(accelerator, model, optimizer, range(4, 8)), accelerator.scaler.state_dict()
    same = all(map(torch.equal, got[0], expected[0])) and got[1] == expected[1]
    return same, saved, loaded, optimizer.num_updates


@pytest.mark.parametrize("sharded_states", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_loading_leaves_the_scaler_as_it_was_saved(run: Run, sharded_states: bool) -> None:
    for same, saved, loaded, num_updates in run(interrupt_scaled, sharded_states):
        assert saved == loaded
        assert saved["scale"] == 128.0
        assert saved["_growth_tracker"] == 1
        assert same
        assert num_updates == 8


class Counting(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        own = self.state.setdefault("count", {"steps": 0})  # type: ignore[call-overload]
        own["steps"] += 1
        return super().step(closure)


class Held(torch.optim.SGD):
    """Keeps distributed tensors in a list."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["past"] = [parameter.grad]
        return super().step(closure)


def save_counting() -> list[Any]:
    OPTIMIZERS["counting"] = lambda parameters: Counting(parameters, lr=0.1, momentum=0.9)
    OPTIMIZERS["held"] = lambda parameters: Held(parameters, lr=0.1)
    found: list[Any] = []
    for sharded_states in (True, False):
        run = start("counting", sharded_states)
        train(*run, range(2))
        run[0].save_state(f"saved_{sharded_states}")
        run[0].free_memory()
        run = start("counting", sharded_states)
        run[0].load_state(f"saved_{sharded_states}")
        found.append(run[2].state["count"])
        run[0].free_memory()
        run = start("held", sharded_states)
        train(*run, range(1))
        with pytest.raises(CheckpointError) as caught:
            run[0].save_state(f"held_{sharded_states}")
        found.append(str(caught.value))
        run[0].free_memory()
    return found


def test_state_that_belongs_to_no_parameter_is_loaded(run: Run) -> None:
    for sharded, held_in_shards, whole, held in run(save_counting):
        assert sharded == whole == {"steps": 2}
        assert "of the optimizer is a list with DTensors" in held
        assert "of the optimizer is a list with DTensors" in held_in_shards
