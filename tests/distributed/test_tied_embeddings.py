"""Tied embeddings stay tied under FSDP 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from accelerate import Accelerator, FullyShardedDataParallelPlugin

Run = Callable[..., list[Any]]
WORDS, WIDTH = 13, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden))


class Model(nn.Module):
    """Embedding and head have the same weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(words)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def words(rank: int, step: int) -> torch.Tensor:
    return torch.randint(WORDS, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = words(rank, step)
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), inputs.flatten())


def expected_weights(steps: int) -> dict[str, torch.Tensor]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        ((loss_of(model, 0, step) + loss_of(model, 1, step)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def start(efficient: bool, classes: str) -> tuple[Any, Any, Any]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_ram_efficient_loading=efficient,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=classes.split(","),
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = Model()
    if efficient and not accelerator.is_main_process:
        model.to("meta").tie_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer)


def check_tied(model: Any, optimizer: Any) -> None:
    assert model.head.weight is model.embed.weight
    assert isinstance(model.head.weight, DTensor)
    owners = [
        module
        for module in model.modules()
        if isinstance(module, FSDPModule)
        and any(p.sharded_param is model.head.weight for p in parameters_of_unit(module))
    ]
    assert owners == [model]
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert held.count(id(model.head.weight)) == 1
    assert len(held) == len(set(held)) == 5


def parameters_of_unit(module: Any) -> list[Any]:
    group = module._get_fsdp_state()._fsdp_param_group
    return [] if group is None else group.fsdp_params


def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        accelerator.backward(loss_of(model, accelerator.process_index, step))
        optimizer.step()
        optimizer.zero_grad()
        check_tied(model, optimizer)


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def train_and_resume(efficient: bool, classes: str) -> list[dict[str, torch.Tensor]]:
    accelerator, model, optimizer = start(efficient, classes)
    check_tied(model, optimizer)
    train(accelerator, model, optimizer, range(2))
    accelerator.save_state("saved")
    accelerator.save_model(model, "weights")
    train(accelerator, model, optimizer, range(2, 4))
    weights = [whole(model)]
    accelerator.load_state("saved")
    check_tied(model, optimizer)
    accelerator.free_memory()
    accelerator, model, optimizer = start(efficient, classes)
    accelerator.load_state("saved")
    check_tied(model, optimizer)
    train(accelerator, model, optimizer, range(2, 4))
    return [*weights, whole(model)]


@pytest.mark.parametrize(("efficient", "classes"), [(False, "Layer"), (True, "Layer,Embedding")])
def test_tied_embeddings_stay_tied_through_training_and_resuming(
    run: Run, efficient: bool, classes: str
) -> None:
    env = {"FSDP_CPU_RAM_EFFICIENT_LOADING": str(efficient).lower()}
    expected = expected_weights(4)
    for uninterrupted, resumed in run(train_and_resume, efficient, classes, processes=2, env=env):
        assert set(uninterrupted) == set(expected)
        for name, value in expected.items():
            torch.testing.assert_close(uninterrupted[name], value, rtol=1e-5, atol=1e-6)
            assert torch.equal(uninterrupted[name], resumed[name])
