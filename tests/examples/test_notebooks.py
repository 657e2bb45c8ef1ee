"""Each notebook of `examples/notebooks`, cell by cell, in an interpreter of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
RUNNER = Path(__file__).with_name("notebook.py")
OUTPUTS = {
    "one_process": r"device\(type='cpu'\)\nepoch 0: loss ",
    "two_processes": r"2 processes, 45 batches on each\n(.*\n)+9610\n",
    "fsdp": r"4805 parameters are on each process\n(.*\n)+9610\n",
}


def test_each_notebook_is_run_and_is_in_the_docs() -> None:
    assert {path.stem for path in FOLDER.iterdir() if path.is_file()} == set(OUTPUTS)
    page = (FOLDER.parents[1] / "docs" / "tutorials" / "examples.md").read_text()
    assert [name for name in OUTPUTS if f"`{name}.ipynb`" not in page] == []


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_notebook_has_no_outputs(name: str) -> None:
    cells = json.loads((FOLDER / f"{name}.ipynb").read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTPUTS)
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(RUNNER), str(FOLDER / f"{name}.ipynb")],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(OUTPUTS[name], done.stdout), done.stdout
    (accuracy,) = re.findall(r"^accuracy: (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert float(accuracy) > 0.93
