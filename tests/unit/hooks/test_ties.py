"""Optimizers that hold offloaded parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate import cpu_offload, disk_offload
from accelerate.base import StateError
from accelerate.hooks import align_module_device, remove_hook_from_submodules

X = torch.ones(2, 3)
OFFLOADS: dict[str, Callable[[nn.Module, Path], object]] = {
    "cpu": lambda model, folder: cpu_offload(model, execution_device="cpu"),
    "disk": lambda model, folder: disk_offload(model, folder, execution_device="cpu"),
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, head: nn.Module | None = None) -> list[float]:
    losses = []
    for _ in range(3):
        outputs = model(X) if head is None else head(model(X))
        loss = outputs.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("where", OFFLOADS)
def test_a_step_of_offloaded_parameters_is_refused(where: str, is_first: bool, tmp_path: Path) -> None:
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if is_first else None
    OFFLOADS[where](model, tmp_path)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(StateError, match=r"SGD.step\(\): 4 trainable parameters are offloaded.*adapter"):
        train(model, optimizer)


@pytest.mark.parametrize("where", OFFLOADS)
def test_an_optimizer_may_hold_frozen_offloaded_parameters(where: str, tmp_path: Path) -> None:
    losses = []
    for is_offloaded in (False, True):
        model = build().requires_grad_(False)
        head = nn.Linear(2, 2)
        if is_offloaded:
            OFFLOADS[where](model, tmp_path)
        nn.init.ones_(head.weight)
        nn.init.ones_(head.bias)
        optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], 0.1)
        losses.append(train(model, optimizer, head))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("where", OFFLOADS)
def test_an_optimizer_updates_a_model_that_was_offloaded_for_some_time(where: str, tmp_path: Path) -> None:
    model = build()
    plain = copy.deepcopy(model)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), 0.1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(2):
        OFFLOADS[where](model, tmp_path)
        model(X)
        remove_hook_from_submodules(model)
    assert train(model, optimizer) == expected
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_model_that_was_converted_while_it_was_offloaded_keeps_its_dtype(tmp_path: Path) -> None:
    model = build()
    originals = list(model.parameters())
    disk_offload(model, tmp_path, execution_device="cpu")
    model.half()
    remove_hook_from_submodules(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    assert {parameter.dtype for parameter in originals} == {torch.float32}


def test_parameters_are_updated_while_they_are_loaded(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    plain = copy.deepcopy(layer)
    train(plain, torch.optim.SGD(plain.parameters(), 0.1))
    disk_offload(nn.Sequential(layer), tmp_path, execution_device="cpu")
    with align_module_device(layer):
        optimizer = torch.optim.SGD(list(layer._parameters.values()), 0.1)  # type: ignore[arg-type]
        for _ in range(3):
            nn.functional.linear(X, layer.weight, layer.bias).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    remove_hook_from_submodules(layer)
    assert torch.equal(layer(X), plain(X))
