"""Saves in the background, and the memory that they use."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch

from accelerate import Accelerator, PartialState
from accelerate.base import CheckpointError, environ
from accelerate.checkpointing import BackgroundSave, Payload, StagingMemory
from accelerate.utils import ProjectConfiguration

pytestmark = pytest.mark.usefixtures("states")


@pytest.mark.parametrize(("value", "seconds"), [(None, 60.0), ("7", 7.0), ("0", 1800.0)])
def test_the_timeout_of_consensus_is_the_hang_timeout(value: str | None, seconds: float) -> None:
    with environ.patch_environment(**({} if value is None else {"accelerate_hang_timeout": value})):
        assert Accelerator(cpu=True)._runtime.checkpoints.timeout == seconds


def test_taken_numbers_are_skipped(tmp_path: object) -> None:
    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project)
    assert accelerator.save_state().name == "checkpoint_0"
    project.iteration = 0
    assert accelerator.save_state().name == "checkpoint_1"
    assert accelerator.save_iteration == 2


def test_a_background_failure_is_raised_once(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.checkpointing import saving

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    project = ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, async_save=True
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    monkeypatch.setattr(saving, "seal", full)
    folder = accelerator.save_state()
    with pytest.raises(CheckpointError, match="No space left"):
        accelerator.wait_for_checkpoint()
    accelerator.wait_for_checkpoint()
    assert not folder.exists()
    monkeypatch.undo()
    assert accelerator.save_state().parent.exists()
    accelerator.wait_for_checkpoint()


def test_a_background_job_does_not_block_the_caller() -> None:
    background, go, done = BackgroundSave(), threading.Event(), []
    background.wait()
    background.start(lambda: done.append(go.wait(5)))
    assert done == []
    go.set()
    background.wait()
    assert done == [True]


def test_the_next_job_waits_for_the_one_before() -> None:
    background, go, order = BackgroundSave(), threading.Event(), []
    background.start(lambda: (go.wait(5), order.append("first")))
    threading.Timer(0.05, go.set).start()
    background.start(lambda: order.append("second"))
    background.wait()
    assert order == ["first", "second"]


@pytest.mark.usefixtures("states")
def test_an_error_is_raised_once(caplog: pytest.LogCaptureFixture) -> None:
    PartialState(cpu=True)
    background = BackgroundSave()

    def fail() -> None:
        raise OSError(28, "No space left on device")

    background.start(fail)
    with pytest.raises(OSError, match="No space left"):
        background.start(lambda: None)
    background.wait()
    background.start(fail)
    with pytest.raises(OSError, match="No space left"):
        background.wait()
    background.wait()
    assert "A checkpoint was not saved" in caplog.text


def test_staged_copies_do_not_change_with_the_originals() -> None:
    weight = torch.ones(3)
    state = {"weight": weight, "same": weight, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "step": 3}
    (staged,) = StagingMemory().stage([Payload("x", state)])
    weight.zero_()
    state["groups"][0]["lr"] = 9.0  # type: ignore[index]
    assert staged.content["weight"].tolist() == [1.0, 1.0, 1.0]
    assert staged.content["weight"] is staged.content["same"]
    assert staged.content["groups"] == [{"lr": 0.1, "betas": (0.9, 0.99)}]


def test_memory_is_used_again() -> None:
    area = StagingMemory()
    first = area.stage([Payload("x", {"weight": torch.ones(3)})])[0].content["weight"]
    again = area.stage([Payload("x", {"weight": torch.zeros(3)})])[0].content["weight"]
    other = area.stage([Payload("x", {"weight": torch.zeros(5)})])[0].content["weight"]
    assert again.data_ptr() == first.data_ptr()
    assert other.shape == (5,)


def test_the_tensors_of_a_dtype_are_in_one_buffer_and_are_written_alone(tmp_path: Path) -> None:
    state = {"a": torch.ones(1000), "b": torch.zeros(3), "c": torch.ones(2, dtype=torch.int64)}
    (staged,) = StagingMemory().stage([Payload("x", state)])
    a, b, _ = staged.content.values()
    assert b.data_ptr() == a.data_ptr() + a.nbytes
    torch.save(b, tmp_path / "b")
    assert (tmp_path / "b").stat().st_size < a.nbytes


def test_strided_and_sparse_tensors() -> None:
    tensors = {"t": torch.arange(6.0).view(2, 3).t(), "s": torch.eye(2).to_sparse()}
    (staged,) = StagingMemory().stage([Payload("x", tensors)])
    assert torch.equal(staged.content["t"], tensors["t"])
    assert torch.equal(staged.content["s"].to_dense(), torch.eye(2))


class Notes:
    """An object with a state that changes."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines


def test_mappings_keep_their_kind_and_other_objects_are_copied() -> None:
    state = {"count": Counter("aab"), "order": OrderedDict(b=1, a=2), "notes": Notes(["first"])}
    (staged,) = StagingMemory().stage([Payload("x", state)])
    state["notes"].lines.append("second")  # type: ignore[attr-defined]
    assert type(staged.content["count"]) is Counter
    assert staged.content["count"] == {"a": 2, "b": 1}
    assert type(staged.content["order"]) is OrderedDict
    assert list(staged.content["order"].items()) == [("b", 1), ("a", 2)]
    assert staged.content["notes"].lines == ["first"]


def test_tensors_of_one_shape_have_memory_of_their_own_in_each_save() -> None:
    area = StagingMemory()
    for offset in (0.0, 10.0):
        state = {"a": torch.tensor([offset + 1]), "b": torch.tensor([offset + 2])}
        staged = area.stage([Payload("x", state), Payload("y", state["a"] + 2)])
        assert staged[0].content["a"].item() == offset + 1
        assert staged[0].content["b"].item() == offset + 2
        assert staged[1].content.item() == offset + 3
