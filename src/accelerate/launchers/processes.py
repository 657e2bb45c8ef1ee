"""Processes that are forked from a running program, and the error of the one that failed first."""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from accelerate.base import LaunchError, are_libraries_initialized, current, patch_environment
from accelerate.launch import (
    Failure,
    PrepareForLaunch,
    collect,
    count_of,
    find_first,
    hold_loopback_store,
    run_key,
)
from accelerate.nested import iterate_tensors
from accelerate.state import process_group

_SECONDS_TO_END = 10.0
# Libraries that may start CUDA when they are imported.
_CUDA_STARTERS = ("bitsandbytes", "cupy", "jax", "pycuda.autoinit", "tensorflow")
_AGENT_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


@dataclass(frozen=True)
class LocalWorkers:
    """The processes to start on this machine, and the address and port of rank 0."""

    size: int
    machines: int
    machine: int
    address: str
    port: int
    precision: str
    further: Mapping[str, str] = field(default_factory=dict)

    def environment(self) -> dict[str, str]:
        return {
            "WORLD_SIZE": str(self.size * self.machines),
            "LOCAL_WORLD_SIZE": str(self.size),
            "NPROC": str(self.size),
            "NODE_RANK": str(self.machine),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "FORK_LAUNCHED": "1",
            **(run_key(current()) if self.machines == 1 else {}),
            **precision_variables(self.precision),
            **self.further,
        }


class Worker:
    """The user's function in a process of its own: its error is written to a file, and nothing is returned.

    Args:
        function: The user's function.
        reports: Folder for the errors of processes that fail.
    """

    def __init__(self, function: Callable[..., Any], reports: Path) -> None:
        self.function = function
        self.reports = reports
        self.__name__ = self.__qualname__ = getattr(function, "__name__", "function")  # for torch's agent

    def __call__(self, *args: Any) -> None:
        try:
            self.function(*args)
        except BaseException as error:
            Failure.of(error, current()).write(self.reports)
            raise
        process_group.close_group()


class CpuWorker(Worker):
    """The same in a fork that computes on the CPU: OpenMP's threads do not survive a fork."""

    def __call__(self, *args: Any) -> None:
        outermost = current().get("OMP_NUM_THREADS", "").partition(",")[0]  # OpenMP takes one for each level
        torch.set_num_threads(max(1, count_of({"OMP_NUM_THREADS": outermost}, "OMP_NUM_THREADS", 1)))
        super().__call__(*args)


def run_forked(launcher: PrepareForLaunch, args: tuple[Any, ...], size: int, reports: Path) -> None:
    """Fork the processes, wait for all, and leave none behind, however this ends.

    Args:
        launcher: Called in each process with its index and `args`.
        args: For the function.
        size: How many processes.
        reports: Folder of the errors that workers write.

    Raises:
        LaunchError: A process failed.
    """
    context: Any = start_processes(  # type: ignore[no-untyped-call]
        launcher, args=args, nprocs=size, join=False, start_method="fork"
    )
    try:
        while not context.join():
            pass
    except ProcessException as error:
        _end(context.processes)  # before the reports are read, so that they are whole
        raise _failed(reports, error) from error
    finally:
        _end(context.processes)
        for file in context.error_files:  # torch leaves them where they are
            Path(file).unlink(missing_ok=True)


def _end(processes: list[Any]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(_SECONDS_TO_END)
        if process.is_alive():
            process.kill()
            process.join()


def run_elastic(
    worker_class: type[Worker],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    workers: LocalWorkers,
    rdzv_backend: str = "static",
    rdzv_configs: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Let torch's elastic agent fork the processes, and start them again as asked.

    Args:
        worker_class: What runs the function in each process.
        function: The user's function.
        args: Its arguments.
        workers: The processes.
        rdzv_backend: How the machines meet.
        rdzv_configs: Further settings of torch's rendezvous.
        options: Further fields of torch's `LaunchConfig`.

    Raises:
        LaunchError: A process failed, and no restart was left.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    own_rank = {"rank": workers.machine} if rdzv_backend == "static" else {}
    config = LaunchConfig(
        min_nodes=workers.machines,
        max_nodes=workers.machines,
        nproc_per_node=workers.size,
        rdzv_backend=rdzv_backend,
        rdzv_configs={**own_rank, **(rdzv_configs or {})},
        start_method="fork",
        **options,
    )
    signals = current().get(_AGENT_SIGNALS, "SIGTERM,SIGINT,SIGHUP,SIGQUIT")  # the agent leaves it there
    is_alone = workers.machines == 1 and rdzv_backend == "static"
    held = hold_loopback_store(workers.address, workers.port) if is_alone else None
    with (
        tempfile.TemporaryDirectory() as folder,
        patch_environment(**workers.environment(), **{_AGENT_SIGNALS: signals}),
    ):
        try:
            elastic_launch(config, worker_class(function, Path(folder)))(*args)
            return
        except ChildFailedError as error:
            failed = _failed(Path(folder), error)
        finally:
            del held
    # Raised out here: the agent's exception would keep the agent alive, and the port on which it listens.
    raise failed


def _failed(reports: Path, error: Exception) -> LaunchError:
    """The error of a run, with the traceback of the process that failed first."""
    first = find_first(collect(reports, 1))
    report = str(error) if first is None or first.failure is None else first.failure.trace
    hint = ""
    if "re-initialize CUDA in forked subprocess" in report:
        hint = f"\n\n{describe_cuda_use()}"
    return LaunchError(f"A process that was launched failed.\n\n{report.strip()}{hint}")


def precision_variables(name: str) -> dict[str, str]:
    """The variables that ask for mixed precision, under our name and the one the documentation uses."""
    return {"ACCELERATE_MIXED_PRECISION": name, "MIXED_PRECISION": name}


def thread_variables() -> dict[str, str]:
    """One thread for each forked process, where the user did not ask for more."""
    return {} if current().get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": "1"}


def describe_cuda_use() -> str:
    """Say that CUDA is in use in this process, so that it cannot be forked, by what, and what to do."""
    holders = [f"the variable {name!r}" for name in _cuda_variables()]
    suspects = are_libraries_initialized(*_CUDA_STARTERS)
    if not holders and any(_on_cuda(thing) for thing in gc.get_objects()):
        holders = ["a tensor that some object holds"]
    known = f" It is used by {', '.join(holders)}." if holders else ""
    known += f" Importing {', '.join(suspects)} may have started it." if suspects else ""
    return (
        f"CUDA was already started in this process, and a process that uses it cannot be forked.{known} Move "
        "everything that touches the GPU (`.cuda()`, `.to('cuda')`, `torch.cuda.*`, imports that start CUDA) "
        "into the function, restart the notebook and launch again."
    )


def _cuda_variables() -> Iterator[str]:
    """Names of the notebook's own variables that hold something on a GPU."""
    for name, value in list(vars(sys.modules["__main__"]).items()):
        values = value.parameters() if isinstance(value, torch.nn.Module) else iterate_tensors(value)
        if not name.startswith("_") and any(_on_cuda(tensor) for tensor in values):
            yield name


def _on_cuda(thing: object) -> bool:
    return issubclass(type(thing), torch.Tensor) and bool(thing.is_cuda)  # type: ignore[attr-defined]
