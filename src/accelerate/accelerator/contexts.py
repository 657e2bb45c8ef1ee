"""Context managers around parts of a training loop, for profiles, peak memory and uneven inputs.

`Accelerator` has a method of the same name for each of them.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch.profiler import profile as TorchProfile

from accelerate import diagnostics, ops, plugins
from accelerate.accelerator.accumulation import Accumulation
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, closed_at_exit

logger = get_logger(__name__)


@contextmanager
@closed_at_exit
def profile(state: AcceleratorState, settings: plugins.ProfileKwargs) -> Generator[TorchProfile, None, None]:
    """Profiles the block of a context manager, and waits for all ranks at the end."""
    with settings.build() as profiler:
        yield profiler
    state.wait_for_everyone()


@contextmanager
def peak_memory(state: AcceleratorState, snapshot_dir: str | Path | None) -> Iterator[diagnostics.PeakMemory]:
    """Measures the peak memory of the block of a context manager on each rank."""
    backend, result = state.device_backend, diagnostics.PeakMemory()
    meter = diagnostics.MemoryMeter(backend)
    meter.start()
    snapshot: AbstractContextManager[None] = nullcontext()
    if snapshot_dir is not None:
        snapshot = diagnostics.snapshot_on_exhaustion(backend, snapshot_dir, state.process_index)
    with snapshot:
        yield result
    result.peak = meter.peak()
    result.peaks = ops.gather_object([result.peak])


@contextmanager
def join_uneven_inputs(
    accumulation: Accumulation, loaders: Sequence[Any], joinables: Sequence[Any], even_batches: bool | None
) -> Iterator[None]:
    """Lets ranks have different numbers of batches in the block of a context manager."""
    if accumulation.strategy.context.topology.size == 1:
        yield
        return
    with set_even_batches(loaders, even_batches), accumulation.strategy.join(joinables):
        _set_joined(accumulation, True)
        try:
            yield
        finally:
            _set_joined(accumulation, False)


def _set_joined(accumulation: Accumulation, is_joined: bool) -> None:
    accumulation.is_joined = is_joined
    for optimizer in accumulation.prepared.optimizers:
        optimizer.is_joined = is_joined


@contextmanager
def set_even_batches(loaders: Sequence[Any], even_batches: bool | None) -> Iterator[None]:
    """Sets `even_batches` of loaders of map-style datasets in the block of a context manager."""
    samplers: list[Any] = [getattr(loader, "batch_sampler", None) for loader in loaders]
    if even_batches is None:
        samplers = []
    if any(not hasattr(sampler, "even_batches") for sampler in samplers):
        logger.warning(
            "even_batches has no effect on loaders of iterable datasets: their processes read on their own."
        )
    with ExitStack() as stack:
        for sampler in (sampler for sampler in samplers if hasattr(sampler, "even_batches")):
            stack.callback(setattr, sampler, "even_batches", sampler.even_batches)
            sampler.even_batches = even_batches
        yield
