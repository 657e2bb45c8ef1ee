"""Thread that appends the records of a rank to its file, so that training does not wait for a file system."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import ClassVar

from accelerate.monitoring.records import Record, RecordWriter
from accelerate.monitoring.run_folders import create_run_folder, remove_old_runs

logger = logging.getLogger(__name__)

CAPACITY = 100_000  # maximum number of queued calls, after which records are dropped


class RecordThread:
    """Writer of the records of this process, in a thread of its own in a folder.

    It starts with the first record. After an error of the file system one message is logged, and no more
    records are written.

    Args:
        folder: Folder of the records, or None if there are none.
        in_state_folder: Whether it is in the state folder of the user, in which this thread creates it.
        removes_old: Whether the thread removes the records of old runs from the state folder.
        level: Level of the messages, which is lower where the user has not asked for records.
    """

    SECONDS_TO_END: ClassVar[float] = 10.0
    """Seconds that the end of a run waits for its last records to be written."""

    def __init__(
        self,
        folder: Path | None,
        rank: int,
        *,
        in_state_folder: bool = False,
        removes_old: bool = False,
        level: int = logging.WARNING,
    ) -> None:
        self.folder, self._rank, self.level = folder, rank, level
        self._in_state_folder, self._removes_old = in_state_folder, removes_old
        self.is_run_ending = False  # a program may remove its folder before it ends
        self._has_given_up = folder is None
        self._has_warned = False
        self._pid = os.getpid()
        self._queue: Queue[tuple[Record, ...]] = Queue()  # an empty tuple ends the thread
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._writer: RecordWriter | None = None

    def put(self, *records: Record) -> None:
        """Queues records without waiting for the file system."""
        if not records or self._has_given_up or self._queue.qsize() >= CAPACITY:
            return
        self._queue.put(records)
        with self._lock:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._write_all, name="accelerate-records", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # from Python 3.12 on an interpreter that exits starts no threads
                self._write_queued()
            else:
                self._thread = thread

    def flush(self, seconds: float | None = None) -> bool:
        """Waits until all records are written, unless the file system does not respond.

        Args:
            seconds: Timeout in seconds, by default `SECONDS_TO_END`.

        Returns:
            Whether the thread has nothing left to do.
        """
        if os.getpid() != self._pid:
            return True
        limit = self.SECONDS_TO_END if seconds is None else seconds
        with self._queue.all_tasks_done:
            is_done = self._queue.all_tasks_done.wait_for(
                lambda: not self._queue.unfinished_tasks, 0.0 if self._has_given_up else limit
            )
        if not is_done and not self._has_given_up:
            self._has_given_up = True
            self.log_no_response()
        return is_done

    def close(self, seconds: float | None = None) -> None:
        """Writes all records, closes the file, and ends the thread until the next record."""
        if os.getpid() != self._pid:
            return
        is_done = self.flush(seconds)
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is None:
            self.guard(self._close_file)
            return
        self._queue.put(())
        thread.join(self.SECONDS_TO_END if is_done else 0.0)

    def guard(self, function: Callable[[], None]) -> None:
        """Calls a function, and logs its exception the first time."""
        try:
            function()
        except Exception as error:
            if not self._has_warned:
                logger.warning("Records of this run are incomplete: %r. Training continues.", error)
            logger.debug("The thread that records the run got an exception.", exc_info=error)
            self._has_warned = True

    def _write_all(self) -> None:
        while records := self._queue.get():
            self.guard(partial(self._write, records))
            self._queue.task_done()
        self.guard(self._close_file)
        self._queue.task_done()

    def _write_queued(self) -> None:
        while True:
            try:
                records = self._queue.get_nowait()
            except Empty:
                return
            self.guard(partial(self._write, records))
            self._queue.task_done()

    def _write(self, records: tuple[Record, ...]) -> None:
        if self._has_given_up or self.folder is None:
            return
        try:
            if self._writer is None:
                self._writer = self._open(self.folder)
            self._writer.write(*records)
        except OSError as error:
            self._has_given_up = True
            is_expected = self.is_run_ending and isinstance(error, FileNotFoundError)
            level = logging.INFO if is_expected else self.level
            text = "The run is no longer recorded in %s: %s. Training continues."
            logger.log(level, text, self.folder, error)

    def _open(self, folder: Path) -> RecordWriter:
        if self._in_state_folder:
            create_run_folder(folder)
        writer = RecordWriter(folder, self._rank)
        if self._removes_old:
            remove_old_runs()
            self._removes_old = False
        return writer

    def log_no_response(self) -> None:
        """Logs a message about records that the end of a run does not wait for any longer."""
        text = "The last records of this run are not in %s: the file system has not responded for %g s."
        logger.log(self.level, text, self.folder, self.SECONDS_TO_END)

    def _close_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
