"""The records of a run of several ranks: one folder of the user, and nothing in that of the project."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accelerate import Accelerator
from accelerate.accelerator.recording import agree_on_run_id
from accelerate.base import environ
from accelerate.logging import get_logger
from accelerate.monitoring import RecordThread, Start, find_records, find_runs
from accelerate.state import services
from accelerate.utils import ProjectConfiguration

logger = get_logger(__name__)


def train_in_a_project(folder: str) -> str:
    """Train with a checkpoint, a tracker and a warning, and return the name of the folder of the records."""
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=project, log_with="tensorboard")
    accelerator.init_trackers("run", config={"lr": 0.1})
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(5):
        loss = model(torch.ones(2, 4)).sum()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": loss.item()}, step=step)
    accelerator.save_state()
    logger.warning("the learning rate is large")
    accelerator.end_training()
    thread = services.find(RecordThread)
    assert thread is not None
    assert thread.folder is not None
    return thread.folder.name


def starts_of(folder: Path) -> list[Start]:
    return [start for records in find_records(folder) for start in records if isinstance(start, Start)]


def test_a_run_writes_only_the_files_of_the_script_to_its_project(run, tmp_path: Path) -> None:
    project = tmp_path / "project"
    names = [run(train_in_a_project, str(project), processes=2) for _ in range(2)]
    for ranks in names:
        assert ranks[0] == ranks[1], "the ranks of a run have one folder"
    assert names[0] != names[1], "each run has its own folder"
    assert sorted(path.name for path in find_runs(project)) == sorted({name for (name, _) in names})
    assert [start.rank for start in starts_of(project)] == [0, 1]
    assert sorted(path.name for path in project.iterdir()) == ["checkpoints", "run"]
    assert [path.name for path in sorted((project / "checkpoints").iterdir())] == [
        "checkpoint_0",
        "checkpoint_1",
    ]
    for path in project.glob("checkpoints/**/*.json"):
        text = path.read_text(encoding="utf-8")
        assert socket.gethostname() not in text, path
        assert sys.argv[0] not in text, path
    logged = {path.name.partition(".")[0] for path in project.glob("run/**/*") if path.is_file()}
    assert logged == {"events", "hparams"}, "the files of TensorBoard"


def agree_as_two_nodes(local_size: int) -> str | None:
    """Return the identifier of a run whose launchers have given each rank another one."""
    accelerator = Accelerator(cpu=True)
    state = accelerator.state
    topology = replace(state.topology, local_size=local_size)
    view: Any = SimpleNamespace(topology=topology, process_index=state.process_index)
    own = {"ACCELERATE_RUN_ID": f"20260102-03040{state.process_index}-0123abcd"}
    run_id = agree_on_run_id(view, own)
    accelerator.wait_for_everyone()  # rank 0 has the store
    return run_id


def test_the_ranks_of_several_nodes_use_the_identifier_of_rank_0(run) -> None:
    assert run(agree_as_two_nodes, 1, processes=2) == ["20260102-030400-0123abcd"] * 2
    assert run(agree_as_two_nodes, 2, processes=2)[1] == "20260102-030401-0123abcd"


SCRIPT = """
import sys, time
import torch
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, project_dir=sys.argv[1])
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
for step in range(3):
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
import os
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and accelerator.process_index == 1:
    raise ValueError("broken batch")
"""


@pytest.mark.slow
def test_restarts_append_to_the_records_of_a_launch_and_nothing_is_printed_at_the_end(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    project = tmp_path / "project"
    options = ["--cpu", "--num_processes", "2", "--max_restarts", "1"]
    with environ.detached_environment() as variables:
        command = [sys.executable, "-m", "accelerate.commands.launch", *options, str(script), str(project)]
        ended = subprocess.run(
            [*command, "--token", "hunter2"],
            capture_output=True,
            text=True,
            timeout=240,
            env={**os.environ, **variables},
        )
    assert ended.returncode == 0, ended.stderr
    assert "steps in" not in ended.stdout + ended.stderr
    assert not project.exists()
    (folder,) = find_runs(project)
    assert [(start.rank, start.script) for start in starts_of(project)] == [
        (0, "train.py"),
        (0, "train.py"),
        (1, "train.py"),
        (1, "train.py"),
    ]
    text = "".join(path.read_text(encoding="utf-8") for path in folder.iterdir())
    assert "hunter2" not in text

    report = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "report"]
    for words in ([], [str(project)]):
        shown = subprocess.run([*report, *words], capture_output=True, text=True, cwd=tmp_path, timeout=120)
        assert shown.returncode == 0, shown.stderr
        assert "All ranks finished." in shown.stdout
        (tmp_path / "report.html").unlink()
    monitor = [sys.executable, "-m", "accelerate.commands.monitor"]
    shown = subprocess.run(monitor, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert "finished" in shown.stdout, shown.stderr
    summary = subprocess.run([*report, "--json"], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert json.loads(summary.stdout)[0]["starts"][0]["script"] == "train.py"
    assert not (tmp_path / "report.html").exists()
