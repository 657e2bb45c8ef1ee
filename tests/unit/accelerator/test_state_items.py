"""One row of the registry adds an object to checkpoints, replica groups and local SGD."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.accelerator import state_items
from accelerate.accelerator.state_items import Source, list_items
from accelerate.base import CheckpointError
from accelerate.checkpointing import (
    StateItem,
    StatePart,
    apply_items,
    capture_items,
    check_items,
    model_item,
    object_item,
)
from accelerate.local_sgd import LocalSGD

pytestmark = pytest.mark.usefixtures("states")


class Counter:
    """An object with a state, which no package knows."""

    def __init__(self) -> None:
        self.state = {"num_tokens": 0}

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()

    def row(_: Source) -> Iterator[StateItem]:
        yield object_item("counter", counter, StatePart("counter.bin", counter))

    monkeypatch.setattr(state_items, "KINDS", (*state_items.KINDS, row))
    return counter


def prepared() -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return accelerator, model, optimizer


def step(accelerator: Accelerator, model: Any, optimizer: Any) -> None:
    accelerator.backward(model(torch.ones(1, 3)).sum())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("in_shards", [False, True])
def test_one_row_is_saved_and_loaded(
    counter: Counter, tmp_path: Path, in_shards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, *_ = prepared()
    monkeypatch.setattr(type(accelerator._runtime.strategy.state), "saves_shards", in_shards)
    counter.state["num_tokens"] = 7
    accelerator.save_state(tmp_path / "a")
    counter.state["num_tokens"] = 9
    accelerator.load_state(tmp_path / "a")
    assert counter.state == {"num_tokens": 7}


def test_replica_groups_receive_all_items(counter: Counter) -> None:
    accelerator, model, optimizer = prepared()
    step(accelerator, model, optimizer)
    counter.state["num_tokens"] = 7
    accelerator.project_configuration.iteration = 3
    items = list_items(accelerator._runtime.strategy)
    state = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, capture_items(items))
    before = model.weight.clone(), optimizer.state[model.weight]["exp_avg"].clone()
    step(accelerator, model, optimizer)
    counter.state["num_tokens"], accelerator.project_configuration.iteration = 9, 4
    check_items(items, state)
    apply_items(items, state)
    after = model.weight, optimizer.state[model.weight]["exp_avg"]
    assert all(map(torch.equal, before, after))
    assert (optimizer.num_updates, accelerator.project_configuration.iteration) == (1, 3)
    assert counter.state == {"num_tokens": 7}


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def test_replica_groups_receive_extra_states_of_modules() -> None:
    source, target = Extra(2, 2), Extra(2, 2)
    source.scale, target.scale = 5.0, 1.0
    apply_items([model_item(target)], capture_items([model_item(source)]))
    assert target.scale == 5.0
    assert torch.equal(target.weight, source.weight)


def test_the_state_of_an_object_is_computed_on_all_ranks() -> None:
    class Communicating(Counter):
        num_calls = 0

        def state_dict(self) -> dict[str, int]:
            self.num_calls += 1
            return super().state_dict()

    owner = Communicating()
    assert StatePart("counter.bin", owner).collect(writes_common=False) == []
    assert owner.num_calls == 1


def test_a_state_of_other_objects_is_refused() -> None:
    items = list_items(prepared()[0]._runtime.strategy)
    with pytest.raises(CheckpointError, match="the state has 2 models, and this run has 1"):
        check_items(items, {**capture_items(items), "models": [{}, {}]})


def test_items_say_which_ranks_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, _ = prepared()
    accelerator.average(model)
    accelerator.register_for_checkpointing(Counter())
    accelerator.prepare(torch.utils.data.DataLoader([1, 2]))
    monkeypatch.setattr(type(accelerator), "use_distributed", True)
    LocalSGD(accelerator, model, 2)
    held = {item.kind: item.held_by for item in list_items(accelerator._runtime.strategy)}
    ranks, shards = ("loaders", "local_sgd"), ("models", "optimizers", "averages")
    assert {kind for kind in held if held[kind] == "rank"} == set(ranks)
    assert {kind for kind in held if held[kind] == "shards"} == set(shards)
    assert {kind for kind in held if held[kind] == "all"} == {"custom", "counters", "iteration"}
