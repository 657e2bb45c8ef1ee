"""Checkpoints of the original package: loaded and resumed with the same numbers."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.base import CheckpointError
from accelerate.checkpointing import capture_generators
from accelerate.utils import (
    DataLoaderConfiguration,
    ProjectConfiguration,
    load_fsdp_model,
    load_fsdp_optimizer,
)

Run = Callable[..., list[Any]]

SAMPLES = Path(__file__).parents[1] / "samples" / "original_checkpoint"
UNVERIFIED = "holds no manifest.json: other software wrote it"

pytestmark = pytest.mark.usefixtures("states")


def build(**options: Any) -> Any:
    """The run that wrote the folders, with other weights and random numbers."""
    found = importlib.util.spec_from_file_location("write_original_checkpoint", SAMPLES / "write.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    return module.Run(Accelerator(dataloader_config=config, **options), seed=99)


def facts(name: str, rank: int = 0) -> Any:
    return json.loads((SAMPLES / f"{name}_{rank}.json").read_text())


def assert_same(found: Any, expected: Any) -> None:
    """Compare numbers to the last digits of float32, which depend on the processor that computed them."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the folder that one process wrote."""
    return Path(shutil.copytree(SAMPLES / "one_process", tmp_path / "checkpoint"))


def test_a_checkpoint_of_one_process_resumes(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = build()
    run.accelerator.load_state(folder)
    assert UNVERIFIED in caplog.text
    assert_same(run.resume(), facts("one_process"))


def resume(folder: str) -> Any:
    run = build()
    run.accelerator.load_state(folder)
    return run.resume()


def test_a_checkpoint_of_two_processes_resumes(run: Run) -> None:
    found = run(resume, str(SAMPLES / "two_processes"), processes=2)
    assert_same(found, [facts("two_processes", rank) for rank in range(2)])


def test_one_process_resumes_a_checkpoint_of_two(caplog: pytest.LogCaptureFixture) -> None:
    run = build()
    run.accelerator.load_state(SAMPLES / "two_processes")
    assert "was saved by 2 processes, and this run has 1" in caplog.text
    assert run.count.steps == 2
    assert run.scheduler.scheduler.last_epoch == 4
    with pytest.raises(CheckpointError, match="was saved by 2 processes"):
        run.accelerator.load_state(SAMPLES / "two_processes", world_size_policy="strict")


def count_after(folder: str) -> Any:
    run = build()
    run.accelerator.load_state(folder)
    return run.count.steps, run.accelerator.unwrap_model(run.second).weight.tolist(), torch.rand(1).item()


def test_two_processes_resume_a_checkpoint_of_one(run: Run) -> None:
    expected = torch.load(SAMPLES / "one_process" / "pytorch_model_1.bin")["weight"].tolist()
    first, second = run(count_after, str(SAMPLES / "one_process"), processes=2)
    assert first[:2] == second[:2] == (2, expected)
    assert first[2] != second[2], "each has random numbers of its own"


def test_an_original_checkpoint_among_numbered_ones_is_loaded_only_by_its_path(
    folder: Path, tmp_path: Path
) -> None:
    """Among numbered checkpoints one that cannot be verified is not the newest."""
    (tmp_path / "checkpoints").mkdir()
    folder.rename(tmp_path / "checkpoints" / "checkpoint_3")
    run = build(project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True))
    with pytest.raises(CheckpointError, match=r"other software wrote is loaded by its name: load_state\("):
        run.accelerator.load_state()
    run.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_3")
    assert run.accelerator.project_configuration.iteration == 4


def test_a_scaler_missing_in_the_checkpoint_keeps_its_initial_state(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """On the CPU the original has none in fp16."""
    run = build(mixed_precision="fp16")
    before = run.accelerator.scaler.get_scale()
    run.accelerator.load_state(folder)
    assert "holds no scaler.pt: this GradScaler keeps its initial state" in caplog.text
    assert run.accelerator.scaler.get_scale() == before
    assert run.count.steps == 2


class Sampler:
    """Some versions pickled the sampler itself."""


@pytest.mark.parametrize(
    ("name", "content"),
    [("sampler.bin", Sampler()), ("sampler.bin", {"epoch": 3}), ("dl_state_dict.bin", {"_num_yielded": 3})],
)
def test_loader_positions_of_unknown_format_give_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, name: str, content: Any
) -> None:
    torch.save(content, folder / name)
    run = build()
    run.accelerator.load_state(folder)
    assert f"{name} stores the order and position of a loader in an unknown format" in caplog.text
    assert_same(run.resume(), facts("one_process"))
    assert len(list(run.loader)) == 6


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


def replace(path: Path) -> None:
    torch.save({"x": Sampler()}, path)


@pytest.mark.parametrize("damage", [Path.unlink, cut, replace])
@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model_1.bin",
        "optimizer.bin",
        "scheduler.bin",
        "custom_checkpoint_0.pkl",
        "random_states_0.pkl",
    ],
)
def test_missing_and_damaged_files_are_named(folder: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(folder / name)
    run = build()
    before = {key: value.clone() for key, value in run.first.state_dict().items()}
    said = "model_1" if name.startswith("pytorch_model") and damage is Path.unlink else name
    with pytest.raises(CheckpointError, match=said):
        run.accelerator.load_state(folder)
    assert all(torch.equal(value, before[key]) for key, value in run.first.state_dict().items())
    assert run.count.steps == 0


SHARDS = Path(__file__).parents[1] / "samples" / "original_shards"


def original() -> tuple[dict[str, Any], dict[Any, Any]]:
    """Weights and states of the optimizer, as the run that wrote the shards had them."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    states = optimizer.state_dict()["state"]
    return model.state_dict(), {(i, key): states[i][key] for i in states for key in states[i]}


def load_shards(kind: str, version: int | None, copy: str) -> Any:
    """What the first process holds after it has loaded one object at a time, and a folder of a whole run."""
    plugin = None if version is None else FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = Accelerator(fsdp_plugin=plugin)
    model: Any = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1.0))
    accelerator.backward(model(torch.ones(2, 6)).square().sum())
    optimizer.step()
    form = FullyShardedDataParallelPlugin(fsdp_version=2)
    found = []
    strategy = accelerator._runtime.strategy.state
    for run in (False, True):
        if run:
            optimizer.step()
            rank = accelerator.process_index  # a folder of a whole run has these, too
            torch.save({"step": 0, **capture_generators()}, f"{copy}/random_states_{rank}.pkl")
            accelerator.wait_for_everyone()
            accelerator.load_state(copy)
        else:
            load_fsdp_model(form, accelerator, model, SHARDS / kind)
            load_fsdp_optimizer(form, accelerator, optimizer, model, SHARDS / kind)
        (owner,) = strategy.optimizer_owners([optimizer], gather=True)
        states = owner.state_dict()["state"]
        named = {(i, key): states[i][key].clone() for i in states for key in states[i]}
        weights = {name: value.clone() for name, value in strategy.state_dict(model, unwrap=True).items()}
        found.append((weights, named, optimizer.param_groups[0]["lr"]))
    return found


KINDS = ("fsdp1", "fsdp2", "whole")


def check_shards(found: Any) -> None:
    weights, states = original()
    for own_weights, own_states, lr in found:
        assert lr == 0.01
        for wanted, own in ((weights, own_weights), (states, own_states)):
            assert set(own) == set(wanted)
            for name, tensor in wanted.items():
                torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_loads_shards(kind: str, tmp_path: Path) -> None:
    copy = shutil.copytree(SHARDS / kind, tmp_path / "copy")
    check_shards(load_shards(kind, None, str(copy)))


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_load_shards(run: Run, kind: str, version: int, tmp_path: Path) -> None:
    copy = shutil.copytree(SHARDS / kind, tmp_path / "copy")
    check_shards(run(load_shards, kind, version, str(copy))[0])
