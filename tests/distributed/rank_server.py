"""Forks the ranks of distributed tests from one process that has imported torch and accelerate already.

Run as a program by `conftest.py` beside it: it reads one request (a line of JSON) after another from stdin,
forks the ranks, waits for them and answers with a line of JSON. A fork costs milliseconds where a fresh
interpreter spends seconds on imports. The server itself starts no thread, so forking is safe, and it calls
nothing of what it imports: each rank starts with the modules as their import leaves them.

A request: {"folder": str, "environments": [{...}, ...], "timeout": seconds,
            "grace": seconds that the others get to end after one has failed (optional)}
A reply:   {"codes": [exit code, ...], "first": index of the first rank that failed or null,
            "expired": whether time was up before any failed, "strays": [[pid, ...], ...]}
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import json
import os
import pickle
import pkgutil
import select
import signal
import sys
import time
import traceback
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

import numpy
import psutil

import accelerate

PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "torch.optim.lr_scheduler",
    "torch.utils.data",
    "torch._dynamo",  # the first optimizer imports it
    "torch._inductor.config",
    "torch.utils.serialization",
    "pytest",
    "safetensors.torch",
    "transformers.modeling_utils",
    "xxhash",
)
"""What a training run imports, beside the modules of accelerate."""
KEPT: list[types.ModuleType] = []  # the modules of libraries that are imported before the first fork
REMOVED: dict[str, types.ModuleType] = {}
"""None for the name of each of them."""
TICK = 0.01
GRACE = 5.0
STACK_SIGNAL = signal.SIGUSR1


class Watched:
    """One forked rank: its process, and how it ended."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> None:
        if self.code is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.code = os.waitstatus_to_exitcode(status)

    def write_stack(self) -> None:
        os.kill(self.pid, STACK_SIGNAL)

    def kill(self) -> None:
        kill_group(self.pid)
        _, status = os.waitpid(self.pid, 0)
        self.code = os.waitstatus_to_exitcode(status)


def kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:  # its last member has just ended
        return


def running_members(leader: int) -> list[int]:
    """Return the pids of a process group that still run (a rank's own children)."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:  # no process is left; psutil reads all processes of the machine
        return []
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if process.info["status"] != psutil.STATUS_ZOMBIE and os.getpgid(process.pid) == leader:
                found.append(process.pid)
        except ProcessLookupError:
            continue
    return found


def wait_for_strays(leader: int, seconds: float = 3.0) -> list[int]:
    """Give what a rank started a moment to end, then kill it and return its pids."""
    deadline = time.monotonic() + seconds
    while strays := running_members(leader):
        if time.monotonic() > deadline:
            kill_group(leader)
            await_end_of(leader)
            return strays
        time.sleep(TICK)
    return []


def await_end_of(leader: int) -> None:
    while running_members(leader):
        time.sleep(TICK)


def parent_gone() -> bool:
    """Wait one tick; true when stdin was closed, because the tests ended or gave this server up."""
    readable, _, _ = select.select([0], [], [], TICK)
    return bool(readable)


def watch(ranks: list[Watched], timeout: float, grace: float) -> tuple[int | None, bool]:
    """Wait until every rank has ended, or time is up, or one has failed and the others do not follow."""
    deadline, first = time.monotonic() + timeout, None
    while True:
        for index, rank in enumerate(ranks):
            rank.poll()
            if rank.code and first is None:
                first, deadline = index, min(deadline, time.monotonic() + grace)
        running = [rank for rank in ranks if rank.code is None]
        if not running:
            return first, False
        if parent_gone():
            for rank in running:
                rank.kill()
            raise SystemExit("the tests ended while ranks were running")
        if time.monotonic() > deadline:
            for rank in running:
                rank.write_stack()
            time.sleep(0.5)
            for rank in running:
                rank.kill()
            return first, first is None


def load_module(name: str, path: str) -> Any:
    """Import a test module under the name that pytest gave it, so that pickles load in both processes."""
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):  # `pickle` imports them before it looks for the module
        package = types.ModuleType(".".join(parents[:depth]))
        package.__path__ = [str(Path(path).parents[len(parents) - depth])]
        sys.modules.setdefault(package.__name__, package)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def become_rank(folder: Path, index: int, environment: dict[str, str]) -> None:
    """Turn a fresh fork into one rank: process group, environment, output file, stack dump on a signal."""
    os.setpgid(0, 0)
    output = os.open(folder / f"{index}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 256)  # the server's pipes: the tests must see them end when the server ends
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    faulthandler.enable()
    stack = open(folder / f"{index}.stack", "w")  # noqa: SIM115 (open until the rank ends)
    faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    numpy.random.seed()  # forks would all draw the same numbers
    skip_static_destructors()


def skip_static_destructors() -> None:
    """End this process without the C++ destructors of the libraries that were loaded before the fork.

    They remove each operator of torch from its dispatch table, which takes longer than most tests. Python's
    own end comes first and is complete: threads, `atexit`, modules, objects and their destructors.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    libc.__cxa_atexit(libc.fflush, None, None)  # the last one registered is called first


class LastObject:
    """Ends the process when `sys` is cleared, which is after all other modules but `builtins`.

    The interpreter would release interned strings and types next, and copy each page of the server that holds
    them.
    """

    def __init__(self, code: int) -> None:
        self._code, self._flush, self._exit = code, ctypes.CDLL(None).fflush, os._exit

    def __del__(self) -> None:
        self._flush(None)
        self._exit(self._code)


def end_with(code: object) -> SystemExit:
    """Return the exception that ends this process with an exit code, or with a message and 1."""
    if code is None or isinstance(code, int):
        sys.last_object = LastObject(code or 0)  # type: ignore[attr-defined]
    return SystemExit(code)


def call(folder: Path, index: int) -> None:
    """Call the test's function and leave its return value, or the traceback, in the folder.

    Raises:
        SystemExit: always, with 0, 1 or the code of the function's own: the interpreter ends as in a script,
            running what waits for its exit.
    """
    try:
        name, path, function, arguments = pickle.loads((folder / "call").read_bytes())
        target: Any = load_module(name, path)
        for part in function.split("."):
            target = getattr(target, part)
        value = pickle.dumps(target(*pickle.loads(arguments)))
    except BaseException as error:
        (folder / f"{index}.error").write_text(traceback.format_exc())
        raise end_with(error.code if isinstance(error, SystemExit) else 1) from None
    (folder / f"{index}.result").write_bytes(value)
    raise end_with(0)


def first_error(folder: Path, first: int) -> int:
    """Return the rank that wrote its traceback first, since several may end between two checks."""
    times = {int(path.stem): path.stat().st_mtime_ns for path in folder.glob("*.error")}
    return min(times, key=lambda rank: times[rank]) if first in times else first


def serve_one(request: dict[str, Any]) -> dict[str, Any]:
    folder = Path(request["folder"])
    ranks = []
    for index, environment in enumerate(request["environments"]):
        pid = os.fork()
        if pid == 0:
            become_rank(folder, index, environment)
            call(folder, index)
        ranks.append(Watched(pid))
    first, expired = watch(ranks, request["timeout"], request.get("grace", GRACE))
    if first is not None:
        first = first_error(folder, first)
    strays = [wait_for_strays(rank.pid) for rank in ranks]
    return {"codes": [rank.code for rank in ranks], "first": first, "expired": expired, "strays": strays}


WARNINGS_OF_TORCH = (
    "TypedStorage is deprecated",
    "The epoch parameter in `scheduler.step",
    "Importing .*torchao",
    "Warning. Profiler clears events at the end of each cycle",
    "Guards may run slower on Python 3.13.0",
    r"the \(type, exc, tb\) signature of throw",
)
"""Of older versions about calls of their own, as in `pyproject.toml`."""


def import_modules() -> None:
    """Import what ranks use: packages of accelerate import their modules on first use, in each rank anew."""
    for name in PRELOADED:
        importlib.import_module(name)
    for module in pkgutil.walk_packages(accelerate.__path__, "accelerate."):
        if module.name != "accelerate.memory_utils":  # an old path, which gives a warning
            importlib.import_module(module.name)
    for library in weakref.finalize._registry:  # type: ignore[attr-defined]
        library.atexit = False  # it would remove the operators of torch at the end of each rank
    cleared = ("__", "accelerate.state", "builtins", "sys", "torch.distributed.distributed_c10d")
    names = [name for name in sys.modules if not name.startswith(cleared)]
    KEPT.extend(sys.modules[name] for name in names)
    REMOVED.update(dict.fromkeys(names))  # type: ignore[arg-type]


def keep_libraries() -> None:
    """Let this process end without clearing the modules of libraries, which takes longer than most tests.

    The end of the interpreter replaces modules by None, too. It still clears that of the test, and those that
    hold states and process groups.
    """
    sys.modules.update(REMOVED)


def main() -> None:
    reply = os.dup(1)
    os.dup2(2, 1)
    warnings.simplefilter("error")
    for message in WARNINGS_OF_TORCH:
        warnings.filterwarnings("ignore", message, module=r"torch")
    atexit.register(keep_libraries)  # the first one registered is called last
    import_modules()
    assert psutil.Process().num_threads() == 1, (
        "an import has started a thread: ranks cannot be forked safely"
    )
    gc.freeze()  # ranks end three times as fast when they need not walk what was there before them
    # Ranks close the descriptor; an object that closes it again would hit whatever has its number by then.
    requests = open(os.dup(0), "rb", buffering=0, closefd=False)  # noqa: SIM115
    while line := requests.readline():
        os.write(reply, json.dumps(serve_one(json.loads(line))).encode() + b"\n")


if __name__ == "__main__":
    main()
