"""`examples/accumulation.py`, unchanged: what its table claims is so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "accumulation.py"
ROW = re.compile(r"^  (\w+): (\S+) in full windows, (\S+) in the last, short one$", re.MULTILINE)
LOSS = re.compile(r"^epoch \d: (\d\.\d+) nats for each of (\d+) tokens$", re.MULTILINE)
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
LAUNCH += ["--main_process_port", "0"]


@pytest.mark.parametrize("start", [[sys.executable], LAUNCH], ids=["one process", "two processes"])
def test_items_make_the_gradients_of_the_big_batch(start: list[str]) -> None:
    command = [*start, str(SCRIPT), "--epochs", "2", "--samples", "300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {way: (float(full), float(last)) for way, full, last in ROW.findall(done.stdout)}
    assert list(rows) == ["means", "num_items", "windows"]
    assert min(rows["means"]) > 1e-2
    assert max(*rows["num_items"], *rows["windows"]) < 1e-6
    (first, tokens), (second, _) = LOSS.findall(done.stdout)
    assert float(second) < float(first)
    assert int(tokens) > 10_000
