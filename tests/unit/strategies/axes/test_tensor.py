"""Plans of tensor parallelism are found, read and refused."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from accelerate.base import ConfigurationError, PreparationError
from accelerate.state import PartialState
from accelerate.strategies.axes import check_divisible, plan_of

pytestmark = pytest.mark.usefixtures("states")


@pytest.fixture(autouse=True)
def alone() -> None:
    PartialState(cpu=True)


def model(plan: Any = None) -> Any:
    net: Any = nn.Module()
    net.layers = nn.ModuleList(
        nn.ModuleDict({"up": nn.Linear(2, 4), "down": nn.Linear(4, 2)}) for _ in range(2)
    )
    net.embed = nn.Embedding(3, 2)
    net.head = nn.Linear(2, 3, bias=False)
    if plan is not None:
        net.tp_plan = plan
    return net


def test_patterns_and_styles() -> None:
    plan = plan_of(model({"layers.*.up": "colwise", "layers.1.down": "rowwise", "absent.*": "colwise"}))
    assert {name: type(style) for name, style in plan.items()} == {
        "layers.0.up": ColwiseParallel,
        "layers.1.up": ColwiseParallel,
        "layers.1.down": RowwiseParallel,
    }


def test_a_star_matches_one_part() -> None:
    with pytest.raises(PreparationError, match="tp_plan of Module fits none of its modules: \\*.up"):
        plan_of(model({"*.up": "colwise"}))


def test_styles_of_torch_and_plans_of_libraries() -> None:
    style = SequenceParallel()
    net = model()
    net._tp_plan = {"head": style}
    assert plan_of(net) == {"head": style}


def test_tied_modules_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    net = model({"head": "colwise_rep", "layers.*.up": "colwise"})
    net.head.weight = net.embed.weight
    with caplog.at_level(logging.INFO):
        assert set(plan_of(net)) == {"layers.0.up", "layers.1.up"}
    assert "head share parameters with modules outside of the tp_plan" in caplog.text


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (None, "Module has no plan of how its layers are sharded .* Give it a plan"),
        ({}, "Give it a plan"),
        ({"head": "diagonal"}, "'diagonal' for head: the styles by name are colwise, rowwise"),
    ],
)
def test_invalid_tensor_parallel_plans_are_refused(plan: Any, message: str) -> None:
    with pytest.raises(PreparationError, match=message):
        plan_of(model(plan))


@pytest.mark.parametrize(
    ("plan", "size", "problem"),
    [
        ({"layers.*.up": "colwise"}, 3, "tp_size=3: layers.0.up of Module has a weight of shape"),
        ({"layers.*.down": "rowwise"}, 3, "whose dimension 1 is sharded"),
        ({"layers.*.up": "colwise", "head": "colwise_rep"}, 2, ""),  # the head is gathered
    ],
)
def test_weights_that_ranks_do_not_divide_are_refused(plan: Any, size: int, problem: str) -> None:
    net = model(plan)
    with pytest.raises(ConfigurationError, match=problem) if problem else nullcontext():
        check_divisible(net, plan_of(net), size)


def test_heads_that_ranks_do_not_divide_are_refused() -> None:
    net = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("q_proj", "k_proj")})
    net.config, net.tp_plan = SimpleNamespace(num_attention_heads=4, num_key_value_heads=1), {"*": "colwise"}
    with pytest.raises(ConfigurationError, match="tp_size=2: ModuleDict has num_key_value_heads=1"):
        check_divisible(net, plan_of(net), 2)
