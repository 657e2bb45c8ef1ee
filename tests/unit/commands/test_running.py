"""Commands that succeed, fail, and take too long."""

from __future__ import annotations

import sys

import pytest

from accelerate.commands import test as command_of_tests
from accelerate.commands.running import (
    SubprocessCallException,
    execute_subprocess_async,
    path_in_accelerate_package,
    run_command,
)

BOTH = [sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr)"]
FAILS = [sys.executable, "-c", "import sys; print('failed', file=sys.stderr); sys.exit(3)"]
SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_run_command_returns_the_output() -> None:
    assert sorted(str(run_command(BOTH, return_stdout=True)).split()) == ["err", "out"]
    assert run_command(BOTH) is None


def test_a_failed_command_raises_an_error_with_its_output() -> None:
    with pytest.raises(SubprocessCallException, match=r"exit code 3. It printed:\s+failed"):
        run_command(FAILS)
    with pytest.raises(RuntimeError, match=r"failed with returncode 3. Its errors:\s+failed"):
        execute_subprocess_async(FAILS)


def test_lines_are_shown_and_returned(capsys: pytest.CaptureFixture[str]) -> None:
    done = execute_subprocess_async(BOTH)
    assert (done.returncode, done.stdout, done.stderr) == (0, ["out"], ["err"])
    shown = capsys.readouterr()
    assert "Running:" in shown.out
    assert "stdout: out" in shown.out
    assert "stderr: err" in shown.err


def test_quiet_commands_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    execute_subprocess_async(BOTH, quiet=True, echo=False)
    assert capsys.readouterr() == ("", "")


def test_a_command_that_takes_too_long_is_ended() -> None:
    with pytest.raises(RuntimeError, match="took longer than 0.2 s"):
        execute_subprocess_async(SLEEPS, timeout=0.2, quiet=True, echo=False)


def test_the_environment_is_the_one_given() -> None:
    shows = [sys.executable, "-c", "import os; print(os.environ.get('COLOR'))"]
    assert run_command(shows, return_stdout=True, env={"COLOR": "red"}) == "red\n"


def test_paths_in_the_package() -> None:
    assert path_in_accelerate_package("commands", "running.py").is_file()
    assert command_of_tests.execute_subprocess_async is execute_subprocess_async
