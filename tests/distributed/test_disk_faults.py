"""A disk that fails, or a process that ends, at any call: the old checkpoint stays, the next is saved."""

from __future__ import annotations

import builtins
import io
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from accelerate import Accelerator
from accelerate.base import CheckpointError
from accelerate.utils import ProjectConfiguration
from accelerate.weights import files as weights_files

Run = Callable[..., list[Any]]
FULL = OSError(28, "No space left on device")
NEVER = 10**9


class Disk:
    """Counts the calls by which a save writes to the disk, and makes the n-th fail.

    Args:
        fail: is called in the place of that call, after a part of what it should write was written.
    """

    def __init__(self, fail: Callable[[Exception], NoReturn]) -> None:
        self.count, self.fails_at, self.names = 0, NEVER, []
        self._fail, self._lock = fail, threading.Lock()
        for name in ("open", "write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "link"):
            setattr(os, name, self._watched(name, getattr(os, name)))
        io.open = builtins.open = self._watched_open(io.open)
        torch.save = self._watched_writer(torch.save, RuntimeError("PytorchStreamWriter failed writing file"))
        weights_files.save_file = self._watched_writer(
            weights_files.save_file, SafetensorError("I/O error: No space left on device (os error 28)")
        )

    def arm(self, n: int) -> None:
        self.count, self.fails_at, self.names = 0, n, []

    def disarm(self) -> int:
        self.fails_at = NEVER
        return self.count

    def is_due(self, name: str) -> bool:
        with self._lock:
            self.count += 1
            self.names.append(name)
            return self.count == self.fails_at

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.is_due(name):
                self._fail(OSError(FULL.errno, FULL.strerror, str(args[0])))
            return call(*args, **kwargs)

        return watched

    def _watched_open(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wax+"):
                return call(file, mode, *args, **kwargs)
            if self.is_due("open to write"):
                self._fail(OSError(FULL.errno, FULL.strerror, str(file)))
            return Watched(call(file, mode, *args, **kwargs), self)

        return watched

    def _watched_writer(self, call: Callable[..., Any], error: Exception) -> Callable[..., Any]:
        def watched(content: Any, path: Any, *args: Any) -> None:
            if self.is_due(f"begin {Path(path).name}"):
                self._fail(error)
            call(content, path, *args)
            if self.is_due(f"end {Path(path).name}"):
                os.truncate(path, os.path.getsize(path) // 2)
                self._fail(error)

        return watched


class Watched:
    """A file whose writes are counted."""

    def __init__(self, file: Any, disk: Disk) -> None:
        self._file, self._disk = file, disk

    def write(self, data: Any) -> Any:
        if self._disk.is_due("write to a file"):
            self._file.write(data[: len(data) // 2])
            self._file.flush()
            self._disk._fail(FULL)
        return self._file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *args: object) -> None:
        self._file.close()


def fail(error: Exception) -> NoReturn:
    raise error


def end_at_once(error: Exception) -> NoReturn:
    os._exit(7)


class Training:
    """A run whose weights and moments all hold one number."""

    def __init__(self, numbered: bool, blocking: bool) -> None:
        project = ProjectConfiguration("project", automatic_checkpoint_naming=numbered, total_limit=1)
        self.accelerator = Accelerator(project_config=project)
        model = nn.Linear(3, 2)
        self.model, self.optimizer = self.accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        )
        self.folder = None if numbered else Path("project/checkpoints/named")
        self.blocking = blocking

    def save(self, number: int) -> str:
        """Save; why it failed, empty when it did not."""
        for parameter in self.optimizer.optimizer.param_groups[0]["params"]:
            self.optimizer.optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
            parameter.data.fill_(number)
        try:
            self.accelerator.save_state(self.folder, blocking=self.blocking)
            self.accelerator.wait_for_checkpoint()
        except CheckpointError as error:
            return str(error)
        return ""

    def load(self) -> int:
        """Load what there is; its number."""
        self.accelerator.load_state(self.folder)
        (state,) = {
            int(value)
            for parameter in self.optimizer.optimizer.param_groups[0]["params"]
            for tensor in (parameter, self.optimizer.optimizer.state[parameter]["momentum_buffer"])
            for value in tensor.unique()
        }
        return state


def left_over() -> list[str]:
    return [name for name in os.listdir("project/checkpoints") if name.startswith(".")]


def fail_at_each_call(numbered: bool, blocking: bool) -> list[str]:
    """Let each call of a save over another checkpoint fail; the names of the calls."""
    training, disk = Training(numbered, blocking), Disk(fail)
    assert training.save(1) == ""
    disk.arm(NEVER)
    assert training.save(2) == ""
    calls, names, number = disk.disarm(), disk.names, 2
    for n in range(1, calls + 1):
        disk.arm(n)
        failure = training.save(number + 1)
        disk.disarm()
        case = f"call {n}, {disk.names[-1]}: {failure}"
        assert training.load() == number + (not failure), case
        assert not failure or "No space left" in failure or "StreamWriter" in failure, case
        assert not failure or "Fix the cause" in failure or "Choose a folder" in failure, case
        assert training.save(number + 2) == "", case
        assert training.load() == number + 2, case
        assert left_over() == [], case
        number += 2
    return names


SLOWLY = [pytest.param(*case, marks=pytest.mark.slow) for case in ((True, False), (False, True))]


@pytest.mark.parametrize(("numbered", "blocking"), [(True, True), (False, False), *SLOWLY])
def test_a_fault_at_any_call_leaves_the_checkpoint_before(run: Run, numbered: bool, blocking: bool) -> None:
    (names,) = run(fail_at_each_call, numbered, blocking, processes=1)
    reached = {"fsync", "rename", "begin model.safetensors", "end optimizer.bin"}
    if sys.version_info >= (3, 11):  # before, pathlib keeps functions of `os` and `io` of its own
        reached |= {"mkdir", "write to a file"}
    assert reached <= set(names)


def end_at_each_call(numbered: bool) -> int:
    """Let a process end at each call of a save over another checkpoint."""
    training, disk = Training(numbered, blocking=True), Disk(end_at_once)
    assert training.save(1) == ""
    disk.arm(NEVER)
    assert training.save(2) == ""
    calls, number = disk.disarm(), 2
    for n in range(1, calls + 1):
        if (pid := os.fork()) == 0:
            disk.arm(n)
            training.save(number + 1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        loaded = training.load()
        assert loaded in (number, number + 1), f"call {n}"
        assert code == 7 or loaded == number + 1, f"call {n}"
        number += 2
        assert training.save(number) == "", f"call {n}"
        assert training.load() == number, f"call {n}"
        assert left_over() == [], f"call {n}"
    return calls


@pytest.mark.parametrize("numbered", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_process_ended_at_any_call_leaves_a_complete_checkpoint(run: Run, numbered: bool) -> None:
    (calls,) = run(end_at_each_call, numbered, processes=1)
    assert calls > 20


def fail_on_one_rank(rank: int, every: int) -> int:
    training, disk = Training(numbered=True, blocking=True), Disk(fail)
    mine = training.accelerator.process_index == rank
    assert training.save(1) == ""
    disk.arm(NEVER)
    assert training.save(2) == ""
    calls, number = training.accelerator.gather(torch.tensor(disk.disarm()))[rank].item(), 2
    for n in range(1, calls + 1, every):
        disk.arm(n if mine else NEVER)
        failure = training.save(number + 1)
        disk.disarm()
        failures = training.accelerator.gather(torch.tensor(bool(failure))).tolist()
        assert len(set(failures)) == 1, f"call {n}: {failures} {failure}"
        assert training.load() == number + (not failure), f"call {n}: {failure}"
        assert not failure or f"process {rank}: " in failure or "Choose a folder" in failure, failure
        number += 2
        assert training.save(number) == "", f"call {n}: {failure}"
        assert training.load() == number
        training.accelerator.wait_for_everyone()
        assert left_over() == []
        training.accelerator.wait_for_everyone()  # the next save creates a folder
    return calls


@pytest.mark.parametrize(("rank", "every"), [(0, 5), (1, 1)])
def test_an_error_of_one_rank_is_raised_on_all(run: Run, rank: int, every: int) -> None:
    assert min(run(fail_on_one_rank, rank, every)) >= 4


def fill_the_disk(blocking: bool) -> tuple[str, int, list[str]]:
    """Let the system itself refuse to make files larger."""
    training = Training(numbered=True, blocking=blocking)
    training.model.extra = nn.Parameter(torch.zeros(100_000))
    assert training.save(1) == ""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    failure = training.save(2)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = left_over()
    loaded = training.load()
    assert training.save(3) == ""
    return failure, loaded, left


@pytest.mark.parametrize("blocking", [True, False])
def test_a_write_that_the_system_refuses_leaves_the_old_checkpoint(run: Run, blocking: bool) -> None:
    ((failure, loaded, left),) = run(fill_the_disk, blocking, processes=1)
    assert "model.safetensors could not be written" in failure
    assert "the ones before it are unchanged" in failure
    assert loaded == 1
    assert left == []
