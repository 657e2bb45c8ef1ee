"""Gradients are compressed for the all-reduce, and every process gets the same ones."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate.plugins import DistributedDataParallelKwargs
from accelerate.state.process_group import close_group

# How far gradients may be off: float16 keeps 11 bits, bfloat16 8.
FORMATS = {"fp16": 2e-3, "bf16": 2e-2}
EXACT = 1e-6
STEPS = 3


Gradients = tuple[torch.Tensor, torch.Tensor]


def train(variants: list[dict[str, Any]]) -> list[list[list[list[float]]]]:
    """Run a few backward passes with each variant; return its gradients, and those of the joined batches."""
    dist.init_process_group("gloo")
    try:
        return [train_one(kwargs) for kwargs in variants]
    finally:
        # The threads of gloo end with the last model that holds it; one that calls Python at exit aborts.
        gc.collect()
        close_group()


def train_one(kwargs: dict[str, Any]) -> list[list[list[float]]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain, model = nn.Linear(32, 16), nn.Linear(32, 16)
    model.load_state_dict(plain.state_dict())
    wrapped = DistributedDataParallel(model)
    DistributedDataParallelKwargs(**kwargs).register_comm_hook(wrapped)
    steps = []
    for batch in torch.randn(STEPS, size * 4, 32):
        for module, share in ((wrapped, batch[rank * 4 : rank * 4 + 4]), (plain, batch)):
            module.zero_grad()
            module(share).square().mean().backward()
        steps.append([flat(model), flat(plain)])
    return steps


def flat(model: nn.Module) -> list[float]:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).tolist()


def train_all(run: Callable[..., Any], *variants: dict[str, Any]) -> list[list[Gradients]]:
    """Train on two processes; check that both end with the same gradients and return those of each step."""
    first, second = run(train, list(variants))
    for ours, theirs in zip(first, second, strict=True):
        assert ours == theirs
    return [[(torch.tensor(ours), torch.tensor(true)) for ours, true in steps] for steps in first]


def off_by(gradients: Gradients) -> float:
    """The largest difference, relative to the largest gradient."""
    ours, true = gradients
    return ((ours - true).abs().max() / true.abs().max()).item()


def test_comm_hooks_compress_gradients_to_the_format(run: Callable[..., Any]) -> None:
    plain, fp16, bf16, *wrapped = train_all(
        run,
        {},
        {"comm_hook": "fp16"},
        {"comm_hook": "bf16"},
        {"comm_hook": "fp16", "comm_wrapper": "fp16"},
        {"comm_hook": "fp16", "comm_wrapper": "bf16"},
        {"comm_hook": "bf16", "comm_wrapper": "bf16"},
    )
    assert all(off_by(step) < EXACT for step in plain)
    for steps, tolerance in ((fp16, FORMATS["fp16"]), (bf16, FORMATS["bf16"])):
        assert all(EXACT < off_by(step) < tolerance for step in steps)
    assert all(EXACT < off_by(step) < FORMATS["bf16"] for steps in wrapped for step in steps)


def test_power_sgd_compresses_after_its_first_iterations(run: Callable[..., Any]) -> None:
    options = {"matrix_approximation_rank": 1, "start_powerSGD_iter": STEPS - 1}
    power = {"comm_hook": "power_sgd", "comm_state_option": options}
    formats = [EXACT, *FORMATS.values()]
    runs = train_all(run, *({**power, "comm_wrapper": wrapper} for wrapper in ("no", *FORMATS)))
    for steps, tolerance in zip(runs, formats, strict=True):
        assert off_by(steps[0]) < tolerance
        assert off_by(steps[-1]) > FORMATS["bf16"]
        assert torch.cosine_similarity(*steps[-1], dim=0) > 0.3


def test_batched_power_sgd_is_exact_before_it_compresses(run: Callable[..., Any]) -> None:
    options = {"start_powerSGD_iter": STEPS + 1}
    (steps,) = train_all(run, {"comm_hook": "batched_power_sgd", "comm_state_option": options})
    assert all(off_by(step) < EXACT for step in steps)
