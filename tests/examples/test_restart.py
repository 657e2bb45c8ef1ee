"""`examples/restart.py`, unchanged: a run that was killed ends with the weights of one that was not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "restart.py"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
STARTS = re.compile(r"^starting at step (\d+)$", re.MULTILINE)
END = re.compile(r"^(\d+) steps, loss of the last batch .*\nweights: ([0-9a-f]{64})$", re.MULTILINE)
STEPS = 90  # 1797 images, 2 processes with batches of 20, 2 epochs


class Training(NamedTuple):
    """Steps at which each start of a run began, checksum of its weights, and what it wrote to stderr."""

    starts: list[int]
    weights: str
    err: str


def train(project: Path, *options: str, restarts: int = 0) -> Training:
    command = [*LAUNCH, "--main_process_port", "0", "--max_restarts", str(restarts), str(SCRIPT)]
    command += ["--project", str(project), "--num_epochs", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    ((steps, weights),) = END.findall(done.stdout)
    assert int(steps) == STEPS
    return Training([int(step) for step in STARTS.findall(done.stdout)], weights, done.stderr)


def read_report(project: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "report", "--json", str(project)]
    (report,) = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return dict(report)


@pytest.fixture
def undisturbed(run_ranks: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run that nothing happens to."""
    project = str(tmp_path_factory.mktemp("whole"))
    printed = run_ranks(SCRIPT, "--project", project, "--num_epochs", "2", "--save_every", "1000")
    assert STARTS.findall(printed) == ["0"]
    ((_, weights),) = END.findall(printed)
    return str(weights)


# The last checkpoint before a death: in the middle of an epoch; at its very end; none.
@pytest.mark.slow
@pytest.mark.parametrize(("die_at", "last_saved"), [(40, 30), (46, 45), (7, 0)])
def test_killed_once(tmp_path: Path, undisturbed: str, die_at: int, last_saved: int) -> None:
    starts, weights, err = train(tmp_path, "--die_at", str(die_at), restarts=1)
    assert (tmp_path / f"died_at_step_{die_at}").exists()
    assert starts == [0, last_saved], "one restart is enough, and resumes from the newest checkpoint"
    assert weights == undisturbed
    newest = f". The newest checkpoint is {tmp_path}/checkpoints/checkpoint_" if last_saved else ""
    assert (
        f"rank 1 was ended by SIGKILL after step {die_at}. All processes start again (restart 1 of 1){newest}"
        in err
    )
    assert len(err.splitlines()) == 1, "one line for a restart, without messages of gloo and of the agent"
    report = read_report(tmp_path)
    first, second = report["attempts"]
    assert (first["rank"], first["step"], first["checkpoint_step"]) == (1, die_at, last_saved)
    assert second["rank"] == -1
    goodput = report["goodput"]
    wall = second["time"] - first["began"]
    assert goodput["wall"] == pytest.approx(wall, rel=0.005)
    assert goodput["seconds_by"]["steps"] > 0
    assert goodput["seconds_by"]["startup"] > 0
    assert goodput["seconds_by"]["stopping"] < 8.0


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_a_run_that_is_killed_twice_resumes_twice(tmp_path: Path, undisturbed: str, background: bool) -> None:
    """The second kill is in a restarted run, which had itself resumed from a checkpoint."""
    options = ["--die_at", "38", "77", *(["--background"] if background else [])]
    starts, weights, _ = train(tmp_path, *options, restarts=2)
    assert {path.name for path in tmp_path.glob("died*")} == {"died_at_step_38", "died_at_step_77"}
    assert len(starts) == 3
    assert starts == sorted(starts)
    assert weights == undisturbed
