"""Plans of runs on the CPU measure the workspaces of its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate import Accelerator, torch_private


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(64, 64, batch_first=True)

    def forward(self, values: Tensor) -> Tensor:
        outputs: Tensor = self.layer(values)[0]
        return outputs


def square(model: nn.Module, batch: Any) -> Tensor:
    outputs: Tensor = model(batch)
    return outputs.square().mean()


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))


def plan(model: nn.Module, batch: Tensor) -> Any:
    optimizer = torch.optim.SGD(model.parameters())
    return Accelerator(cpu=True).plan_memory(model, optimizer, batch, square)


def test_the_workspace_of_convolutions_bounds_what_a_run_needs_beside_the_plan(states: None) -> None:
    model, batch = convolutions(), torch.randn(4, 3, 64, 64)
    planned = plan(model, batch)
    existing = planned.parts.parameters + planned.parts.inputs
    measured = torch_private.peak_on_cpu(lambda: square(model, batch).backward())
    assert measured is not None
    gap = measured[1] - (planned.peak - existing)
    assert planned.workspace > 0
    assert gap <= 1.05 * planned.workspace
    assert "workspace of a kernel of this CPU (measured)" in str(planned)


@pytest.mark.parametrize(
    ("model", "batch", "has_workspace"),
    [(Recurrent(), torch.randn(2, 8, 64), True), (nn.Linear(4, 4), torch.randn(2, 4), False)],
)
def test_recurrent_layers_have_a_workspace(
    states: None, model: nn.Module, batch: Tensor, has_workspace: bool
) -> None:
    planned = plan(model, batch)
    assert (planned.workspace > 0) is has_workspace
    assert ("not included" in str(planned)) is has_workspace
