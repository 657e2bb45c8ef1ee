"""Real launches: scripts in processes of their own, started the way users start them."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
SECONDS = 120
GLOO = re.compile(
    r"\[Gloo\] Rank (?=\[Gloo\]|\d)|"
    r"\d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is : \d+\n"
)
"""What torch before 2.10 prints when a group opens; ranks print in between each other's words."""
WRITER = """
import json, os, sys
folder = os.environ["SAMPLE_FOLDER"]
rank = os.environ.get("RANK", "alone")
with open(os.path.join(folder, rank + ".json"), "w") as file:
    json.dump({"arguments": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid()}, file)
"""

TWO_IN_GATE = [pytest.param("1", marks=pytest.mark.slow), "2"]
"""Numbers of processes, of which the slow part has the other one."""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


class Scripts:
    """A folder of scripts, and what their processes wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, text: str, name: str = "script.py") -> str:
        path = self.folder / name
        path.write_text(text)
        return str(path)

    def variables(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        return {**kept, "SAMPLE_FOLDER": str(self.folder), "HF_HOME": str(self.folder), **more}

    def run(self, *words: str, command: list[str] = LAUNCH, **more: str) -> Ended:
        ended = subprocess.run(
            [*command, *words],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=self.folder,
            env=self.variables(**more),
            check=False,
        )
        return Ended(ended.returncode, GLOO.sub("", ended.stdout), ended.stderr)

    def seen(self) -> dict[str, Mapping[str, Any]]:
        """What each process wrote, by its rank."""
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))}


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path)


def test_one_process_runs_the_script_directly(scripts: Scripts) -> None:
    ended = scripts.run("--cpu", "--mixed_precision", "bf16", scripts.write(WRITER), "--x", "1", "--", "-h")
    assert ended.code == 0, ended.err
    (seen,) = scripts.seen().values()
    assert seen["arguments"] == ["--x", "1", "--", "-h"]
    assert seen["environment"]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert seen["environment"]["ACCELERATE_USE_CPU"] == "True"
    assert "RANK" not in seen["environment"]
    assert "OMP_NUM_THREADS" not in seen["environment"]


def test_two_processes_have_ranks_and_their_share_of_the_cores(scripts: Scripts) -> None:
    ended = scripts.run(
        "--cpu", "--num_processes", "2", "--debug", scripts.write(WRITER), "--num_processes", "9"
    )
    assert ended.code == 0, ended.err
    seen = scripts.seen()
    assert list(seen) == ["0", "1"]
    for rank, one in seen.items():
        variables = one["environment"]
        assert one["arguments"] == ["--num_processes", "9"]
        assert (variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == (rank, "2")
        assert variables["ACCELERATE_DEBUG_MODE"] == "true"
        assert int(variables["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert "assumed" not in ended.err


@pytest.mark.slow
def test_modules_and_programs_are_launched_too(scripts: Scripts) -> None:
    scripts.write(WRITER, "sample_module.py")
    ended = scripts.run("--cpu", "-m", "sample_module", "a")
    assert ended.code == 0, ended.err
    assert scripts.seen()["alone"]["arguments"] == ["a"]
    words = ("--cpu", "--num_processes", "2", "--no_python", sys.executable, scripts.write(WRITER), "b")
    ended = scripts.run(*words)
    assert ended.code == 0, ended.err
    assert scripts.seen()["1"]["arguments"] == ["b"]


@pytest.mark.parametrize("count", TWO_IN_GATE)
def test_the_exit_code_is_that_of_the_script(scripts: Scripts, count: str) -> None:
    script = scripts.write(
        "import os, sys, time\nsys.exit(5) if os.environ.get('RANK') != '1' else time.sleep(60)"
    )
    ended = scripts.run("--cpu", "--num_processes", count, script)
    assert ended.code == 5
    if count == "2":
        assert "rank 0 failed first: exit code 5, and left no Python error." in ended.err
    assert "Traceback" not in ended.err


def test_a_failed_run_ends_with_one_screen(scripts: Scripts) -> None:
    script = scripts.write(
        "import os\nfrom accelerate import PartialState\nstate = PartialState()\n"
        "if state.process_index == 1:\n    import no_such_package\nstate.wait_for_everyone()\n"
    )
    ended = scripts.run("--cpu", "--num_processes", "2", script)
    assert ended.code == 1
    screen = ended.err[ended.err.index("the run failed") :]
    assert screen.count("Traceback") == 1
    assert "rank 1 on " in screen
    assert "ModuleNotFoundError: No module named 'no_such_package'" in screen
    assert "rank 0: " in screen
    assert "What to do:   Install it with pip" in screen
    (report,) = re.findall(r"For machines: (\S+failure\.json)", screen)
    assert json.loads(Path(report).read_text())["first"]["rank"] == 1
    shutil.rmtree(Path(report).parent)


@pytest.mark.slow
@pytest.mark.parametrize("processes", TWO_IN_GATE)
def test_a_failed_group_is_restarted_up_to_the_given_number(scripts: Scripts, processes: str) -> None:
    text = "import os, sys\nsys.exit(0 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' else 3)"
    ended = scripts.run("--cpu", "--num_processes", processes, "--max_restarts", "1", scripts.write(text))
    assert ended.code == 0, ended.err


def test_a_busy_port_is_replaced_with_a_message(scripts: Scripts) -> None:
    with socket.socket() as server:
        server.bind(("", 0))
        server.listen()
        port = str(server.getsockname()[1])
        words = ("--cpu", "--num_processes", "2", "--main_process_port", port, scripts.write(WRITER))
        ended = scripts.run(*words)
        assert ended.code == 0, ended.err
        assert f"port {port} is in use" in ended.err
        assert scripts.seen()["0"]["environment"]["MASTER_PORT"] != port
        several = ("--num_machines", "2", "--main_process_ip", "127.0.0.1", "--machine_rank", "0")
        ended = scripts.run(*several, *words)
        assert ended.code == 1
        assert ended.err.startswith(f"accelerate: error: Port {port} is in use on this machine")


@pytest.mark.slow
def test_logs_of_the_processes_are_kept(scripts: Scripts) -> None:
    script = scripts.write("import os\nprint('hello from', os.environ['RANK'])")
    logs = scripts.folder / "logs"
    ended = scripts.run("--cpu", "--num_processes", "2", "--tee", "3", "--log_dir", str(logs), script)
    assert ended.code == 0, ended.err
    assert "hello from 1" in ended.out
    assert {"hello from 0\n", "hello from 1\n"} <= {path.read_text() for path in logs.rglob("stdout.log")}


BACKGROUND = (signal.SIGINT, signal.SIGQUIT)


class Launched:
    """A launcher that runs, and the processes that have written their pids."""

    def __init__(
        self,
        scripts: Scripts,
        count: str,
        text: str,
        *ignored: int,
        options: tuple[str, ...] = (),
        **variables: str,
    ) -> None:
        def ignore() -> None:  # whatever the process of these tests ignores
            for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        self.folder, self.count = scripts.folder, int(count)
        self.process = subprocess.Popen(
            [*LAUNCH, "--cpu", "--num_processes", count, *options, scripts.write(text)],
            env=scripts.variables(**variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=ignore,
        )

    def send(self, number: int) -> list[int]:
        """Send a signal to the launcher when all processes run; their pids."""
        deadline = time.monotonic() + SECONDS
        while len(pids := written_pids(self.folder)) < self.count and time.monotonic() < deadline:
            time.sleep(0.05)
        if len(pids) < self.count:
            self.process.kill()
            pytest.fail(f"{len(pids)} of {self.count} processes were started: {self.wait()}")
        self.process.send_signal(number)
        return pids

    def wait(self) -> Ended:
        try:
            out, err = self.process.communicate(timeout=SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
        return Ended(self.process.returncode, GLOO.sub("", out), err)


@pytest.mark.parametrize(
    ("ignored", "number", "count"),
    [
        ((), signal.SIGTERM, "2"),
        (BACKGROUND, signal.SIGINT, "1"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ((), signal.SIGTERM, "1"),
                ((), signal.SIGINT, "1"),
                ((), signal.SIGINT, "2"),
                ((), signal.SIGHUP, "2"),
                (BACKGROUND, signal.SIGTERM, "1"),
                (BACKGROUND, signal.SIGTERM, "2"),
                (BACKGROUND, signal.SIGINT, "2"),
            ]
        ),
    ],
)
def test_ending_the_launcher_ends_its_processes(
    scripts: Scripts, ignored: tuple[int, ...], number: signal.Signals, count: str
) -> None:
    """Also from the background of a shell, which has its programs ignore the keys of the terminal."""
    text = WRITER + "\nimport time\ntime.sleep(100)"
    launched = Launched(scripts, count, text, *ignored, TORCH_ELASTIC_SHUTDOWN_TIMEOUT="90")
    pids = launched.send(number)
    ended = launched.wait()
    assert ended.code == 128 + number, ended.err
    assert f"{number.name} ended all processes" in ended.err
    assert "the run failed" not in ended.err
    assert "Traceback" not in ended.err or count == "1"
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


SLOW_START = """
import json, os, time
if "ACCELERATE_FAILURE_DIR" in os.environ:  # a process of the launcher, before anything of it is imported
    name = os.environ.get("RANK", "alone") + os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    with open(os.path.join(os.environ["SAMPLE_FOLDER"], name + ".json"), "w") as file:
        json.dump({"pid": os.getpid()}, file)
    time.sleep(1)
"""
ASKS = """
import time
from accelerate import Accelerator
accelerator, saves = Accelerator(), 0
for step in range(10_000):
    saves += accelerator.should_save
    if accelerator.should_stop:
        break
    time.sleep(0.002)
print(f"{saves} {step < 9_999}\\n", end="", flush=True)
accelerator.end_training()
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", ["1", "2"])
def test_a_request_while_the_processes_start_is_answered(scripts: Scripts, count: str) -> None:
    scripts.write(SLOW_START, "sitecustomize.py")
    launched = Launched(scripts, count, ASKS, PYTHONPATH=str(scripts.folder))
    launched.send(signal.SIGUSR1)
    ended = launched.wait()
    assert ended.code == 0, ended.err
    assert ended.out == "1 True\n" * int(count), ended.err


FAILS_ONCE = """
import os, sys
from accelerate.launch.children import NOTES
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(3)
print(f"{[int(number) for number in NOTES.take()]}\\n", end="", flush=True)
"""


@pytest.mark.slow
def test_a_request_while_processes_are_started_again_ends_none(scripts: Scripts) -> None:
    scripts.write(SLOW_START, "sitecustomize.py")
    path = str(scripts.folder)
    launched = Launched(scripts, "2", FAILS_ONCE, options=("--max_restarts", "1"), PYTHONPATH=path)
    launched.count = 4  # of both attempts
    launched.send(signal.SIGUSR2)
    ended = launched.wait()
    assert ended.code == 0, ended.err
    assert ended.out == f"[{int(signal.SIGUSR2)}]\n" * 2, ended.err


@pytest.mark.parametrize("count", TWO_IN_GATE)
def test_processes_that_ignore_the_end_are_killed_within_seconds(scripts: Scripts, count: str) -> None:
    deaf = "import signal, time\nfor number in (2, 15): signal.signal(number, signal.SIG_IGN)\n"
    launcher = subprocess.Popen(
        [*LAUNCH, "--cpu", "--num_processes", count, scripts.write(deaf + WRITER + "time.sleep(100)")],
        env=scripts.variables(TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1"),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + SECONDS
        while len(pids := written_pids(scripts.folder)) < int(count) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(pids) == int(count)
        begun = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        _, err = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
        launcher.wait()
    assert time.monotonic() - begun < 15
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert "SIGTERM ended all processes" in err


def written_pids(folder: Path) -> list[int]:
    texts = [path.read_text() for path in folder.glob("*.json")]
    return [json.loads(text)["pid"] for text in texts if text.endswith("}")]


@pytest.mark.slow
def test_a_configuration_file_is_used(scripts: Scripts) -> None:
    path = scripts.folder / "c.yaml"
    path.write_text("use_cpu: true\nnum_processes: 2\nmixed_precision: bf16\ndistributed_type: MULTI_CPU\n")
    ended = scripts.run("--config_file", str(path), scripts.write(WRITER))
    assert ended.code == 0, ended.err
    assert len(scripts.seen()) == 2
    assert scripts.seen()["0"]["environment"]["ACCELERATE_MIXED_PRECISION"] == "bf16"


CHECKED = """
from accelerate import PartialState
state = PartialState()
print(f"{state.process_index} {state.num_processes} {state.device.type}\\n", end="", flush=True)
"""


@pytest.mark.parametrize("command", [["accelerate", "launch"], ["accelerate-launch"], LAUNCH])
@pytest.mark.slow
def test_every_way_to_call_the_launcher_works(scripts: Scripts, command: list[str]) -> None:
    words = (
        command
        if command[0] == sys.executable
        else [str(Path(sys.executable).with_name(command[0])), *command[1:]]
    )
    ended = scripts.run("--cpu", "--num_processes", "2", scripts.write(CHECKED), command=words)
    assert ended.code == 0, ended.err
    assert sorted(ended.out.split("\n")) == ["", "0 2 cpu", "1 2 cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_the_self_check_passes(scripts: Scripts, count: int) -> None:
    path = scripts.folder / "c.yaml"
    path.write_text(f"use_cpu: true\nnum_processes: {count}\nmixed_precision: 'no'\n")
    ended = scripts.run(
        "--config_file", str(path), command=[sys.executable, "-m", "accelerate.commands.test"]
    )
    assert ended.code == 0, ended.out + ended.err
    assert "All checks passed." in ended.out
    assert ended.out.count("\n    ok  ") == 8
    assert "FAILED" not in ended.out


@pytest.mark.slow
def test_a_key_press_reaches_the_script_once(scripts: Scripts) -> None:
    """A terminal sends Ctrl-C to launcher and script alike; the launcher must not send it a second time."""
    script = scripts.write(COUNTER)
    terminal, other_end = os.openpty()
    launcher = subprocess.Popen(
        [*LAUNCH, "--cpu", "-q", script],
        env=scripts.variables(),
        stdin=other_end,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=own_terminal,
    )
    try:
        os.close(other_end)
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        os.write(terminal, b"\x03")
        out, _ = launcher.communicate(timeout=30)
    finally:
        launcher.kill()
        launcher.wait()
        os.close(terminal)
    assert out == "1 interrupt\n"
    assert launcher.returncode == 4


def own_terminal() -> None:
    """Make standard input the controlling terminal of this process."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


COUNTER = """
import signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
print("ready", flush=True)
while not seen:
    time.sleep(0.01)
time.sleep(0.5)
print(len(seen), "interrupt", flush=True)
sys.exit(4)
"""


@pytest.mark.parametrize("backend", [pytest.param("static", marks=pytest.mark.slow), "c10d"])
def test_two_machines_share_the_processes(scripts: Scripts, backend: str) -> None:
    """Two launchers, one for each machine; here both are this host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    words = ["--cpu", "--num_machines", "2", "--num_processes", "2", "--rdzv_backend", backend]
    words += ["--main_process_ip", "127.0.0.1", "--main_process_port", port]
    script = scripts.write(WRITER)
    launchers = [
        subprocess.Popen(
            [*LAUNCH, *words, "--machine_rank", rank, script],
            env=scripts.variables(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        errors = [launcher.communicate(timeout=SECONDS)[1] for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()
            launcher.wait()
    assert [launcher.returncode for launcher in launchers] == [0, 0], errors
    seen = scripts.seen()
    assert list(seen) == ["0", "1"]
    assert {one["environment"]["LOCAL_RANK"] for one in seen.values()} == {"0"}
    assert {one["environment"]["WORLD_SIZE"] for one in seen.values()} == {"2"}
