"""Tracker without a library, which writes values to the records of the run for `accelerate report`."""

from __future__ import annotations

import atexit
import json
import logging
import time
from typing import Any

from accelerate.base import environ, wrong_value
from accelerate.launch import new_run_id, run_id_of
from accelerate.logging import get_logger
from accelerate.monitoring import (
    RECORDS_VARIABLE,
    Event,
    RecordThread,
    Values,
    recorded_rank,
    records_folder,
    uses_state_folder,
)
from accelerate.state import PartialState, services
from accelerate.tracking.base import GeneralTracker, flatten, on_main_process

logger = get_logger(__name__)


class ReportTracker(GeneralTracker):
    """Tracker that writes values to the records of this rank for `accelerate report`.

    The records are in the state folder of the user, or in the folder of `ACCELERATE_RUN_RECORDS`. A thread
    writes them. It is the one of the monitor of the run if that writes records.

    Args:
        run_name: Name of the project, which is part of the configuration of the run.
    """

    name = "report"
    requires_logging_directory = False
    blocks = True

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.run_name = run_name
        self.writer: RecordThread | None = None

    @property
    def tracker(self) -> RecordThread | None:
        """Thread that writes the records, or None on ranks that do not log."""
        return self.writer

    @on_main_process
    def start(self) -> None:
        """Starts to write records.

        Raises:
            ConfigurationError: The records of runs are disabled.
        """
        setting = environ.current().get(RECORDS_VARIABLE)
        if setting and setting.lower() in environ.FALSE_WORDS:
            fix = "Leave the variable out or name a folder, or take 'report' out of log_with"
            raise wrong_value(RECORDS_VARIABLE, setting, "the tracker 'report' writes records", fix)
        found = services.find(RecordThread)
        self.writer = _open_records(setting or "yes") if found is None or found.folder is None else found
        self.writer.level = logging.WARNING
        atexit.register(self.finish)
        self.store_init_configuration({"project_name": self.run_name})

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        assert self.writer is not None
        text = json.dumps({name: str(value) for name, value in flatten(values).items()})
        self.writer.put(Event(time=time.time(), name="config", step=0, text=text))

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Logs numbers and text, also in dictionaries, and warns about other values."""
        assert self.writer is not None
        flat = flatten(values)
        for name in [name for name, value in flat.items() if not isinstance(value, (int, float, str))]:
            kind = type(flat.pop(name)).__name__
            logger.warning_once(
                f"the tracker 'report' does not log {name!r}: a {kind} is not a number or text"
            )
        number = None if step is None else int(step)  # JSON has no numbers of numpy and tensors
        self.writer.put(Values(time=time.time(), step=number, values=flat))

    def finish(self) -> None:
        """Waits until all records are written, unless the file system does not respond."""
        atexit.unregister(self.finish)
        if self.writer is None:
            return
        if self.writer is services.find(RecordThread):
            self.writer.flush()
        else:
            self.writer.close()


def _open_records(chosen: str) -> RecordThread:
    """Returns the thread that writes the records of a run without a monitor that writes any."""
    state, run_id = PartialState(), run_id_of(environ.current()) or new_run_id()
    folder, rank = (
        records_folder(chosen, None, run_id),
        recorded_rank(state.process_index, state.num_processes),
    )
    return RecordThread(folder, rank, in_state_folder=uses_state_folder(chosen, None))
