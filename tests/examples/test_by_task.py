"""Each script of `examples/by_task`, unchanged, in two forked ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "by_task"
MOST_LINES = 90

# Script -> (options, what it prints last as a number, the range of that number).
RUNS = {
    "audio": ("", r"accuracy: (\d\.\d+) of 300 sounds", (0.95, 1.0)),
    "diffusion": ("--num_epochs 8", r"epoch 7: loss (\d\.\d+)\n32 images", (0.0, 0.45)),
    "language_model": ("", r"epoch 1: loss (\d\.\d+)", (0.0, 3.0)),
    "reinforcement": ("--num_updates 30", r"update 30: the pole is upright for (\d+\.\d)", (80.0, 100.0)),
}


def test_every_script_is_run_is_short_and_is_in_the_docs() -> None:
    scripts = sorted(FOLDER.glob("*.py"))
    assert [path.stem for path in scripts] == sorted(RUNS)
    assert [path.name for path in scripts if len(path.read_text().splitlines()) >= MOST_LINES] == []
    page = (FOLDER.parents[1] / "docs" / "tutorials" / "examples.md").read_text()
    assert [path.name for path in scripts if f"`{path.name}`" not in page] == []


@pytest.mark.slow
@pytest.mark.parametrize("script", RUNS)
def test_two_processes(run_ranks: Callable[..., str], script: str) -> None:
    options, expected, (least, most) = RUNS[script]
    printed = run_ranks(FOLDER / f"{script}.py", *options.split())
    (value,) = re.findall(expected, printed)
    assert least <= float(value) <= most
