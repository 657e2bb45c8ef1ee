"""Programs on a simulated Windows and macOS: import, train, launch, save, replace, load, resume and stop.

`simulation/simulated.py` lists what is simulated. The tests show that nothing is used that the
system lacks; they do not replace a run on that system.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

HERE = Path(__file__).parent
SECONDS = 200
PATIENCE = 10  # seconds in which helpers of multiprocessing end
SIGBREAK = 21
COMMAND = (sys.executable, "-m", "accelerate.commands.accelerate_cli")


class System:
    """Starts programs with their output in a file; all processes are ended afterwards."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.output = name, folder, folder / "output"
        self._temporary = TemporaryDirectory()  # with a short path, because that of a socket is limited
        self.temporary = Path(self._temporary.name)
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, *words: object) -> subprocess.Popen[bytes]:
        variables = {
            "PYTHONPATH": str(HERE / "simulation"),
            "SIMULATED_SYSTEM": self.name,
            "SIMULATED_FOLDER": str(self.folder),
            "TMPDIR": str(self.temporary),  # where files in use cannot be removed either
            "PYTHONWARNDEFAULTENCODING": "1",
            "PYTHONWARNINGS": "ignore::EncodingWarning",
            "PYTHONIOENCODING": "cp1252",
        }
        with self.output.open("wb") as file:
            process = subprocess.Popen(
                [str(word) for word in words],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def run(self, *words: object) -> tuple[int, str]:
        code = self.start(*words).wait(timeout=SECONDS)
        return code, self.text()

    def text(self) -> str:
        return self.output.read_text(encoding="cp1252")

    def close(self) -> list[psutil.Process]:
        """End what does not end by itself, and return it."""
        sessions = {process.pid for process in self._started}
        family = [each for each in psutil.process_iter() if _session(each.pid) in sessions]
        _, left = psutil.wait_procs(family, timeout=PATIENCE)
        for process in left:
            process.kill()
        for started in self._started:
            started.wait()
        self._temporary.cleanup()
        return left


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@contextmanager
def simulated(name: str, folder: Path) -> Iterator[System]:
    system = System(name, folder)
    try:
        yield system
    finally:
        left = system.close()
    assert not left


@pytest.fixture
def windows(tmp_path: Path) -> Iterator[System]:
    with simulated("win32", tmp_path) as system:
        yield system


@pytest.fixture
def macos(tmp_path: Path) -> Iterator[System]:
    with simulated("darwin", tmp_path) as system:
        yield system


def launched(*words: object) -> tuple[object, ...]:
    return (*COMMAND, "launch", "--cpu", "--main_process_port", "0", *words)


@pytest.mark.slow
def test_a_process_trains_with_a_worker_of_its_loader(windows: System) -> None:
    code, text = windows.run(sys.executable, HERE / "train.py", windows.folder / "run", 1)
    assert code == 0, text
    assert "rank 0 of 1 is done" in text


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_launched_processes_train_save_load_and_resume(windows: System, count: int) -> None:
    code, text = windows.run(
        *launched("--num_processes", count, HERE / "train.py", windows.folder / "run", 0)
    )
    assert code == 0, text
    assert all(f"rank {rank} of {count} is done" in text for rank in range(count))
    assert "Failed to register signal handler" not in text


@pytest.mark.slow
def test_processes_on_macos_train_save_load_and_resume(macos: System) -> None:
    code, text = macos.run(*launched("--num_processes", 2, HERE / "train.py", macos.folder / "run", 1))
    assert code == 0, text
    assert all(f"rank {rank} of 2 is done" in text for rank in range(2))


@pytest.mark.slow
def test_a_failed_rank_ends_the_others_and_is_shown(windows: System) -> None:
    code, text = windows.run(*launched("--num_processes", 2, HERE / "fail.py"))
    assert code == 1
    assert "rank 1 on" in text
    assert "KeyError: 'rank 1 fails'" in text


@pytest.mark.slow
@pytest.mark.parametrize(("count", "expected"), [(1, 0), (2, 128 + SIGBREAK)])
def test_an_event_of_the_console_stops_all_ranks(windows: System, count: int, expected: int) -> None:
    process = windows.start(*launched("--num_processes", count, HERE / "stop.py"))
    deadline = time.monotonic() + SECONDS
    while windows.text().count("is ready") < count and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(process.pid, SIGBREAK)
    assert process.wait(timeout=SECONDS) == expected, windows.text()
    assert windows.text().count("stopped") == count, windows.text()
    assert "the run failed" not in windows.text()


def test_open_files_are_not_replaced(windows: System) -> None:
    code, text = windows.run(sys.executable, HERE / "mapped.py", windows.folder / "run")
    assert code == 0, text


@pytest.mark.slow
def test_functions_are_started_without_fork(windows: System) -> None:
    code, text = windows.run(sys.executable, HERE / "notebook.py")
    assert code == 0, text
    assert text.count("added up") == 4


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param("env", "cpu cores", marks=pytest.mark.slow),
        pytest.param("config default --config_file a.yaml", "was written to", marks=pytest.mark.slow),
        ("launch --cpu --num_processes 2 --explain train.py", "torchrun"),
        pytest.param("test", "All checks passed", marks=pytest.mark.slow),
    ],
)
def test_commands_run(windows: System, words: str, expected: str) -> None:
    code, text = windows.run(*COMMAND, *words.split())
    assert code == 0, text
    assert expected in text
