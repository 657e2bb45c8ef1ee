"""The strategy of one process is the default of every method."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from accelerate import Accelerator
from accelerate.base import PreparationError
from accelerate.strategies import refuse_split_model
from accelerate.utils import DynamoBackend, TorchDynamoPlugin

pytestmark = pytest.mark.usefixtures("states")


def test_mistakes_are_logged_when_objects_are_prepared(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(2, 2)
    stale = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    with caplog.at_level(logging.WARNING):
        Accelerator(cpu=True).prepare(model, stale)
    assert "weight, bias" in caplog.text
    assert "steps no parameter of any prepared model" in caplog.text


@pytest.mark.parametrize("together", [True, False])
def test_a_correct_preparation_logs_nothing(caplog: pytest.LogCaptureFixture, together: bool) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accelerator = Accelerator(cpu=True)
    with caplog.at_level(logging.WARNING):
        if together:
            accelerator.prepare(optimizer, model)
        else:
            accelerator.prepare(model)
            accelerator.prepare(optimizer)
    assert caplog.text == ""


class Adversarial(torch.nn.Module):
    """Its own parameters are those of the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return self.generator.parameters(recurse)


def test_a_model_may_hide_the_parameters_of_a_second_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    model = Adversarial()
    generator = torch.optim.AdamW(model.parameters(), lr=1.0)
    discriminator = torch.optim.AdamW(model.discriminator.parameters(), lr=1.0)
    accelerator = Accelerator(cpu=True)
    with caplog.at_level(logging.WARNING):
        accelerator.prepare(model, generator)
        accelerator.prepare(discriminator)
    assert caplog.text == ""


class Tied(torch.nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


@pytest.fixture
def replaces_parameters() -> Iterator[None]:
    """Let torch replace parameters when it moves a module, as it does on devices of other packages."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.usefixtures("replaces_parameters")
@pytest.mark.parametrize("order", ["together", "model first", "optimizer first"])
def test_optimizers_step_parameters_that_a_move_has_replaced(order: str) -> None:
    accelerator = Accelerator(cpu=True)
    model = Tied()
    old = model.first.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if order == "together":
        model, optimizer = accelerator.prepare(model, optimizer)
    elif order == "model first":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    new = model.first.weight
    assert new is not old
    assert new is model.second.weight
    before = new.detach().clone()
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    assert not torch.equal(new, before)


def test_compilation_keeps_the_model_behind_the_wrapper() -> None:
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(backend=DynamoBackend.EAGER))
    model = torch.nn.Linear(2, 2)
    prepared = accelerator.prepare(model)
    assert torch.equal(prepared(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert accelerator.unwrap_model(prepared, keep_torch_compile=False) is model
    assert set(accelerator.get_state_dict(prepared)) == {"weight", "bias"}


def test_a_compiled_forward_runs_under_autocast_in_one_graph() -> None:
    dynamo_plugin = TorchDynamoPlugin(backend="eager", fullgraph=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", dynamo_plugin=dynamo_plugin)
    prepared = accelerator.prepare(torch.nn.Linear(2, 2))
    assert prepared(torch.ones(1, 2)).dtype == torch.float32


def test_a_model_on_several_devices_is_refused_for_several_processes() -> None:
    model = torch.nn.Linear(2, 2)
    model.hf_device_map = {"a": 0, "b": "cpu"}  # type: ignore[assignment]
    with pytest.raises(PreparationError, match="several devices \\(0, cpu\\).*cannot replicate.*device_map"):
        refuse_split_model(model, "which it cannot replicate")
    assert Accelerator(cpu=True).verify_device_map(model)
    assert not Accelerator(cpu=True).verify_device_map(torch.nn.Linear(2, 2))
