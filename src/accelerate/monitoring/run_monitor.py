"""Monitor of one rank, whose thread records windows of steps, events and conclusions while the rank trains.

`accelerator/recording.py` creates it. The thread starts at the first step of a run with a folder of records.
The thread and training never wait for each other. `RecordThread` writes the files in another thread, so a
file system that does not respond only delays the end of the process by a few seconds.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from accelerate.monitoring.conclusions import Finding, RunFacts, conclude
from accelerate.monitoring.rank_comparison import RankExchange, Straggler
from accelerate.monitoring.record_thread import RecordThread
from accelerate.monitoring.records import (
    Checkpoint,
    Conclusion,
    End,
    Event,
    Record,
    RecordQueue,
    Start,
    Window,
    format_flops,
    recorded_rank,
)
from accelerate.monitoring.step_clock import ClosedWindow, StepClock, StepTimes

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two writes."""
FIRST_INTERVAL = 0.05
"""Seconds between two writes until the first step is written."""
NUM_RECENT_WINDOWS = 30
"""Number of windows from which conclusions are drawn."""
MIN_WINDOWS = 3
"""Number of windows before the first conclusion, unless the run has ended."""
MAX_PART, MAX_SECONDS = 1 / 1800, 60.0
"""Length of a written window as a part of the time of all steps, and at most in seconds.

A run of a month writes about 30 MB on each rank.
"""
SECONDS_TO_DISCONNECT = 2.0
"""Timeout for a comparison to end before the process group is closed, in seconds."""


class MonitorSources(Protocol):
    """Source of the values of the records, which a monitor reads mostly in its thread."""

    def start(self) -> Start:
        """Returns the first record."""

    def memory(self) -> tuple[int, int]:
        """Returns the current and peak bytes."""

    def learning_rate(self) -> object:
        """Returns a value that is recorded if it is a number or a tensor of one element."""

    def num_workers(self) -> int | None:
        """Returns the number of workers of the first loader, also after it was freed, or None."""

    def batches(self) -> tuple[int, int]:
        """Returns the number of batches of this epoch so far and in total, which are 0 if unknown."""

    def recompilations(self) -> int:
        """Returns how often functions were compiled again in this process."""

    def connect(self) -> RankExchange | None:
        """Opens a connection to the store for the comparison of several ranks, if there is a store."""


class RunMonitor:
    """Monitor of one rank, which is a service of the process.

    Args:
        records: Thread that writes the records, without a folder for none.
        queue: Events and checkpoints of this process that are to be recorded.
        prints_times: Whether rank 0 prints the time of steps and the conclusions at the end.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        sources: MonitorSources,
        records: RecordThread,
        clock: StepClock,
        queue: RecordQueue,
        prints_times: bool = False,
    ) -> None:
        self.rank, self.size, self._sources, self._clock, self._queue = rank, size, sources, clock, queue
        self.records, self._prints_times = records, prints_times
        self._connect = sources.connect if size > 1 else None
        self._start_time = time.time()
        self._pid = os.getpid()
        self._is_recorded, self._has_begun = records.folder is not None, False
        self._num_workers: int | None = None
        self._recent: deque[ClosedWindow] = deque(maxlen=NUM_RECENT_WINDOWS)
        self._num_windows = 0
        self._unwritten: list[ClosedWindow] = []
        self._unwritten_comparisons: list[Record] = []
        self._all = StepTimes()  # all windows
        self._known: set[str] = set()  # names of the conclusions that hold
        self._saves = self._saves_in_background = 0
        self._has_stopped = self._is_finished = self._is_reset = False
        self._exchange: RankExchange | None = None
        self._compared_at = 0.0
        self._compared: deque[ClosedWindow] = deque(maxlen=NUM_RECENT_WINDOWS)  # since the last comparison
        self._are_even = self._connect is None or not self._is_recorded
        self._straggler: Straggler | None = None
        self._recompilations = sources.recompilations()
        self._end = ("finished", "")  # how the run ended, and its traceback
        self._ended = threading.Event()
        self._comparing = threading.Lock()  # held while the thread uses the store
        self._thread: threading.Thread | None = None
        queue.clear()
        if self._is_recorded:
            clock.on_first_step = self._start

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="accelerate-monitor", daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        if self._connect is not None and not self._is_finished:
            self.records.guard(self._connect_ranks)
        interval = FIRST_INTERVAL
        while not self._ended.wait(interval):
            self.records.guard(self.flush)
            interval = INTERVAL if self._num_windows else FIRST_INTERVAL
        self.records.guard(self._write_end)

    def _connect_ranks(self) -> None:
        """Opens the connection for the comparison of ranks, unless the process group is closed."""
        with self._comparing:
            connect, self._connect = self._connect, None
            try:
                self._exchange = connect() if connect is not None else None
            except RuntimeError as error:
                logger.warning("Ranks are not compared: the store gives no connection (%s).", error)

    def flush(self) -> None:
        """Writes the windows, events and conclusions since the last call."""
        windows = _take(self._clock.windows)
        for window in windows:
            if self._num_windows == 1:
                self._recent.clear()  # the first window has warm-up steps
            self._recent.append(window)
            self._all += window.times
            self._num_windows += 1
        self._compared.extend(windows)
        self._record_recompilations()
        events = _take(self._queue)
        for record in events:
            self._count(record)
        compared = self._compare()
        conclusions = self._conclude()
        self._unwritten += windows
        self._unwritten_comparisons += compared
        self._write([*self._due_records(), *events, *conclusions])

    def _due_records(self) -> list[Record]:
        """Returns records of windows and comparisons, of which a long run joins several to one."""
        length = min(self._all.seconds * MAX_PART, MAX_SECONDS)
        seconds = sum(window.times.seconds for window in self._unwritten)
        if self._has_begun and seconds < length and not self._is_finished:
            return []
        windows, comparisons = self._unwritten, self._unwritten_comparisons
        self._unwritten, self._unwritten_comparisons = [], []
        if length > 1.0:
            windows, comparisons = join_windows(windows), comparisons[-1:]
        return [*map(self._window, windows), *comparisons]

    def _window(self, window: ClosedWindow) -> Window:
        memory, peak = self._sources.memory()
        batch, num_batches = self._sources.batches()
        self._num_workers = self._sources.num_workers()  # the loader may be freed before the last conclusion
        kept = {**window.values, "learning_rate": self._sources.learning_rate()}
        numbers = {name: read_number(value) for name, value in kept.items()}
        values = {name: number for name, number in numbers.items() if number is not None}
        return Window(
            time=window.time,
            first=window.last - window.times.steps + 1,
            last=window.last,
            seconds=window.times.seconds,
            seconds_by=window.times.seconds_by,
            recovery=window.recovery,
            memory=memory,
            peak_memory=peak,
            samples=window.times.samples,
            items=window.times.items,
            flops_per_second=window.times.flops_per_second,
            mfu=window.times.mfu or 0.0,
            batch=batch,
            num_batches=num_batches,
            conclusions=sorted(self._known),
            values=values,
        )

    def _count(self, record: Record) -> None:
        if isinstance(record, Checkpoint) and record.event == "committed":
            self._saves += 1
            self._saves_in_background += record.blocked < record.seconds / 2
        if isinstance(record, Event) and record.name == "stop":
            self._has_stopped = True

    def _record_recompilations(self) -> None:
        before, self._recompilations = self._recompilations, self._sources.recompilations()
        if self._recompilations > before:
            text = f"torch.compile has compiled {self._recompilations - before} functions again"
            step = self._clock.number
            self._queue.append(Event(time=time.time(), name="recompilation", step=step, text=text))

    def _compare(self) -> list[Record]:
        """Compares the ranks if the interval is over, and returns the record on rank 0."""
        with self._comparing:
            exchange, now = self._exchange, time.monotonic()
            if exchange is None or not self._compared or now < self._compared_at + exchange.interval:
                return []
            self._compared_at = now
            windows = _take(self._compared)
            try:
                exchange.exchange(windows[-1].last, _join(windows))
            except RuntimeError:  # the process that hosts the store has ended, and the run ends
                self._exchange = None
                return []
            self._straggler, self._are_even = exchange.straggler, exchange.result.are_even
            compared, exchange.times = exchange.times, None
            return [] if compared is None else [compared.shifted(recorded_rank(0, self.size))]

    def _facts(self, times: StepTimes, run: StepTimes) -> RunFacts:
        return RunFacts(
            times,
            run,
            self.size,
            self._num_workers,
            self._straggler,
            self._are_even,
            self._saves,
            self._saves_in_background,
            self._recompilations,
            self._clock.idle,
        )

    def _conclude(self) -> list[Record]:
        """Draws conclusions from the last windows, and returns records of the new ones."""
        if not self._recent or (self._num_windows < MIN_WINDOWS and not self._is_finished):
            return []
        findings = conclude(self._facts(_join(self._recent), self._all))
        new = [finding for finding in findings if finding.name not in self._known]
        self._known = {finding.name for finding in findings}
        now, step = time.time(), self._recent[-1].last
        return [Conclusion(time=now, name=finding.name, step=step, text=finding.text) for finding in new]

    def _write(self, records: Sequence[Record]) -> None:
        """Passes records to the thread that writes them."""
        if not self._is_recorded or not records:
            return
        if not self._has_begun:
            if self._is_reset:  # the thread has written nothing so far, so the end is not recorded either
                return
            self.records.put(replace(self._sources.start(), time=self._start_time))
            self._has_begun = True
        self.records.put(*records)

    def close(self) -> None:
        """Stops the comparison of ranks before the process group and its store are closed."""
        if os.getpid() != self._pid:
            return
        is_idle = self._comparing.acquire(timeout=SECONDS_TO_DISCONNECT)
        self._connect = self._exchange = None
        if is_idle:
            self._comparing.release()

    def finish(self, how: str, error: str = "") -> None:
        """Ends the monitor, prints the time of steps if asked to, and writes how the run ended.

        A second call does nothing.
        """
        if os.getpid() != self._pid or self._is_finished:
            return
        self._is_finished = self.records.is_run_ending = True
        self._clock.on_first_step = None
        self.close()
        self.print_times()
        self._clock.end_run()
        deadline = time.monotonic() + RecordThread.SECONDS_TO_END
        if self._thread is not None or (self._is_recorded and (error or self._clock.steps)):
            self._end = how, error
            self._ended.set()
            self._join()
        self.records.close(max(deadline - time.monotonic(), 0.0))

    def _join(self) -> None:
        """Waits until the last records are written, or until `RecordThread.SECONDS_TO_END` are over."""
        if self._thread is None:
            try:
                self._start()
            except RuntimeError:  # since Python 3.12, an interpreter that exits cannot start threads
                self.records.guard(self._write_end)
                return
        thread, self._thread = self._thread, None
        assert thread is not None
        thread.join(RecordThread.SECONDS_TO_END)
        if thread.is_alive():
            self.records.log_no_response()

    def _write_end(self) -> None:
        """Writes the remaining records, and how the run ended."""
        self.flush()
        how, error = self._end
        how = "stopped" if how == "finished" and self._has_stopped else how
        self._write([End(time=time.time(), how=how, error=error)])
        self._is_recorded = False

    def end(self) -> None:
        """Ends the monitor when the state is reset, in a process that continues."""
        self._is_reset = True
        self.finish("finished")

    def print_times(self) -> None:
        """Prints the time of the run by phase and the conclusions on rank 0, if the user asked for them."""
        if not self._prints_times or self.rank:
            return
        times = self._clock.times()
        if times.steps:
            text = format_table(times, conclude(self._facts(times, times)))
            print(text, file=sys.stderr, flush=True)


def format_table(times: StepTimes, findings: Sequence[Finding]) -> str:
    """Formats the time of a run by phase, and the conclusions."""
    rate = f"{times.steps_per_second:.4g} steps/s"
    samples = f", {times.samples_per_second:.4g} samples/s on each rank" if times.samples else ""
    items = f", {times.items_per_second:.4g} items/s" if times.items else ""
    flops = "".join(f", {text}" for text in format_flops(times.flops_per_second, times.mfu))
    lines = [f"{times.steps} steps in {times.seconds:.1f} s ({rate}{samples}{items}{flops}):"]
    for name, seconds in times.seconds_by.items():
        if seconds:
            lines.append(f"  {name:11} {seconds:9.2f} s  {seconds / times.seconds:6.1%}")
    return "\n".join([*lines, *(f"  {finding.text}" for finding in findings)])


def read_number(value: object) -> float | None:
    """Returns a number or a tensor of one element as a float, and None for other values."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _take(queue: deque[Any]) -> list[Any]:
    """Removes and returns the current items of a queue, to which another thread may append."""
    return [queue.popleft() for _ in range(len(queue))]


def join_windows(windows: Sequence[ClosedWindow]) -> list[ClosedWindow]:
    """Returns one window for all whose steps follow each other, with the values of the last one."""
    joined: list[ClosedWindow] = []
    for window in windows:
        if joined and joined[-1].last == window.last - window.times.steps:
            before = joined.pop()
            names = before.recovery | window.recovery
            window = replace(
                window,
                times=before.times + window.times,
                values=before.values | window.values,
                recovery={
                    name: before.recovery.get(name, 0.0) + window.recovery.get(name, 0.0) for name in names
                },
            )
        joined.append(window)
    return joined


def _join(windows: Sequence[ClosedWindow] | deque[ClosedWindow]) -> StepTimes:
    """Returns the sum of the times of several windows."""
    return sum((window.times for window in windows), StepTimes())
