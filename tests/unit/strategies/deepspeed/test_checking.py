"""Tests of whether objects make one engine."""

from __future__ import annotations

import pytest
import torch

from accelerate.strategies.deepspeed.checking import problems_of
from accelerate.strategies.deepspeed.dummies import DummyOptim, DummyScheduler

MODEL = torch.nn.Linear(1, 1)
OWN = torch.optim.SGD(MODEL.parameters(), lr=0.1)
RATE = torch.optim.lr_scheduler.ConstantLR(OWN)
STAND_IN = DummyOptim([])
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
]


@pytest.mark.parametrize(("models", "optimizers", "schedulers", "config", "said"), TABLE)
def test_reasons(models, optimizers, schedulers, config, said):
    problems = problems_of(models, optimizers, schedulers, config)
    assert len(problems) == len(said)
    for problem, part in zip(problems, said, strict=True):
        assert part in problem
