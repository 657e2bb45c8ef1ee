"""Models and optimizers in shards: read by one process, or refused with what is wrong."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import MetadataIndex

from accelerate.base import CheckpointError
from accelerate.checkpointing import (
    CheckpointReader,
    ModuleShards,
    OptimizerShards,
    ShardedState,
    ShardsOrFilePart,
    by_name,
    folder_of,
    in_order,
    manifest,
    no_change,
    read_shards,
    shard_files,
    shard_index,
)


class Tied(nn.Module):
    def __init__(self, fill: float = 0.0, width: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.tensor(0))
        self.note = "new"
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(fill)

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


def save(folder: Path, owner: ShardedState, index: int = 0) -> CheckpointReader:
    name = folder_of(owner.root, index)
    payload = shard_files.payload(name, 0, owner.state())
    path = folder / payload.name
    path.parent.mkdir()
    assert payload.finish is not None
    payload.finish(path.parent, [payload.write(payload.content, path)])
    return CheckpointReader(folder)


def test_a_sharded_model_is_loaded_with_buffers_and_extra_state(tmp_path: Path) -> None:
    model = Tied(2.0)
    model.note = "old"
    model.count += 5  # type: ignore[operator]
    options = save(tmp_path, ModuleShards(model))
    other = Tied()
    apply = read_shards("pytorch_model_fsdp_0", ModuleShards(other), options)
    assert other.note == "new"
    assert other.first.weight.sum() == 0  # nothing is changed yet
    apply.apply()
    assert (other.note, int(other.count)) == ("old", 5)  # type: ignore[arg-type]
    assert other.last.weight is other.first.weight
    assert torch.equal(other.last.weight, model.last.weight)


class Scaled(nn.Linear):
    """Has a tensor as extra state."""

    scale: torch.Tensor

    def get_extra_state(self) -> torch.Tensor:
        return self.scale

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert isinstance(state, torch.Tensor)
        self.scale = state


def test_an_extra_state_that_is_a_tensor_is_loaded(tmp_path: Path) -> None:
    model, other = Scaled(2, 2), Scaled(2, 2)
    model.scale, other.scale = torch.ones(3), torch.zeros(5)
    options = save(tmp_path, ModuleShards(model))
    read_shards("pytorch_model_fsdp_0", ModuleShards(other), options).apply()
    assert torch.equal(other.scale, torch.ones(3))


def test_unsharded_files_are_read_by_the_other_part(tmp_path: Path) -> None:
    class Whole:
        collected: list[Any] = []

        def collect(self, leads: bool = True) -> list[Any]:
            assert not leads
            return self.collected

        def read(self, options: CheckpointReader) -> Any:
            return no_change

    def fail() -> ShardedState:
        raise AssertionError

    part = ShardsOrFilePart("pytorch_model_fsdp_0", fail, Whole())
    assert part.read(CheckpointReader(tmp_path)) is no_change
    assert part.collect(writes_common=False) is Whole.collected


def test_missing_and_unexpected_names_raise_an_error(tmp_path: Path) -> None:
    options = save(tmp_path, ModuleShards(nn.Linear(3, 3)))
    with pytest.raises(
        CheckpointError, match=r"It lacks 0\.weight, 0\.bias\. The model does not have weight"
    ):
        read_shards("pytorch_model_fsdp_0", ModuleShards(nn.Sequential(nn.Linear(3, 3))), options)
    loose = CheckpointReader(tmp_path, model_kwargs={"strict": False})
    wider = nn.Linear(3, 3, bias=False)
    read_shards("pytorch_model_fsdp_0", ModuleShards(wider), loose).apply()


def test_one_name_of_a_tied_tensor_is_enough(tmp_path: Path) -> None:
    owner = ModuleShards(Tied(4.0))
    state = {place: value for place, value in owner.state().items() if place[1] != "last.weight"}
    payload = shard_files.payload("pytorch_model_fsdp_0", 0, state)
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    assert payload.finish is not None
    report = payload.write(payload.content, tmp_path / payload.name)
    payload.finish(tmp_path / "pytorch_model_fsdp_0", [report])
    model = Tied()
    read_shards("pytorch_model_fsdp_0", ModuleShards(model), CheckpointReader(tmp_path)).apply()
    assert model.last.weight.sum() == 36


def test_other_shapes_raise_an_error(tmp_path: Path) -> None:
    options = save(tmp_path, ModuleShards(nn.Linear(3, 4)))
    with pytest.raises(CheckpointError, match=r"weight has the shape \(4, 3\) instead of \(4, 2\)"):
        read_shards("pytorch_model_fsdp_0", ModuleShards(nn.Linear(2, 4)), options)


def stepped(order: str = "wb", **options: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    own = {"w": model.weight, "b": model.bias}
    optimizer = torch.optim.AdamW([own[each] for each in order], **options)
    return model, optimizer


def owner_of(optimizer: Any, names: Any = (("weight",), ("bias",))) -> OptimizerShards:
    return OptimizerShards(optimizer, [list(names)])


def test_an_optimizer_is_loaded_in_any_order_of_its_parameters(tmp_path: Path) -> None:
    model, optimizer = stepped(lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    options = save(tmp_path, owner_of(optimizer))
    other_model, other = stepped("bw", lr=0.1)
    owner = owner_of(other, (("bias", "alias"), ("weight",)))
    read_shards("optimizer_0", owner, options).apply()
    assert other.param_groups[0]["lr"] == 0.5
    for name in ("weight", "bias"):
        old = optimizer.state[getattr(model, name)]
        new = other.state[getattr(other_model, name)]
        assert set(new) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(new[key], old[key]) for key in old)


def test_a_mapped_state_is_copied_into_the_tensors_of_an_optimizer(tmp_path: Path) -> None:
    model, optimizer = stepped()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    maps: list[Any] = []

    def map_file(path: Path) -> Any:
        maps.append(manifest.map_writable(path))
        return maps[-1]

    reader = replace(save(tmp_path, owner_of(optimizer)), map_file=map_file)
    live = optimizer.state[model.weight]["exp_avg"]
    expected = live.clone()
    live.zero_()
    change = read_shards("optimizer_0", owner_of(optimizer), reader)
    assert live.sum() == 0  # nothing is changed yet
    change.apply()
    assert optimizer.state[model.weight]["exp_avg"] is live
    assert torch.equal(live, expected)
    other_model, other = stepped()
    read_shards("optimizer_0", owner_of(other), reader).apply()
    del change
    assert torch.equal(other.state[other_model.weight]["exp_avg"], expected)
    for mapped in maps:
        mapped.close()  # raises if a tensor is a view of it


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer = stepped()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    options = save(tmp_path, owner_of(optimizer))
    with pytest.raises(CheckpointError, match="does not fit this AdamW: it does not step bias"):
        read_shards("optimizer_0", owner_of(optimizer, (("weight",), ("other",))), options)
    fresh = stepped()[1]
    (tmp_path / "fresh").mkdir()
    empty = save(tmp_path / "fresh", owner_of(fresh))
    with pytest.raises(CheckpointError, match="Group 0 of the optimizer was saved with other parameters: "):
        read_shards("optimizer_0", owner_of(fresh, (("weight",), ("other",))), empty)
    two = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}])
    with pytest.raises(CheckpointError, match="holds 1 groups of parameters, and this AdamW has 2"):
        read_shards("optimizer_0", OptimizerShards(two, [[["weight"]], [["bias"]]]), empty)


def rewrite(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the metadata of a folder of shards."""
    content = pickle.loads((folder / shard_index.NAME).read_bytes())
    change(content)
    (folder / shard_index.NAME).write_bytes(pickle.dumps(content))


def move(old: str, *place: Any) -> Callable[[Any], None]:
    return lambda content: content.planner_data.update({old: ("optimizer", *place)})


def exchange(content: Any) -> None:
    move(LR, "param_groups", 0, "params")(content)
    move("optimizer.param_groups.0.params", "param_groups", 0, "lr")(content)


def lose(content: Any) -> None:
    content.storage_data = {
        index: info for index, info in content.storage_data.items() if "exp_avg" not in index.fqn
    } | {MetadataIndex(index.fqn): info for index, info in content.storage_data.items()}


LR = "optimizer.param_groups.0.lr"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (move(LR, "state"), "holds something else than an optimizer"),
        (move(LR, "other", 0, "lr"), "holds something else than an optimizer"),
        (move(LR, "param_groups", "a", "lr"), "holds something else than an optimizer"),
        (move(LR, "state", 0, "lr"), "holds something else than an optimizer"),
        (move(LR, "param_groups", 7, "lr"), "holds 2 groups of parameters, and this AdamW has 1"),
        (move(LR, "param_groups", 0, "params"), "gives several entries the same path"),
        (exchange, "saved without names of parameters"),
        (lose, "does not say where a part of optimizer.state.weight.exp_avg is stored"),
    ],
)
def test_inconsistent_metadata_is_refused(tmp_path: Path, change: Callable[[Any], None], reason: str) -> None:
    model, optimizer = stepped()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    options = save(tmp_path, owner_of(optimizer))
    rewrite(tmp_path / "optimizer_0", change)
    with pytest.raises(CheckpointError, match=reason):
        read_shards("optimizer_0", owner_of(optimizer), options)


def test_memory_is_not_reserved_for_what_the_files_do_not_hold(tmp_path: Path) -> None:
    def grow(content: Any) -> None:
        entry = content.state_dict_metadata["optimizer.state.weight.step"]
        entry.size, entry.chunks[0].sizes, entry.chunks[0].offsets = 3 * (torch.Size((2**45,)),)
        entry.chunks[0].offsets = torch.Size((0,))
        for index, info in content.storage_data.items():
            info.length = 2**50 if index.fqn.endswith("weight.step") else info.length

    model, optimizer = stepped()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    options = save(tmp_path, owner_of(optimizer))
    rewrite(tmp_path / "optimizer_0", grow)
    with pytest.raises(CheckpointError, match="bytes, and at least 1125899906.* are needed: it is truncated"):
        read_shards("optimizer_0", owner_of(optimizer), options)


NAMES = [[["a.weight", "tied.weight"], ["a.bias"]]]


def stepped_once(lr: float) -> torch.optim.Optimizer:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("named", [True, False])
def test_states_are_loaded_by_name_and_by_order(named: bool) -> None:
    optimizer, other = stepped_once(0.1), stepped_once(0.5)
    state: Any = optimizer.state_dict()
    if named:
        state = by_name(state, NAMES)
        assert list(state["state"]) == ["a.weight", "a.bias"]
        assert state["param_groups"][0]["params"] == ["a.weight", "a.bias"]
        state["state"]["tied.weight"] = state["state"].pop("a.weight")
    other.load_state_dict(in_order(state, lambda: NAMES))
    assert other.param_groups[0]["lr"] == 0.1
    old, new = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert all(torch.equal(old[index][key], new[index][key]) for index in old for key in old[index])


def test_states_of_others_are_refused() -> None:
    optimizer = stepped_once(0.1)
    with pytest.raises(CheckpointError, match=r"parameters it does not step: a\.bias, a\.weight"):
        in_order(by_name(optimizer.state_dict(), NAMES), lambda: [[["b"], ["c"]]])
    twice = by_name(optimizer.state_dict(), NAMES)
    twice["param_groups"] *= 2
    with pytest.raises(CheckpointError, match="has 2 groups, and there are 1"):
        in_order(twice, lambda: NAMES)
