"""Facet of `Accelerator`: contexts around parts of a training loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import profile

from accelerate import diagnostics, ops, plugins
from accelerate.accelerator.runtime import Runtime
from accelerate.logging import get_logger
from accelerate.state import closed_at_exit

logger = get_logger(__name__)


class Contexts:
    """Number format, profiler, memory, uneven inputs and context parallelism as `with` blocks."""

    _runtime: Runtime
    _cp_context: Callable[..., AbstractContextManager[Any]]

    def autocast(self, autocast_handler: plugins.AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Return a context in which operations run in the number format of the run.

        Forwards of prepared models need no such context.

        Args:
            autocast_handler: arguments for this context; the default are those given to `Accelerator`.
        """
        settings = autocast_handler or self._runtime.request.autocast or plugins.AutocastKwargs()
        return self._runtime.strategy.precision.autocast(settings.enabled, settings.cache_enabled)

    @contextmanager
    @closed_at_exit
    def profile(self, profile_handler: plugins.ProfileKwargs | None = None) -> Generator[profile, None, None]:
        """Profile the block; each rank writes its trace when the handler names a folder.

        Args:
            profile_handler: what to record; the default is the one given to `Accelerator`.

        Yields:
            The running `torch.profiler.profile`.
        """
        settings = profile_handler or self._runtime.request.profile or plugins.ProfileKwargs()
        with settings.build() as profiler:
            yield profiler
        self._runtime.state.wait_for_everyone()

    @contextmanager
    def peak_memory(self, snapshot_dir: str | Path | None = None) -> Iterator[diagnostics.PeakMemory]:
        """Measure how much memory the block uses at most, on each rank; enter and leave it on all ranks.

        Args:
            snapshot_dir: where a rank whose memory runs out in the block writes `memory_RANK.pickle`, its
                allocations and their lines of code; they are recorded for that. `None` records none.

        Yields:
            The result, which is there after the block; printed, it is a line for each rank.
        """
        state = self._runtime.state
        backend, used = state.device_backend, diagnostics.PeakMemory()
        meter = diagnostics.MemoryMeter(backend)
        meter.start()
        snapshot: AbstractContextManager[None] = nullcontext()
        if snapshot_dir is not None:
            snapshot = diagnostics.snapshot_on_exhaustion(backend, snapshot_dir, state.process_index)
        with snapshot:
            yield used
        used.peak = meter.peak()
        used.peaks = ops.gather_object([used.peak])

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Train on loaders that end at different times: ranks that are done answer for the others.

        Args:
            joinables: prepared models (and joinable optimizers) that are used in the block, on all ranks.
                Models that exchange nothing, such as frozen and not prepared ones, have no effect.
            even_batches: overrides, inside the block, whether prepared map-style loaders are filled up to the
                same number of batches; `None` leaves them.
        """
        if not self._runtime.state.use_distributed:
            yield
            return
        with _even_batches_set_to(self._runtime, even_batches), self._runtime.strategy.join(joinables):
            _set_joined(self._runtime, True)
            try:
                yield
            finally:
                _set_joined(self._runtime, False)

    @contextmanager
    def unsharded(self, *models: nn.Module) -> Iterator[None]:
        """Bring parameters of sharded models together on each rank, for evaluation; enter it on all ranks.

        Inside, ranks may run the models as often as they like, each for itself: generating texts of different
        lengths does not hang. No gradients are computed. Whole models must fit the memory of each device.

        Args:
            *models: prepared models; none for all of them. Those that are not sharded are left as they are.
        """
        with torch.no_grad(), self._runtime.strategy.unsharded(models or self._runtime.prepared.models):
            yield

    def maybe_context_parallel(
        self,
        buffers: list[Any] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Any] | None = None,
    ) -> AbstractContextManager[Any]:
        """Return a context that splits `buffers` along their sequence; nothing without a context-parallel
        axis.

        Args:
            buffers: tensors that all ranks of the axis hold whole.
            buffer_seq_dims: sequence dimension of each of them.
            no_restore_buffers: those that need not be whole again afterwards.

        Raises:
            StateError: nothing has been prepared yet.
            ConfigurationError: buffers and dimensions do not go together, or a sequence cannot be split.
        """
        return self._cp_context(
            buffers=buffers, buffer_seq_dims=buffer_seq_dims, no_restore_buffers=no_restore_buffers
        )


def _set_joined(runtime: Runtime, value: bool) -> None:
    runtime.joins = value
    for optimizer in runtime.prepared.optimizers:
        optimizer.is_joined = value


@contextmanager
def _even_batches_set_to(runtime: Runtime, even_batches: bool | None) -> Iterator[None]:
    """Set `even_batches` of all prepared loaders that have it, inside the block."""
    loaders = [] if even_batches is None else runtime.prepared.loaders
    samplers: list[Any] = [getattr(loader, "batch_sampler", None) for loader in loaders]
    if any(not hasattr(sampler, "even_batches") for sampler in samplers):
        logger.warning(
            "even_batches has no effect on loaders of iterable datasets: their processes read on their own."
        )
    with ExitStack() as stack:
        for sampler in (sampler for sampler in samplers if hasattr(sampler, "even_batches")):
            stack.callback(setattr, sampler, "even_batches", sampler.even_batches)
            sampler.even_batches = even_batches
        yield
