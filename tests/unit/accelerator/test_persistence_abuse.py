"""Saving and loading with damaged, hostile and unusual files, and after mistakes of the user."""

from __future__ import annotations

import json
import os
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stand_ins.objects import CreatesFolder
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.base import CheckpointError, ConfigurationError
from accelerate.checkpointing import Manifest, manifest, seal
from accelerate.utils import ProjectConfiguration

pytestmark = pytest.mark.usefixtures("states")


class Holder:
    """An object of the user's own with any state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def build(project: Path | None = None, **choices: Any) -> tuple[Accelerator, nn.Module]:
    config = (
        ProjectConfiguration(str(project), automatic_checkpoint_naming=True, **choices) if project else None
    )
    accelerator = Accelerator(cpu=True, project_config=config)
    model = nn.Linear(2, 1)
    schedule: Any
    model, optimizer, schedule, _ = accelerator.prepare(
        model,
        optimizer := torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        torch.optim.lr_scheduler.StepLR(optimizer, 1),
        DataLoader(range(4)),
    )
    accelerator.register_for_checkpointing(Holder(1))
    return accelerator, model


def swap(folder: Path, name: str, content: Any, *, verified: bool) -> None:
    """Put another file in the place of one, so that checksums fit, or without any."""
    torch.save(content, folder / name)
    read = manifest.read(folder)
    os.unlink(folder / manifest.NAME)
    if verified:
        Manifest({each: seal(folder, each) for each in read.files}, read.world_size).write(folder)


FILES = ("optimizer.bin", "scheduler.bin", "sampler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl")


UNVERIFIED = [(name, False) for name in FILES if name != "sampler.bin"]  # that one is left alone


@pytest.mark.parametrize(("name", "verified"), [*((name, True) for name in FILES), *UNVERIFIED])
def test_a_malicious_file_runs_no_code_and_changes_nothing(tmp_path: Path, name: str, verified: bool) -> None:
    accelerator, model = build()
    folder = accelerator.save_state(tmp_path / "one")
    swap(folder, name, {"a": CreatesFolder(tmp_path / "trap")}, verified=verified)
    with torch.no_grad():
        model.weight.fill_(7)
    with pytest.raises(CheckpointError, match=rf"{name} holds a `\w+\.mkdir`.*weights_only"):
        accelerator.load_state(folder)
    assert not (tmp_path / "trap").exists()
    assert bool((model.weight == 7).all())


def test_a_malicious_sampler_file_of_other_software_is_not_read(tmp_path: Path) -> None:
    accelerator, _ = build()
    folder = accelerator.save_state(tmp_path / "one")
    swap(folder, "sampler.bin", {"a": CreatesFolder(tmp_path / "trap")}, verified=False)
    accelerator.load_state(folder)
    assert not (tmp_path / "trap").exists()


def test_a_checkpoint_of_a_later_format_is_skipped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, model = build(tmp_path)
    accelerator.save_state()
    before = model.weight.clone()
    newest = accelerator.save_state()
    content = json.loads((newest / manifest.NAME).read_text())
    (newest / manifest.NAME).write_text(json.dumps({**content, "format": 2}))
    with torch.no_grad():
        model.weight.zero_()
    accelerator.load_state()
    assert torch.equal(model.weight, before)
    assert "checkpoint_1: manifest.json has format 2" in caplog.text
    assert "load it with the version of accelerate that saved it" in caplog.text


def test_a_file_without_its_registered_object_is_refused(tmp_path: Path) -> None:
    accelerator, _ = build()
    accelerator.register_for_checkpointing(Holder(2))
    folder = accelerator.save_state(tmp_path / "one")
    accelerator._custom_objects.pop()
    with pytest.raises(RuntimeError, match=r"holds custom_checkpoint_1\.pkl, and .* 1 objects \(Holder\)"):
        accelerator.load_state(folder)


@pytest.mark.parametrize("blocking", [True, False])
def test_states_of_plain_types_are_restored(tmp_path: Path, blocking: bool) -> None:
    accelerator = Accelerator(cpu=True)
    state = {
        "huge": {index: [float(index)] for index in range(20_000)},
        "counts": Counter("abracadabra"),
        "ordered": OrderedDict(b=torch.ones(2), a=()),
        1: {"set": {1, 2}, "none": None, "text": "ü", "bytes": b"\0", "complex": 1j, "dtype": torch.float16},
    }
    first, second = Holder(state), Holder([torch.arange(3)])
    accelerator.register_for_checkpointing(first, second)
    accelerator.save_state(tmp_path / "one", blocking=blocking)
    accelerator.wait_for_checkpoint()
    first.state = second.state = None
    accelerator.load_state(tmp_path / "one")
    assert second.state[0].tolist() == [0, 1, 2]
    assert first.state["counts"] == Counter("abracadabra")
    assert first.state["huge"] == state["huge"]
    assert first.state[1] == state[1]
    assert list(first.state["ordered"]) == ["b", "a"]


def test_a_save_within_an_accumulation_window_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))
    with accelerator.accumulate(model):
        folder = accelerator.save_state(tmp_path / "one")
    assert "in the middle of an accumulation window" in caplog.text
    assert manifest.read(folder).run["sync_gradients"] is False
    with accelerator.no_sync(model):
        accelerator.save_state(folder)
    accelerator.load_state(folder)


def test_the_home_folder_is_expanded_for_saves_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    accelerator, _ = build()
    accelerator.save_state("~/one")
    assert (tmp_path / "one" / manifest.NAME).is_file()
    accelerator.load_state("~/one")
    numbered, _ = build(Path("~/project"))
    assert numbered.save_state() == tmp_path / "project" / "checkpoints" / "checkpoint_0"
    numbered.load_state()


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no folder to save to"):
        Accelerator(cpu=True).save_state("")


def test_a_project_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    accelerator, _ = build(tmp_path / "link", total_limit=1)
    accelerator.save_state()
    assert os.listdir(tmp_path / "real" / "checkpoints") == ["checkpoint_0"]
    accelerator.load_state()


def test_a_folder_that_cannot_be_written_is_named() -> None:
    accelerator, _ = build()
    with pytest.raises(CheckpointError, match="/proc/one cannot be written: .*Choose a folder"):
        accelerator.save_state("/proc/one")


def test_a_model_without_weights_has_a_checkpoint_too(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Identity())
    accelerator.load_state(accelerator.save_state(tmp_path / "one"))


def test_weights_without_values_are_an_error_and_leave_nothing(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare_model(nn.Linear(1, 1, device="meta"), device_placement=False)
    with pytest.raises(ConfigurationError, match="meta device"):
        accelerator.save_state(tmp_path / "one")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["a\nb", "a\tb", "\x01", "a\x7f", "\u202eabc", "a\u2028b", "x" * 255, "line\n/below"]
)
def test_a_checkpoint_with_an_unusual_name_is_saved_replaced_and_loaded(name: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(2, 1))
    for value in (1.0, 2.0):
        nn.init.constant_(model.weight, value)
        accelerator.save_state(tmp_path / name)
    nn.init.zeros_(model.weight)
    accelerator.load_state(tmp_path / name)
    assert model.weight.tolist() == [[2.0, 2.0]]
    assert os.listdir((tmp_path / name).parent) == [Path(name).name]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a\0b", "it contains a NUL character"),
        ("a\ud800b", "which has no encoding"),
        ("new/" + "x" * 256, "a part of it has 256 bytes, and file systems take 255"),
        ("new/" + "ü" * 128, "a part of it has 256 bytes, and file systems take 255"),
    ],
)
def test_a_path_that_no_file_system_has_is_refused_before_anything_is_written(
    name: str, reason: str, tmp_path: Path
) -> None:
    path = f"{tmp_path}/{name}"
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match=f"(?s)output_dir=.*{reason}"):
        accelerator.save_state(path)
    with pytest.raises(ConfigurationError, match=f"(?s)save_directory=.*{reason}"):
        accelerator.save_model(nn.Linear(2, 1), path)
    with pytest.raises(ConfigurationError, match=f"(?s)input_dir=.*{reason}"):
        accelerator.load_state(path)
    for argument in ("project_dir", "logging_dir"):
        with pytest.raises(ConfigurationError, match=f"(?s){argument}=.*{reason}"):
            ProjectConfiguration(**{argument: path})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=f"(?s)project_dir=.*{reason}"):
        Accelerator(cpu=True, project_dir=path)
    assert os.listdir(tmp_path) == []
