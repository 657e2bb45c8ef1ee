"""Units hold whole ties and one dtype."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import FullyShardedDataParallelPlugin
from accelerate.base import PreparationError
from accelerate.state import PartialState
from accelerate.strategies.fsdp import choose_units, parameters_by_unit, split_by_dtype

pytestmark = pytest.mark.usefixtures("states")


@pytest.fixture(autouse=True)
def alone() -> None:
    PartialState(cpu=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(inputs))  # type: ignore[no-any-return]


class Layers(nn.Module):
    """A namespace whose modules other code calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)


def model() -> Any:
    return nn.ModuleDict({"enter": nn.Linear(2, 2), "blocks": nn.ModuleList([Block(), Block()])})


def plugin(**fields: Any) -> FullyShardedDataParallelPlugin:
    given = {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Block"],
        **fields,
    }
    return FullyShardedDataParallelPlugin(**given)


def test_the_plugin_stays_for_other_models() -> None:
    chosen, net = plugin(), model()
    policy = chosen.auto_wrap_policy
    assert choose_units(chosen, net) == list(net["blocks"])
    assert chosen.auto_wrap_policy is policy


def test_modules_tied_to_other_modules_are_no_units(caplog: pytest.LogCaptureFixture) -> None:
    net = model()
    net["blocks"][1].linear.weight = net["enter"].weight
    with caplog.at_level(logging.INFO):
        assert choose_units(plugin(), net) == [net["blocks"][0]]
    assert "1 modules of ModuleDict have parameters that are tied" in caplog.text
    net["blocks"][0].linear.weight = net["blocks"][0].norm.weight  # a tie inside a unit
    assert choose_units(plugin(), net) == [net["blocks"][0]]


def test_containers_are_never_called_and_no_units(caplog: pytest.LogCaptureFixture) -> None:
    kinds = (nn.ModuleList, Layers)
    policy = lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, kinds)  # noqa: E731
    net = model()
    net["layers"] = Layers()
    with caplog.at_level(logging.WARNING):
        assert choose_units(plugin(auto_wrap_policy=policy), net) == []
    assert "finds no module in ModuleDict: it is sharded as one unit" in caplog.text


def test_each_parameter_is_held_once() -> None:
    net = model()
    ignored = net["enter"].bias
    held = [
        [parameter.name for parameter in unit]
        for unit in parameters_by_unit(net, list(net["blocks"]), [ignored])
    ]
    assert [sorted(names) for names in held] == [
        sorted(
            f"blocks.{index}.{name}" for name in ("norm.weight", "norm.bias", "linear.weight", "linear.bias")
        )
        for index in (0, 1)
    ] + [["enter.weight"]]


def test_odd_dtypes_become_units() -> None:
    net = model()
    net["blocks"][0].linear.to(torch.bfloat16)  # the larger part of its block: the norm is odd
    units = list(net["blocks"])
    assert split_by_dtype(net, units) == [net["blocks"][0].norm, *units]
    net["blocks"][0].linear.requires_grad_(False)
    assert split_by_dtype(net, units) == units  # one dtype trains


def test_two_dtypes_in_one_module_are_refused() -> None:
    net = model()
    net["enter"].bias.data = net["enter"].bias.data.bfloat16()
    with pytest.raises(
        PreparationError, match="several dtypes .bfloat16, float32. in one module, near enter.w"
    ):
        split_by_dtype(net, list(net["blocks"]))
    assert split_by_dtype(net, list(net["blocks"]), [net["enter"].bias]) == list(net["blocks"])
