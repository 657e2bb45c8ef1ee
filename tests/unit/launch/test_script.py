"""A script that the entry runs finds everything as Python itself would have it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate.base import ConfigurationError, clear_environment, current, patch_environment
from accelerate.launch import FOLDER_VARIABLE, PrepareForLaunch
from accelerate.launch.failures import ENTRY, VERBOSE_VARIABLE

WITNESS = """
import __main__, pickle, sys
class Here: number: int = 0
print(Here.__annotations__)
print(__name__, __file__, sys.argv, sys.path[0], __spec__ is None, __package__, __doc__)
print(__main__.__file__ == __file__, type(pickle.loads(pickle.dumps(Here()))) is Here, sorted(
    name for name in vars(__main__) if not name.startswith("__")))
"""


def run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "witness.py"
    path.write_text(WITNESS)
    return path


@pytest.mark.parametrize("other_folder", [False, True])
def test_a_script_runs_as_under_plain_python(script: Path, tmp_path: Path, other_folder: bool) -> None:
    folder = tmp_path / "other_folder" if other_folder else tmp_path
    folder.mkdir(exist_ok=True)
    name = str(script) if other_folder else script.name
    plain, ours = run(folder, name, "-m", "a b"), run(folder, str(ENTRY), name, "-m", "a b")
    assert plain.returncode == ours.returncode == 0
    assert ours.stdout == plain.stdout


def test_a_folder_runs_as_under_plain_python(script: Path, tmp_path: Path) -> None:
    script.rename(tmp_path / "__main__.py")
    plain, ours = run(tmp_path.parent, str(tmp_path)), run(tmp_path.parent, str(ENTRY), str(tmp_path))
    assert plain.returncode == ours.returncode == 0
    # Python sets `__spec__` and `__package__` of a folder, and this package does not.
    names, others = (output.splitlines()[1].split(" ")[:4] for output in (plain.stdout, ours.stdout))
    assert names == others


def test_a_module_runs_as_under_plain_python(script: Path, tmp_path: Path) -> None:
    plain, ours = run(tmp_path, "-m", "witness", "x"), run(tmp_path, str(ENTRY), "-m", "witness", "x")
    assert plain.returncode == ours.returncode == 0
    keep = [line.split(" ", 2)[-1] for line in plain.stdout.splitlines()]
    assert [line.split(" ", 2)[-1] for line in ours.stdout.splitlines()] == keep


ENDINGS = {
    "error": ("def f():\n    raise KeyError('k')\nf()\n", 1),
    "chained": ("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('x') from e\n", 1),
    "syntax": ("a = (\n", 1),
    "exit": ("import sys\nsys.exit(5)\n", 5),
    "exit text": ("import sys\nsys.exit('done')\n", 1),
    "atexit": ("import atexit\natexit.register(print, 'bye')\nraise RuntimeError('late')\n", 1),
    "hook": ("import sys\nsys.excepthook = lambda *a: print('hooked', a[1])\nraise RuntimeError('own')\n", 1),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_ends_as_under_plain_python(tmp_path: Path, ending: str) -> None:
    text, code = ENDINGS[ending]
    (tmp_path / "s.py").write_text(text)
    plain, ours = run(tmp_path, "s.py"), run(tmp_path, str(ENTRY), "s.py")
    assert plain.returncode == ours.returncode == code
    assert ours.stdout == plain.stdout
    # Plain Python spells the main script by its absolute path in some versions.
    assert ours.stderr.replace(f"{tmp_path}/", "") == plain.stderr.replace(f"{tmp_path}/", "")


def test_the_error_is_written_down(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("raise KeyError('k')\n")
    ended = run(tmp_path, str(ENTRY), "s.py", **{FOLDER_VARIABLE: str(tmp_path)})
    assert "KeyError: 'k'" in ended.stderr
    record = json.loads(next(tmp_path.glob("rank-0.attempt-0.*")).read_text())
    assert record["headline"] == "KeyError: 'k'"
    assert "entry.py" not in record["trace"]
    assert record["place"].endswith("s.py:1")


@pytest.mark.parametrize("verbose", [False, True])
def test_one_of_several_prints_a_line_unless_logs_are_kept(tmp_path: Path, verbose: bool) -> None:
    (tmp_path / "s.py").write_text("raise KeyError('k')\n")
    variables = {FOLDER_VARIABLE: str(tmp_path), "RANK": "1", "WORLD_SIZE": "2"}
    ended = run(tmp_path, str(ENTRY), "s.py", **variables, **({VERBOSE_VARIABLE: "1"} if verbose else {}))
    assert ("Traceback" in ended.stderr) == verbose
    assert (ended.stderr == "rank 1: KeyError: 'k'\n") != verbose


def test_without_its_folder_the_error_is_printed_whole(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("raise KeyError('k')\n")
    variables = {FOLDER_VARIABLE: str(tmp_path / "gone"), "RANK": "1", "WORLD_SIZE": "2"}
    assert "Traceback" in run(tmp_path, str(ENTRY), "s.py", **variables).stderr


def test_an_interrupt_ends_a_script_as_under_plain_python(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("raise KeyboardInterrupt\n")
    plain, ours = run(tmp_path, "s.py"), run(tmp_path, str(ENTRY), "s.py", **{FOLDER_VARIABLE: str(tmp_path)})
    assert plain.returncode == ours.returncode
    assert ours.stderr.replace(f"{tmp_path}/", "") == plain.stderr.replace(f"{tmp_path}/", "")
    assert not list(tmp_path.glob("rank-*"))


@pytest.mark.parametrize(
    ("ends", "headline", "shown"),
    [
        ("raise KeyboardInterrupt\n", "KeyboardInterrupt", "rank 1: KeyboardInterrupt at"),
        ("import sys\nsys.exit('no data')\n", "SystemExit: no data", "no data\n"),
    ],
)
def test_one_of_several_writes_down_how_it_ends_itself(
    tmp_path: Path, ends: str, headline: str, shown: str
) -> None:
    (tmp_path / "s.py").write_text(ends)
    variables = {FOLDER_VARIABLE: str(tmp_path), "RANK": "1", "WORLD_SIZE": "2"}
    plain, ours = run(tmp_path, "s.py"), run(tmp_path, str(ENTRY), "s.py", **variables)
    assert ours.returncode == plain.returncode
    assert ours.stderr.startswith(shown)
    assert len(ours.stderr.splitlines()) == 1
    assert json.loads(next(tmp_path.glob("rank-1.attempt-0.*")).read_text())["headline"] == headline


NAMES = ("LOCAL_RANK", "RANK", "FORK_LAUNCHED")


def seen_by_worker(index: int, kind: str, **variables: str) -> dict[str, str]:
    seen: dict[str, str] = {}
    with clear_environment(), patch_environment(**variables):
        PrepareForLaunch(lambda *args: seen.update(current()), kind)(index, "x")
    return {name: seen[name] for name in NAMES if name in seen}


def test_a_worker_has_the_variables_of_its_rank() -> None:
    seen = seen_by_worker(1, "MULTI_CPU", NODE_RANK="2", NPROC="4")
    assert seen == {"LOCAL_RANK": "1", "RANK": "9", "FORK_LAUNCHED": "1"}


@pytest.mark.parametrize("kind", ["NO", "XLA"])
def test_other_kinds_set_no_rank(kind: str) -> None:
    assert seen_by_worker(1, kind) == {"FORK_LAUNCHED": "1"}


def test_a_debug_worker_needs_its_file() -> None:
    with clear_environment(), pytest.raises(ConfigurationError, match="ACCELERATE_DEBUG_RDV_FILE is not set"):
        PrepareForLaunch(print, debug=True)(0)
