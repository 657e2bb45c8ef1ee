"""A wheel of the package trains in an environment without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 600


@pytest.mark.slow
def test_a_wheel_passes_the_self_check(tmp_path: Path) -> None:
    def run(*words: str, **variables: str) -> str:
        command = [sys.executable, *words]
        environment = {**os.environ, **variables}
        ended = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    run("-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("accelerate-*.whl")
    run("-m", "pip", "install", "--no-deps", "--target", str(tmp_path / "site"), str(wheel))
    variables = {"PYTHONPATH": str(tmp_path / "site"), "ACCELERATE_USE_CPU": "true"}
    path = run("-c", "import accelerate; print(accelerate.__file__)", **variables).strip()
    assert Path(path).is_relative_to(tmp_path)
    text = run("-m", "accelerate.commands", "test", "--num_processes", "2", **variables)
    assert "Traceback" not in text
