"""Sums of gradients are rounded as in the run that was interrupted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.stand_ins.cases import call_for_each
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate.state.process_group import close_group
from accelerate.strategies import adopt_order, order_of

Run = Callable[..., list[Any]]


class Crossed(nn.Module):
    """Gradients are ready neither in the order of its layers nor in the reverse one."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first, self.last = (nn.Linear(37, 37) for _ in range(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(inputs)).tanh())


def replica(**options: Any) -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(Crossed(), **options)


def gradients(model: nn.Module, seed: int) -> list[float]:
    torch.manual_seed(seed * 10 + dist.get_rank())
    model.zero_grad()
    model(torch.randn(5, 37)).square().sum().backward()
    return torch.cat([each.grad.flatten() for each in model.parameters()]).tolist()


def compare(**options: Any) -> Any:
    dist.init_process_group("gloo")
    try:
        trained, orders = replica(**options), []
        for step in range(3):
            orders.append(order_of(trained))
            later = gradients(trained, step)
        orders.append(order_of(trained))
        fresh, plain = replica(**options), replica(**options)
        first = next(fresh.parameters())
        first.grad = torch.ones_like(first)
        adopt_order(fresh, orders[1])
        held = bool((first.grad == 1).all()), [each.grad is None for each in fresh.parameters()]
        orders.append(order_of(fresh))
        same = gradients(fresh, 2) == later
        orders.append(order_of(fresh))
        adopt_order(trained, [*reversed(orders[1])])
        again = gradients(trained, 2) == later
        return orders, held, same, again, gradients(plain, 2) == later
    finally:
        gc.collect()
        close_group()


def compare_views() -> Any:
    return compare(gradient_as_bucket_view=True)[:4]


def test_gradients_as_bucket_views_are_reduced_in_the_same_order(run: Run) -> None:
    for orders, _, same, again in run(compare_views, processes=3):
        assert orders[1:] == [[5, 4, 1, 0, 3, 2]] * 5
        assert same
        assert again


def test_the_first_backward_after_a_checkpoint_keeps_the_bucket_order(run: Run) -> None:
    for orders, held, same, again, plain in run(compare, processes=3):
        assert orders == [[], *[[5, 4, 1, 0, 3, 2]] * 5]
        assert held == (True, [False, True, True, True, True, True])
        assert same
        assert again
        assert not plain  # otherwise all of this would not be needed


def leave_alone(kind: str) -> Any:
    dist.init_process_group("gloo")
    try:
        model = replica(**{"find_unused_parameters": True} if kind == "unused" else {})
        if kind == "sparse":
            model = DistributedDataParallel(
                nn.Sequential(nn.Embedding(3, 2, sparse=True), *[nn.Linear(2, 2)] * 2)
            )
        arrived: list[int] = []
        if kind == "hook":
            next(model.parameters()).register_post_accumulate_grad_hook(lambda each: arrived.append(1))
        orders = {"short": [1, 0], "twice": [0, 0, 1, 2, 3, 4], "sparse": [2, 1, 0]}
        order = orders.get(kind, [5, 4, 1, 0, 3, 2])
        adopt_order(model, order)
        return order_of(model), arrived, all(each.grad is None for each in model.parameters())
    finally:
        gc.collect()
        close_group()


def test_unsupported_models_keep_their_buckets(run: Run) -> None:
    kinds = ["unused", "hook", "short", "twice", "sparse"]
    (found,) = run(call_for_each, leave_alone, kinds, processes=1)
    assert dict(zip(kinds, found, strict=True)) == dict.fromkeys(kinds, ([], [], True))
