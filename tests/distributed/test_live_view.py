"""`accelerate launch --monitor` in a terminal, where the output of the ranks is not changed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
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
    time.sleep(0.01 * (1 + accelerator.process_index))
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
    """Launches a script in a terminal, and calls `on_output` with what was written so far."""

    def run(
        script: str, *words: str, on_output: Callable[[int, bytes], None] | None = None, columns: int = 100
    ) -> Ended:
        (tmp_path / "script.py").write_text(script)
        terminal, other_end = os.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50 if columns else 0, columns, 0, 0))
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


@pytest.mark.slow
def test_two_ranks_show_throughput_phases_and_their_output(run_in_terminal: Run) -> None:
    ended = run_in_terminal(TRAIN, "--num_processes", "2")
    assert ended.code == 0, ended.text
    for rank in (0, 1):
        numbers = re.findall(rf"rank {rank} has batch (\d+)", ended.text)  # two ranks may share a line
        assert numbers == ["0", "50", "100", "150"]
    assert re.search(r"· step \d+ · [\d.]+ steps/s · [\d.]+ samples/s on each rank", ended.text)
    assert re.search(r"loss -?[\d.]+", ended.text)
    assert re.search(r"■ forward \d+%", ended.text)
    assert re.search(r"slowest of 2 ranks: rank 1, \d\d+% slower in its own work", ended.text)
    last = ended.text[ended.text.rindex("╭") :]
    assert re.findall(r"^│ +(\d) +200 .* finished", last, re.MULTILINE) == ["0", "1"]


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_failed_run_shows_its_state_and_then_its_failure(run_in_terminal: Run, restarts: int) -> None:
    words = ("--num_processes", "2", "--max_restarts", str(restarts))
    ended = run_in_terminal(TRAIN, *words, "--", "60")
    assert ended.code == 1
    view, _, digest = ended.text.rpartition("╯")
    last = view[view.rindex("╭") :]
    assert ("1 restart" in last) == restarts
    assert re.search(r"^│ +1 +6\d .* failed", last, re.MULTILINE)
    assert "rank 1" in digest
    assert 'raise ValueError("broken batch")' in digest
    report = re.search(r"For machines: (\S+)", digest)
    assert report is not None
    shutil.rmtree(Path(report[1]).parent)


NOISY = r"""
import sys
for number in range(3000):
    print("out", number, flush=True)
    print("err", number, file=sys.stderr)
sys.stderr.buffer.write(b"10%\r\x1b[9A\x1b[2J20%\rbytes \xff\n")
sys.stderr.buffer.flush()
sys.stdout.write("x" * 100_000)
sys.exit(3 if sys.stdout.isatty() else 4)
"""


@pytest.mark.parametrize("columns", [pytest.param(0, marks=pytest.mark.slow), 100])
def test_the_output_of_a_script_is_unchanged_and_in_order(columns: int, run_in_terminal: Run) -> None:
    ended = run_in_terminal(NOISY, columns=columns)
    assert ended.code == 3
    lines = "".join(f"out {number}\r\nerr {number}\r\n" for number in range(3000)).encode()
    assert ended.raw == lines + b"10%\r\x1b[9A\x1b[2J20%\rbytes \xff\r\n" + b"x" * 100_000


@pytest.mark.slow
def test_a_view_of_a_terminal_without_columns_has_a_width(run_in_terminal: Run) -> None:
    ended = run_in_terminal(TRAIN, columns=0)
    assert ended.code == 0
    assert len(re.findall(r"^╭─ script.py ─{86}╮$", ended.text, re.MULTILINE)) >= 1
    assert "rank 0 has batch 150" in ended.text


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


@pytest.mark.slow
def test_a_key_press_reaches_the_script_once(run_in_terminal: Run) -> None:
    pressed: list[int] = []

    def press(terminal: int, raw: bytes) -> None:
        if b"ready" in raw and not pressed:
            pressed.append(os.write(terminal, b"\x03"))

    ended = run_in_terminal(WAITING, on_output=press)
    assert ended.code == 4
    assert "\n1 interrupt\n" in ended.text


@pytest.mark.slow
def test_without_a_terminal_the_last_view_is_printed_too(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAIN)
    ended = subprocess.run(
        [*LAUNCH, "--num_processes", "1", "script.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert ended.stdout == "".join(f"rank 0 has batch {number}\n" for number in range(0, 400, 50))
    assert "\x1b" not in ended.stderr
    assert re.search(r"^│ +0 +400 .* finished", ended.stderr, re.MULTILINE)


BROKEN = """
import os, pathlib
assert os.environ["ACCELERATE_RUN_RECORDS"] == "yes"
folder = pathlib.Path("records")
folder.mkdir()
record = '{"kind": "start", "time": 0, "rank": 0, "world_size": 1, "pid": "one"}'
(folder / "rank-00000.jsonl").write_text(record + "\\n")
path = pathlib.Path(os.environ["ACCELERATE_FAILURE_DIR"], "rank-00000.path")
path.write_text(str(folder.absolute() / "rank-00000.jsonl"))
print("trained")
"""


def test_damaged_records_do_not_disturb_the_run(run_in_terminal: Run) -> None:
    ended = run_in_terminal(BROKEN)
    assert (ended.code, ended.raw) == (0, b"trained\r\n")


def test_a_launch_without_a_live_view_loads_no_module_for_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("")
    modules = "('rich', 'torch', 'accelerate.launch.printed_views', 'accelerate.monitoring')"
    program = (
        "import atexit, sys; from accelerate.commands.launch import main; "
        f"atexit.register(lambda: print([name for name in {modules} if name in sys.modules])); main()"
    )
    words = ["--cpu", "-q", "--num_processes", "1", "script.py"]
    ended = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert ended.stdout == "[]\n"
