"""Whole states of optimizers; distributed ones are in the contract of strategies."""

from __future__ import annotations

import torch
from torch import nn

from accelerate.strategies.dtensor_state import WholeOptimizer, gather_state


def stepped() -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.Adam([parameter], lr=0.5)
    optimizer.step()
    return optimizer


def test_plain_tensors_are_unchanged() -> None:
    state = gather_state(stepped(), keep=True)
    fresh = torch.optim.Adam([nn.Parameter(torch.ones(3))], lr=0.1)
    whole = WholeOptimizer(fresh, state)
    assert whole.state_dict() is state
    whole.load_state_dict(state)
    assert fresh.param_groups[0]["lr"] == 0.5
    torch.testing.assert_close(fresh.state_dict()["state"], state["state"])
