"""Values of a checkpoint are copied into live tensors of the same layout, and into no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate.checkpointing import single_shard
from accelerate.checkpointing.changes import copy_into, fill_states, fill_weights
from accelerate.weights import PinnedBuffers


class Tagged(Tensor):
    pass


VALUE = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("live", "fits"),
    [
        (torch.zeros(2, 3), True),
        (nn.Parameter(torch.zeros(2, 3)), True),
        (torch.zeros(3, 2).t(), True),
        (torch.zeros(3, 2), False),
        (torch.zeros(2, 3, dtype=torch.float64), False),
        (torch.zeros(2, 3).as_subclass(Tagged), False),
        (torch.zeros(2, 3).to_sparse(), False),
        (torch.zeros(2, 3, device="meta"), False),
        (0.0, False),
        (None, False),
    ],
)
def test_a_value_is_copied_into_a_tensor_of_its_layout(live: Any, fits: bool) -> None:
    for value in (VALUE, single_shard(VALUE)):
        with torch.no_grad():
            assert copy_into(live, value, PinnedBuffers()) is fits
    assert not fits or torch.equal(live, VALUE)


@pytest.mark.parametrize("value", [1.0, "text", None, VALUE.to_sparse()])
def test_other_values_are_not_copied(value: Any) -> None:
    assert not copy_into(torch.zeros(2, 3), value, PinnedBuffers())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("is_mapped", [False, True])
def test_states_are_the_tensors_of_the_optimizer_or_copies(is_mapped: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = optimizer_of(model)
    live = optimizer.state[model.weight]
    read = {"exp_avg": VALUE.clone(), "step": torch.tensor(7.0), "max_exp_avg_sq": VALUE.clone(), "note": "a"}
    parameters = dict(enumerate(model.parameters()))
    states = {0: read, 1: {"step": torch.tensor(7.0)}, 5: {"odd": VALUE}, 6: None}
    filled = fill_states(optimizer, states, parameters, {}, is_mapped=is_mapped)
    source = live if is_mapped else read  # values in memory are used without a copy
    assert filled[0]["exp_avg"] is source["exp_avg"]
    assert torch.equal(filled[0]["exp_avg"], VALUE)
    assert (filled[0]["step"], filled[0]["note"], filled[6]) == (7.0, "a", None)
    assert (filled[0]["max_exp_avg_sq"] is read["max_exp_avg_sq"]) is not is_mapped
    assert (filled[5]["odd"] is VALUE) is not is_mapped
    assert torch.equal(filled[5]["odd"], VALUE)


def test_weights_are_the_tensors_of_the_module() -> None:
    model = nn.Linear(3, 2)
    own = dict(model.named_parameters())
    filled = fill_weights(model, own, {"weight": VALUE, "bias": torch.zeros(3), "other": VALUE})
    assert filled["weight"] is model.weight
    assert torch.equal(model.weight, VALUE)
    assert (filled["bias"].shape, filled["other"] is VALUE) == ((3,), True)


class Doubled(nn.Linear):
    """Loads weights of another scale."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}weight"] = 2 * state_dict[f"{prefix}weight"]
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_module_that_loads_in_its_own_way_gets_the_values() -> None:
    model = Doubled(3, 2)
    before = model.weight.detach().clone()
    assert fill_weights(model, dict(model.named_parameters()), {"weight": VALUE})["weight"] is VALUE
    assert torch.equal(model.weight, before)
