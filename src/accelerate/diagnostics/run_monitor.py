"""The records of one rank while it trains: a thread writes windows of steps, events and conclusions.

The thread starts with the first step, and only where something reads what it writes: a folder of records, or
a launcher that shows the run. It never waits for training, and training never waits for it. Only the thread
accesses the files: a file system that does not respond delays the end of the process by a few seconds.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import torch_private
from accelerate.base import environ
from accelerate.diagnostics.rank_exchange import RankExchange
from accelerate.launch import count_of
from accelerate.monitoring import (
    Checkpoint,
    ClosedWindow,
    Conclusion,
    End,
    Event,
    Finding,
    RankStatus,
    Record,
    RecordWriter,
    RunFacts,
    Start,
    StepTimes,
    Straggler,
    Window,
    conclude,
)
from accelerate.state import StoreChannel, process_group, run_records, services, step_clock

logger = logging.getLogger(__name__)

PAUSE = 1.0
"""Seconds between two looks."""
RECENT = 30
"""Windows from which conclusions are drawn."""
FEWEST_WINDOWS = 3
"""Windows of a run that goes on from which on there are conclusions."""
SECONDS_TO_DISCONNECT = 2.0
SECONDS_TO_END = 10.0
"""Seconds that the end of a run waits for its last records to be written."""
LEAST_SECONDS, LEAST_STEPS = 3.0, 100
"""A run of so many seconds or steps ends with a table."""
PATIENCE = timedelta(seconds=5)


@dataclass(frozen=True)
class Sources:
    """What a monitor reads besides the clock; called by its thread."""

    start: Callable[[], Start]
    memory: Callable[[], tuple[int, int]]  # bytes now, and at most
    learning_rate: Callable[[], object]  # a number or a tensor of one element, else it is not recorded
    num_workers: Callable[[], int | None]
    updates: Callable[[], dict[int, int]]  # of optimizers, by what identifies them
    batches: Callable[[], tuple[int, int]] = lambda: (0, 0)  # of this pass so far, and in total; 0 if unknown


class RunMonitor:
    """Watches one rank; a service of the run.

    Args:
        rank: Of this process.
        size: The world size.
        sources: What is read.
        records: Folder of the records; None for none.
        status: Folder of the status files of a launcher; None for none.
        connect: Opens a connection to the store for the comparison of ranks; None where there is one rank.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        sources: Sources,
        records: Path | None,
        status: Path | None,
        connect: Callable[[], RankExchange | None] | None = None,
    ) -> None:
        self.rank, self.size, self._sources = rank, size, sources
        self._records, self._status, self._connect = records, status, connect
        self._began = time.time()
        self._pid = os.getpid()
        self._writer: RecordWriter | None = None
        self._recent: deque[ClosedWindow] = deque(maxlen=RECENT)
        self._num_windows = 0
        self._known: dict[str, str] = {}  # texts of conclusions by name
        self._saves = self._saves_in_background = 0
        self._has_stopped = self._is_finished = self._has_failed = False
        self._checkpoint = ("", 0.0)
        self._exchange: RankExchange | None = None
        self._compared_at = 0.0
        self._compared: deque[ClosedWindow] = deque(maxlen=RECENT)  # windows since the last comparison
        self._slowest, self._slowest_by = -1, 0.0
        self._attempt = count_of(environ.current(), "TORCHELASTIC_RESTART_COUNT", 0)
        self._ended_as = ""
        self._pass = (0.0, 0, 0)  # a time in this pass over the loader, the batches until then and until now
        self._are_even = connect is None or (records is None and status is None)
        self._straggler: Straggler | None = None
        self._values: dict[str, float] = {}  # of the last window
        self._recompilations = torch_private.count_recompilations()
        self._end = ("finished", "")  # how the run has ended, and the traceback
        self._ended = threading.Event()
        self._comparing = threading.Lock()  # held while the thread uses the store
        self._thread: threading.Thread | None = None
        run_records.clear()
        if records is not None or status is not None:
            step_clock.on_first_step = self._start
        if status is not None:
            self._write_status(None)

    def _start(self) -> None:
        """Start the thread."""
        thread = threading.Thread(target=self._run, name="accelerate-monitor", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        if self._connect is not None and not self._is_finished:
            self._guard(self._connect_ranks)
        while not self._ended.wait(PAUSE):
            self._guard(self.look)
        self._guard(self._write_end)

    def _guard(self, function: Callable[[], None]) -> None:
        """Call a function; the first exception is logged, and later calls go on."""
        try:
            function()
        except Exception as error:
            if not self._has_failed:
                logger.warning("Records of this run are incomplete: %r. Training goes on.", error)
            logger.debug("The thread that records the run got an exception.", exc_info=error)
            self._has_failed = True

    def _connect_ranks(self) -> None:
        """Open the connection over which ranks are compared, unless the group is closed already."""
        with self._comparing:
            connect, self._connect = self._connect, None
            try:
                self._exchange = connect() if connect is not None else None
            except RuntimeError as error:
                logger.warning("Ranks are not compared: the store gives no connection (%s).", error)

    def look(self) -> None:
        """Write what has happened since the last look."""
        windows = _take(step_clock.windows)
        for window in windows:
            if self._num_windows == 1:
                self._recent.clear()  # the first steps warm up
            self._recent.append(window)
            self._num_windows += 1
        self._compared.extend(windows)
        written = [self._window(window) for window in windows]
        self._note_recompilations()
        happened = _take(run_records)
        for record in happened:
            self._notice(record)
        compared = self._compare()
        self._write([*written, *happened, *compared, *self._conclude()])
        if self._status is not None:
            self._write_status(written[-1] if written else None)

    def _window(self, window: ClosedWindow) -> Window:
        memory, peak = self._sources.memory()
        kept = {**window.values, "learning_rate": self._sources.learning_rate()}
        numbers = {name: read_number(value) for name, value in kept.items()}
        values = {name: number for name, number in numbers.items() if number is not None}
        return Window(
            time=window.time,
            first=window.last - window.times.steps + 1,
            last=window.last,
            seconds=window.times.seconds,
            seconds_by=window.times.seconds_by,
            memory=memory,
            peak_memory=peak,
            samples=window.times.samples,
            values=values,
        )

    def _notice(self, record: Record) -> None:
        if isinstance(record, Checkpoint) and record.event == "committed":
            self._saves += 1
            self._saves_in_background += record.blocked < record.seconds / 2
            self._checkpoint = (record.path, record.time)
        if isinstance(record, Event) and record.name == "stop":
            self._has_stopped = True

    def _note_recompilations(self) -> None:
        before, self._recompilations = self._recompilations, torch_private.count_recompilations()
        if self._recompilations > before:
            text = f"torch.compile has compiled {self._recompilations - before} functions again"
            step = step_clock.number
            run_records.append(Event(time=time.time(), name="recompilation", step=step, text=text))

    def _compare(self) -> list[Record]:
        """Compare the ranks, when it is time; on rank 0 the result is a record."""
        with self._comparing:
            return self._compare_over(self._exchange)

    def _compare_over(self, exchange: RankExchange | None) -> list[Record]:
        if exchange is None or not self._compared or time.monotonic() < self._compared_at + exchange.interval:
            return []
        self._compared_at = time.monotonic()
        windows = _take(self._compared)
        try:
            exchange.look(windows[-1].last, _join(windows))
        except RuntimeError:  # the process that keeps the store has ended: so does the run
            self._exchange = None
            return []
        self._straggler, verdict = exchange.straggler, exchange.verdict
        self._slowest, self._slowest_by = verdict.slowest, verdict.slowest_by
        self._are_even = verdict.are_even
        compared, exchange.times = exchange.times, None
        return [] if compared is None else [compared]

    def _facts(self, times: StepTimes) -> RunFacts:
        return RunFacts(
            times,
            self.size,
            self._sources.num_workers(),
            self._straggler,
            self._are_even,
            self._saves,
            self._saves_in_background,
            self._recompilations,
            step_clock.idle,
        )

    def _conclude(self) -> list[Record]:
        """Draw conclusions from the last windows; a new one is a record."""
        if not self._recent or (self._num_windows < FEWEST_WINDOWS and not self._is_finished):
            return []
        findings = conclude(self._facts(_join(self._recent)))
        new = [finding for finding in findings if finding.name not in self._known]
        self._known = {finding.name: finding.text for finding in findings}
        now, step = time.time(), self._recent[-1].last
        return [Conclusion(time=now, name=finding.name, step=step, text=finding.text) for finding in new]

    def _write(self, records: Sequence[Record]) -> None:
        """Write records; after one that could not be written no others are."""
        if self._records is None or not records:
            return
        try:
            if self._writer is None:
                self._writer = RecordWriter(self._records, self.rank)
                self._writer.write(replace(self._sources.start(), time=self._began))
            self._writer.write(*records)
        except OSError as error:
            # A program may remove its folder before it ends.
            level = (
                logging.INFO
                if self._is_finished and isinstance(error, FileNotFoundError)
                else logging.WARNING
            )
            logger.log(
                level, "The run is no longer recorded in %s: %s. Training goes on.", self._records, error
            )
            self._records = None

    def _write_status(self, window: Window | None) -> None:
        last = self._recent[-1].times if self._recent else StepTimes()
        memory, peak = self._sources.memory()
        self._values |= {} if window is None else window.values
        batch, num_batches = self._sources.batches()
        status = RankStatus(
            rank=self.rank,
            world_size=self.size,
            time=time.time(),
            pid=self._pid,
            attempt=self._attempt,
            ended=self._ended_as,
            step=step_clock.number,
            seconds=last.seconds,
            seconds_by=last.seconds_by,
            steps_per_second=last.steps_per_second,
            samples_per_second=last.samples_per_second,
            memory=memory,
            peak_memory=peak,
            values=self._values,
            last_checkpoint=self._checkpoint[0],
            last_checkpoint_time=self._checkpoint[1],
            slowest=self._slowest,
            slowest_by=self._slowest_by,
            batch=batch,
            num_batches=num_batches,
            seconds_left=self._seconds_left(batch, num_batches),
            conclusions=self._known,
        )
        try:
            status.write(self._status)  # type: ignore[arg-type]
        except OSError:  # the launcher has ended, and removed its folder
            self._status = None

    def _seconds_left(self, batch: int, num_batches: int) -> float:
        """Seconds until the end of the pass over the loader, if it goes on as since it was first seen."""
        now = time.monotonic()
        began, first, last = self._pass
        if not first or batch < last:
            began, first = now, batch
        self._pass = began, first, batch
        rate = (batch - first) / (now - began) if now > began else 0.0
        return max(num_batches - batch, 0) / rate if rate else 0.0

    def close(self) -> None:
        """Stop to compare ranks: the process group closes, and with it the store."""
        if os.getpid() != self._pid:
            return
        is_idle = self._comparing.acquire(timeout=SECONDS_TO_DISCONNECT)
        self._connect = self._exchange = None
        if is_idle:
            self._comparing.release()

    def finish(self, how: str, error: str = "") -> None:
        """End the run: log a table on rank 0, and write how it ended. A second call does nothing."""
        if os.getpid() != self._pid or self._is_finished:
            return
        self._is_finished = True
        step_clock.on_first_step = None
        self.close()
        self.log_table()
        step_clock.end_run()
        if self._thread is None and not error and not step_clock.steps:
            return
        self._end = how, error
        self._ended.set()
        self._join()

    def _join(self) -> None:
        """Wait until the last records are written, unless the file system does not respond."""
        if self._thread is None:
            try:
                self._start()
            except RuntimeError:  # from Python 3.12 on an interpreter that exits starts no threads
                self._guard(self._write_end)
                return
        thread, self._thread = self._thread, None
        assert thread is not None
        thread.join(SECONDS_TO_END)
        if thread.is_alive():
            logger.warning(
                "The last records of this run are not in %s: the file system has not responded for %g s.",
                self._records or self._status,
                SECONDS_TO_END,
            )

    def _write_end(self) -> None:
        """Write what has happened since the last look, and how the run has ended."""
        self.look()
        how, error = self._end
        self._ended_as = "stopped" if how == "finished" and self._has_stopped else how
        if self._status is not None:
            self._write_status(None)
        self._write([End(time=time.time(), how=self._ended_as, error=error)])
        if self._writer is not None:
            self._writer.close()
            self._writer, self._records = None, None

    def end(self) -> None:
        """End with the state, in a process that goes on."""
        if self._writer is None:
            self._records = None  # nothing was worth a record
        self.finish("finished")

    def log_table(self) -> None:
        """Log one table of the run at level INFO, on rank 0."""
        times = step_clock.times(self._sources.updates())
        is_long = times.seconds >= LEAST_SECONDS or times.steps >= LEAST_STEPS
        if self.rank == 0 and is_long and times.steps and logger.isEnabledFor(logging.INFO):
            logger.info(spell_table(times, conclude(self._facts(times))))


def spell_table(times: StepTimes, findings: Sequence[Finding]) -> str:
    """Write where the time of a run went, and the conclusions."""
    rate = f"{times.steps_per_second:.4g} steps/s"
    samples = f", {times.samples_per_second:.4g} samples/s on each rank" if times.samples else ""
    lines = [f"{times.steps} steps in {times.seconds:.1f} s ({rate}{samples}):"]
    for name, seconds in times.seconds_by.items():
        if seconds:
            lines.append(f"  {name:11} {seconds:9.2f} s  {seconds / times.seconds:6.1%}")
    return "\n".join([*lines, *(f"  {finding.text}" for finding in findings)])


def find_monitor() -> RunMonitor | None:
    """Return the monitor of the run."""
    return services.find(RunMonitor)


def start_monitor(
    rank: int, size: int, sources: Sources, records: Path | None, status: Path | None, is_first: bool
) -> None:
    """Record this run; nothing happens a second time."""
    if services.find(RunMonitor) is not None:
        return
    connect = partial(connect_exchange, rank, size, is_first) if size > 1 else None
    monitor = RunMonitor(rank, size, sources, records, status, connect)
    services.put(RunMonitor, monitor, close=monitor.close, end=monitor.end)


def connect_exchange(rank: int, size: int, is_first: bool) -> RankExchange | None:
    """Open a connection to the store of the process group; None where it has no such store."""
    channel: StoreChannel | None = process_group.connect_channel("times", PATIENCE)
    return None if channel is None else RankExchange(channel, rank, size, is_first)


def read_number(value: object) -> float | None:
    """Return a number or a tensor of one element as a float; None for anything else."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _take(queue: deque[Any]) -> list[Any]:
    """Take all items that are there; another thread may add some."""
    return [queue.popleft() for _ in range(len(queue))]


def _join(windows: Sequence[ClosedWindow] | deque[ClosedWindow]) -> StepTimes:
    """Return the times of several windows together."""
    return sum((window.times for window in windows), StepTimes())


def _finish_at_exit() -> None:
    monitor = services.find(RunMonitor)
    if monitor is None:
        return
    failed = process_group.failed()
    error: Any = getattr(sys, "last_value", None)
    trace = "".join(traceback.format_exception(type(error), error, sys.last_traceback)) if failed else ""
    monitor.finish("failed" if failed else "finished", trace)


# Registered after the process group's own, and so called before it.
atexit.register(_finish_at_exit)
