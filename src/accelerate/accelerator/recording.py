"""Start of the monitor of a run, with the values that it reads while the rank trains.

`build_runtime` calls `start`. The monitor itself is `monitoring/run_monitor.py`.
"""

from __future__ import annotations

import atexit
import os
import platform
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import psutil
import torch

from accelerate import diagnostics, strategies, torch_private
from accelerate.accelerator.measured import local_scalar
from accelerate.base import DistributedType, environ as variables
from accelerate.launch import SCRIPT, count_of
from accelerate.monitoring import (
    RankExchange,
    RecordThread,
    RunMonitor,
    Setting,
    Start,
    hide_secrets,
    hide_secrets_of_command,
    recorded_rank,
    records_folder,
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
    state = runtime.state
    chosen = decode(DiagnosticsSection, environ).run_records
    folder = records_folder(chosen, runtime.request.project.project_dir)
    if folder is None and variables.MONITOR_FOLDER in environ:  # `accelerate launch --monitor` reads them
        folder = Path(environ[variables.MONITOR_FOLDER])
    sources = RunSources(runtime, environ)
    monitor = RunMonitor(state.process_index, state.num_processes, sources, folder, step_clock, run_records)
    services.put(RunMonitor, monitor, close=monitor.close, end=monitor.end)
    services.put(RecordThread, monitor.records)
    SCRIPT.count_steps = lambda: step_clock.number


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
        self._num_replicas = 1 if runtime.recovery is None else runtime.recovery.num_replicas
        self._reference = ref(runtime.prepared)  # the monitor may live longer than the `Accelerator`
        self._environ = dict(environ)
        self._argv = hide_secrets_of_command(sys.argv)
        backend = runtime.state.device_backend
        self._meter = diagnostics.MemoryMeter(backend)
        self._module: Any = None if backend.is_host else backend.torch_module()

    def start(self) -> Start:
        state, mesh = self._state, mesh_sizes(self._state.device_mesh)
        return Start(
            time=time.time(),
            rank=recorded_rank(state.process_index, state.num_processes),
            world_size=self._num_replicas * state.num_processes,
            host=socket.gethostname(),
            pid=os.getpid(),
            attempt=count_of(self._environ, "TORCHELASTIC_RESTART_COUNT", 0),
            device=str(state.device),
            device_name=self._device_name(),
            argv=self._argv,
            versions={
                "python": platform.python_version(),
                "torch": torch.__version__,
                "accelerate": version("accelerate"),
            },
            settings=list(_settings(state, self._request, self._environ)) if state.is_main_process else [],
            mesh={**({"replicas": self._num_replicas} if mesh and self._num_replicas > 1 else {}), **mesh},
        )

    def _device_name(self) -> str:
        name = getattr(self._module, "get_device_name", platform.processor)
        return str(name())

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
            return position.offset.seen, len(loader)
        except TypeError:  # an iterable dataset
            return position.offset.seen, 0

    def num_workers(self) -> int | None:
        loaders = self._prepared.loaders
        return getattr(loaders[0], "num_workers", None) if loaders else None

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
    """Yields the settings of a run with their sources."""
    from accelerate.settings import SECTIONS, Layer, merge_layers, read  # all sections: for records only

    asked = "Accelerator" if request.mixed_precision else "built-in"
    yield Setting(name="mixed_precision", value=str(state.mixed_precision), source=asked)
    yield Setting(name="distributed_type", value=DistributedType(state.distributed_type).value, source="run")
    steps = request.accumulation.num_steps
    source = "Accelerator" if steps != 1 else "built-in"
    yield Setting(name="gradient_accumulation_steps", value=str(steps), source=source)
    for row, value, source in merge_layers(Layer("environment", read(environ, SECTIONS))):
        if source != "built-in":
            shown = str(hide_secrets({row.name: value})[row.name])
            yield Setting(name=row.name, value=shown, source=source)
