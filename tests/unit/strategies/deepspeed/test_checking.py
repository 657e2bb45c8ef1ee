"""Tests of whether objects make one engine."""

from __future__ import annotations

import pytest
import torch

from accelerate.strategies.deepspeed import DummyOptim, DummyScheduler, problems_of

MODEL = torch.nn.Linear(1, 1)
OWN = torch.optim.SGD(MODEL.parameters(), lr=0.1)
RATE = torch.optim.lr_scheduler.ConstantLR(OWN)
STAND_IN = DummyOptim([])
OTHER, FROZEN = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).requires_grad_(False)
PARTLY = torch.nn.Sequential(torch.nn.Linear(1, 1).requires_grad_(False), torch.nn.Linear(1, 1))
GROUPS = torch.optim.SGD([{"params": each.parameters()} for each in PARTLY], lr=0.1)
ALL_EMPTY = torch.optim.SGD([{"params": []}, {"params": []}], lr=0.1)
WITH_EMPTY = torch.optim.SGD([{"params": MODEL.parameters()}, {"params": []}], lr=0.1)


class Lomo(torch.optim.SGD):
    """Updates parameters while gradients appear."""

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        """Never called."""


OPTIMIZER, SCHEDULER = {"optimizer": {"type": "AdamW"}}, {"scheduler": {"type": "WarmupLR"}}

TABLE = [
    ([MODEL], [OWN], [RATE], {}, []),
    ([MODEL], [STAND_IN], [DummyScheduler(STAND_IN)], {**OPTIMIZER, **SCHEDULER}, []),
    ([MODEL], [STAND_IN], [DummyScheduler(STAND_IN, lr_scheduler_callable=print)], OPTIMIZER, []),
    ([], [], [], {}, []),
    ([MODEL, MODEL], [], [], {}, ["2 models"]),
    ([MODEL], [OWN, OWN], [], {}, ["2 optimizers"]),
    ([], [OWN], [], {}, ["SGD without its model"]),
    ([MODEL], [STAND_IN], [], {}, ["which has none. Add an `optimizer`"]),
    ([MODEL], [OWN], [], OPTIMIZER, ["has the optimizer AdamW"]),
    ([MODEL], [OWN], [RATE], SCHEDULER, ["has the scheduler WarmupLR"]),
    ([MODEL], [], [DummyScheduler(OWN)], SCHEDULER, ["without its optimizer"]),
    ([MODEL], [OWN], [DummyScheduler(OWN)], {}, ["pass lr_scheduler_callable"]),
    ([OTHER], [OWN], [], {}, ["SGD has 2 tensors that are not parameters of Linear"]),
    ([FROZEN], [torch.optim.SGD(FROZEN.parameters())], [], {}, ["no parameter that is trained"]),
    ([FROZEN], [STAND_IN], [], OPTIMIZER, ["no parameter that is trained"]),
    ([PARTLY], [GROUPS], [], {"zero_optimization": {"stage": 2}}, ["(0), which ZeRO stage 2 cannot shard"]),
    ([PARTLY], [GROUPS], [], {"zero_optimization": {"stage": 3}}, []),
    ([MODEL], [WITH_EMPTY], [], {"zero_optimization": {"stage": 2}}, []),  # DeepSpeed drops empty groups
    ([MODEL], [ALL_EMPTY], [], {}, ["SGD has no parameters"]),
    ([MODEL], [Lomo(MODEL.parameters())], [], {}, ["Lomo updates parameters in the backward pass"]),
]


@pytest.mark.parametrize(("models", "optimizers", "schedulers", "config", "said"), TABLE)
def test_reasons(models, optimizers, schedulers, config, said):
    problems = problems_of(models, optimizers, schedulers, config)
    assert len(problems) == len(said)
    for problem, part in zip(problems, said, strict=True):
        assert part in problem
