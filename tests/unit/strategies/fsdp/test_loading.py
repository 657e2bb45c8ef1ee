"""Weights of rank 0 on one process; several are in the distributed tests."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from accelerate.base import PreparationError
from accelerate.state import PartialState
from accelerate.strategies.dtensors import empty_model, send_from_main
from accelerate.strategies.fsdp import (
    MainWeights,
    disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading,
    ensure_weights_retied,
    fsdp2_load_full_state_dict,
)

pytestmark = pytest.mark.usefixtures("states")
CPU = torch.device("cpu")
RUN = SimpleNamespace(device=CPU)


@pytest.fixture(autouse=True)
def alone() -> None:
    PartialState(cpu=True)


def tied() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    model.register_buffer("kept", torch.ones(1))
    model.register_buffer("passing", torch.ones(2), persistent=False)
    return model


def test_the_variables_for_other_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "False")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "False")
    enable_fsdp_ram_efficient_loading()
    assert (os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == (
        "True",
        "True",
    )
    disable_fsdp_ram_efficient_loading()
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "False"


def test_a_model_moved_to_the_meta_device_is_restored() -> None:
    model, expected = tied(), tied()
    weights = MainWeights(model)
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert model[1].weight is model[0].weight
    fsdp2_load_full_state_dict(RUN, model, weights.state)
    weights.restore_buffers(CPU)
    assert model[1].weight is model[0].weight
    assert [p.requires_grad for p in model.parameters()] == [True, False, True]
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert torch.equal(model.passing, torch.ones(2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("1.bias"), "it lacks 1.bias"),
        (lambda state: state.update({"1.bias": torch.ones(3)}), "other shapes of 1.bias"),
    ],
)
def test_weights_that_do_not_fill_the_model_are_refused(change, message: str) -> None:  # type: ignore[no-untyped-def]
    state = dict(tied().state_dict())
    change(state)
    with pytest.raises(PreparationError, match=message):
        fsdp2_load_full_state_dict(RUN, tied(), state)


def test_broadcast_fills_empty_parameters() -> None:
    model = tied()
    optimized = model[0].weight
    send_from_main(model, CPU)
    assert model[0].weight is optimized  # what has memory stays the same object
    empty_model(model)
    send_from_main(model, CPU)
    assert model[1].weight is model[0].weight
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_initialising_keeps_ties() -> None:
    model = tied()
    empty_model(model)
    initialise = ensure_weights_retied(lambda module: module.to_empty(device=CPU, recurse=False), model, CPU)
    for module in model.modules():
        initialise(module)
    assert model[1].weight is model[0].weight
    assert not any(p.is_meta for p in model.parameters())
