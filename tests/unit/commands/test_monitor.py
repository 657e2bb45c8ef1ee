"""`accelerate monitor` for runs that go on, have ended, or have no records."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from accelerate.monitoring import PHASES, End, RecordWriter, Start, Window, machine_digest

COMMAND = [sys.executable, "-m", "accelerate.commands.monitor"]


def write_run(folder: Path, *, has_ended: bool) -> None:
    """Writes the records of a run of this process."""
    writer = RecordWriter(folder / "run_records", 0)
    seconds_by = dict.fromkeys(PHASES, 0.0) | {"forward": 1.5, "data": 0.5}
    now = time.time()
    writer.write(
        Start(time=now - 9, rank=0, world_size=1, machine=machine_digest(), pid=os.getpid()),
        Window(time=now, first=1, last=50, seconds=2.0, seconds_by=seconds_by),
    )
    if has_ended:
        writer.write(End(time=now, how="finished"))
    writer.close()


@pytest.mark.parametrize(("has_ended", "state"), [(True, "finished"), (False, "running")])
def test_without_a_terminal_the_view_is_printed_once(has_ended: bool, state: str, tmp_path: Path) -> None:
    write_run(tmp_path, has_ended=has_ended)
    ended = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "step 50 · 25 steps/s" in ended.stdout
    assert "■ data 25%  ■ forward 75%" in ended.stdout
    assert re.search(rf" 50 .*{state} +│$", ended.stdout, re.MULTILINE)


@pytest.mark.parametrize("columns", [0, 100])
def test_a_terminal_shows_the_run_until_its_end(columns: int, tmp_path: Path) -> None:
    write_run(tmp_path, has_ended=False)
    terminal, other_end = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 0 if columns == 0 else 50, columns, 0, 0))
    monitor = subprocess.Popen(
        [*COMMAND, str(tmp_path)],
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(other_end)
    raw = b""
    try:
        while b"finished" not in raw:
            raw += os.read(terminal, 65536)
            if b"running" in raw:
                write_run(tmp_path, has_ended=True)
        while data := _read(terminal):
            raw += data
        assert monitor.wait(60) == 0
    finally:
        monitor.kill()
        monitor.wait()
        os.close(terminal)
    assert b"step 50" in raw


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the process has ended
        return b""


@pytest.mark.parametrize("name", [".", "missing"])
def test_a_folder_without_records_is_an_error(name: str, tmp_path: Path) -> None:
    ended = subprocess.run([*COMMAND, name], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 2
    assert "project_dir" in ended.stderr
