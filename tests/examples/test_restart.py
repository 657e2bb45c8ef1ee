"""`examples/restart.py`, unchanged: a run that was killed ends with the weights of one that was not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "restart.py"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
STARTS = re.compile(r"^starting at step (\d+)$", re.MULTILINE)
END = re.compile(r"^(\d+) steps, loss of the last batch .*\nweights: ([0-9a-f]{64})$", re.MULTILINE)
STEPS = 90  # 1797 images, 2 processes with batches of 20, 2 epochs


def train(project: Path, *options: str, restarts: int = 0) -> tuple[list[int], str]:
    """Return the steps that each start of the run began at, and the checksum of the weights at its end."""
    command = [*LAUNCH, "--main_process_port", "0", "--max_restarts", str(restarts), str(SCRIPT)]
    command += ["--project", str(project), "--num_epochs", "2", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    ((steps, weights),) = END.findall(done.stdout)
    assert int(steps) == STEPS
    return [int(step) for step in STARTS.findall(done.stdout)], weights


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of a run that nothing happens to."""
    starts, weights = train(tmp_path_factory.mktemp("whole"), "--save_every", "1000")
    assert starts == [0]
    return weights


# The last checkpoint before a death: in the middle of an epoch; at its very end; none.
@pytest.mark.parametrize(
    ("die_at", "last_saved"),
    [(40, 30), pytest.param(46, 45, marks=pytest.mark.slow), pytest.param(7, 0, marks=pytest.mark.slow)],
)
def test_killed_once(tmp_path: Path, undisturbed: str, die_at: int, last_saved: int) -> None:
    starts, weights = train(tmp_path, "--die_at", str(die_at), restarts=1)
    assert (tmp_path / f"died_at_step_{die_at}").exists()
    assert starts == [0, last_saved], "one restart is enough, and resumes from the newest checkpoint"
    assert weights == undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_killed_twice(tmp_path: Path, undisturbed: str, background: bool) -> None:
    """The second kill is in a restarted run, which had itself resumed from a checkpoint."""
    options = ["--die_at", "38", "77", *(["--background"] if background else [])]
    starts, weights = train(tmp_path, *options, restarts=2)
    assert {path.name for path in tmp_path.glob("died*")} == {"died_at_step_38", "died_at_step_77"}
    assert len(starts) == 3
    assert starts == sorted(starts)
    assert weights == undisturbed
