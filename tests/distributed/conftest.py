"""The one launcher of distributed tests: the fixture `run`."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

RANK_SERVER = Path(__file__).with_name("rank_server.py")
START_SECONDS = 120  # the first reply also waits for `import torch`
OUTPUT_LINES = 40
ON_SIMULATED_DEVICE = hasattr(torch, "sim")  # see tests/simulated_device


class RankServer:
    """The process that forks ranks; started on first use and again after it was given up."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BaseException:  # a timeout or an interrupt of pytest: the ranks must not continue
            self.close()
            raise
        if not line:
            self.close()
            pytest.fail("the rank server ended without a reply; its output is above", pytrace=False)
        return dict(json.loads(line))

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    @staticmethod
    def _start() -> subprocess.Popen[bytes]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        return subprocess.Popen(
            [sys.executable, str(RANK_SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **threads},
            start_new_session=True,
        )


SERVER = RankServer()


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    """The one server of this process: each conftest that imports this fixture gets the same."""
    SERVER.ask({"folder": os.getcwd(), "environments": [], "timeout": START_SECONDS})
    yield SERVER
    SERVER.close()


@pytest.fixture
def run(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Call a module-level function of a test file in several processes.

    `run(function, *args, processes=2, env=None, timeout=60)` starts `processes` ranks on the CPU with the
    variables that torchrun would set (and `ACCELERATE_USE_CPU=true`), calls `function(*args)` in each, and
    returns what they returned, in the order of the ranks. `env` adds variables; None takes one away.
    Warnings are errors. The working directory of the ranks is an empty folder which they share. A rank that
    raises, ends badly, leaves processes behind or does not end in time fails the test, with its traceback or
    its stack.
    """

    def run(
        function: Callable[..., Any],
        *args: Any,
        processes: int = 2,
        env: Mapping[str, str | None] | None = None,
        timeout: float = 60,
    ) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        (folder / "call").write_bytes(pickle.dumps(describe_call(function, args)))
        with hold_port() as port:
            environments = [rank_environment(rank, processes, port, env or {}) for rank in range(processes)]
            reply = rank_server.ask({"folder": str(folder), "environments": environments, "timeout": timeout})
        if complaint := describe_failure(folder, function.__qualname__, timeout, reply):
            pytest.fail(complaint, pytrace=False)
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(processes)]

    return run


class Ended(NamedTuple):
    """How ranks ended: their codes (minus the number of a signal) and what each wrote to its output."""

    codes: list[int]
    outputs: list[str]


@pytest.fixture
def end(rank_server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Ended]:
    """Call a function in several processes as `run` does, where it is meant to end badly.

    `end(function, *args, processes=2, env=None, timeout=60, grace=20)` tells how the ranks ended. One that
    leaves processes behind, does not end in time, or not within `grace` seconds after the first that ended
    badly, fails the test.
    """

    def end(
        function: Callable[..., Any],
        *args: Any,
        processes: int = 2,
        env: Mapping[str, str | None] | None = None,
        timeout: float = 60,
        grace: float = 20,
    ) -> Ended:
        folder = tmp_path_factory.mktemp("ranks")
        (folder / "call").write_bytes(pickle.dumps(describe_call(function, args)))
        with hold_port() as port:
            environments = [rank_environment(rank, processes, port, env or {}) for rank in range(processes)]
            request = {
                "folder": str(folder),
                "environments": environments,
                "timeout": timeout,
                "grace": grace,
            }
            reply = rank_server.ask(request)
        outputs = [read(folder / f"{rank}.output") for rank in range(processes)]
        stood = [stack for rank in range(processes) if (stack := read(folder / f"{rank}.stack"))]
        if stood or any(reply["strays"]):
            pytest.fail("\n".join(["a rank had to be stopped", *stood, *outputs]), pytrace=False)
        return Ended(reply["codes"], outputs)

    return end


def describe_call(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[str, str, str, bytes]:
    """Name a function so that another process finds it; arguments stay pickled until its module is loaded."""
    path = sys.modules[function.__module__].__file__
    if "<" in function.__qualname__ or path is None:
        raise ValueError(f"{function.__qualname__}: run() needs a function at the top of a test file")
    return function.__module__, path, function.__qualname__, pickle.dumps(args)


@contextmanager
def hold_port() -> Iterator[int]:
    """Bind a free port without listening on it: rank 0 can use it (SO_REUSEADDR), other processes cannot."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield int(holder.getsockname()[1])


def rank_environment(rank: int, processes: int, port: int, extra: Mapping[str, str | None]) -> dict[str, str]:
    """This process's variables, those of torchrun for one rank, and a test's own."""
    variables: dict[str, str | None] = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **({} if ON_SIMULATED_DEVICE else {"ACCELERATE_USE_CPU": "true"}),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        **extra,
    }
    return {name: value for name, value in variables.items() if value is not None}


def describe_failure(folder: Path, name: str, timeout: float, reply: Mapping[str, Any]) -> str:
    """One text for everything that went wrong in a run, the first failure first; empty when all is well."""
    complaints = [describe_rank(folder, rank, reply) for rank in failing_order(reply)]
    text = "\n\n".join(filter(None, complaints))
    if not text:
        return ""
    headline = f"{name} did not end within {timeout} s" if reply["expired"] else f"{name} failed"
    return f"{headline} on {len(reply['codes'])} processes\n\n{text}"


def failing_order(reply: Mapping[str, Any]) -> list[int]:
    ranks = list(range(len(reply["codes"])))
    return sorted(ranks, key=lambda rank: rank != reply["first"])


def describe_rank(folder: Path, rank: int, reply: Mapping[str, Any]) -> str:
    """What went wrong on one rank: its error, or where it stood when it was stopped, and its last output."""
    code, strays = reply["codes"][rank], reply["strays"][rank]
    answered = (folder / f"{rank}.result").exists()
    if code == 0 and answered and not strays:
        return ""
    error, stack, output = (read(folder / f"{rank}.{kind}") for kind in ("error", "stack", "output"))
    findings = (
        (strays, f"left processes running: {strays}"),
        (stack, f"was stopped; it stood here:\n{stack}"),
        (error, error),
        (
            not answered and not error and not stack,
            f"ended with exit code {code} before its function returned",
        ),
        (code and answered and not stack, f"ended with exit code {code} after its function had returned"),
        (output, "its output ends with:\n" + "\n".join(output.splitlines()[-OUTPUT_LINES:])),
    )
    return f"rank {rank}: " + "\n".join(text for found, text in findings if found)


def read(path: Path) -> str:
    text = path.read_text(errors="replace") if path.exists() else ""
    return text.partition("nanobind: leaked")[0]  # triton prints what a rank that ends has not freed
