"""LocalSGD without other processes, and its calls of an accelerator with several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate.accelerator import Accelerator
from accelerate.base import DistributedType, PreparationError, StateError
from accelerate.local_sgd import LocalSGD
from accelerate.state import Observers
from accelerate.strategies import DataParallel, Strategy, TensorParallel
from accelerate.strategies.deepspeed import DeepSpeed
from accelerate.strategies.fsdp import Fsdp1, Fsdp2
from accelerate.strategies.megatron import MegatronLM


class FakeAccelerator:
    """Two processes, of which the other one has parameters of 3; notes the order of what happens."""

    use_distributed = True
    torch_device_mesh: Any = None

    def __init__(self, strategy: type[Strategy] = DataParallel) -> None:
        self.distributed_type = strategy.distributed_type or DistributedType.MULTI_CPU
        self._runtime = SimpleNamespace(
            strategy=strategy,
            prepared=SimpleNamespace(models=[], local_sgd=[], optimizers=[]),
            observers=Observers(),
        )
        self.events: list[str] = []

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        self.events.append("local")
        try:
            yield
        finally:
            self.events.append("synced")

    def reduce(self, tensors: list[torch.Tensor], reduction: str) -> list[torch.Tensor]:
        assert reduction == "mean"
        self.events.append(f"average {len(tensors)}")
        return [(tensor + 3) / 2 for tensor in tensors]


def train(local_sgd: LocalSGD, steps: int) -> None:
    with local_sgd:
        for _ in range(steps):
            local_sgd.step()


@pytest.mark.usefixtures("states")
def test_local_sgd_on_one_process_does_not_change_training() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    before = [parameter.clone() for parameter in model.parameters()]
    local_sgd = LocalSGD(accelerator, model, local_sgd_steps=2)
    train(local_sgd, 4)
    assert local_sgd.enabled is False
    assert local_sgd.num_steps == 4
    assert all(map(torch.equal, before, model.parameters()))


def test_parameters_are_averaged_every_few_steps_and_at_the_end() -> None:
    accelerator: Any = FakeAccelerator()
    model = torch.nn.Linear(1, 1)
    torch.nn.init.ones_(model.weight)
    model.bias.requires_grad_(False)
    weight, bias = model.weight, model.bias.clone()
    train(LocalSGD(accelerator, model, 2), 5)
    assert accelerator.events == ["local", "average 1", "average 1", "average 1", "synced"]
    assert model.weight is weight
    assert weight.item() == 2.75
    assert torch.equal(model.bias, bias)


def test_a_disabled_local_sgd_has_no_effect() -> None:
    accelerator: Any = FakeAccelerator()
    train(LocalSGD(accelerator, torch.nn.Linear(1, 1), 1, enabled=False), 3)
    assert accelerator.events == []


def test_a_failing_block_does_not_wait_for_other_ranks() -> None:
    accelerator: Any = FakeAccelerator()
    with pytest.raises(KeyError), LocalSGD(accelerator, torch.nn.Linear(1, 1), 1):
        raise KeyError
    assert accelerator.events == ["local", "synced"]


@pytest.mark.parametrize("strategy", [Fsdp2, Fsdp1, TensorParallel, DeepSpeed, MegatronLM])
def test_split_models_are_refused(strategy: type[Strategy]) -> None:
    accelerator: Any = FakeAccelerator(strategy)
    with pytest.raises(ValueError, match="LocalSGD averages whole models"):
        LocalSGD(accelerator, torch.nn.Linear(1, 1), 1)


def test_ranks_that_train_on_one_batch_are_refused() -> None:
    accelerator: Any = FakeAccelerator()
    accelerator.torch_device_mesh = SimpleNamespace(mesh_dim_names=("dp_replicate", "cp"), shape=(2, 2))
    with pytest.raises(PreparationError, match="the ranks of cp_size=2 train on one batch together"):
        LocalSGD(accelerator, torch.nn.Linear(1, 1), 1)


@pytest.mark.parametrize("steps", [0, 2.5])
def test_intervals_that_are_no_number_of_steps_are_refused(steps: Any) -> None:
    accelerator: Any = FakeAccelerator()
    with pytest.raises(ValueError, match=f"local_sgd_steps={steps}"):
        LocalSGD(accelerator, torch.nn.Linear(1, 1), steps)


def test_blocks_cannot_be_nested() -> None:
    accelerator: Any = FakeAccelerator()
    local_sgd = LocalSGD(accelerator, torch.nn.Linear(1, 1), 2)
    with local_sgd, pytest.raises(StateError, match="cannot be nested"), local_sgd:
        pass
