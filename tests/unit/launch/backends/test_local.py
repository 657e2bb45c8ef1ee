from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest

from accelerate.base import ConfigurationError
from accelerate.launch import FORWARDED, LaunchPlan, Target, exit_code
from accelerate.launch.backends import LocalLauncher


def run(code: str, **environment: str) -> int:
    return LocalLauncher().run(
        LaunchPlan("local", Target("program", sys.executable, ("-c", code)), environment=environment)
    )


@pytest.mark.parametrize("code", [0, 1, 7])
def test_the_exit_code_is_that_of_the_script(code: int) -> None:
    assert run(f"raise SystemExit({code})") == code


def test_the_environment_is_added(tmp_path: Path) -> None:
    assert run("import os; raise SystemExit(int(os.environ['SAMPLE']))", SAMPLE="5") == 5


def test_a_script_that_a_signal_ends_has_the_exit_code_of_a_shell() -> None:
    assert run("import os, signal; os.kill(os.getpid(), signal.SIGKILL)") == 137
    assert exit_code(-15) == 143
    assert exit_code(3) == 3


def test_signals_are_forwarded_and_handlers_put_back() -> None:
    before = {number: signal.getsignal(number) for number in FORWARDED}
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    assert run(code) == 143
    assert {number: signal.getsignal(number) for number in FORWARDED} == before


def test_another_thread_can_launch_too() -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run("raise SystemExit(3)")))
    thread.start()
    thread.join()
    assert codes == [3]


def test_a_program_that_is_not_there_is_named() -> None:
    plan = LaunchPlan("local", Target("program", "/nowhere/program"))
    with pytest.raises(ConfigurationError, match="/nowhere/program cannot be started: No such file"):
        LocalLauncher().run(plan)
