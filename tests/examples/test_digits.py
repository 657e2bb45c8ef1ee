"""`examples/digits.py`, unchanged, started in every way that its first lines name."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .scripts import run_script

SCRIPT = Path(__file__).parents[2] / "examples" / "digits.py"
PYTHON = [sys.executable]
ACCELERATE = str(Path(sys.executable).with_name("accelerate"))
LAUNCH = [*PYTHON, "-m", "accelerate.commands.launch", "--cpu"]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
NUM_EPOCHS = "6"
RESULT = re.compile(r"^(\d+) of (\d+) held-out images recognised", re.MULTILINE)

WAYS = {
    "plain python": (PYTHON, 1),
    "accelerate launch": ([ACCELERATE, "launch", "--cpu", "--num_processes", "2"], 2),
    "the launcher as a module": ([*LAUNCH, "--num_processes", "2"], 2),
    "one launched process": (LAUNCH, 1),
    "torchrun": (TORCHRUN, 2),
    "bf16": ([*LAUNCH, "--num_processes", "2", "--mixed_precision", "bf16"], 2),
}
IN_GATE = ("accelerate launch",)


def train(start: list[str], num_epochs: str) -> subprocess.CompletedProcess[str]:
    command = [*start, str(SCRIPT), "--num_epochs", num_epochs]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in IN_GATE else [pytest.mark.slow]) for way in WAYS]
)
def test_recognises_the_digits(way: str) -> None:
    start, num_processes = WAYS[way]
    done = train(start, NUM_EPOCHS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{num_processes} process(es) on cpu" in done.stdout
    results = RESULT.findall(done.stdout)
    assert len(results) == 1, "the main process alone prints"
    assert results[0][1] == "360", "each held-out image counts once"
    assert len(re.findall(r"epochs:\s+0%", done.stderr)) == 1, "the main process alone shows a bar"


def test_too_little_training_is_an_error(end: Callable[..., Any]) -> None:
    ended = end(run_script, str(SCRIPT), "--num_epochs", "0", processes=1)
    assert ended.codes == [1]
    assert "is under the 96% that this net should reach" in ended.outputs[0]
