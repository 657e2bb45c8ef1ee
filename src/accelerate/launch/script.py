"""Execution of a script in a launched process as Python would run it, and of a function in a worker.

The launcher starts `entry.py` instead of a script: `python entry.py script.py ...` or `python entry.py -m
module ...`. The script runs as `__main__`, with its own `sys.argv`, `sys.path` and `__file__`. An error that
ends it is recorded with a traceback that begins with its own lines.
"""

from __future__ import annotations

import os
import runpy
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate.base import ConfigurationError, DistributedType, end_with_parent, environ, stack_dumps
from accelerate.launch.children import NOTES
from accelerate.launch.failures import (
    ENTRY,
    FOLDER_VARIABLE,
    RESTART_CODE,
    VERBOSE_VARIABLE,
    Failure,
    is_last_attempt,
    shortened,
    starts_again,
)

PACKAGE = str(Path(__file__).parents[1]) + os.sep
SELF_CHECKS = str(Path(PACKAGE) / "test_utils") + os.sep
"""Folder of scripts of this package, which are launched like those of users."""


@dataclass
class Script:
    """State of the script that this process runs."""

    # Returns the number of steps, or None before an `Accelerator` is created.
    count_steps: Callable[[], int] | None = None
    uses_ranks: bool = False  # whether the script has created a state of the package, which knows the ranks
    # Rank of a process that SIGTERM asked to end, with all processes of its machine, or None.
    ended_rank: int | None = None

    @property
    def step(self) -> int:
        """Number of steps of the optimizers, or -1 if it is not known."""
        return -1 if self.count_steps is None else self.count_steps()


SCRIPT = Script()


def run_script(words: list[str]) -> None:
    """Runs a module, or a script or folder in the existing `__main__`, where pickle looks up names."""
    if words[0] == "-m":
        sys.path[0] = str(Path.cwd())
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    script = Path(words[0]).absolute()
    if script.is_dir():
        script /= "__main__.py"
    sys.path[0] = str(script.resolve().parent)
    sys.argv = words
    namespace = vars(sys.modules["__main__"])
    preserved = {
        name: namespace[name] for name in ("__name__", "__builtins__", "__loader__", "__spec__", "__doc__")
    }
    namespace.clear()
    namespace.update(preserved, __file__=str(script), __doc__=None, __package__=None, __cached__=None)
    # Otherwise the script would have the `annotations` of this file.
    exec(compile(script.read_bytes(), str(script), "exec", dont_inherit=True), namespace)


def report(error: BaseException) -> None:
    """Records the error and prints it, as one line if the launcher reports errors of all ranks."""
    trace = _script_frames(error.__traceback__)
    # The interpreter sets these for an uncaught error, and the process group reads them at exit.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    variables = environ.current()
    failure = Failure.of(error.with_traceback(trace), variables, SCRIPT.step)
    folder = variables.get(FOLDER_VARIABLE)
    written = folder is not None and failure.write(Path(folder))
    if written and failure.world_size > 1 and starts_again(variables):
        return
    if written and failure.world_size > 1 and VERBOSE_VARIABLE not in variables:
        print(f"rank {failure.rank}: {shortened(failure.headline)}", file=sys.stderr, flush=True)
    else:
        sys.excepthook(type(error), error, trace)


def report_end(error: SystemExit | KeyboardInterrupt) -> None:
    """Records the exit of one of several processes, for which Python then prints one line."""
    trace, variables = _script_frames(error.__traceback__), environ.current()
    failure = Failure.of(error.with_traceback(trace), variables, SCRIPT.step)
    hook = sys.excepthook
    sys.excepthook = lambda kind, value, _: hook(kind, value.with_traceback(trace), trace)
    if failure.world_size == 1 or FOLDER_VARIABLE not in variables:
        return
    failure.write(Path(variables[FOLDER_VARIABLE]))
    if VERBOSE_VARIABLE not in variables:
        line = f"rank {failure.rank}: {failure.headline} at {failure.place}"
        sys.excepthook = lambda *_: print(line, file=sys.stderr, flush=True)


def _script_frames(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback without the frames of this package and `runpy`.

    Frames of this package stay where the error was raised in one of them.
    """
    runners = (str(ENTRY), __file__, "<frozen runpy>", runpy.__file__)
    while trace is not None and trace.tb_frame.f_code.co_filename in runners:
        trace = trace.tb_next
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    is_own = [file.startswith(PACKAGE) and not file.startswith(SELF_CHECKS) for file in files]
    shown: TracebackType | None = None
    for frame, own in zip(reversed(frames), reversed(is_own), strict=True):
        if not own or is_own[-1]:
            shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown


def main(words: list[str]) -> None:
    """Runs the target, and exits with code 1 after an error, or with the code of the script.

    A script that ends because another machine of an elastic run was asked to end exits with `RESTART_CODE`.
    Other ranks that wait for this one can request its stack. The process ends with its launcher.
    """
    end_with_parent(environ.take_parent())
    NOTES.install()
    stack_dumps.offer()
    try:
        run_script(words)
    except SystemExit as error:
        if isinstance(error.code, str):
            report_end(error)
        if error.code in (None, 0) and _starts_again():
            sys.exit(RESTART_CODE)
        raise
    except KeyboardInterrupt as error:
        report_end(error)
        raise
    except Exception as error:
        report(error)
        sys.exit(1)
    _note_independent_processes()
    if _starts_again():
        sys.exit(RESTART_CODE)


def _note_independent_processes() -> None:
    """Prints a line if no process used the others, so that each of them did the whole work."""
    variables = environ.current()
    size = int(variables.get("WORLD_SIZE") or 1)
    if size == 1 or variables.get("RANK") != "0" or SCRIPT.uses_ranks or FOLDER_VARIABLE not in variables:
        return
    if not _has_process_group() and not any("RANK" in text or "mpi4py" in text for text in _own_sources()):
        print(
            f"accelerate launch: the script created no Accelerator, so {size} processes did the same work "
            "independently. Create one and prepare its model, optimizer and loaders, or launch one process.",
            file=sys.stderr,
        )


def _has_process_group() -> bool:
    """Returns whether the script has opened a process group of torch."""
    if "torch.distributed" not in sys.modules:
        return False
    from accelerate import torch_private  # it imports torch

    return torch_private.has_opened_group()


def _own_sources() -> Iterator[str]:
    """Yields the texts of the script and of the modules that it has imported from outside of libraries."""
    libraries = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    paths = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    for path in paths:
        if path and path.endswith(".py") and not path.startswith((*libraries, PACKAGE)):
            with suppress(OSError):  # of a module without a file, such as one in an archive
                yield Path(path).read_text(encoding="utf-8", errors="replace")


def _starts_again() -> bool:
    """Returns whether an elastic run continues on this machine, because only another one was asked to end."""
    variables = environ.current()
    if SCRIPT.ended_rank is None or environ.ELASTIC not in variables:
        return False
    if is_last_attempt(variables):
        return False
    size = int(variables["LOCAL_WORLD_SIZE"])
    return SCRIPT.ended_rank // size != int(variables["RANK"]) // size


RENDEZVOUS_FILE = "ACCELERATE_DEBUG_RDV_FILE"


class PrepareForLaunch:
    """Function for `torch.multiprocessing`, which passes the process index as the first argument.

    Args:
        launcher: function of the user.
        distributed_type: distributed type of the processes. With `DistributedType.XLA`, XLA sets the ranks.
        debug: whether to use a file (``ACCELERATE_DEBUG_RDV_FILE``) as the store instead of a port.
    """

    def __init__(
        self,
        launcher: Callable[..., Any],
        distributed_type: DistributedType | str = "NO",
        debug: bool = False,
    ) -> None:
        self.launcher = launcher
        self.distributed_type = DistributedType(distributed_type)
        self.debug = debug

    def __call__(self, index: int, *args: Any) -> None:
        """Sets the rank of this process, and then calls the function.

        Args:
            index: index of this process on its node, from 0.
            *args: arguments of the function.
        """
        if self.debug:
            _rendezvous_over_file(index)
        elif self.distributed_type != DistributedType.NO and self.distributed_type != DistributedType.XLA:
            first = environ.get_int_from_env(["NODE_RANK"], 0) * environ.get_int_from_env(["NPROC"], 1)
            environ.assign({"LOCAL_RANK": str(index), "RANK": str(first + index)})
        environ.assign({"FORK_LAUNCHED": "1"})
        self.launcher(*args)


def _rendezvous_over_file(index: int) -> None:
    import torch.distributed
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    path = environ.current().get(RENDEZVOUS_FILE)
    if not path:
        raise ConfigurationError(
            f"{RENDEZVOUS_FILE} is not set: a debug launch uses this file as its store. Set it to a path."
        )
    size = environ.get_int_from_env(["WORLD_SIZE"], 1)
    torch.distributed.init_process_group(
        backend="gloo", rank=index, store=FileStore(path, size), world_size=size
    )
