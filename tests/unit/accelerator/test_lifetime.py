"""What dies with the last reference to an `Accelerator` and its prepared objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState

pytestmark = pytest.mark.usefixtures("states")


@pytest.mark.parametrize("is_open", [False, True])
def test_an_accelerator_its_loader_and_its_gradient_state_are_freed(is_open: bool) -> None:
    def make() -> list[weakref.ref[Any]]:
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(torch.arange(8), batch_size=2))  # type: ignore[arg-type]
        iterator = iter(loader)
        if is_open:
            next(iterator)
        return [weakref.ref(each) for each in (accelerator, loader, accelerator.gradient_state)]

    references = make()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def train(
    steps: int, count: int = 1, schedules: bool = True, **arguments: Any
) -> dict[str, weakref.ref[Any]]:
    accelerator = Accelerator(cpu=True, **arguments)
    models: Any = [nn.Linear(2, 2) for _ in range(count)]
    inner = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    schedulers: Any = [torch.optim.lr_scheduler.ConstantLR(each) for each in inner if schedules]
    loader = DataLoader(torch.ones(8, 2), batch_size=2)  # type: ignore[arg-type]
    loader, *prepared = accelerator.prepare(loader, *models, *inner, *schedulers)
    models, optimizers, schedulers = prepared[:count], prepared[count : 2 * count], prepared[2 * count :]
    for _, batch in zip(range(steps), loader, strict=False):
        with accelerator.accumulate(*models):
            loss = torch.stack([model(batch).sum() for model in models]).sum()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(models[0].parameters(), 1.0)
            for each in (*optimizers, *schedulers):
                each.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        accelerator.gather_for_metrics(batch)
    objects = {"accelerator": accelerator, "loader": loader, "inner": inner[0]}
    objects |= {"model": models[0], "optimizer": optimizers[0], "last optimizer": optimizers[-1]}
    if schedules:
        objects["scheduler"] = schedulers[0]
    return {name: weakref.ref(each) for name, each in objects.items()}


RUNS: dict[str, Callable[[], dict[str, weakref.ref[Any]]]] = {
    "without a step": lambda: train(0),
    "plain": lambda: train(9),
    "left early": lambda: train(2),
    "accumulation": lambda: train(9, gradient_accumulation_steps=2),
    "bf16": lambda: train(9, mixed_precision="bf16"),
    "fp16": lambda: train(9, mixed_precision="fp16"),
    "fp16 without schedulers": lambda: train(9, schedules=False, mixed_precision="fp16"),
    "fp16 with two optimizers": lambda: train(9, 2, mixed_precision="fp16"),
    "dispatched": lambda: train(9, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)),
}


def test_objects_are_freed_without_the_garbage_collector() -> None:
    train(1)  # torch imports its compiler for the first optimizer, which keeps the frames of the callers
    left = {}
    for name, run in RUNS.items():
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        gc.collect()
        gc.disable()
        try:
            alive = [kind for kind, reference in run().items() if reference() is not None]
        finally:
            gc.enable()
        if alive:
            left[name] = alive
    assert not left


def test_a_forward_under_autocast_names_its_deleted_model() -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    forward = accelerator.prepare(nn.Linear(1, 1)).forward
    assert forward(torch.ones(1, 1)).dtype == torch.float32
    accelerator.free_memory()
    with pytest.raises(RuntimeError, match="The model of this forward has been deleted"):
        forward(torch.ones(1, 1))
