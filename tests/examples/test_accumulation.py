"""`examples/accumulation.py`, unchanged: what its table claims is so."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "accumulation.py"
ROW = re.compile(r"^  (\w+): (\S+) in full windows, (\S+) in the last, short one$", re.MULTILINE)
LOSS = re.compile(r"^epoch \d: (\d\.\d+) nats for each of (\d+) tokens$", re.MULTILINE)
OPTIONS = ("--epochs", "2", "--samples", "300")


def check(printed: str) -> None:
    rows = {way: (float(full), float(last)) for way, full, last in ROW.findall(printed)}
    assert list(rows) == ["means", "num_items", "windows"]
    assert min(rows["means"]) > 1e-2
    assert max(*rows["num_items"], *rows["windows"]) < 1e-6
    (first, tokens), (second, _) = LOSS.findall(printed)
    assert float(second) < float(first)
    assert int(tokens) > 10_000


@pytest.mark.slow
def test_items_make_the_gradients_of_the_big_batch_on_one_process() -> None:
    command = [sys.executable, str(SCRIPT), *OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    check(done.stdout)


@pytest.mark.slow
def test_items_make_the_gradients_of_the_big_batch_on_two(run_ranks: Callable[..., str]) -> None:
    check(run_ranks(SCRIPT, *OPTIONS))
