"""`plan_memory` on several ranks: each strategy has its layout, and nothing is communicated."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin, torch_private
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


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6))

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(values)
        return values


def planned_and_measured(sharded: bool, frees: bool, steps: int) -> float:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=frees,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Sequential"],
    )
    accelerator = Accelerator(
        cpu=True, fsdp_plugin=plugin if sharded else None, gradient_accumulation_steps=steps
    )
    model, batch = Blocks(), torch.zeros(64, 128)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    planned = accelerator.plan_memory(model, optimizer, batch, loss_of).peak
    model, optimizer = accelerator.prepare(model, optimizer)
    tracker = torch_private.MemTracker()
    tracker.track_external(model, batch)
    with tracker:
        for _ in range(2 * steps):
            tracker.reset_mod_stats()
            gc.collect()  # the hooks of the tracker leave cycles
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                optimizer.step()
                optimizer.zero_grad()
    return planned / sum(parts["Total"] for parts in tracker.get_tracker_snapshot("peak").values())


@pytest.mark.parametrize(
    ("sharded", "frees", "steps", "difference"),
    [(False, False, 1, 0.05), (True, True, 1, 0.2), (True, False, 1, 0.2), (True, True, 2, 0.2)],
    ids=["ddp", "full_shard", "shard_grad_op", "full_shard, accumulation"],
)
def test_a_plan_is_near_the_peak_of_ranks_that_train(
    sharded: bool, frees: bool, steps: int, difference: float, run: Any
) -> None:
    for ratio in run(planned_and_measured, sharded, frees, steps, processes=2):
        assert ratio == pytest.approx(1, abs=difference)
