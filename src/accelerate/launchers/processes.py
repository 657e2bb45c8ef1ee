"""The processes that a running program starts: what each of them does, and how they are started and ended."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from accelerate.base import LaunchError, current, patch_environment
from accelerate.launch import PrepareForLaunch, count_of, hold_loopback_store, run_key
from accelerate.launchers.cuda_use import describe_cuda_use
from accelerate.state import process_group

_SECONDS_TO_END = 10.0
_AGENT_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


@dataclass(frozen=True)
class LocalWorkers:
    """The processes to start on this machine, and where they meet those of others."""

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


@dataclass(frozen=True)
class Rendezvous:
    """What torch's elastic agent is told beside the workers."""

    backend: str
    endpoint: str
    settings: Mapping[str, Any]
    run_id: str
    max_restarts: int
    monitor_interval: float
    log_prefix: str | None


class Worker:
    """The user's function in a process of its own: what it raises is written down, and nothing is returned.

    Args:
        function: The user's function.
        reports: Folder for the tracebacks of processes that fail.
    """

    def __init__(self, function: Callable[..., Any], reports: Path) -> None:
        self.function = function
        self.reports = reports
        self.__name__ = self.__qualname__ = getattr(function, "__name__", "function")  # for torch's agent

    def __call__(self, *args: Any) -> None:
        try:
            self.function(*args)
        except BaseException:
            attempt = count_of(current(), "TORCHELASTIC_RESTART_COUNT", 0)
            report = self.reports / f"{attempt:04}-{time.time_ns()}-{current().get('RANK', os.getpid())}"
            report.write_text(traceback.format_exc())
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
        reports: Where the launcher's worker writes down what it raises.

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
        raise _failed(_first_report(reports) or str(error)) from error
    finally:
        _end(context.processes)
        for file in context.error_files:  # torch leaves them where they are
            Path(file).unlink(missing_ok=True)


def _first_report(reports: Path) -> str:
    """Return the traceback written first after the last start: the others mostly miss who failed first."""
    written = sorted(path.name for path in reports.iterdir())
    if not written:
        return ""
    last_start = written[-1].partition("-")[0]
    return (reports / next(name for name in written if name.startswith(last_start))).read_text()


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
    meeting: Rendezvous,
) -> None:
    """Let torch's elastic agent fork the processes, and start them again as asked.

    Raises:
        LaunchError: A process failed, and no restart was left.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = dict(meeting.settings)
    if meeting.backend == "static":
        settings.setdefault("rank", workers.machine)
    config = LaunchConfig(
        min_nodes=workers.machines,
        max_nodes=workers.machines,
        nproc_per_node=workers.size,
        run_id=meeting.run_id,
        rdzv_backend=meeting.backend,
        rdzv_endpoint=meeting.endpoint,
        rdzv_configs=settings,
        max_restarts=meeting.max_restarts,
        monitor_interval=meeting.monitor_interval,
        start_method="fork",
        log_line_prefix_template=meeting.log_prefix,
    )
    signals = current().get(_AGENT_SIGNALS, "SIGTERM,SIGINT,SIGHUP,SIGQUIT")  # the agent leaves it there
    alone = workers.machines == 1 and meeting.backend == "static"
    held = hold_loopback_store(workers.address, workers.port) if alone else None
    with (
        tempfile.TemporaryDirectory() as folder,
        patch_environment(**workers.environment(), **{_AGENT_SIGNALS: signals}),
    ):
        try:
            elastic_launch(config, worker_class(function, Path(folder)))(*args)
            return
        except ChildFailedError as error:
            report = _first_report(Path(folder)) or str(error)
        finally:
            del held
    # Raised out here: the agent's exception would keep the agent alive, and the port on which it listens.
    raise _failed(report)


def _failed(report: str) -> LaunchError:
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
