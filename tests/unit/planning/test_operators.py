"""Steps whose sizes depend on values are traced with known, balanced or largest values."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.planning import Step, loss_of, trace_step

CPU = torch.device("cpu")
WIDTH, TOKENS, EXPERTS = 64, 256, 4


class Layers(nn.Module):
    def __init__(self, compute: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({f"expert_{index}": nn.Linear(WIDTH, WIDTH) for index in range(EXPERTS)})
        self.register_buffer("order", torch.arange(TOKENS).flip(0))

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        return self.compute(self, values, mask).pow(2).mean()


def known_mask(model: Any, values: Tensor, mask: Tensor) -> Tensor:
    return torch.cat([model.router(values[mask]), model.router(values)[mask.nonzero().squeeze(1)]])


def known_sizes(model: Any, values: Tensor, mask: Tensor) -> Tensor:
    size = int(mask.sum())
    if mask.all() or mask.long().max() > 1:
        raise ValueError("wrong mask")
    assert torch.unique(mask).numel() == 2
    return model.router(values[:size]) * mask.sum().item() * float(f"{mask.sum()}")


def known_buffer(model: Any, values: Tensor, mask: Tensor) -> Tensor:
    return model.router(values[model.order < 32])


def overwritten(model: Any, values: Tensor, mask: Tensor) -> Tensor:
    mask = mask.clone()
    mask[:128] = True
    return model.router(values[mask])


def routed(model: Any, values: Tensor, mask: Tensor) -> Tensor:
    weights, chosen = model.router(values).softmax(-1).topk(2)
    result = torch.zeros_like(values)
    for index in chosen.unique():
        tokens, position = torch.where(chosen == index)
        expert = model.experts[f"expert_{index}"]
        result = result.index_add(0, tokens, expert(values[tokens]) * weights[tokens, position, None])
    return result


def repeated(model: Any, values: Tensor, mask: Tensor) -> Tensor:
    return model.router(values).repeat_interleave(mask.long() + 1, dim=0)


def of_numpy(model: Any, values: Tensor, mask: Tensor) -> Tensor:
    return model.router(values[torch.from_numpy(mask.numpy().copy())])


def converted(model: Any, values: Tensor, mask: Tensor) -> Tensor:
    return model.router.to(values.dtype).to("cpu")(values)


def finite(model: Any, values: Tensor, mask: Tensor) -> Tensor:
    values = model.router(values)
    if torch.isnan(values).any() or not torch.isfinite(values).all():
        raise ValueError("not finite")
    return values / values.abs().max().item()


def make_step(compute: Callable[..., Tensor]) -> Step:
    torch.manual_seed(0)
    model = Layers(compute)
    batch = {"values": torch.randn(TOKENS, WIDTH), "mask": torch.arange(TOKENS) % 4 == 0}
    return Step(model, [torch.optim.SGD(model.parameters(), lr=0.1)], batch, loss_of, CPU)


def run_step(step: Step) -> int:
    """The peak of a step with real tensors, by torch's tracker."""
    tracker = torch_private.MemTracker()
    tracker.track_external(step.model, *step.batch.values())
    with tracker:
        step.loss(step.model, step.batch).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(step.model.parameters(), 1.0)
        step.optimizers[0].step()
    return tracker.get_tracker_snapshot("peak")[CPU]["Total"]


@pytest.mark.parametrize(
    "compute",
    [known_mask, known_sizes, known_buffer, overwritten, routed, repeated, of_numpy, converted, finite],
)
def test_a_step_that_needs_values_has_its_peak(compute: Callable[..., Tensor]) -> None:
    traced = trace_step(make_step(compute)).peak.total
    assert traced == pytest.approx(run_step(make_step(compute)), rel=0.05)


@pytest.mark.parametrize(
    "select",
    [
        lambda values: values[values > 0],
        lambda values: values.masked_select(values > 0),
        lambda values: values.flatten()[(values > 0).flatten().nonzero().squeeze(1)],
        lambda values: values.sum() * torch.unique(values).numel(),
    ],
    ids=["index", "masked_select", "nonzero", "unique"],
)
def test_sizes_that_depend_on_weights_are_the_largest(select: Callable[[Tensor], Tensor]) -> None:
    step = make_step(lambda model, values, mask: select(model.experts["expert_0"](values)))
    whole = make_step(lambda model, values, mask: model.experts["expert_0"](values))
    traced = trace_step(step).peak.total
    assert traced >= run_step(step)
    assert traced < 2 * trace_step(whole).peak.total


def test_generators_are_restored() -> None:
    def draw(model: Any, values: Tensor, mask: Tensor) -> Tensor:
        np.random.uniform()
        random.random()
        return model.router(values) * torch.rand(())

    before = np.random.get_state()[1].copy(), random.getstate(), torch.get_rng_state()  # type: ignore[index]
    trace_step(make_step(draw))
    after = np.random.get_state()[1], random.getstate(), torch.get_rng_state()  # type: ignore[index]
    assert np.array_equal(before[0], after[0])
    assert before[1] == after[1]
    assert torch.equal(before[2], after[2])


def test_values_of_the_model_and_the_batch_are_unchanged() -> None:
    def change(model: Any, values: Tensor, mask: Tensor) -> Tensor:
        model.order.add_(1)
        mask.logical_not_()
        return model.router(values[mask]) * model.order.sum().item()

    step = make_step(change)
    trace_step(step)
    assert torch.equal(step.model.order, torch.arange(TOKENS).flip(0))
    assert int(step.batch["mask"].sum()) == TOKENS // 4
