"""Start processes from a running program: a notebook, or a test."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException, start_processes

from accelerate import launch
from accelerate.base import (
    ConfigurationError,
    DistributedType,
    LaunchError,
    PrecisionName,
    PrecisionType,
    are_libraries_initialized,
    current,
    parse_flag_from_env,
    patch_environment,
    wrong_value,
)
from accelerate.devices import DeviceBackend, check_cuda_p2p_ib_support, count_chips, hardware_table
from accelerate.nested import iterate_tensors
from accelerate.state import AcceleratorState, GradientState, PartialState, process_group

_STATES = (AcceleratorState, PartialState, GradientState)
_SECONDS_TO_END = 10.0
# Libraries that may start CUDA when they are imported.
_CUDA_STARTERS = ("bitsandbytes", "cupy", "jax", "pycuda.autoinit", "tensorflow")
# With "spawn", on Windows, the function has to be importable.
_START_METHOD = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
_AGENT_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: PrecisionName = "no",
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

    The processes are forked, so the function may be defined in a cell; on Windows they are not, and the
    function has to be defined in a file that they can import. It has to make the `Accelerator`, and
    nothing may have used a GPU before. A single process is not started: the function is called here, and the
    state of an `Accelerator` that it makes ends with it.

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
    backend = hardware_table.CPU if parse_flag_from_env("ACCELERATE_USE_CPU") else hardware_table.detect()
    if backend.own_runtime:
        _run_replicas(function, args, num_processes, mixed_precision)
        return
    size = _num_workers(num_processes, backend)
    if size * num_nodes == 1:
        _run_here(function, args, mixed_precision, backend)
        return
    _refuse_used_notebook(backend)
    port = _free_port(int(use_port), num_nodes)
    further: dict[str, str] = {}
    if backend.is_host:
        further = {"ACCELERATE_USE_CPU": "true", **thread_variables()}
    elif backend.comm == "nccl" and not check_cuda_p2p_ib_support():
        further = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    workers = LocalWorkers(size, num_nodes, node_rank, master_addr, port, mixed_precision, further)
    print(f"Launching training on {size} x {backend.label}.")
    if backend.is_host and num_nodes == 1:
        run_forked(function, args, size, workers.environment())
        return
    run_elastic(
        function,
        args,
        workers,
        backend.is_host,
        rdzv_backend,
        rdzv_conf,
        rdzv_endpoint=rdzv_endpoint or f"{master_addr}:{port}",
        run_id=rdzv_id,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
        log_line_prefix_template=log_line_prefix_template,
    )


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
        raise wrong_value("num_processes", num_processes, "at least one process is needed", "Give at least 1")
    _refuse_used_notebook(hardware_table.CPU)
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "ACCELERATE_USE_CPU": "yes",
            launch.RENDEZVOUS_FILE: str(Path(folder) / "rendezvous"),
            **mixed_precision_variables("no"),
            **thread_variables(),
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        }
        run_forked(function, args, num_processes, variables, debug=True)


def test_launch() -> None:
    """Check that a process can join the run: build a `PartialState`."""
    PartialState()


test_launch.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it where it is imported


def _check_arguments(function: object, precision: str, machines: int, machine: int) -> None:
    if not callable(function):
        fix = "Pass the function itself, and its arguments in `args`"
        raise wrong_value("function", function, "it cannot be called", fix, TypeError)
    names = [str(kind.value) for kind in PrecisionType]
    if precision not in names:
        raise wrong_value("mixed_precision", precision, "no such precision", f"Use one of {', '.join(names)}")
    if not 0 <= machine < machines:
        fix = f"Use a number from 0 to {machines - 1}"
        raise wrong_value("node_rank", machine, f"there are {machines} machines", fix)


def _num_workers(wanted: int | None, backend: DeviceBackend) -> int:
    limit = 1 if backend.is_host or backend.comm is None else backend.count()
    if wanted is None:
        return limit
    if wanted < 1:
        raise wrong_value("num_processes", wanted, "at least one process is needed", "Give at least 1")
    if wanted > limit and not backend.is_host:
        fix = f"Give at most {limit}, or set ACCELERATE_USE_CPU=true to train on the CPU"
        raise wrong_value("num_processes", wanted, f"{backend.label} has room for {limit} here", fix)
    return wanted


def _run_here(
    function: Callable[..., Any], args: tuple[Any, ...], precision: str, backend: DeviceBackend
) -> None:
    print(f"Launching training on one {backend.label}.")
    absent = [kind for kind in _STATES if not kind._shared_state]
    try:
        with patch_environment(**mixed_precision_variables(precision), **dict(backend.notebook_variables)):
            function(*args)
    finally:  # so that another launch, of several processes too, finds no `Accelerator` here
        for kind in absent:
            kind._reset_state()


def _run_replicas(
    function: Callable[..., Any], args: tuple[Any, ...], num_processes: int | None, precision: str
) -> None:
    """Start the replicas of an XLA run; the runtime gives them their ranks."""
    chips = count_chips()
    if num_processes not in (None, 1, chips or num_processes):
        reason = f"the runtime starts one process for each of the {chips} chips, or a single one"
        raise wrong_value("num_processes", num_processes, reason, f"Give {chips} or 1, or leave it out")
    xmp = import_module("torch_xla.distributed.xla_multiprocessing")
    launcher = launch.PrepareForLaunch(function, DistributedType.XLA)
    print("Launching training on the devices of torch_xla.")
    with patch_environment(**mixed_precision_variables(precision)):
        nprocs = 1 if num_processes == 1 else None
        xmp.spawn(launcher, args=args, nprocs=nprocs, start_method="fork")


def _refuse_used_notebook(backend: DeviceBackend) -> None:
    """Raise when a fork of this process would not be able to train."""
    if AcceleratorState._shared_state or PartialState._shared_state:
        raise ConfigurationError(
            "An Accelerator (or PartialState) was already made in this process, so the launched processes "
            "would take it for theirs. Make it inside the function only, restart the notebook, launch again."
        )
    if backend.prevents_fork():
        raise ConfigurationError(describe_cuda_use())


def _free_port(port: int, machines: int) -> int:
    if port == 0 or (machines == 1 and launch.is_port_in_use(port)):
        return launch.get_free_port()
    return port


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
            **(launch.run_key(current()) if self.machines == 1 else {}),
            **mixed_precision_variables(self.precision),
            **self.further,
        }


class Worker:
    """The user's function in a process of its own, which writes its error to a folder and returns nothing."""

    def __init__(self, function: Callable[..., Any], reports: Path, on_cpu: bool) -> None:
        self.function, self.reports, self.on_cpu = function, reports, on_cpu
        self.__name__ = self.__qualname__ = getattr(function, "__name__", "function")  # for torch's agent

    def __call__(self, *args: Any) -> None:
        if self.on_cpu:  # OpenMP's threads do not survive a fork
            first_level = {"OMP": current().get("OMP_NUM_THREADS", "").partition(",")[0]}
            torch.set_num_threads(max(1, launch.count_of(first_level, "OMP", 1)))
        try:
            self.function(*args)
        except BaseException as error:
            launch.Failure.of(error, current()).write(self.reports)
            raise
        process_group.close_group()


def run_forked(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    size: int,
    variables: Mapping[str, str],
    *,
    debug: bool = False,
) -> None:
    """Fork processes on the CPU, wait for all, and leave none behind, however this ends.

    With `debug` they meet over a file, see `PrepareForLaunch`.
    """
    with tempfile.TemporaryDirectory() as folder, patch_environment(**variables):
        worker = Worker(function, Path(folder), on_cpu=True)
        launcher = launch.PrepareForLaunch(worker, DistributedType.MULTI_CPU, debug)
        start: Any = start_processes
        context = start(launcher, args=args, nprocs=size, join=False, start_method=_START_METHOD)
        try:
            while not context.join():
                pass
        except ProcessException as error:
            _end(context.processes)  # before the reports are read, so that they are whole
            raise _failed(Path(folder), error) from error
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
    function: Callable[..., Any],
    args: tuple[Any, ...],
    workers: LocalWorkers,
    on_cpu: bool,
    rdzv_backend: str = "static",
    rdzv_configs: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Let torch's elastic agent fork the processes; `options` are further fields of its `LaunchConfig`."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    own_rank = {"rank": workers.machine} if rdzv_backend == "static" else {}
    config = LaunchConfig(
        min_nodes=workers.machines,
        max_nodes=workers.machines,
        nproc_per_node=workers.size,
        rdzv_backend=rdzv_backend,
        rdzv_configs={**own_rank, **(rdzv_configs or {})},
        start_method=_START_METHOD,
        **options,
    )
    signals = current().get(_AGENT_SIGNALS, "SIGTERM,SIGINT,SIGHUP,SIGQUIT")  # the agent leaves it there
    is_alone = workers.machines == 1 and rdzv_backend == "static"
    held = launch.hold_loopback_store(workers.address, workers.port) if is_alone else None
    with (
        tempfile.TemporaryDirectory() as folder,
        patch_environment(**workers.environment(), **{_AGENT_SIGNALS: signals}),
    ):
        try:
            elastic_launch(config, Worker(function, Path(folder), on_cpu))(*args)
            return
        except ChildFailedError as error:
            failed = _failed(Path(folder), error)
        finally:
            del held
    # Raised out here: the agent's exception would keep the agent alive, and the port on which it listens.
    raise failed


def _failed(reports: Path, error: Exception) -> LaunchError:
    """The error of a run, with the traceback of the process that failed first."""
    first = launch.find_first(launch.collect(reports, 1))
    report = str(error) if first is None or first.failure is None else first.failure.trace
    hint = f"\n\n{describe_cuda_use()}" if "re-initialize CUDA in forked subprocess" in report else ""
    return LaunchError(f"A process that was launched failed.\n\n{report.strip()}{hint}")


def mixed_precision_variables(name: str) -> dict[str, str]:
    """The variables that ask for mixed precision, under our name and the one the documentation uses."""
    return {"ACCELERATE_MIXED_PRECISION": name, "MIXED_PRECISION": name}


def thread_variables() -> dict[str, str]:
    """One thread for each forked process, where the user did not ask for more."""
    return {"OMP_NUM_THREADS": current().get("OMP_NUM_THREADS") or "1"}


def describe_cuda_use() -> str:
    """Say that CUDA is in use in this process, so that it cannot be forked, by what, and what to do."""
    holders = [f"the variable {name!r}" for name in _cuda_variables()]
    suspects = are_libraries_initialized(*_CUDA_STARTERS)
    if not holders and any(map(_on_cuda, gc.get_objects())):
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


def _on_cuda(value: object) -> bool:
    return issubclass(type(value), torch.Tensor) and bool(value.is_cuda)  # type: ignore[attr-defined]
