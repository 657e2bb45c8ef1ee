"""`examples/weights_to_evaluator.py`, unchanged: the evaluator reads the weights of the training steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "weights_to_evaluator.py"
LAUNCH = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
ACCURACY = re.compile(r"^step (\d+): accuracy (\d\.\d+)$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "options", "steps"),
    [([], [], [20, 40]), (LAUNCH, [], [20, 40]), (LAUNCH, ["--fsdp"], [20, 40])],
)
def test_the_evaluator_reports_rising_accuracies(
    launcher: list[str], options: list[str], steps: list[int]
) -> None:
    command = [sys.executable, *launcher, str(SCRIPT), "--steps", "40", "--every", "20", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    results = ACCURACY.findall(done.stdout)
    assert [int(step) for step, _ in results] == steps
    first, last = (float(accuracy) for _, accuracy in results)
    assert 0.2 < first < last
    assert last > 0.7
