"""Type checkers accept what users write, and know the types of results: mypy and pyright, without a cast."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = [str(HERE / name) for name in ("typical_script.py", "kept_types.py")]
FLOOR = "3.10"
SUMMARY = {"mypy": "Found 1 error in 1 file (checked 3 source files)", "pyright": "1 error, 0 warnings"}


def check(checker: str, config: pytest.Config, folder: Path, *files: str) -> str:
    """Run a checker as users do, away from the settings of this project."""
    assert config.cache is not None
    cache = config.cache.mkdir("mypy")  # without it torch is read anew each time
    options = {
        "mypy": ["--strict", "--config-file=", f"--python-version={FLOOR}", f"--cache-dir={cache}"],
        "pyright": [f"--pythonversion={FLOOR}", f"--pythonpath={sys.executable}"],
    }
    words = [sys.executable, "-m", checker, *options[checker], *files]
    variables = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=280)
    return f"exit code {done.returncode}\n{done.stdout}{done.stderr}"


WRONG = """
import torch
from accelerate import Accelerator
model = Accelerator().prepare(torch.nn.Linear(1, 1))
text: str = model
"""


ERROR = re.compile(r"^\s*(\S+?):(\d+).*\berror\b.*$", re.MULTILINE)


@pytest.mark.parametrize("checker", [pytest.param("mypy", marks=pytest.mark.slow), "pyright"])
def test_type_checkers_accept_user_code_and_find_a_mistake(
    checker: str, pytestconfig: pytest.Config, tmp_path: Path
) -> None:
    """One run over all files: the only error is the mistake."""
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    found = check(checker, pytestconfig, tmp_path, *FILES, str(wrong))
    assert found.startswith("exit code 1\n")
    (error,) = ERROR.finditer(found)
    assert (Path(error[1]).name, error[2]) == ("wrong.py", "5"), found
    assert "Linear" in error[0]
    assert SUMMARY[checker] in found, found


@pytest.mark.usefixtures("states")
def test_the_script_runs(tmp_path: Path) -> None:
    train = runpy.run_path(str(HERE / "typical_script.py"))["train"]
    losses = train(tmp_path)
    assert losses[1] < losses[0] / 2
    assert {"layer.safetensors", "model", "state"} <= {path.name for path in tmp_path.iterdir()}
