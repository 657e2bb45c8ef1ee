"""Loops whose ranks would train apart equal one process, or raise an error on all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.base import StateError
from accelerate.local_sgd import LocalSGD
from accelerate.utils import GradientAccumulationPlugin

STEPS, ROWS = 5, 8  # rows of all ranks together
Run = Callable[..., list[Any]]
Loop = Callable[["Parts"], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Parts:
    """What a loop trains with; `again()` returns the batch of this rank in the next step."""

    def __init__(self, prepare: Callable[[nn.Module], None] = lambda model: None, **arguments: Any) -> None:
        self.accelerator = Accelerator(**arguments)
        torch.manual_seed(0)
        self.bare = Net()
        prepare(self.bare)
        self.sgd = torch.optim.SGD(self.bare.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(self.bare, self.sgd)
        self.generator = torch.Generator().manual_seed(1)
        self.backward = self.accelerator.backward

    def batch(self) -> torch.Tensor:
        rows = torch.randn(ROWS, 4, generator=self.generator)
        size = ROWS // self.accelerator.num_processes
        return rows[self.accelerator.process_index * size :][:size]

    def loss(self, model: nn.Module | None = None) -> torch.Tensor:
        x = self.batch()
        return ((model or self.model)(x) - x.sum(1, keepdim=True).sin()).square().mean()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def before_prepare(p: Parts) -> None:
    for _ in range(STEPS):
        p.backward(p.loss(p.bare))
        p.accelerator.clip_grad_norm_(p.bare.parameters(), 0.1)
        p.step()


def unwrapped(p: Parts) -> None:
    for _ in range(STEPS):
        p.backward(p.loss(p.accelerator.unwrap_model(p.model)))
        p.step()


def partly_unwrapped(p: Parts) -> None:
    for _ in range(STEPS):
        p.backward(p.loss() + p.bare.first(p.batch()).square().mean())
        p.backward(p.bare.first(p.batch()).square().mean())
        p.step()


def two_forwards_two_backwards(p: Parts) -> None:
    for _ in range(STEPS):
        first, second = p.loss(), p.loss()
        p.backward(first)
        p.backward(second)
        p.step()


def two_backwards(p: Parts) -> None:
    for _ in range(STEPS):
        loss = p.loss()
        p.backward(loss, retain_graph=True)
        p.backward(loss * 0.5)
        p.step()


def accumulated_unwrapped(p: Parts) -> None:
    for _ in range(2 * STEPS):
        with p.accelerator.accumulate(p.model):
            p.backward(p.loss(p.bare))
            p.step()


def unfrozen(p: Parts) -> None:
    for index in range(STEPS):
        p.bare.first.requires_grad_(index >= 2)
        p.backward(p.loss())
        p.step()


def freeze_first(model: Any) -> None:
    model.first.requires_grad_(False)


def closures(p: Parts) -> None:
    lbfgs = p.accelerator.prepare(
        torch.optim.LBFGS(p.bare.parameters(), lr=1.0, max_iter=6, line_search_fn="strong_wolfe")
    )
    for _ in range(2):
        generator = p.generator.get_state()

        def closure() -> torch.Tensor:
            p.generator.set_state(generator)
            lbfgs.zero_grad()
            loss = p.loss()
            p.backward(loss)
            return loss

        lbfgs.step(closure)


def closure_of_sgd(p: Parts) -> None:
    def closure() -> float:
        p.optimizer.zero_grad()
        loss = p.loss()
        p.backward(loss)
        return loss.item()

    for _ in range(STEPS):
        p.optimizer.step(closure)


def raw(p: Parts) -> None:
    for _ in range(STEPS):
        p.loss().backward()
        p.step()


EQUAL: dict[str, tuple[Loop, dict[str, Any]]] = {
    "before_prepare": (before_prepare, {}),
    "unwrapped": (unwrapped, {}),
    "partly_unwrapped": (partly_unwrapped, {}),
    "two_forwards_two_backwards": (two_forwards_two_backwards, {}),
    "views of buckets": (
        two_forwards_two_backwards,
        {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]},
    ),
    "two_backwards": (two_backwards, {}),
    "accumulated_unwrapped": (accumulated_unwrapped, {"gradient_accumulation_steps": 2}),
    "unfrozen": (unfrozen, {"prepare": freeze_first}),
    "closures": (closures, {}),
    "closure_of_sgd": (closure_of_sgd, {}),
    "raw": (raw, {}),
}
"""Loops whose result equals that of one process with the joined batch."""


def train_equal() -> dict[str, list[torch.Tensor]]:
    results = {}
    for name, (loop, arguments) in EQUAL.items():
        parts = Parts(**copy.deepcopy(arguments))
        loop(parts)
        results[name] = [parameter.detach().clone() for parameter in parts.bare.parameters()]
        reset(parts)
    return results


def reset(parts: Parts) -> None:
    parts.accelerator.free_memory()
    parts.accelerator.state._reset_state()
    parts.accelerator.gradient_state._reset_state()


def test_loops_that_torch_lets_diverge_equal_one_process(run: Run) -> None:
    (one,) = run(train_equal, processes=1)
    several = run(train_equal)
    wrong = []
    for name, expected in one.items():
        for rank, results in enumerate(several):
            if not all(
                torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(results[name], expected, strict=True)
            ):
                wrong.append(f"{name} on rank {rank}")
        if not all(map(torch.equal, *(results[name] for results in several))):
            wrong.append(f"{name}: ranks differ")
    assert not wrong


# Loops that are refused


def gradients_by_hand(p: Parts) -> None:
    for _ in range(STEPS):
        parameters = list(p.bare.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(p.loss(), parameters), strict=True):
            parameter.grad = gradient
        p.step()


def raw_unwrapped(p: Parts) -> None:
    for _ in range(STEPS):
        p.loss(p.bare).backward()
        p.step()


def raw_unfrozen(p: Parts) -> None:
    for index in range(STEPS):
        p.bare.first.requires_grad_(index >= 2)
        p.loss().backward()
        p.step()


def in_no_sync(p: Parts) -> None:
    for _ in range(STEPS):
        with p.accelerator.no_sync(p.model):
            p.backward(p.loss())
        p.step()


def not_prepared(p: Parts) -> None:
    scale = nn.Parameter(torch.ones(1))
    optimizer = p.accelerator.prepare(torch.optim.SGD([*p.bare.parameters(), scale], lr=0.1))
    for _ in range(STEPS):
        p.backward(p.loss() * scale)
        optimizer.step()
        optimizer.zero_grad()


def changed_weights(p: Parts) -> None:
    for _ in range(STEPS):
        p.backward(p.loss())
        p.step()
        with torch.no_grad():
            p.bare.head.bias.add_(p.accelerator.process_index)


REFUSED: dict[str, tuple[Loop, dict[str, Any], int, str]] = {
    "gradients_by_hand": (gradients_by_hand, {}, 1, "first.weight.*torch.autograd.grad.*reduce"),
    "raw_unwrapped": (raw_unwrapped, {}, 1, "first.weight.*No forward has called the model"),
    "raw_unfrozen": (raw_unfrozen, {"prepare": freeze_first}, 3, "first.weight.*frozen or did not exist"),
    "in_no_sync": (in_no_sync, {}, 1, "first.weight.*no_sync"),
    "not_prepared": (not_prepared, {}, 1, "parameter 6 of group 0.*no prepared model"),
    "changed_weights": (changed_weights, {}, 2, "head.bias.*gradients are equal"),
    "bf16": (raw_unwrapped, {"mixed_precision": "bf16"}, 1, "No forward has called the model"),
}
"""Loops that raise an error on all ranks, with the step and its text."""


def train_refused() -> dict[str, str]:
    results = {}
    for name, (loop, arguments, _, _) in REFUSED.items():
        parts = Parts(**copy.deepcopy(arguments))
        try:
            loop(parts)
        except StateError as error:
            results[name] = str(error)
        reset(parts)
    return results


def test_loops_that_cannot_be_reduced_raise_an_error_on_all_ranks(run: Run) -> None:
    import re

    wrong = []
    for rank, results in enumerate(run(train_refused)):
        for name, (_, _, step, pattern) in REFUSED.items():
            text = results.get(name, "no error")
            if f"after step {step} of SGD" not in text or not re.search(pattern, text):
                wrong.append(f"{name} on rank {rank}: {text}")
            if name != "no error" and "check_replicas=False" not in text:
                wrong.append(f"{name} does not name the switch: {text}")
    assert not wrong, "\n".join(wrong)
