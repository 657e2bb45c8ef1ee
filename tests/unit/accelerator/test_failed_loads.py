"""A state that does not fit changes no object; an object that refuses its state is named."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, rng
from accelerate.base import CheckpointError
from accelerate.checkpointing import Manifest, manifest, seal

pytestmark = pytest.mark.usefixtures("states")


class Counter:
    """An object of the user's own that changes its values in their places."""

    def __init__(self) -> None:
        self.numbers, self.tensor, self.refuses = [1, 2], torch.ones(3), False

    def state_dict(self) -> Any:
        return {"numbers": self.numbers, "tensor": self.tensor}

    def load_state_dict(self, state: Any) -> None:
        self.extra = True
        self.numbers[:] = state["numbers"]
        self.tensor.copy_(state["tensor"])
        if state.get("refuse"):
            raise RuntimeError("it refuses")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.note = nn.Linear(2, 2), nn.BatchNorm1d(2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(x))  # type: ignore[no-any-return]

    def get_extra_state(self) -> Any:
        return torch.tensor([self.note])

    def set_extra_state(self, state: Any) -> None:
        self.note = int(state)


def falling(epoch: int) -> float:
    return 1 / (1 + epoch)


def build() -> tuple[Accelerator, dict[str, Any]]:
    accelerator = Accelerator(cpu=True)
    model = Net()
    inner = torch.optim.Adam(model.parameters(), lr=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(inner, 2), torch.optim.lr_scheduler.LambdaLR(inner, falling)]
    schedule: Any = torch.optim.lr_scheduler.SequentialLR(inner, schedules, [3])
    loader = DataLoader(torch.arange(8.0).reshape(4, 2), batch_size=2, shuffle=True)
    model, optimizer, schedule, loader = accelerator.prepare(model, inner, schedule, loader)
    counter, scaler, head = Counter(), torch.amp.GradScaler("cpu"), nn.Linear(1, 1)
    accelerator.register_for_checkpointing(counter, scaler, head)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    return accelerator, {
        **objects,
        "counter": counter,
        "scaler": scaler,
        "head": accelerator._custom_objects[2],
    }


def train(accelerator: Accelerator, objects: Mapping[str, Any], times: int = 1) -> None:
    for _ in range(times):
        for batch in objects["loader"]:
            objects["scaler"].scale(objects["model"](batch).square().sum()).backward()
            objects["optimizer"].step()
            objects["schedule"].step()
            objects["optimizer"].zero_grad()
        objects["scaler"].update(objects["scaler"].get_scale() / 2)
    accelerator.step += 3
    objects["model"].note += 1


def facts(accelerator: Accelerator, objects: Mapping[str, Any]) -> dict[str, Any]:
    """All that a load may change, in copies."""
    loader, optimizer = objects["loader"], objects["optimizer"]
    schedule = objects["schedule"].scheduler
    found = {
        "model": objects["model"].state_dict(),
        "note": objects["model"].note,
        "optimizer": optimizer.state_dict(),
        "updates": optimizer.num_updates,
        "schedule": schedule.state_dict(),
        "schedules": [{k: v for k, v in vars(e).items() if k != "optimizer"} for e in schedule._schedulers],
        "counter": vars(objects["counter"]),
        "scaler": {name: value for name, value in vars(objects["scaler"]).items() if name[0] == "_"},
        "head": objects["head"].state_dict(),
        "position": vars(loader.tracker),
        "epoch": loader.iteration,
        "sampler": [generator.get_state() for generator in loader_generators(loader)],
        "random": rng.capture(),
        "run": (accelerator.step, accelerator.sync_gradients),
    }
    return copy.deepcopy(found)


def loader_generators(loader: Any) -> list[torch.Generator]:
    from accelerate.data_loader import resume

    return resume.generators_of(loader)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return bool(np.array_equal(first, second))
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second or (type(first) is type(second) and hasattr(first, "__dict__")))


# Damages


def rewritten(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        state = torch.load(folder / name, weights_only=False)
        changed = change(state)
        torch.save(state if changed is None else changed, folder / name)

    return damage


def weights(**changes: Any) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        state = {**load_file(folder / "model.safetensors"), **changes}
        kept_ones = {name: value for name, value in state.items() if value is not None}
        save_file(kept_ones, folder / "model.safetensors", {"format": "pt"})

    return damage


def optimizer(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return rewritten("optimizer.bin", change)


def put(*path: Any) -> Callable[[Any], None]:
    """Set the last value at the path of the others."""

    def change(state: Any) -> None:
        *places, last, value = path
        for place in places:
            state = state[place]
        state[last] = value

    return change


def drop(*path: Any) -> Callable[[Any], None]:
    def change(state: Any) -> None:
        *places, last = path
        for place in places:
            state = state[place]
        del state[last]

    return change


def refused(state: Any) -> None:
    state.update(numbers=[7], tensor=torch.zeros(3), refuse=True)


STATE = torch.Generator().get_state()
HEAD = "custom_checkpoint_2.pkl"
LONG_AGO = put("state", 0, "exp_avg", torch.ones(2, 3))

DAMAGES: dict[str, Callable[[Path], None]] = {
    "optimizer: another shape": optimizer(LONG_AGO),
    "optimizer: a shape that broadcasts": optimizer(put("state", 0, "exp_avg", torch.ones(1, 2))),
    "optimizer: no step": optimizer(drop("state", 1, "step")),
    "optimizer: a text in a state": optimizer(put("state", 0, "exp_avg", "text")),
    "optimizer: a state that is a list": optimizer(put("state", 0, [1])),
    "optimizer: states in a list": optimizer(put("state", [1])),
    "optimizer: a state of nothing": optimizer(put("state", 99, {"step": 1})),
    "optimizer: a state by name": optimizer(put("state", "other.weight", {"step": 1})),
    "optimizer: two groups": optimizer(lambda state: state["param_groups"].append(state["param_groups"][0])),
    "optimizer: no groups": optimizer(drop("param_groups")),
    "optimizer: no options": optimizer(drop("param_groups", 0, "betas")),
    "optimizer: fewer parameters": optimizer(put("param_groups", 0, "params", [0])),
    "optimizer: parameters in a text": optimizer(put("param_groups", 0, "params", "0123")),
    "optimizer: a number": optimizer(lambda state: 3),
    "scheduler: a list": rewritten("scheduler.bin", lambda state: [1]),
    "scaler: a key less": rewritten("custom_checkpoint_1.pkl", drop("_growth_tracker")),
    "scaler: nothing": rewritten("custom_checkpoint_1.pkl", lambda state: {}),
    "module: another shape": rewritten(HEAD, put("weight", torch.ones(3, 1))),
    "module: a name less": rewritten(HEAD, drop("bias")),
    "model: another shape": weights(**{"layer.weight": torch.ones(2, 3)}),
    "model: a name less": weights(**{"layer.bias": None}),
    "model: a name more": weights(other=torch.ones(1)),
    "model: complex numbers": weights(**{"layer.bias": torch.ones(2, dtype=torch.complex64)}),
    "loader: a number": rewritten("sampler.bin", lambda state: 3),
    "loader: another version": rewritten("sampler.bin", put("version", 9)),
    "loader: a generator that is none": rewritten("sampler.bin", put("generators", [torch.ones(3)])),
    "loader: a start that is none": rewritten("sampler.bin", put("start", {"global": {}, "generators": []})),
    "random: a list": rewritten("random_states_0.pkl", lambda state: [1]),
    "random: one less": rewritten("random_states_0.pkl", drop("numpy_random_seed")),
    "random: of Python": rewritten("random_states_0.pkl", put("random_state", (3, (1, 2), None))),
    "random: of numpy": rewritten("random_states_0.pkl", put("numpy_random_seed", "MT19937")),
    "random: of torch": rewritten("random_states_0.pkl", put("torch_manual_seed", STATE[:9].clone())),
}


def seal_again(folder: Path) -> None:
    """Let the checksums fit what was changed."""
    read = manifest.read(folder)
    os.unlink(folder / manifest.NAME)
    files = {each: seal(folder, each) for each in read.files}
    Manifest(files, read.world_size, step=read.step, run=read.run).write(folder)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_load_that_fails_changes_nothing(tmp_path: Path, name: str) -> None:
    accelerator, objects = build()
    with warnings.catch_warnings():  # torch warns of this once in a process
        warnings.simplefilter("ignore")
        torch.ones(2).copy_(torch.ones(2, dtype=torch.complex64))
    train(accelerator, objects)
    folder = accelerator.save_state(tmp_path / "one")
    DAMAGES[name](folder)
    seal_again(folder)
    train(accelerator, objects, 2)
    before = facts(accelerator, objects)
    with pytest.raises(CheckpointError, match="A checkpoint was not loaded, and nothing was changed"):
        accelerator.load_state(folder)
    after = facts(accelerator, objects)
    assert [key for key in before if not same(before[key], after[key])] == []
    train(accelerator, objects)


REFUSED: dict[str, tuple[Callable[[Path], None], str, set[str]]] = {
    "own: it refuses": (rewritten("custom_checkpoint_0.pkl", refused), "Counter (custom", {"counter"}),
    "scheduler: a number inside": (
        rewritten("scheduler.bin", put("_schedulers", 1, 3)),
        "AcceleratedScheduler (scheduler.bin)",
        {"counter", "scaler", "schedule", "schedules"},
    ),
    "model: an extra state": (
        weights(_extra_state=torch.ones(2)),
        "Net (model.safetensors)",
        {"counter", "scaler", "schedule", "schedules", "optimizer", "position", "epoch", "model"},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_object_that_refuses_its_state_is_named(tmp_path: Path, name: str) -> None:
    damage, text, changed = REFUSED[name]
    accelerator, objects = build()
    train(accelerator, objects)
    folder = accelerator.save_state(tmp_path / "one")
    damage(folder)
    seal_again(folder)
    train(accelerator, objects, 2)
    before = facts(accelerator, objects)
    with pytest.raises(CheckpointError, match=r"These objects have its state, or a part of it: ") as caught:
        accelerator.load_state(folder)
    assert text in str(caught.value)
    after = facts(accelerator, objects)
    assert {key for key in before if not same(before[key], after[key])} <= changed


class Renamed(nn.Linear):
    """Takes weights of other names."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            if f"{prefix}old_{name}" in state_dict:
                state_dict[f"{prefix}{name}"] = state_dict.pop(f"{prefix}old_{name}")
        super()._load_from_state_dict(state_dict, prefix, *rest)


def test_a_model_that_renames_weights_is_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Renamed(2, 2))
    folder = accelerator.save_state(tmp_path / "one")
    saved = load_file(folder / "model.safetensors")
    save_file({f"old_{name}": value + 1 for name, value in saved.items()}, folder / "model.safetensors")
    seal_again(folder)
    before, states = copy.deepcopy(model.state_dict()), rng.capture()
    torch.rand(3)
    accelerator.load_state(folder)
    assert all(torch.equal(model.state_dict()[name], before[name] + 1) for name in before)
    assert same(rng.capture(), states)


def test_random_states_are_unchanged_if_a_model_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, objects = build()
    folder = accelerator.save_state(tmp_path / "one")
    train(accelerator, objects)
    before = rng.capture()

    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(objects["model"], "load_state_dict", fail)
    with pytest.raises(CheckpointError, match=r"out of memory.*part of it: .*Net \(model\.safetensors\)"):
        accelerator.load_state(folder)
    assert same(rng.capture(), before)
