"""Model FLOPs of a step on a device whose backward pass runs in a thread of its own."""

from __future__ import annotations

import pytest
import torch
from tests.simulated_device import sim
from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerate import Accelerator

pytestmark = pytest.mark.usefixtures("states")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6, bias=False), nn.Linear(6, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = checkpoint(self.first, x, use_reentrant=False)
        return self.second(hidden.tanh()).sum()


def test_backward_passes_count_without_recomputation() -> None:
    accelerator, net = Accelerator(), Net()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(3):
        with accelerator.count_flops():
            accelerator.backward(net(torch.ones(2, 4, device=accelerator.device)))
            optimizer.step()
            optimizer.zero_grad()
    sim.synchronize()
    first, second = 2 * 2 * 4 * 6, 2 * 2 * 6 * 3
    assert accelerator.step_times().step_flops == 2 * first + 3 * second
