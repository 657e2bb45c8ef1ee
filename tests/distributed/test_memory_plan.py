"""`plan_memory` on several ranks: each strategy has its layout, and nothing is communicated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.base import StateError

WIDTH = 8


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def plan_of_two_ranks(sharded: bool) -> tuple[str, dict[str, int], str]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False) if sharded else None
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, batch = build(), torch.zeros(4, WIDTH)
    optimizer = torch.optim.SGD(model.parameters())
    plan = accelerator.plan_memory(model, optimizer, batch, loss_of)
    model, optimizer = accelerator.prepare(model, optimizer)
    try:
        again = str(accelerator.plan_memory(model, optimizer, batch, loss_of).parts == plan.parts)
    except StateError as error:
        again = str(error)
    return plan.layout.name, plan.parts.as_dict(), again


def test_a_plan_has_the_layout_of_the_strategy(run: Any) -> None:
    size = sum(parameter.nbytes for parameter in build().parameters())
    for name, parts, again in run(plan_of_two_ranks, False, processes=2):
        assert (name, parts["parameters"], parts["communication"], again) == ("ddp", size, size, "True")
    for name, parts, again in run(plan_of_two_ranks, True, processes=2):
        assert (name, parts["parameters"]) == ("shard_grad_op", size // 2)
        assert "before `prepare`" in again
