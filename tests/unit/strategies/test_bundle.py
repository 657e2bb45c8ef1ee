"""A bundle classifies each object and keeps the order."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from accelerate.strategies import Kind, kind_of, parameter_ids


class OwnScheduler:
    def step(self) -> None: ...

    def get_last_lr(self) -> list[float]:
        return [0.0]


def objects() -> dict[Kind, Any]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return {
        Kind.MODEL: model,
        Kind.OPTIMIZER: optimizer,
        Kind.SCHEDULER: torch.optim.lr_scheduler.ConstantLR(optimizer),
        Kind.LOADER: DataLoader([1, 2]),
        Kind.OTHER: "text",
    }


def test_each_object_has_its_kind() -> None:
    for kind, obj in objects().items():
        assert kind_of(obj) is kind
    assert kind_of(OwnScheduler()) is Kind.SCHEDULER
    assert kind_of(None) is Kind.OTHER


def test_an_optimizer_around_another_is_one() -> None:
    class Around:
        """Has what an optimizer has, and derives from nothing, as schedule-free's wrapper does."""

        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base = base

        def __getattr__(self, name: str) -> Any:
            return getattr(self.base, name)

    inner = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    assert kind_of(Around(inner)) is Kind.OPTIMIZER
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 1.0)
    assert kind_of(scheduler) is Kind.SCHEDULER


def test_parameter_ids_are_those_of_all_groups() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 2.0}], lr=1.0)
    assert parameter_ids([optimizer]) == {id(model.weight), id(model.bias)}
