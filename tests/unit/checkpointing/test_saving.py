"""A checkpoint appears when all files are written; errors leave what was there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.base import CheckpointError
from accelerate.checkpointing import (
    Payload,
    Request,
    Saver,
    manifest,
    retention,
    saved_lines,
    saving,
    temporary,
)
from accelerate.checkpointing.folder import name_of
from accelerate.state import Consensus, services
from accelerate.weights import read_torch


def put(content: Any, path: Path) -> None:
    path.write_text(content)


def request(target: Path, **choices: Any) -> Request:
    return Request(target, timeout=1.0, **choices)


def save(target: Path, text: str = "x", **choices: Any) -> Path:
    saver = begin(request(target, **choices))
    saver.write([Payload("a.bin", text, put), Payload("deep/b.bin", text, put)])
    return saver.commit()


def begin(request: Request) -> Saver:
    saver = Saver(Consensus())
    saver.begin(request)
    return saver


def test_a_checkpoint_exists_after_all_files_are_written(tmp_path: Path) -> None:
    target = tmp_path / "new" / "one"
    saver = begin(request(target, step=3, epoch=2, iteration=5, run={"num_steps": 4}))
    assert not target.exists()
    (saver.staging.folder / "hook.txt").write_text("by a hook")
    saver.write([Payload("a.bin", "x", put)])
    assert not target.exists()
    assert saver.commit() == target
    read = manifest.read(target)
    assert sorted(read.files) == ["a.bin", "hook.txt"]
    assert (read.step, read.epoch, read.iteration, read.world_size) == (3, 2, 5, 1)
    assert read.run == {"num_steps": 4, manifest.SAVE: manifest.checksum_of(saver.staging.name.encode())}
    assert manifest.problems(target, read, deep=True) == []
    assert os.listdir(target.parent) == ["one"]


def fail(error: Exception) -> Callable[[Any, Path], None]:
    def write(content: Any, path: Path) -> None:
        path.write_text("a part")
        raise error

    return write


@pytest.mark.parametrize(
    ("error", "text"),
    [(OSError(28, "No space left"), r"No space left\)"), (KeyError("x"), r"KeyError: 'x'\)")],
)
def test_a_failed_write_keeps_the_old_checkpoint(tmp_path: Path, error: Exception, text: str) -> None:
    target = save(tmp_path / "one", "old")
    saver = begin(request(target))
    saver.write([Payload("a.bin", "new", put), Payload("b.bin", "new", fail(error))])
    with pytest.raises(CheckpointError, match=rf"process 0: .*{text}. Fix the cause"):
        saver.commit()
    assert (target / "a.bin").read_text() == "old"
    assert os.listdir(tmp_path) == ["one"]


def test_an_aborted_save_leaves_no_files(tmp_path: Path) -> None:
    begin(request(tmp_path / "one")).abort(KeyError("hook"))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file cannot be written: .*it is a file.*Choose a folder"):
        begin(request(tmp_path / "file"))
    with pytest.raises(CheckpointError, match="cannot be written"):
        begin(request(Path("/proc/nothing/one")))


class WatchedConsensus(Consensus):
    """Verifies that the files do not change while the ranks decide."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.decisions = 0

    def decide(self, operation: str, value: Any, reduce_fn: Any, timeout: float) -> Any:
        before = sorted(self.folder.rglob("*"))
        decision = super().decide(operation, value, reduce_fn, timeout)
        assert sorted(self.folder.rglob("*")) == before
        self.decisions += 1
        return decision


def test_the_consensus_decides_and_does_not_access_the_disk(tmp_path: Path) -> None:
    consensus = WatchedConsensus(tmp_path)
    saver = Saver(consensus)
    saver.begin(request(tmp_path / "one"))
    saver.write([Payload("a.bin", "x", put)])
    saver.commit()
    assert consensus.decisions == 4
    assert os.listdir(tmp_path) == ["one"]


class FailingConsensus(Consensus):
    """Fails after the folder was created, as if another rank did not arrive."""

    def decide(self, operation: str, value: Any, reduce_fn: Any, timeout: float) -> Any:
        raise CheckpointError("not together")


def test_a_folder_that_ranks_do_not_agree_on_is_removed(tmp_path: Path) -> None:
    before = set(services.of_process(temporary._FoldersInUse))
    with pytest.raises(CheckpointError, match="not together"):
        Saver(FailingConsensus()).begin(request(tmp_path / "one"))
    assert os.listdir(tmp_path) == []
    assert services.of_process(temporary._FoldersInUse) == before


@pytest.mark.usefixtures("states")
def test_old_checkpoints_are_removed_after_the_new_one_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Accelerator(cpu=True)
    for number in (0, 1):
        save(tmp_path / name_of(number), keep=1)
    assert os.listdir(tmp_path) == ["checkpoint_1"]

    def refuse(path: Path) -> None:
        assert (tmp_path / "checkpoint_2" / manifest.NAME).is_file()
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(retention.folder, "remove", refuse)
    save(tmp_path / "checkpoint_2", keep=1)
    assert "checkpoint_2 is saved, and older checkpoints could not be deleted" in caplog.text
    monkeypatch.undo()
    save(tmp_path / "checkpoint_3", keep=1)
    assert os.listdir(tmp_path) == ["checkpoint_3"]


FOLDER = Path("runs/a")


def test_each_file_has_its_line() -> None:
    names = [
        "custom_checkpoint_1.pkl",
        "custom_checkpoint_0.pkl",
        "random_states_0.pkl",
        "scaler.pt",
        "sampler.bin",
        "sampler_2.bin",
        "scheduler.bin",
        "optimizer.bin",
        "optimizer_1.bin",
        "model_1.safetensors",
        "pytorch_model.bin",
        "stream_0_0.bin",
    ]
    assert saved_lines(FOLDER, names, ["Counter", "Average"]) == [
        "Model weights saved in runs/a/model_1.safetensors",
        "Model weights saved in runs/a/pytorch_model.bin",
        "Optimizer state saved in runs/a/optimizer.bin",
        "Optimizer state saved in runs/a/optimizer_1.bin",
        "Scheduler state saved in runs/a/scheduler.bin",
        "Sampler state for dataloader 0 saved in runs/a/sampler.bin",
        "Sampler state for dataloader 2 saved in runs/a/sampler_2.bin",
        "Gradient scaler state saved in runs/a/scaler.pt",
        "Random states saved in runs/a/random_states_0.pkl",
        "Saving the state of Average to runs/a/custom_checkpoint_1.pkl",
        "Saving the state of Counter to runs/a/custom_checkpoint_0.pkl",
    ]


def test_a_folder_of_shards_has_one_line() -> None:
    names = ["pytorch_model_fsdp_0/a", "pytorch_model_fsdp_0/b", "optimizer_0/a"]
    assert saved_lines(FOLDER, names, []) == [
        "Model weights saved in runs/a/pytorch_model_fsdp_0",
        "Optimizer state saved in runs/a/optimizer_0",
    ]


def test_a_sparse_tensor_is_saved_with_a_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "is_shown", lambda: True)
    saver = begin(request(tmp_path / "one"))
    saver.write([Payload("a.bin", {"a": torch.eye(2).to_sparse()})])
    saver.commit()
    assert torch.equal(read_torch(tmp_path / "one" / "a.bin")["a"].to_dense(), torch.eye(2))
