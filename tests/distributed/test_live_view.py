"""`accelerate launch --monitor` in a terminal: the view, the output of ranks above it, and how runs end."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "-q", "--monitor"]
ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
TRAIN = """
import sys, time
import torch
from torch.utils.data import DataLoader
from accelerate import Accelerator
accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
loader = DataLoader([torch.randn(8) for _ in range(1600)], batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
for number, batch in enumerate(loader):
    time.sleep(0.02 * (1 + accelerator.process_index))
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
    if number % 50 == 0:
        print(f"rank {accelerator.process_index} has batch {number}")
    if sys.argv[1:] == [str(number)] and accelerator.process_index == 1:
        raise ValueError("broken batch")
"""


class Ended(NamedTuple):
    code: int
    raw: bytes

    @property
    def text(self) -> str:
        """What was written to the terminal, without escape sequences."""
        return ESCAPES.sub("", self.raw.decode(errors="replace")).replace("\r\n", "\n").replace("\r", "\n")


def own_terminal() -> None:
    """Make standard input the controlling terminal of this process."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def read_all(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # the last process with this terminal has ended
            return
        if not data:
            return
        yield data


Run = Callable[..., Ended]


@pytest.fixture
def run_in_terminal(tmp_path: Path) -> Run:
    """Launch a script in a terminal of 100 columns; `on_output` is called with what was written so far."""

    def run(script: str, *words: str, on_output: Callable[[int, bytes], None] | None = None) -> Ended:
        (tmp_path / "script.py").write_text(script)
        terminal, other_end = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
        before = words[: words.index("--")] if "--" in words else words
        command = [*LAUNCH, *before, "script.py", *words[len(before) + 1 :]]
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        launcher = subprocess.Popen(
            command,
            stdin=other_end,
            stdout=other_end,
            stderr=other_end,
            cwd=tmp_path,
            env={**variables, "TERM": "xterm-256color", "OMP_NUM_THREADS": "1"},
            preexec_fn=own_terminal,
        )
        raw = b""
        try:
            os.close(other_end)
            for data in read_all(terminal):
                raw += data
                if on_output is not None:
                    on_output(terminal, raw)
            code = launcher.wait(timeout=60)
        finally:
            launcher.kill()
            launcher.wait()
            os.close(terminal)
        return Ended(code, raw)

    return run


def test_two_ranks_show_throughput_phases_and_their_output(run_in_terminal: Run) -> None:
    ended = run_in_terminal(TRAIN, "--num_processes", "2")
    assert ended.code == 0, ended.text
    for rank in (0, 1):
        numbers = re.findall(rf"^rank {rank} has batch (\d+)$", ended.text, re.MULTILINE)
        assert numbers == ["0", "50", "100", "150"]
    assert "2 of 2 ranks are starting" in ended.text
    assert re.search(r"· step \d+ · [\d.]+ steps/s · [\d.]+ samples/s on each rank", ended.text)
    assert re.search(r"epoch: batch \d+ of 200, \d+ s left", ended.text)
    assert re.search(r"loss -?[\d.]+", ended.text)
    assert re.search(r"■ forward \d+%", ended.text)
    assert re.search(r"slowest of 2 ranks: rank 1, \d\d+% slower in its own work", ended.text)
    last = ended.text[ended.text.rindex("╭") :]
    assert re.findall(r"^│ +(\d) +200 .* finished", last, re.MULTILINE) == ["0", "1"]


def test_a_failed_run_shows_its_state_and_then_its_failure(run_in_terminal: Run) -> None:
    ended = run_in_terminal(TRAIN, "--num_processes", "2", "--max_restarts", "1", "--", "60")
    assert ended.code == 1
    view, _, digest = ended.text.rpartition("╯")
    last = view[view.rindex("╭") :]
    assert "1 restart" in last
    assert re.search(r"^│ +1 +6\d .* failed", last, re.MULTILINE)
    assert "rank 1" in digest
    assert 'raise ValueError("broken batch")' in digest
    report = re.search(r"For machines: (\S+)", digest)
    assert report is not None
    shutil.rmtree(Path(report[1]).parent)


NOISY = r"""
import sys
for number in range(3000):
    print("out", number)
    print("err", number, file=sys.stderr)
sys.stdout.flush()
sys.stderr.buffer.write(b"10%\r\x1b[9A\x1b[2J20%\rbytes \xff\n")
sys.stdout.write("no newline")
sys.exit(3)
"""


def test_no_output_is_lost_and_the_exit_code_is_that_of_the_script(run_in_terminal: Run) -> None:
    ended = run_in_terminal(NOISY)
    assert ended.code == 3
    for stream in ("out", "err"):
        assert re.findall(rf"^{stream} (\d+)$", ended.text, re.MULTILINE) == [str(n) for n in range(3000)]
    assert b"10%\r20%\rbytes \xff\r\n" in ended.raw
    assert re.search(r"^no newline$", ended.text, re.MULTILINE)


WAITING = """
import signal, sys, time
seen = []
signal.signal(signal.SIGINT, lambda *_: seen.append(1))
print("ready")
while not seen:
    time.sleep(0.01)
time.sleep(0.5)
print(len(seen), "interrupt")
sys.exit(4)
"""


def test_a_key_press_reaches_the_script_once(run_in_terminal: Run) -> None:
    pressed: list[int] = []

    def press(terminal: int, raw: bytes) -> None:
        if b"ready" in raw and not pressed:
            pressed.append(os.write(terminal, b"\x03"))

    ended = run_in_terminal(WAITING, on_output=press)
    assert ended.code == 4
    assert "\n1 interrupt\n" in ended.text


LEAVING = """
import os, subprocess, sys
left = subprocess.Popen(["sleep", "600"], stdin=subprocess.DEVNULL, start_new_session=True)
print("left", left.pid)
left.returncode = 0  # it is not waited for
"""


def test_a_process_that_a_script_leaves_behind_does_not_keep_the_launcher(run_in_terminal: Run) -> None:
    left: list[int] = []

    def note(terminal: int, raw: bytes) -> None:
        if not left and (found := re.search(rb"left (\d+)\r\n", raw)):
            left.append(int(found[1]))

    try:
        assert run_in_terminal(LEAVING, on_output=note).code == 0
    finally:
        for pid in left:
            os.kill(pid, signal.SIGKILL)


def test_without_a_terminal_one_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('trained')")
    command = [word for word in LAUNCH if word != "-q"]
    ended = subprocess.run(
        [*command, "--num_processes", "1", "script.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert ended.stdout == "trained\n"
    assert ended.stderr.splitlines()[-1] == (
        "accelerate launch: --monitor shows nothing: standard error is not a terminal."
    )


BROKEN = """
import os, time
with open(os.environ["ACCELERATE_MONITOR_DIR"] + "/rank-00000.json", "w") as file:
    file.write('{"rank": 0, "world_size": 1, "time": "now"}')
print("before")
time.sleep(2)
print("after")
"""


def test_a_view_that_cannot_be_drawn_ends_and_the_run_goes_on(run_in_terminal: Run) -> None:
    ended = run_in_terminal(BROKEN)
    assert ended.code == 0
    assert re.search(r"^before$.*^after$", ended.text, re.MULTILINE | re.DOTALL)
    assert "accelerate launch: the live view has ended: TypeError: " in ended.text


def test_a_launch_without_it_loads_nothing_for_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    modules = "('rich', 'torch', 'accelerate.launch.terminal', 'accelerate.monitoring')"
    program = (
        "import atexit, sys; from accelerate.commands.launch import main; "
        f"atexit.register(lambda: print([name for name in {modules} if name in sys.modules])); main()"
    )
    words = ["--cpu", "-q", "--num_processes", "1", "script.py"]
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert ended.stdout == "[]\n"
