"""Trackers and memory over two processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

MIB = 2**20


def log_on_all(folder: str) -> tuple[str, str, list[str]]:
    from accelerate import Accelerator

    accelerator = Accelerator(log_with="tensorboard", project_dir=folder)
    accelerator.init_trackers("run", config={"lr": 0.1})
    accelerator.log({"loss": 1.0}, step=1)
    tracker = accelerator.get_tracker("tensorboard")
    tracker.writer.add_scalar("mine", 1.0)
    accelerator.end_training()
    kinds = [type(each).__name__ for each in accelerator.trackers]
    return type(tracker).__name__, type(tracker.tracker).__name__, kinds


def measure_a_block() -> tuple[int, list[int]]:
    from accelerate import Accelerator

    accelerator = Accelerator()
    with accelerator.peak_memory() as used:
        if accelerator.process_index == 1:
            np.ones(300 * MIB // 8)
    return used.peak, used.peaks


def test_the_first_process_alone_writes(run: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is an optional package")
    first, second = run(log_on_all, str(tmp_path))
    assert first == ("TensorBoardTracker", "SummaryWriter", ["TensorBoardTracker"])
    assert second == ("TensorBoardTracker", "Silence", ["TensorBoardTracker"])
    # One file of the run, and one of its hyperparameters.
    assert {path.parent.parent.name for path in tmp_path.rglob("events.out.*")} <= {"run", tmp_path.name}
    writers = {path.name.split(".")[-2] for path in (tmp_path / "run").glob("events.out.*")}
    assert len(writers) == 1


@pytest.mark.cpu_only
def test_each_rank_has_its_own_peak(run: Callable[..., Any]) -> None:
    (first, peaks), (second, same) = run(measure_a_block)
    assert peaks == same == [first, second]
    assert second - first > 200 * MIB
