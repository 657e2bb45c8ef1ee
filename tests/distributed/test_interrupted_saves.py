"""Saves during the end of the script, after an error, and by two runs in the same folder."""

from __future__ import annotations

import os
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.base import CheckpointError
from accelerate.checkpointing import BackgroundSave, parts, retention
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration

Run = Callable[..., list[Any]]
JOBS, SAVES = 3, 12


def build(limit: int | None = None) -> tuple[Accelerator, nn.Module]:
    project = ProjectConfiguration("project", automatic_checkpoint_naming=True, total_limit=limit)
    accelerator = Accelerator(project_config=project)
    return accelerator, accelerator.prepare(nn.Linear(64, 64))


def leave(how: str, folder: str) -> None:
    """End the script in some way while a checkpoint is being written."""
    os.chdir(folder)
    accelerator, _ = build()
    write = parts.write_whole_tensors

    def slowly(*args: Any) -> None:
        time.sleep(0.5)
        write(*args)

    def run_late(self: BackgroundSave, job: Callable[[], Any]) -> None:
        time.sleep(0.5)  # the script has ended by then
        run(self, job)

    parts.write_whole_tensors = slowly
    run, BackgroundSave._run = BackgroundSave._run, run_late  # type: ignore[method-assign]
    accelerator.save_state(blocking=False)
    if how == "error":
        raise KeyError("mine")
    if how == "error of one" and accelerator.process_index == 1:
        raise KeyError("mine")
    if how == "exit":
        raise SystemExit(3)
    if how == "end of training":
        accelerator.end_training()


SLOWLY = [("error", 1), ("exit", 1), ("end", 2), ("end of training", 2), ("error", 2)]


@pytest.mark.parametrize(
    ("how", "processes"),
    [("end", 1), ("error of one", 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOWLY)],
)
def test_the_end_of_the_script_waits_for_the_commit(
    end: Callable[..., Any], tmp_path: Path, how: str, processes: int
) -> None:
    end(leave, how, str(tmp_path), processes=processes)
    (checkpoint,) = retention.survey(tmp_path / "project" / "checkpoints")
    assert retention.inspect(checkpoint.path, deep=True)[1] == ""


def save_with_two() -> Any:
    """Two accelerators of one run save in the background, one right behind the other."""
    first, _ = build()
    second = Accelerator(project_config=ProjectConfiguration("other", automatic_checkpoint_naming=True))
    other = second.prepare(nn.Linear(3, 3))
    for _ in range(4):
        first.save_state(blocking=False)
        second.save_state(blocking=False)
    second.wait_for_checkpoint()
    first.load_state()
    second.load_state()
    first.end_training()
    folders = [Path(name) / "checkpoints" for name in ("project", "other")]
    return [len(retention.survey(folder)) for folder in folders], len(list(other.parameters()))


def test_accelerators_of_one_run_take_turns(run: Run) -> None:
    assert run(save_with_two) == [([4, 4], 2)] * 2


def compete(jobs: int) -> list[int]:
    """Let several independent runs save into one folder; return how many saves succeeded."""
    warnings.simplefilter("ignore")
    build()[0].save_state()
    for cls in (AcceleratorState, PartialState, GradientState):
        cls._reset_state()
    pids = [fork(save_often) for _ in range(jobs)]
    saved = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    accelerator, model = build()
    accelerator.load_state()
    assert len(set(model.weight.flatten().tolist())) == 1
    accelerator.save_state()
    left = os.listdir("project/checkpoints")
    assert not [name for name in left if name.startswith(".")], left
    for checkpoint in retention.survey(Path("project/checkpoints")):
        read, fault = retention.inspect(checkpoint.path, deep=True)
        assert fault == ""
        assert read is not None
        assert read.iteration == checkpoint.number
    return saved


def fork(job: Callable[[], int]) -> int:
    if pid := os.fork():
        return pid
    code = 99
    try:
        code = job()
    except BaseException:
        traceback.print_exc()
    os._exit(code)


def save_often() -> int:
    accelerator, model = build(limit=2)
    saved = 0
    for _ in range(SAVES):
        with torch.no_grad():
            model.weight.fill_(os.getpid())
        try:
            accelerator.save_state()
        except CheckpointError as error:
            print(error)
        else:
            saved += 1
    return saved


def test_runs_that_save_to_one_folder_do_not_damage_it(run: Run) -> None:
    (saved,) = run(compete, JOBS, processes=1)
    assert all(count <= SAVES for count in saved), "a run ended with another error"
    assert sum(saved) >= SAVES
