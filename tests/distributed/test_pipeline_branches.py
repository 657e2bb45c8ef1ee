"""A pipeline is exact for models whose code branches on values of the batch or on their settings."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch import Tensor, nn
from torch.nn import functional as F

from accelerate import Accelerator, ParallelismConfig
from accelerate.base import is_torch_version
from accelerate.utils import PipelineConfig

pytestmark = pytest.mark.skipif(is_torch_version("<", "2.13"), reason="pipelines need torch 2.13")
Run = Callable[..., list[Any]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.step = 0
        self.forwards = 0

    def rest(self, hidden: Tensor) -> Tensor:
        for layer in self.layers[1:]:
            hidden = layer(hidden)
        return hidden


class SkipsByValue(Net):
    """Uses a skip connection in some batches only."""

    def forward(self, hidden: Tensor) -> Tensor:
        first = self.layers[0](hidden)
        last = self.rest(first)
        return last + first if hidden[0, 0] > 0 else last


class OtherFunctions(Net):
    """Calls another number of functions before the tensors that a later stage uses."""

    def forward(self, hidden: Tensor) -> Tensor:
        first = self.layers[0](hidden)
        if hidden.tolist()[0][0] > 0:
            kept, other = first.relu() * 2, first * 3
        else:
            kept = first.relu()
            other = kept.sigmoid().tanh()
        return self.rest(first) + kept + other


class SkipsBySetting(Net):
    """Uses a skip connection in each second step, which the training loop counts."""

    def forward(self, hidden: Tensor) -> Tensor:
        first = self.layers[0](hidden)
        last = self.rest(first)
        return last + first if self.step % 2 else last


class Counting(Net):
    def forward(self, hidden: Tensor) -> Tensor:
        self.forwards += 1
        return self.rest(self.layers[0](hidden))


def compare_with_plain(kind: type[Net]) -> tuple[list[float], int]:
    """Returns the differences of losses and weights of each step, and the number of forwards of the model."""
    torch.manual_seed(0)
    batches, targets = torch.randn(6, 8, 4), torch.randn(6, 8, 4)
    batches[:, 4, 0] = batches[:, 0, 0]  # both micro-batches take the same branch
    signs = {bool(batch[0, 0] > 0) for batch in batches}
    assert signs == {True, False}
    model = kind()
    plain = copy.deepcopy(model)
    handler = PipelineConfig(microbatches=2, verify=False)
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(pp_size=2, pp_handler=handler))
    model = accelerator.prepare(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    prepared = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.05))
    differences = []
    for step, (batch, target) in enumerate(zip(batches, targets, strict=True)):
        model.step = plain.step = step
        loss = accelerator.forward_backward(model, (batch, target), F.mse_loss)
        prepared.step()
        prepared.zero_grad()
        expected = F.mse_loss(plain(batch), target)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        weights = dict(plain.named_parameters())
        wrong = [abs(weights[name] - value).max().item() for name, value in model.named_parameters()]
        differences.append(max(abs(loss.item() - expected.item()), *wrong))
    return differences, model.forwards


def test_branches_of_later_batches_are_exact(run: Run) -> None:
    kinds = [SkipsByValue, OtherFunctions, SkipsBySetting, Counting]
    for found in run(call_for_each, compare_with_plain, kinds, processes=2):
        for kind, (differences, _) in zip(kinds, found, strict=True):
            assert max(differences) < 1e-5, kind
        # A trace leaves the attributes of a model: six batches have two micro-batches.
        assert found[-1][1] == 12
