"""Facet of `Accelerator`: stop and save when machine, clock or user asks, on all ranks at once."""

from __future__ import annotations

from accelerate.accelerator.runtime import Runtime


class Stopping:
    """Whether to stop and to save, to be asked once in each step, on all ranks, in the same order."""

    _runtime: Runtime

    @property
    def should_save(self) -> bool:
        """Whether to save a checkpoint now; true once for each request, at the same step on all ranks.

        Asked for by SIGTERM, SIGUSR1, SIGUSR2, the end of `max_time` or of a SLURM allocation, `stop_file`
        and `save_file`. Ask before `should_stop`.
        """
        return self._runtime.agreement.read_save()

    @property
    def should_stop(self) -> bool:
        """Whether to leave the training loop; from the same step on all ranks, and for good.

        Asked for by SIGTERM, SIGUSR1, the end of `max_time` or of a SLURM allocation, and `stop_file`. The
        first question of a run sets the handlers of these signals; a second SIGTERM ends the process.
        """
        return self._runtime.agreement.read_stop()
