"""Saving and loading through an `Accelerator`, in one process."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.stand_ins.objects import Counter
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, disk_offload
from accelerate.base import CheckpointError, ConfigurationError
from accelerate.checkpointing import LOADED, CheckpointReader

pytestmark = pytest.mark.usefixtures("states")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight


def test_saved_and_loaded_objects_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters()), DataLoader([1, 2], shuffle=True))
    accelerator.register_for_checkpointing(Counter())
    target = tmp_path / "one"
    with caplog.at_level(logging.INFO):
        accelerator.save_state(target)
        said, _ = list(caplog.messages), caplog.clear()
        accelerator.load_state(target)
    assert said == [
        f"[RANK 0] Saving current state to {target}",
        f"[RANK 0] Model weights saved in {target}/model.safetensors",
        f"[RANK 0] Optimizer state saved in {target}/optimizer.bin",
        f"[RANK 0] Sampler state for dataloader 0 saved in {target}/sampler.bin",
        f"[RANK 0] Random states saved in {target}/random_states_0.pkl",
        f"[RANK 0] Saving the state of Counter to {target}/custom_checkpoint_0.pkl",
    ]
    assert caplog.messages == [
        f"[RANK 0] Loading states from {target}",
        *(f"[RANK 0] All {what} loaded successfully" for what in LOADED),
        "[RANK 0] All random states loaded successfully",
        "[RANK 0] Loading in 1 custom states",
        f"[RANK 0] Loading the state of Counter from {target}/custom_checkpoint_0.pkl",
    ]


def test_all_objects_are_saved_and_loaded(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model, counter = Tied(), Counter()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.register_for_checkpointing(counter)
    accelerator.backward(model.head(model.embed(torch.ones(2, 4))).sum())
    optimizer.step()
    schedule.step()
    counter.count, accelerator.step = 7, 3
    accelerator.save_state(tmp_path / "one")
    weight, moment = model.head.weight.clone(), optimizer.state_dict()["state"][0]["exp_avg"].clone()
    rate, drawn = schedule.get_last_lr(), torch.rand(3)
    with torch.no_grad():
        model.embed.weight.zero_()
    optimizer.state_dict()["state"][0]["exp_avg"].zero_()
    schedule.step()
    counter.count = accelerator.step = optimizer.num_updates = 0
    accelerator.load_state(tmp_path / "one")
    assert torch.equal(model.head.weight, weight)
    assert model.head.weight is model.embed.weight
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moment)
    assert schedule.get_last_lr() == rate
    assert (counter.count, accelerator.step, optimizer.num_updates) == (7, 3, 1)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("safe", [True, False])
def test_files_have_the_expected_names(tmp_path: Path, safe: bool) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1), nn.Linear(2, 1))
    folder = accelerator.save_state(tmp_path / "one", safe_serialization=safe)
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    models = [f"{stem}.{suffix}", f"{stem}_1.{suffix}"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        ["manifest.json", "random_states_0.pkl", *models]
    )
    accelerator.load_state(folder)


def test_hooks_may_save_and_load_models_themselves(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    accelerator.prepare(nn.Linear(3, 1))

    def save(models: list[nn.Module], weights: list[dict[str, Any]], folder: str) -> None:
        assert models[0] is model
        torch.save(weights.pop(0), Path(folder, "mine.bin"))

    def load(models: list[nn.Module], folder: str) -> None:
        models.pop(0).load_state_dict(torch.load(Path(folder, "mine.bin"), weights_only=True))

    handles = accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)
    folder = accelerator.save_state(tmp_path / "one")
    assert sorted(load_file(folder / "model.safetensors")["weight"].shape) == [1, 3]
    assert "mine.bin" in (folder / "manifest.json").read_text()
    before = model.weight.clone()
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state(folder)
    assert torch.equal(model.weight, before)
    assert len(accelerator._models) == 2
    for handle in handles:
        handle.remove()
    with pytest.raises(CheckpointError, match=r"weight has the shape \(1, 3\) instead of \(1, 2\)"):
        accelerator.load_state(folder)


def test_the_error_of_a_hook_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    folder = accelerator.save_state(tmp_path / "one")

    def fail(*args: Any) -> None:
        raise KeyError("mine")

    accelerator.register_save_state_pre_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        accelerator.save_state(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    accelerator.load_state(folder)


def test_files_of_save_model_are_read_by_safetensors(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["embed.weight"], model.embed.weight)
    with pytest.raises(ConfigurationError, match="meta device"):
        accelerator.save_model(nn.Linear(1, 1, device="meta"), tmp_path)


def test_mistakes_are_named(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="no folder to save to"):
        accelerator.save_state()
    with pytest.raises(ConfigurationError, match="no folder to load from"):
        accelerator.load_state()
    with pytest.raises(ConfigurationError, match="there is no such folder"):
        accelerator.load_state(tmp_path / "nothing")
    with pytest.raises(ConfigurationError, match="world_size_policy='maybe'"):
        accelerator.load_state(tmp_path, world_size_policy="maybe")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Objects of type object cannot be saved"):
        accelerator.register_for_checkpointing(Counter(), object())
    assert accelerator._custom_objects == []


def build_counting() -> tuple[Accelerator, nn.Module, Counter]:
    accelerator, model, counter = Accelerator(cpu=True), nn.Linear(2, 1), Counter()
    accelerator.prepare(model)
    accelerator.register_for_checkpointing(counter)
    return accelerator, model, counter


def save_number(
    accelerator: Accelerator, model: nn.Module, counter: Counter, number: int, folder: Path
) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    counter.count = accelerator.step = number
    accelerator.save_state(folder)


@pytest.mark.parametrize("times", [1, 99])
def test_a_load_never_mixes_files_of_two_saves(tmp_path: Path, times: int) -> None:
    accelerator, model, counter = build_counting()
    folder, spare = tmp_path / "one", [tmp_path / f"spare{number}" for number in range(10)]
    for number, path in enumerate(spare, start=2):
        save_number(accelerator, model, counter, number, path)
    save_number(accelerator, model, counter, 1, folder)
    asked: list[str] = []

    def hook(models: list[nn.Module], place: str) -> None:
        asked.append(place)

    accelerator.register_load_state_pre_hook(hook)
    read = CheckpointReader.has

    def has(load: CheckpointReader, name: str) -> bool:
        """Let another run save after the model was read, and before the counter is."""
        if name.startswith("custom") and len(asked) <= times:
            os.rename(folder, tmp_path / f"gone{len(asked)}")
            os.rename(spare[len(asked)], folder)
        return read(load, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointReader, "has", has)
        if times == 99:
            with pytest.raises(CheckpointError, match="another save replaced it while it was read"):
                accelerator.load_state(folder)
            assert {each for parameter in model.parameters() for each in parameter.flatten().tolist()} == {
                1.0
            }
            return
        accelerator.load_state(folder)
    numbers = {each for parameter in model.parameters() for each in parameter.flatten().tolist()}
    assert numbers == {float(counter.count)} == {float(accelerator.step)} == {3.0}
    assert len(asked) == 2


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_permissions_of_any_new_file(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(3, 2)
        model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for name in ("state", "state"):  # the second takes the place of the first
            accelerator.save_state(tmp_path / name)
        accelerator.save_state(tmp_path / "torch", safe_serialization=False)
        for name, safe in (("model", True), ("bins", False)):
            accelerator.save_model(model, tmp_path / name, max_shard_size=10, safe_serialization=safe)
            accelerator.save_model(model, tmp_path / name, safe_serialization=safe)
        accelerator.save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
        accelerator.save({"a": 1}, tmp_path / "a.bin")
        disk_offload(nn.Linear(3, 2), tmp_path / "offloaded")
    finally:
        os.umask(before)
    modes = {str(path): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()}
    assert len(modes) >= 12
    assert modes == dict.fromkeys(modes, mode)


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    accelerator, *_ = build_counting()

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    accelerator.register_save_state_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        accelerator.save_state(tmp_path / "one")
    assert os.listdir(tmp_path) == []


def test_a_load_drops_the_gradients_of_the_lost_window(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, outside = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    inner = torch.optim.SGD([*model.parameters(), outside], 0.1)
    model, optimizer = accelerator.prepare(model, inner)
    accelerator.save_state(tmp_path)
    with accelerator.accumulate(model, num_items=2):
        accelerator.backward((model(torch.ones(1, 2)) * outside).sum())
    accelerator.load_state(tmp_path)
    assert all(parameter.grad is None for parameter in optimizer.parameters())
    assert accelerator.sync_gradients
    for value in (2.0, 3.0):
        with accelerator.accumulate(model):
            accelerator.backward((model(torch.full((1, 2), value)) * outside).sum())
    assert torch.equal(model.bias.grad, torch.ones(2))


def test_loaders_that_are_prepared_for_each_evaluation_are_not_kept_and_the_resume_is_the_same(
    tmp_path: Path,
) -> None:
    def start() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True)
        generator = torch.Generator().manual_seed(5)
        data = DataLoader(range(6), batch_size=2, shuffle=True, generator=generator)
        return accelerator, accelerator.prepare(data)

    def run_epoch(accelerator: Accelerator, loader: Any) -> list[Any]:
        seen = [batch.tolist() for batch in loader]
        evaluation = accelerator.prepare(DataLoader(range(4), batch_size=2, shuffle=True))
        return [*seen, sum(len(batch) for batch in evaluation)]

    accelerator, loader = start()
    other = accelerator.prepare(DataLoader(range(3), shuffle=True))  # is not read, and stays
    for _ in range(5):
        run_epoch(accelerator, loader)
    assert accelerator._dataloaders[:2] == [loader, other]
    assert len(accelerator._dataloaders) <= 3
    accelerator.save_state(tmp_path / "saved")
    assert len(list((tmp_path / "saved").glob("sampler*.bin"))) <= 3
    expected = [run_epoch(accelerator, loader) for _ in range(2)]
    accelerator.free_memory()
    resumed, loader = start()
    resumed.load_state(tmp_path / "saved")
    assert [run_epoch(resumed, loader) for _ in range(2)] == expected


def test_a_loader_keeps_its_number_when_an_earlier_one_is_dropped(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    first = accelerator.prepare(DataLoader([1, 2]))
    list(first)
    del first
    second = accelerator.prepare(DataLoader([1, 2], shuffle=True))
    assert accelerator._dataloaders == [second]
    list(second)
    accelerator.save_state(tmp_path)
    assert [path.name for path in tmp_path.glob("sampler*.bin")] == ["sampler_1.bin"]
