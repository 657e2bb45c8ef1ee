"""Start processes from a running program: a notebook, or a test."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate.base import (
    ConfigurationError,
    DistributedType,
    PrecisionName,
    PrecisionType,
    parse_flag_from_env,
    patch_environment,
    wrong_value,
)
from accelerate.devices import DeviceBackend, check_cuda_p2p_ib_support, count_chips, hardware_table
from accelerate.launch import RENDEZVOUS_FILE, PrepareForLaunch, get_free_port, is_port_in_use
from accelerate.launchers.processes import (
    CpuWorker,
    LocalWorkers,
    Worker,
    describe_cuda_use,
    precision_variables,
    run_elastic,
    run_forked,
    thread_variables,
)
from accelerate.state import AcceleratorState, GradientState, PartialState

_STATES = (AcceleratorState, PartialState, GradientState)


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

    The processes are forked, so the function may be defined in a cell. It has to make the `Accelerator`, and
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
    workers = LocalWorkers(
        size, num_nodes, node_rank, master_addr, port, mixed_precision, _device_variables(backend)
    )
    print(f"Launching training on {size} x {backend.label}.")
    if backend.is_host and num_nodes == 1:
        with tempfile.TemporaryDirectory() as folder, patch_environment(**workers.environment()):
            worker = CpuWorker(function, Path(folder))
            run_forked(PrepareForLaunch(worker, DistributedType.MULTI_CPU), args, size, Path(folder))
        return
    run_elastic(
        CpuWorker if backend.is_host else Worker,
        function,
        args,
        workers,
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
        raise wrong_value("num_processes", num_processes, "nobody would run", "Give at least 1")
    _refuse_used_notebook(hardware_table.CPU)
    with tempfile.TemporaryDirectory() as rendezvous, tempfile.TemporaryDirectory() as folder:
        environment = {
            "WORLD_SIZE": str(num_processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "ACCELERATE_USE_CPU": "yes",
            RENDEZVOUS_FILE: str(Path(rendezvous) / "rendezvous"),
            **precision_variables("no"),
            **thread_variables(),
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        }
        with patch_environment(**environment):
            worker = CpuWorker(function, Path(folder))
            run_forked(PrepareForLaunch(worker, debug=True), args, num_processes, Path(folder))


def test_launch() -> None:
    """Check that a process can join the run: build a `PartialState`."""
    PartialState()


test_launch.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it where it is imported


def _check_arguments(function: object, precision: str, machines: int, machine: int) -> None:
    if not callable(function):
        raise wrong_value(
            "function",
            function,
            "it cannot be called",
            "Pass the function itself, and its arguments in `args`",
            TypeError,
        )
    names = [str(kind.value) for kind in PrecisionType]
    if precision not in names:
        raise wrong_value("mixed_precision", precision, "no such precision", f"Use one of {', '.join(names)}")
    if not 0 <= machine < machines:
        raise wrong_value(
            "node_rank", machine, f"there are {machines} machines", f"Use a number from 0 to {machines - 1}"
        )


def _num_workers(wanted: int | None, backend: DeviceBackend) -> int:
    """Number of processes on this machine."""
    single = backend.is_host or backend.comm is None
    if wanted is None:
        return 1 if single else backend.count()
    if wanted < 1:
        raise wrong_value("num_processes", wanted, "nobody would run", "Give at least 1")
    limit = wanted if backend.is_host else 1 if backend.comm is None else backend.count()
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
    absent = [kind for kind in _STATES if not kind._shared_state]
    try:
        with patch_environment(**precision_variables(precision), **dict(backend.notebook_variables)):
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
        raise wrong_value(
            "num_processes",
            num_processes,
            f"the runtime starts one process for each of the {chips} chips, or a single one",
            f"Give {chips} or 1, or leave it out",
        )
    xmp = import_module("torch_xla.distributed.xla_multiprocessing")
    launcher = PrepareForLaunch(function, DistributedType.XLA)
    print("Launching training on the devices of torch_xla.")
    with patch_environment(**precision_variables(precision)):
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
    if port == 0 or (machines == 1 and is_port_in_use(port)):
        return get_free_port()
    return port


def _device_variables(backend: DeviceBackend) -> dict[str, str]:
    """The variables that processes on this hardware need."""
    if backend.is_host:
        return {"ACCELERATE_USE_CPU": "true", **thread_variables()}
    if backend.comm == "nccl" and not check_cuda_p2p_ib_support():
        return {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    return {}
