"""Loops that change sharded models in unusual ways train as plain torch trains them, or are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.base import AccelerateError

Run = Callable[..., list[Any]]
STEPS = 5


def build_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def batches() -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        yield torch.randn(4, 4, generator=generator, dtype=torch.float64)


class Descent:
    """Optimizer without a base class, and with no more methods than a loop calls."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.param_groups = [{"params": list(parameters), "lr": lr}]

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad

    def zero_grad(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


class Anchored(torch.optim.SGD):
    """Optimizer that copies parameters when it is created."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.anchors = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        (parameters,) = (group["params"] for group in self.param_groups)
        for parameter, anchor in zip(parameters, self.anchors, strict=True):
            parameter.lerp_(anchor, 0.1)


def train(
    accelerator: Accelerator, model: nn.Module, optimizer: Any, after: Callable[[float], None] | None = None
) -> Any:
    for batch in batches():
        part = batch.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = model(part).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(loss.item())
    return accelerator.get_state_dict(model)


def accelerate(version: int) -> Accelerator:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type="FULL_STATE_DICT", use_orig_params=version == 1 or None
    )
    return Accelerator(fsdp_plugin=plugin)


def assign_data(version: int) -> Any:
    accelerator = accelerate(version)
    model = build_net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))

    def clip(loss: float) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5

    return train(accelerator, model, optimizer, clip)


def step_with(kind: str, version: int) -> Any:
    accelerator = accelerate(version)
    model = build_net()
    kinds: dict[str, Callable[[Any], Any]] = {
        "fused": lambda parameters: torch.optim.SGD(parameters, 0.1, fused=True),
        "signs": lambda parameters: torch.optim.Rprop(parameters, 0.1),
        "anchored": lambda parameters: Anchored(parameters, 0.1),
        "without a base class": lambda parameters: Descent(parameters, 0.1),
    }
    model, optimizer = accelerator.prepare(model, kinds[kind](model.parameters()))
    return train(accelerator, model, optimizer)


def hook_gradients(version: int, register: str) -> Any:
    accelerator = accelerate(version)
    model = build_net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for parameter in model.parameters():
        getattr(parameter, register)(lambda value: None)
    return train(accelerator, model, optimizer)


def embed_sparsely(version: int) -> Any:
    accelerator = accelerate(version)
    model = nn.Embedding(8, 4, sparse=True)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.backward(model(torch.arange(4)).sum())
    return True


def leave_out_the_last_loss(version: int) -> Any:
    accelerator = accelerate(version)
    accelerator.gradient_accumulation_steps = 2
    model = build_net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for index, batch in enumerate(batches()):
        with accelerator.accumulate(model):
            if index != 1:
                accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def backward_without_a_loss(version: int) -> Any:
    accelerate(version).backward(None)  # type: ignore[arg-type]


def watch_before_the_step(version: int) -> Any:
    """A forward with gradients between the backward pass and the step, and a teacher that follows."""
    accelerator = accelerate(version)
    model, teacher = build_net(), build_net().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, teacher, optimizer = accelerator.prepare(model, teacher, optimizer)
    for batch in batches():
        part = batch.chunk(accelerator.num_processes)[accelerator.process_index]
        loss = (model(part) - teacher(part)).square().mean() + model(part).square().mean()
        accelerator.backward(loss)
        model(part)
        optimizer.step()
        optimizer.zero_grad()
        follow(teacher, model)
    return accelerator.get_state_dict(model), accelerator.get_state_dict(teacher)


@torch.no_grad()
def follow(teacher: nn.Module, model: nn.Module) -> None:
    for old, new in zip(teacher.parameters(), model.parameters(), strict=True):
        old.mul_(0.5).add_(new, alpha=0.5)


def error_of(function: Callable[..., Any], *args: Any) -> str:
    try:
        function(*args)
    except AccelerateError as error:
        return str(error)
    return ""


REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "an assignment to data": (assign_data, (2,), "parameter.data.copy_(values)"),
    "a fused optimizer": (step_with, ("fused", 2), "SGD(fused=True) cannot step sharded parameters"),
    "an operation without a sharding": (step_with, ("signs", 2), "prepare(whole_matrices=True)"),
    "copies from before prepare": (step_with, ("anchored", 2), "tensors that were not sharded"),
    "no base class": (step_with, ("without a base class", 2), "Derive it from torch.optim.Optimizer"),
    "a hook of FSDP 1": (hook_gradients, (1, "register_hook"), "without calling hooks"),
    "a late hook of FSDP 1": (
        hook_gradients,
        (1, "register_post_accumulate_grad_hook"),
        "without calling hooks",
    ),
    "no last loss of FSDP 2": (leave_out_the_last_loss, (2,), "had no backward pass"),
    "no last loss of FSDP 1": (leave_out_the_last_loss, (1,), "had no backward pass"),
    "no loss": (backward_without_a_loss, (2,), "loss=None: it is not a tensor"),
    "sparse gradients of FSDP 1": (embed_sparsely, (1,), "Set sparse=False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_loops_that_would_train_otherwise_are_refused(run: Run, name: str) -> None:
    function, args, expected = REFUSED[name]
    messages = run(error_of, function, *args)
    assert all(expected in message for message in messages), messages


@pytest.mark.parametrize("version", [1, 2])
def test_forwards_after_a_step_use_its_weights(run: Run, version: int) -> None:
    weights, _ = run(watch_before_the_step, version)
    model, teacher = build_net(), build_net().requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for batch in batches():
        loss = (model(batch) - teacher(batch)).square().mean() + model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        follow(teacher, model)
    for trained, plain in zip(weights, (model, teacher), strict=True):
        for name, expected in plain.state_dict().items():
            torch.testing.assert_close(trained[name], expected, rtol=1e-9, atol=1e-9)


def count_items() -> Any:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        state_dict_type="FULL_STATE_DICT",
        use_orig_params=True,
        auto_wrap_policy="size_based_wrap",
        min_num_params=20,
    )
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
    model = build_net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    for index, batch in enumerate(batches()):
        part = batch.chunk(accelerator.num_processes)[accelerator.process_index][: 1 + index % 2]
        with accelerator.accumulate(model, num_items=len(part)):
            accelerator.backward(model(part).square().sum())
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.get_state_dict(model)


def test_gradients_of_several_flat_units_are_rescaled_once(run: Run) -> None:
    weights, _ = run(count_items)
    model = build_net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parts = [
        torch.cat([part[: 1 + index % 2] for part in batch.chunk(2)]) for index, batch in enumerate(batches())
    ]
    for window in (parts[:2], parts[2:4]):
        sums = [model(part).square().sum() for part in window]
        (torch.stack(sums).sum() / sum(map(len, window))).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-9, atol=1e-9)
