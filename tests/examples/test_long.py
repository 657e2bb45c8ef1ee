"""`examples/long.py`, unchanged: two ranks with parts of each sequence print the losses of one process."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "long.py"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--main_process_port", "0"]
SEQUENCES = ["--parallelism_config_sp_size", "2", "--parallelism_config_sp_backend", "torch"]
TWO = ["--num_processes", "2", "--use_parallelism_config", *SEQUENCES]
LINE = re.compile(r"^step +(\d+): loss ([\d.]+)$", re.MULTILINE)


def losses(*flags: str) -> list[float]:
    done = subprocess.run([*LAUNCH, *flags, str(SCRIPT)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    found = LINE.findall(done.stdout)
    assert [int(step) for step, _ in found] == list(range(0, 61, 10))
    return [float(loss) for _, loss in found]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_print_the_losses_of_one_process() -> None:
    alone, divided = losses("--num_processes", "1"), losses(*TWO)
    assert divided == pytest.approx(alone, abs=2e-3)
    assert alone[-1] < 0.7 * alone[0]  # it learns
