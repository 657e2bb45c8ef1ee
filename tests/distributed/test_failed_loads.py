"""Loads that fail on one of several processes, or on all."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, FullyShardedDataParallelPlugin, rng
from accelerate.base import CheckpointError
from accelerate.checkpointing import Manifest, manifest, seal

Run = Callable[..., list[Any]]

SHARDED = {"state_dict_type": "SHARDED_STATE_DICT"}
WHOLE = {"state_dict_type": "FULL_STATE_DICT"}
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp2 in shards": {"fsdp_version": 2, **SHARDED},
    "fsdp2 whole": {"fsdp_version": 2, **WHOLE},
    "fsdp1 in shards": {"fsdp_version": 1, **SHARDED},
    "fsdp1 whole": {"fsdp_version": 1, **WHOLE, "use_orig_params": True},
}
IN_GATE = {
    "optimizer": ("fsdp2 in shards", "fsdp1 whole"),
    "random": ("ddp", "fsdp1 in shards"),
    "own": ("fsdp2 whole",),
}


class Stubborn:
    """Refuses on one rank what it has taken."""

    def __init__(self, rank: int) -> None:
        self.rank, self.values, self.refuses = rank, [rank], False

    def state_dict(self) -> Any:
        return {"values": self.values}

    def load_state_dict(self, state: Any) -> None:
        self.values[:] = state["values"]
        if self.refuses and self.rank == 1:
            raise RuntimeError("rank 1 refuses")


def build(way: str) -> tuple[Accelerator, dict[str, Any]]:
    plugin = FullyShardedDataParallelPlugin(**WAYS[way]) if WAYS[way] else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(inner, 2)
    loader = DataLoader(torch.arange(16.0).reshape(8, 2), batch_size=2, shuffle=True)
    objects = dict(
        zip(
            ("model", "optimizer", "schedule", "loader"),
            accelerator.prepare(model, inner, schedule, loader),
            strict=True,
        )
    )
    objects["own"] = Stubborn(accelerator.process_index)
    accelerator.register_for_checkpointing(objects["own"])
    train(accelerator, objects)
    return accelerator, objects


def train(accelerator: Accelerator, objects: dict[str, Any]) -> None:
    for batch in objects["loader"]:
        accelerator.backward(objects["model"](batch).square().mean())
        objects["optimizer"].step()
        objects["schedule"].step()
        objects["optimizer"].zero_grad()
    accelerator.step += 1
    objects["own"].values.append(accelerator.step)


def facts(accelerator: Accelerator, objects: dict[str, Any]) -> dict[str, Any]:
    optimizer = objects["optimizer"]
    found = {
        "model": [local(each) for each in objects["model"].parameters()],
        "state": [{k: local(v) for k, v in state.items()} for state in optimizer.state.values()],
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "updates": optimizer.num_updates,
        "schedule": objects["schedule"].state_dict(),
        "own": objects["own"].values,
        "epoch": (objects["loader"].iteration, vars(objects["loader"].tracker)),
        "random": [state.tolist() for state in (rng.capture()["torch"],)],
        "step": accelerator.step,
    }
    return copy.deepcopy(found)


def local(value: Any) -> Any:
    found = value.to_local() if hasattr(value, "to_local") else value
    return found.detach().tolist() if isinstance(found, torch.Tensor) else found


# Damages


def change_optimizer(content: Any) -> None:
    content["state"][0]["exp_avg"] = torch.ones(7)


def change_shards(content: Any) -> None:
    """Rename the state of a parameter to a name that no parameter has."""
    for key, place in content.planner_data.items():
        if place[1:2] == ("state",):
            content.planner_data[key] = (*place[:2], "other", place[-1])


def rewrite(folder: Path, name: str, change: Callable[[Any], None]) -> None:
    import pickle

    path = folder / name
    if path.name == ".metadata":
        content = pickle.loads(path.read_bytes())
        change(content)
        path.write_bytes(pickle.dumps(content))
    else:
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)
    read = manifest.read(folder)
    os.unlink(folder / manifest.NAME)
    files = {each: seal(folder, each) for each in read.files}
    Manifest(files, read.world_size, step=read.step, run=read.run).write(folder)


def fail_to_load(way: str, kind: str) -> list[str]:
    accelerator, objects = build(way)
    folder = accelerator.save_state("one")
    if accelerator.is_main_process:
        if kind == "optimizer" and "shards" in way:
            rewrite(folder, "optimizer_0/.metadata", change_shards)
        elif kind == "optimizer":
            rewrite(folder, "optimizer.bin", change_optimizer)
        elif kind == "random":
            rewrite(folder, "random_states_1.pkl", lambda content: content.update(torch_manual_seed=3))
    accelerator.wait_for_everyone()
    train(accelerator, objects)
    objects["own"].refuses = kind == "own"
    before = facts(accelerator, objects)
    text = r"rank 1 refuses.*part of it: .*Stubborn \(custom" if kind == "own" else "nothing was changed"
    with pytest.raises(CheckpointError, match=text):
        accelerator.load_state(folder)
    after = facts(accelerator, objects)
    if kind != "own":
        train(accelerator, objects)
    accelerator.end_training()
    return [key for key in before if before[key] != after[key]]


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=[] if way in IN_GATE[kind] else pytest.mark.slow)
        for kind in ("optimizer", "random")
        for way in WAYS
    ],
)
def test_files_that_do_not_fit_change_nothing_on_any_rank(run: Run, kind: str, way: str) -> None:
    assert run(fail_to_load, way, kind, processes=2) == [[], []]


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in IN_GATE["own"] else pytest.mark.slow) for way in WAYS]
)
def test_an_object_that_refuses_on_one_rank_is_named_on_all(run: Run, way: str) -> None:
    for changed in run(fail_to_load, way, "own", processes=2):
        assert not {"model", "random", "step"} & set(changed)
