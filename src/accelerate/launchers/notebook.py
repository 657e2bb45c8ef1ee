"""Launch of processes from a running program, such as a notebook or a test."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from numbers import Integral
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
    end_with_parent,
    parse_flag_from_env,
    patch_environment,
    plain_value,
    wrong_value,
)
from accelerate.devices import DeviceBackend, check_cuda_p2p_ib_support, count_chips, hardware_table
from accelerate.nested import iterate_tensors
from accelerate.state import AcceleratorState, GradientState, PartialState, process_group

_STATES = (AcceleratorState, PartialState, GradientState)
_SECONDS_TO_END = 10.0
# Libraries that may initialize CUDA when they are imported.
_CUDA_INITIALIZERS = ("bitsandbytes", "cupy", "jax", "pycuda.autoinit", "tensorflow")
# With "spawn", on Windows, the function must be importable.
_START_METHOD = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
MAX_PORT = 65535
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
    """Runs a training function in several processes that are started from a notebook.

    The processes are forked, so the function may be defined in a cell. On Windows they are spawned, and the
    function must be defined in a module that they can import. The function must create the `Accelerator`, and
    no code may have used a GPU before. With one process the function is called in this process, and the state
    of an `Accelerator` that it creates is reset afterwards.

    Args:
        function: Function that each process calls.
        args: Its arguments.
        num_processes: Number of processes on this node. Default: one for each device, or one on the CPU.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        use_port: Port of the rendezvous. With one node, the default and a port that is in use are replaced by
            a free one.
        master_addr: Address of node 0.
        node_rank: Rank of this node.
        num_nodes: Number of nodes.
        rdzv_backend: Rendezvous backend, "static" or "c10d".
        rdzv_endpoint: Endpoint of the rendezvous as host:port. Default: `master_addr` and `use_port`.
        rdzv_conf: Further settings of the rendezvous of torch.
        rdzv_id: Name of the run, which is the same on all nodes.
        max_restarts: Maximum number of restarts after a failure (not on the CPU of a single node).
        monitor_interval: Seconds between two checks of the processes.
        log_line_prefix_template: Prefix of each line that they print.

    Raises:
        ConfigurationError: An argument is invalid, there is an `Accelerator` already, or a GPU is in use.
        LaunchError: A process fails. The message has its traceback.
    """
    mixed_precision = plain_value(mixed_precision)
    _check_arguments(function, args, num_processes, mixed_precision, num_nodes, node_rank)
    port = _read_port(use_port)
    backend = hardware_table.CPU if parse_flag_from_env("ACCELERATE_USE_CPU") else hardware_table.detect()
    if backend.own_runtime:
        _run_replicas(function, args, num_processes, mixed_precision)
        return
    size = _num_workers(num_processes, backend)
    if size * num_nodes == 1:
        _run_here(function, args, mixed_precision, backend)
        return
    _check_notebook(backend)
    port = _free_port(port, num_nodes)
    variables: dict[str, str] = {}
    if backend.is_host:
        variables = {"ACCELERATE_USE_CPU": "true", **thread_variables()}
    elif backend.comm == "nccl" and not check_cuda_p2p_ib_support():
        variables = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    workers = LocalWorkers(size, num_nodes, node_rank, master_addr, port, mixed_precision, variables)
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
    """Runs a function in several CPU processes to test its behavior in a distributed run.

    Args:
        function: Function that each process calls.
        args: Its arguments.
        num_processes: Number of processes.

    Raises:
        ConfigurationError: An argument is invalid, or there is an `Accelerator` already.
        LaunchError: A process fails. The message has its traceback.
    """
    _check_arguments(function, args, num_processes)
    _check_notebook(hardware_table.CPU)
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
    """Creates a `PartialState` to check that a process can join the run."""
    PartialState()


test_launch.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it in modules that import it


def _check_arguments(
    function: object,
    args: object,
    processes: object,
    precision: str = "no",
    machines: Any = 1,
    machine: Any = 0,
) -> None:
    if not callable(function):
        fix = "Pass the function itself, and its arguments in `args`"
        raise wrong_value("function", function, "it cannot be called", fix, TypeError)
    if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
        fix = "Pass a tuple of the arguments, such as (1,)"
        raise wrong_value("args", args, "it is not a tuple", fix, TypeError)
    if processes is not None and (not isinstance(processes, Integral) or processes < 1):
        reason = (
            "at least one process is needed"
            if isinstance(processes, Integral)
            else "it is not a whole number"
        )
        raise wrong_value("num_processes", processes, reason, "Give at least 1")
    names = [str(kind.value) for kind in PrecisionType]
    if precision not in names:
        raise wrong_value("mixed_precision", precision, "no such precision", f"Use one of {', '.join(names)}")
    for name, value in (("num_nodes", machines), ("node_rank", machine)):
        if not isinstance(value, Integral):
            raise wrong_value(name, value, "it is not a whole number", "Give an integer", TypeError)
    if not 0 <= machine < machines:
        fix = f"Use a number from 0 to {machines - 1}"
        raise wrong_value("node_rank", machine, f"there are {machines} machines", fix)


def _read_port(port: str | int) -> int:
    try:
        number = int(port)
    except (ValueError, TypeError):
        number = -1
    if not 0 <= number <= MAX_PORT:
        fix = f"Use a number from 0 to {MAX_PORT}, where 0 is any free port"
        raise wrong_value("use_port", port, "it is not the number of a port", fix)
    return number


def _num_workers(requested: int | None, backend: DeviceBackend) -> int:
    limit = 1 if backend.is_host or backend.comm is None else backend.count()
    if requested is None:
        return limit
    if requested > limit and not backend.is_host:
        fix = f"Give at most {limit}, or set ACCELERATE_USE_CPU=true to train on the CPU"
        raise wrong_value("num_processes", requested, f"the limit of {backend.label} is {limit} here", fix)
    return requested


def _run_here(
    function: Callable[..., Any], args: tuple[Any, ...], precision: str, backend: DeviceBackend
) -> None:
    print(f"Launching training on one {backend.label}.")
    uninitialized = [kind for kind in _STATES if not kind._shared_state]
    try:
        with patch_environment(**mixed_precision_variables(precision), **dict(backend.notebook_variables)):
            function(*args)
    finally:  # so that a later launch finds no `Accelerator` in this process
        for kind in uninitialized:
            kind._reset_state()


def _run_replicas(
    function: Callable[..., Any], args: tuple[Any, ...], num_processes: int | None, precision: str
) -> None:
    """Starts the replicas of an XLA run, whose runtime assigns their ranks."""
    chips = count_chips()
    if num_processes not in (None, 1, chips or num_processes):
        reason = f"the runtime starts one process for each of the {chips} chips, or a single process"
        raise wrong_value("num_processes", num_processes, reason, f"Give {chips} or 1, or leave it out")
    xmp = import_module("torch_xla.distributed.xla_multiprocessing")
    launcher = launch.PrepareForLaunch(function, DistributedType.XLA)
    print("Launching training on the devices of torch_xla.")
    with patch_environment(**mixed_precision_variables(precision)):
        nprocs = 1 if num_processes == 1 else None
        xmp.spawn(launcher, args=args, nprocs=nprocs, start_method="fork")


def _check_notebook(backend: DeviceBackend) -> None:
    """Raises an error if a fork of this process could not train."""
    if AcceleratorState._shared_state or PartialState._shared_state:
        raise ConfigurationError(
            "An Accelerator (or PartialState) was already created in this process, and launched processes "
            "would inherit it. Create it inside the function only, restart the notebook, launch again."
        )
    if backend.prevents_fork():
        raise ConfigurationError(describe_cuda_use())


def _free_port(port: int, machines: int) -> int:
    # Several notebooks may start at once, and rank 0 opens the port seconds after this check.
    if port == 0 or (machines == 1 and (port == launch.DEFAULT_PORT or launch.is_port_in_use(port))):
        return launch.get_free_port()
    return port


@dataclass(frozen=True)
class LocalWorkers:
    """Processes to start on this node, and the address and port of rank 0."""

    size: int
    machines: int
    machine: int
    address: str
    port: int
    precision: str
    variables: Mapping[str, str] = field(default_factory=dict)

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
            **self.variables,
        }


class Worker:
    """Function of the user in a worker process, which records its error in a folder."""

    def __init__(self, function: Callable[..., Any], reports: Path, on_cpu: bool) -> None:
        self.function, self.reports, self.on_cpu = function, reports, on_cpu
        # required by the elastic agent
        self.__name__ = self.__qualname__ = getattr(function, "__name__", "function")

    def __call__(self, *args: Any) -> None:
        parent = multiprocessing.parent_process()
        end_with_parent(None if parent is None else parent.pid)
        if self.on_cpu:  # OpenMP threads do not survive a fork
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
    """Forks processes on the CPU, waits for all, and terminates the remaining ones in any case.

    With `debug` they use a file store (`PrepareForLaunch`).
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
            _end(context.processes)  # before the reports are read, so that they are complete
            raise _failed(Path(folder), error) from error
        finally:
            _end(context.processes)
            for file in context.error_files:  # torch does not delete them
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
    """Runs the processes under the elastic agent of torch.

    `options` are further fields of its `LaunchConfig`.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    rank = {"rank": workers.machine} if rdzv_backend == "static" else {}
    config = LaunchConfig(
        min_nodes=workers.machines,
        max_nodes=workers.machines,
        nproc_per_node=workers.size,
        rdzv_backend=rdzv_backend,
        rdzv_configs={**rank, **(rdzv_configs or {})},
        start_method=_START_METHOD,
        **options,
    )
    # the agent does not remove the variable
    signals = current().get(_AGENT_SIGNALS, "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    is_alone = workers.machines == 1 and rdzv_backend == "static"
    store = launch.hold_loopback_store(workers.address, workers.port) if is_alone else None
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
            del store
    # Raised here because the exception of the agent would keep the agent and its port alive.
    raise failed


def _failed(reports: Path, error: Exception) -> LaunchError:
    """Returns the error of a run with the traceback of the process that failed first."""
    first = launch.find_first(launch.collect(reports, 1))
    report = str(error) if first is None or first.failure is None else first.failure.trace
    hint = f"\n\n{describe_cuda_use()}" if "re-initialize CUDA in forked subprocess" in report else ""
    return LaunchError(f"A process that was launched failed.\n\n{report.strip()}{hint}")


def mixed_precision_variables(name: str) -> dict[str, str]:
    """Returns the variables for mixed precision, under our name and the documented one."""
    return {"ACCELERATE_MIXED_PRECISION": name, "MIXED_PRECISION": name}


def thread_variables() -> dict[str, str]:
    """Returns the number of threads of each forked process, 1 unless the user sets it."""
    return {"OMP_NUM_THREADS": current().get("OMP_NUM_THREADS") or "1"}


def describe_cuda_use() -> str:
    """Returns a message that CUDA is initialized in this process, with the cause and the fix."""
    users = [f"the variable {name!r}" for name in _cuda_variables()]
    suspects = are_libraries_initialized(*_CUDA_INITIALIZERS)
    if not users and any(map(_on_cuda, gc.get_objects())):
        users = ["a tensor of some object"]
    details = f" It is used by {', '.join(users)}." if users else ""
    details += f" Importing {', '.join(suspects)} may have initialized it." if suspects else ""
    return (
        "CUDA was already initialized in this process, and a process that uses it cannot be forked."
        f"{details} Move all code that uses the GPU (`.cuda()`, `.to('cuda')`, `torch.cuda.*`, imports that "
        "initialize CUDA) into the function, restart the notebook and launch again."
    )


def _cuda_variables() -> Iterator[str]:
    """Yields the names of global variables of the notebook with tensors on a GPU."""
    for name, value in list(vars(sys.modules["__main__"]).items()):
        values = value.parameters() if isinstance(value, torch.nn.Module) else iterate_tensors(value)
        if not name.startswith("_") and any(_on_cuda(tensor) for tensor in values):
            yield name


def _on_cuda(value: object) -> bool:
    return issubclass(type(value), torch.Tensor) and bool(value.is_cuda)  # type: ignore[attr-defined]
