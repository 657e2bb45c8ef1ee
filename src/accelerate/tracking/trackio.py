"""Trackio."""

from __future__ import annotations

from accelerate.tracking.base import RunTracker


class TrackioTracker(RunTracker):
    """Logs to Trackio, a tracker that keeps its runs in files of this machine.

    Args:
        run_name: Name of the project.
        **kwargs: Arguments of `trackio.init`.
    """

    name = package = "trackio"
    requires_logging_directory = False
    main_process_only = False
