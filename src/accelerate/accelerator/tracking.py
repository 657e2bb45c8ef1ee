"""Facet of `Accelerator`: experiment trackers."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

from accelerate import tracking
from accelerate.accelerator.runtime import Runtime
from accelerate.base import wrong_value


class Tracking:
    """Start, feed and finish trackers; only processes that may write do so."""

    _runtime: Runtime
    log_with: list[Any]

    @property
    def trackers(self) -> list[Any]:
        """The trackers of the run, with everything sent that was logged; empty before `init_trackers`."""
        self._runtime.senders.wait()
        return self._runtime.trackers

    @trackers.setter
    def trackers(self, trackers: list[Any]) -> None:
        self._runtime.trackers = trackers

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Start the trackers named by `log_with`; call it on all ranks.

        Args:
            project_name: name of the experiment.
            config: hyperparameters to store at the start.
            init_kwargs: further arguments for single trackers, by tracker name.
        """
        arguments = init_kwargs or {}
        project = self._runtime.request.project
        folder = None if project.project_dir is None else os.fspath(project.project_dir)
        self._runtime.trackers = [
            tracking.build_tracker(kind, project_name, project.logging_dir, arguments, folder)
            for kind in self.log_with
        ]
        for tracker in self._runtime.trackers:
            tracker.start()
        for tracker in self._runtime.trackers if config is not None else ():
            tracker.store_init_configuration(config)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a running tracker by name.

        Args:
            name: its name, such as "tensorboard".
            unwrap: return the object of the tracker's own library instead.

        Returns:
            The tracker; one that accepts every call and does nothing when no tracker is running.
        """
        for tracker in self.trackers:
            if tracker.name == name:
                return tracker.tracker if unwrap else tracker
        if not self._runtime.trackers:
            return tracking.GeneralTracker(_blank=True)
        running = ", ".join(tracker.name for tracker in self._runtime.trackers)
        fix = "Name one of them, or add it to log_with"
        raise wrong_value("name", name, f"the running trackers are {running}", fix)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Send values to all trackers; call it on all ranks.

        A tracker that waits for a disk or a server (`blocks`) gets them in a thread, in order.

        Args:
            values: what to log, by name: numbers, strings or nested dictionaries of them; also tensors of one
                element, which need not be read before: that would wait for the device.
            step: the training step they belong to.
            log_kwargs: further arguments for single trackers, by tracker name.

        Raises:
            Exception: what a tracker raised, on these values or, in a thread, on earlier ones.
        """
        arguments, senders = log_kwargs or {}, self._runtime.senders
        for tracker in self._runtime.trackers:
            senders.of(tracker).log(tracking.Record(values, step, arguments.get(tracker.name, {})))

    def end_training(self) -> None:
        """Wait for a save in the background, finish all trackers, leave signals alone, close the group.

        Call it last, on all ranks. What one of these raises keeps none of the others from being done.
        """
        runtime = self._runtime
        with ExitStack() as ending:
            ending.callback(runtime.state.destroy_process_group)
            ending.callback(runtime.agreement.close)
            for tracker in reversed(runtime.trackers):
                ending.callback(runtime.senders.of(tracker).finish)
            runtime.checkpoints.background.wait()
