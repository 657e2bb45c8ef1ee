"""Start processes from a running program: a notebook, or a test."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from accelerate.base.enums import DistributedType, PrecisionType
from accelerate.base.environ import current, parse_flag_from_env, patch_environment
from accelerate.base.errors import ConfigurationError, LaunchError, wrong_value
from accelerate.base.packages import are_libraries_initialized
from accelerate.devices import catalogue
from accelerate.devices.backend import DeviceBackend
from accelerate.launch.ports import get_free_port, is_port_in_use
from accelerate.launch.worker import RENDEZVOUS_FILE, PrepareForLaunch
from accelerate.nested import iterate_tensors
from accelerate.state import AcceleratorState, PartialState, process_group

# Libraries that start CUDA when they are imported.
_CUDA_STARTERS = ("bitsandbytes", "tensorflow", "jax", "cupy", "numba.cuda", "pycuda.autoinit")
_SECONDS_TO_END = 10.0
_AGENT_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


@dataclass(frozen=True)
class _Crew:
    """The processes to start on this machine, and where they meet those of others."""

    size: int
    machines: int
    machine: int
    address: str
    port: int
    precision: str

    def environment(self) -> dict[str, str]:
        return {
            "WORLD_SIZE": str(self.size * self.machines),
            "LOCAL_WORLD_SIZE": str(self.size),
            "NPROC": str(self.size),
            "NODE_RANK": str(self.machine),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "FORK_LAUNCHED": "1",
            **_precision(self.precision),
        }


@dataclass(frozen=True)
class _Rendezvous:
    """What torch's elastic agent is told beside the crew."""

    backend: str
    endpoint: str
    settings: Mapping[str, Any]
    run_id: str
    max_restarts: int
    monitor_interval: float
    log_prefix: str | None


class _Worker:
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
            attempt = current().get("TORCHELASTIC_RESTART_COUNT", "0")
            report = self.reports / f"{int(attempt):04}-{time.time_ns()}-{current().get('RANK', os.getpid())}"
            report.write_text(traceback.format_exc())
            raise
        process_group.close_group()


class _CpuWorker(_Worker):
    """The same in a fork that computes on the CPU: OpenMP's threads do not survive a fork."""

    def __call__(self, *args: Any) -> None:
        torch.set_num_threads(int(current().get("OMP_NUM_THREADS") or 1))
        super().__call__(*args)


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run a training function in several processes, started from a notebook.

    The processes are forked, so the function may be defined in a cell. It has to make the `Accelerator`, and
    nothing may have used a GPU before. A single process is not started: the function is called here.

    Args:
        function: What each process calls.
        args: Its arguments.
        num_processes: On this machine. Default: one for each device; one on the CPU.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        use_port: Where the processes meet; on one machine a busy port is replaced by a free one.
        master_addr: Address of machine 0.
        node_rank: Which machine this is.
        num_nodes: Number of machines.
        rdzv_backend: How the machines meet: "static" or "c10d".
        rdzv_endpoint: Where they meet, as host:port. Default: `master_addr` and `use_port`.
        rdzv_conf: Further settings of torch's rendezvous.
        rdzv_id: Name of the run, the same on all machines.
        max_restarts: How often the processes are started again after a failure (not on the CPU of one
            machine).
        monitor_interval: Seconds between two looks at the processes.
        log_line_prefix_template: What precedes each line they print.

    Raises:
        ConfigurationError: An argument cannot work, there is an `Accelerator` already, or a GPU is in use.
        LaunchError: A process failed; the message has its traceback.
    """
    _check_arguments(function, mixed_precision, num_nodes, node_rank)
    backend = catalogue.CPU if parse_flag_from_env("ACCELERATE_USE_CPU") else catalogue.detect()
    if backend == catalogue.XLA:
        _run_replicas(function, args, num_processes, mixed_precision)
        return
    size = _crew_size(num_processes, backend)
    if size * num_nodes == 1:
        _run_here(function, args, mixed_precision, backend)
        return
    _refuse_used_notebook(backend)
    port = _free_port(int(use_port), num_nodes)
    crew = _Crew(size, num_nodes, node_rank, master_addr, port, mixed_precision)
    print(f"Launching training on {size} x {backend.label}.")
    if backend == catalogue.CPU and num_nodes == 1:
        environment = {**crew.environment(), "ACCELERATE_USE_CPU": "true", **_threads()}
        with tempfile.TemporaryDirectory() as folder, patch_environment(**environment):
            worker = _CpuWorker(function, Path(folder))
            _run_forked(PrepareForLaunch(worker, DistributedType.MULTI_CPU), args, size, Path(folder))
        return
    meeting = _Rendezvous(
        rdzv_backend,
        rdzv_endpoint or f"{master_addr}:{port}",
        rdzv_conf or {},
        rdzv_id,
        max_restarts,
        monitor_interval,
        log_line_prefix_template,
    )
    _run_elastic(function, args, crew, meeting)


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> None:
    """Run a function in several CPU processes, to try how it behaves in a distributed run.

    Args:
        function: What each process calls.
        args: Its arguments.
        num_processes: How many.

    Raises:
        ConfigurationError: An argument cannot work, or there is an `Accelerator` already.
        LaunchError: A process failed; the message has its traceback.
    """
    _check_arguments(function, "no", 1, 0)
    if num_processes < 1:
        raise wrong_value("num_processes", num_processes, "nobody would run", "Give at least 1")
    _refuse_used_notebook(catalogue.CPU)
    with tempfile.TemporaryDirectory() as meeting, tempfile.TemporaryDirectory() as folder:
        environment = {
            "WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "ACCELERATE_USE_CPU": "yes",
            RENDEZVOUS_FILE: str(Path(meeting) / "rendezvous"),
            **_precision("no"),
            **_threads(),
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        }
        with patch_environment(**environment):
            worker = _CpuWorker(function, Path(folder))
            _run_forked(PrepareForLaunch(worker, debug=True), args, num_processes, Path(folder))


def test_launch() -> None:
    """Check that a process can find its place: build a `PartialState`."""
    PartialState()


test_launch.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it where it is imported


def _check_arguments(function: object, precision: str, machines: int, machine: int) -> None:
    if not callable(function):
        raise wrong_value(
            "function",
            function,
            "it cannot be called",
            "Pass the function itself, and its arguments in `args`",
        )
    names = [str(kind.value) for kind in PrecisionType]
    if precision not in names:
        raise wrong_value("mixed_precision", precision, "no such precision", f"Use one of {', '.join(names)}")
    if not 0 <= machine < machines:
        raise wrong_value(
            "node_rank", machine, f"there are {machines} machines", f"Use a number from 0 to {machines - 1}"
        )


def _crew_size(wanted: int | None, backend: DeviceBackend) -> int:
    """Number of processes on this machine."""
    single = backend == catalogue.CPU or backend.comm is None
    if wanted is None:
        return 1 if single else backend.count()
    if wanted < 1:
        raise wrong_value("num_processes", wanted, "nobody would run", "Give at least 1")
    limit = wanted if backend == catalogue.CPU else 1 if backend.comm is None else backend.count()
    if wanted > limit:
        raise wrong_value(
            "num_processes",
            wanted,
            f"{backend.label} has room for {limit} here",
            f"Give at most {limit}, or set ACCELERATE_USE_CPU=true to train on the CPU",
        )
    return wanted


def _run_here(
    function: Callable[..., Any], args: tuple[Any, ...], precision: str, backend: DeviceBackend
) -> None:
    print(f"Launching training on one {backend.label}.")
    fallback = {"PYTORCH_ENABLE_MPS_FALLBACK": "1"} if backend == catalogue.MPS else {}
    with patch_environment(**_precision(precision), **fallback):
        function(*args)


def _run_replicas(
    function: Callable[..., Any], args: tuple[Any, ...], num_processes: int | None, precision: str
) -> None:
    """Start the replicas of an XLA run; the runtime gives them their ranks."""
    xmp = import_module("torch_xla.distributed.xla_multiprocessing")
    launcher = PrepareForLaunch(function, DistributedType.XLA)
    print("Launching training on the devices of torch_xla.")
    with patch_environment(**_precision(precision)):
        xmp.spawn(launcher, args=args, nprocs=num_processes, start_method="fork")


def _run_forked(launcher: PrepareForLaunch, args: tuple[Any, ...], size: int, reports: Path) -> None:
    """Fork the processes, wait for all, and leave none behind, however this ends."""
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


def _run_elastic(
    function: Callable[..., Any], args: tuple[Any, ...], crew: _Crew, meeting: _Rendezvous
) -> None:
    """Let torch's elastic agent fork the processes, and start them again as asked."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    settings = dict(meeting.settings)
    if meeting.backend == "static":
        settings.setdefault("rank", crew.machine)
    config = LaunchConfig(
        min_nodes=crew.machines,
        max_nodes=crew.machines,
        nproc_per_node=crew.size,
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
    with (
        tempfile.TemporaryDirectory() as folder,
        patch_environment(**crew.environment(), **{_AGENT_SIGNALS: signals}),
    ):
        try:
            elastic_launch(config, _Worker(function, Path(folder)))(*args)
            return
        except ChildFailedError as error:
            report = _first_report(Path(folder)) or str(error)
    # Raised out here: the agent's exception would keep the agent alive, and the port on which it listens.
    raise _failed(report)


def _failed(report: str) -> LaunchError:
    hint = ""
    if "re-initialize CUDA in forked subprocess" in report:
        hint = f"\n\n{_cuda_in_use()}"
    return LaunchError(f"A process that was launched failed.\n\n{report.strip()}{hint}")


def _refuse_used_notebook(backend: DeviceBackend) -> None:
    """Raise when a fork of this process would not be able to train."""
    if AcceleratorState._shared_state or PartialState._shared_state:
        raise ConfigurationError(
            "An Accelerator (or PartialState) was already made in this process, so the launched processes "
            "would take it for theirs. Make it inside the function only, restart the notebook, launch again."
        )
    if backend == catalogue.CUDA and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigurationError(_cuda_in_use())


def _cuda_in_use() -> str:
    """Say that CUDA is in use here, by whom as far as can be seen, and what to do."""
    holders = [f"the variable {name!r}" for name in _cuda_variables()]
    holders += [f"the library {name}" for name in are_libraries_initialized(*_CUDA_STARTERS)]
    if not holders and any(_on_cuda(thing) for thing in gc.get_objects()):
        holders = ["a tensor that some object holds"]
    known = f" It is used by {', '.join(holders)}." if holders else ""
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


def _free_port(port: int, machines: int) -> int:
    if port == 0 or (machines == 1 and is_port_in_use(port)):
        return get_free_port()
    return port


def _precision(name: str) -> dict[str, str]:
    return {"ACCELERATE_MIXED_PRECISION": name, "MIXED_PRECISION": name}


def _threads() -> dict[str, str]:
    """One thread for each forked process, where the user did not ask for more."""
    return {} if current().get("OMP_NUM_THREADS") else {"OMP_NUM_THREADS": "1"}
