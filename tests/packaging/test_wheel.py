"""The wheel of `make wheel` trains in an environment that does not have the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECONDS = 250
PROCESSES = 2


def run(*command: str | Path, folder: Path) -> str:
    """Run a program in a folder, without variables of Python and of this package."""
    prefixes = ("PYTHON", "ACCELERATE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**kept, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_an_installed_wheel_passes_the_self_check(tmp_path: Path) -> None:
    dist, environment, empty = (tmp_path / name for name in ("dist", "environment", "empty"))
    empty.mkdir()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, ROOT, folder=empty)
    (wheel,) = dist.glob("accelerate-*.whl")
    (archive,) = dist.glob("accelerate-*.tar.gz")
    with tarfile.open(archive) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "src/accelerate/py.typed"} <= names

    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, wheel, folder=empty)
    # Python ignores .pth files, such as that of the checkout, in a folder that a .pth file adds.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib"))

    path = run(python, "-c", "import accelerate; print(accelerate.__file__)", folder=empty).strip()
    assert Path(path).is_relative_to(site)
    text = run(environment / "bin" / "accelerate", "test", "--num_processes", str(PROCESSES), folder=empty)
    assert "All checks passed." in text
