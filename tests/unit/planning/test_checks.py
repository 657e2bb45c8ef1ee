"""A step that cannot be planned has one error with the value, the reason and the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate import Accelerator
from accelerate.base import ConfigurationError


def sum_loss(model: nn.Module, batch: Any) -> Tensor:
    return model(*batch).sum()  # type: ignore[no-any-return]


class Failing(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        raise AssertionError("need 99 samples")


def linear() -> nn.Module:
    return nn.Linear(4, 4)


DENSE = [torch.ones(2, 4)]
JAGGED = [torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 4)], layout=torch.jagged)]


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize(
    ("model", "batch", "loss", "message"),
    [
        (linear(), DENSE, lambda model, batch: model(*batch), "a loss has one element"),
        (linear(), DENSE, lambda model, batch: 1.0, "loss=1.0: it returned a float"),
        (linear(), DENSE, lambda model, batch: None, "it returned a NoneType"),
        (linear(), DENSE, lambda model, batch: sum_loss(model, batch).detach(), "without gradients"),
        (linear(), [torch.ones(2, 5)], sum_loss, "training step fails: RuntimeError.*same reduction dim"),
        (Failing(4, 4), DENSE, sum_loss, "training step fails: AssertionError: need 99 samples"),
        (nn.ReLU(), DENSE, sum_loss, "no parameters that train"),
        (None, DENSE, sum_loss, "model=None: it is not a torch.nn.Module"),
        (nn.Sequential(nn.LazyLinear(4)), DENSE, sum_loss, "0.weight.*have no shape yet"),
        (nn.ModuleList([nn.LazyLinear(4)]), DENSE, sum_loss, "0.weight.*have no shape yet"),
        (nn.Embedding(9, 4, sparse=True), DENSE, sum_loss, "sparse gradients.*sparse=False"),
        (linear(), JAGGED, sum_loss, "nested tensor.*padded, dense batch"),
    ],
)
def test_a_step_without_a_plan_has_one_error(model: Any, batch: Any, loss: Any, message: str) -> None:
    parameters = list(model.parameters()) if model is not None else [nn.Parameter(torch.ones(1))]
    optimizer = torch.optim.SGD(parameters or [nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True).plan_memory(model, optimizer, batch, loss)


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (None, "optimizer=None: it is not a torch.optim.Optimizer"),
        ("adam", "optimizer='adam': it is not a torch.optim.Optimizer"),
        (torch.optim.SGD(linear().parameters(), lr=0.1), "SGD.*updates no parameter of Linear"),
    ],
)
def test_an_optimizer_that_does_not_train_the_model_is_refused(optimizer: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True).plan_memory(linear(), optimizer, DENSE, sum_loss)


@pytest.mark.usefixtures("states")
@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_model_of_torch_jit_is_refused() -> None:
    jit: Any = torch.jit
    model = jit.trace(linear(), DENSE[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="compiled by torch.jit"):
        Accelerator(cpu=True).plan_memory(model, optimizer, DENSE, sum_loss)
