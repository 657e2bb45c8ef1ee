"""Tests of dummy optimizers and schedulers."""

from __future__ import annotations

import pytest
import torch

from accelerate.strategies.deepspeed import DummyOptim, DummyScheduler


def test_dummies_store_their_arguments():
    optimizer = DummyOptim([1], lr=3, betas=(0, 1))
    assert vars(optimizer) == {"params": [1], "lr": 3, "weight_decay": 0, "kwargs": {"betas": (0, 1)}}
    assert vars(DummyScheduler(optimizer, total_num_steps=3, foo=4)) == {
        "optimizer": optimizer,
        "total_num_steps": 3,
        "warmup_num_steps": 0,
        "lr_scheduler_callable": None,
        "kwargs": {"foo": 4},
    }


def test_schedulers_of_torch_refuse_a_dummy_optimizer_with_the_fix():
    stand_in = DummyOptim([])
    assert not hasattr(stand_in, "param_groups")
    with pytest.raises(AttributeError, match="lr_scheduler_callable"):
        torch.optim.lr_scheduler.LambdaLR(stand_in, lambda step: 1.0)
