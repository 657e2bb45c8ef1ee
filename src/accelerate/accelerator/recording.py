"""Start of the monitor of a run, with the values that it reads while the rank trains.

`build_runtime` calls `start`. The monitor itself is `monitoring/run_monitor.py`.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import psutil
import torch

from accelerate import diagnostics, strategies, torch_private
from accelerate.accelerator.accumulation import local_scalar
from accelerate.base import DistributedType
from accelerate.launch import SCRIPT, count_of, is_run_id, new_run_id, run_id_of
from accelerate.monitoring import (
    RankExchange,
    RecordThread,
    RunMonitor,
    Setting,
    Start,
    machine_digest,
    recorded_rank,
    records_folder,
    uses_state_folder,
)
from accelerate.settings import decode
from accelerate.settings.sections import DiagnosticsSection
from accelerate.state import (
    AcceleratorState,
    as_dataclass,
    mesh_sizes,
    process_group,
    run_records,
    services,
    step_clock,
)

if TYPE_CHECKING:
    from accelerate.accelerator.runtime import Runtime


STORE_TIMEOUT = timedelta(seconds=5)  # of one request


def start(runtime: Runtime, environ: Mapping[str, str]) -> None:
    """Starts the monitor of this process, unless it has one."""
    if services.find(RunMonitor) is not None:
        return
    state, settings = runtime.state, decode(DiagnosticsSection, environ)
    project = runtime.request.project.project_dir
    records = _open_records(state, settings.run_records, project, environ)
    sources = RunSources(runtime, environ)
    rank, size = state.process_index, state.num_processes
    monitor = RunMonitor(rank, size, sources, records, step_clock, run_records, settings.step_times)
    services.put(RunMonitor, monitor, close=monitor.close, end=monitor.end)
    services.put(RecordThread, records)
    SCRIPT.count_steps = lambda: step_clock.number


def _open_records(
    state: AcceleratorState, chosen: str | None, project: str | None, environ: Mapping[str, str]
) -> RecordThread:
    """Returns the thread that writes the records of this rank."""
    in_state_folder = uses_state_folder(chosen, project)
    run_id = agree_on_run_id(state, environ) if in_state_folder else ""
    folder = None if run_id is None else records_folder(chosen, project, run_id)
    return RecordThread(
        folder,
        recorded_rank(state.process_index, state.num_processes),
        in_state_folder=in_state_folder,
        removes_old=in_state_folder and state.is_local_main_process,
        level=logging.WARNING if chosen else logging.INFO,
    )


def agree_on_run_id(state: AcceleratorState, environ: Mapping[str, str]) -> str | None:
    """Returns the identifier of this run, or None on a rank that does not get it in time.

    It is that of the launcher of one node, and otherwise that of rank 0, which other ranks read in the store.
    """
    own, topology = run_id_of(environ), state.topology
    if own is None and state.process_index == 0:
        own = new_run_id()
    if topology.size == 1 or (run_id_of(environ) is not None and topology.local_size == topology.size):
        return own
    try:
        channel = process_group.connect_channel("run", STORE_TIMEOUT)
        if channel is None:
            return own
        if state.process_index == 0:
            channel.post("id", own)
            return own
        found = channel.wait(["id"], STORE_TIMEOUT.total_seconds())["id"]
    except RuntimeError:  # the process that hosts the store has ended
        return own
    return found if is_run_id(found) else own


def _finish_at_exit() -> None:
    monitor = services.find(RunMonitor)
    if monitor is None:
        return
    failed = process_group.failed()
    error: Any = getattr(sys, "last_value", None)
    trace = "".join(traceback.format_exception(type(error), error, sys.last_traceback)) if failed else ""
    monitor.finish("failed" if failed else "finished", trace)


# Registered after the exit handler of the process group, and so called before it.
atexit.register(_finish_at_exit)


class RunSources:
    """Values of a run, which the thread of its monitor reads."""

    def __init__(self, runtime: Runtime, environ: Mapping[str, str]) -> None:
        self._state, self._request = runtime.state, runtime.request
        self._num_replicas = runtime.groups.num_replicas
        self._reference = ref(runtime.prepared)  # the monitor may live longer than the `Accelerator`
        self._environ = dict(environ)
        self._script = Path(sys.argv[0]).name if sys.argv else ""
        backend = runtime.state.device_backend
        self._module: Any = None if backend.is_host else backend.torch_module()
        self._num_workers: int | None = None

    @cached_property
    def _meter(self) -> diagnostics.MemoryMeter:
        return diagnostics.MemoryMeter(self._state.device_backend)

    def start(self) -> Start:
        state, mesh = self._state, mesh_sizes(self._state.device_mesh)
        topology = state.topology
        return Start(
            time=time.time(),
            rank=recorded_rank(state.process_index, state.num_processes),
            world_size=self._num_replicas * state.num_processes,
            pid=os.getpid(),
            machine=machine_digest(),
            node=topology.node,
            num_nodes=-(-topology.size // max(topology.local_size, 1)),
            attempt=count_of(self._environ, "TORCHELASTIC_RESTART_COUNT", 0),
            device=str(state.device),
            device_name=str(getattr(self._module, "get_device_name", platform.processor)()),
            script=self._script,
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "accelerate": version("accelerate"),
            },
            settings=list(_settings(state, self._request, self._environ)) if state.process_index == 0 else [],
            mesh={**({"replicas": self._num_replicas} if mesh and self._num_replicas > 1 else {}), **mesh},
        )

    def memory(self) -> tuple[int, int]:
        """Returns the current and peak bytes allocated on the device, or of this process."""
        if hasattr(self._module, "memory_allocated"):
            return int(self._module.memory_allocated()), self._meter.peak()
        return int(psutil.Process().memory_info().rss), self._meter.peak()

    @property
    def _prepared(self) -> strategies.Prepared:
        return self._reference() or strategies.Prepared()

    def learning_rate(self) -> object:
        optimizers = self._prepared.optimizers
        groups = optimizers[0].param_groups if optimizers else ()
        rate = groups[0].get("lr") if groups else None
        return local_scalar(rate) if isinstance(rate, torch.Tensor) else rate

    def batches(self) -> tuple[int, int]:
        """Returns the number of batches of this pass over the first loader so far and in total."""
        loader: Any = next(iter(self._prepared.loaders), None)
        position = getattr(loader, "position", None)
        if position is None:
            return 0, 0
        try:
            return position.seen, len(loader)
        except TypeError:  # an iterable dataset
            return position.seen, 0

    def num_workers(self) -> int | None:
        if loaders := self._prepared.loaders:
            self._num_workers = getattr(loaders[0], "num_workers", None)
        return self._num_workers

    def recompilations(self) -> int:
        return torch_private.count_recompilations()

    def connect(self) -> RankExchange | None:
        """Returns an exchange over the store of the process group, or None if the group has no such store."""
        channel = process_group.connect_channel("times", STORE_TIMEOUT)
        if channel is None:
            return None
        state = self._state
        is_first = state.is_local_main_process
        return RankExchange(channel, as_dataclass, state.process_index, state.num_processes, is_first)


def _settings(
    state: AcceleratorState, request: strategies.RunRequest, environ: Mapping[str, str]
) -> Iterator[Setting]:
    """Yields the settings of a run that this package declares, with their sources, and no texts."""
    from accelerate.settings import SECTIONS, Layer, merge_layers, read  # all sections: for records only

    asked = "Accelerator" if request.mixed_precision else "built-in"
    yield Setting(name="mixed_precision", value=str(state.mixed_precision), source=asked)
    yield Setting(name="distributed_type", value=DistributedType(state.distributed_type).value, source="run")
    steps = request.accumulation.num_steps
    source = "Accelerator" if steps != 1 else "built-in"
    yield Setting(name="gradient_accumulation_steps", value=str(steps), source=source)
    for row, value, source in merge_layers(Layer("environment", read(environ, SECTIONS))):
        if source != "built-in":
            is_text = (
                row.kind in (str, tuple, dict) and not row.choices
            )  # a path, an address, a class, a command
            yield Setting(name=row.name, value="set" if is_text else str(value), source=source)
