"""Progress bar on the terminal of rank 0 for tasks that take more than two seconds."""

from __future__ import annotations

import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.base import environ

if TYPE_CHECKING:
    from rich.console import RenderableType

DELAY = 2.0
"""Seconds after which the bar appears."""


class Bar:
    """Progress bar of one task, which counts bytes and is drawn by a timer thread."""

    def __init__(self, task: str, written: Callable[[], int] | None = None) -> None:
        self._task = task
        self._written = written
        self._done = self.total = 0
        self._lock = threading.Lock()
        self._display: Any = None
        self._timer = threading.Timer(DELAY, self._draw)
        self._timer.daemon = True

    def __enter__(self) -> Bar:
        self._timer.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._timer.cancel()
        self._timer.join()  # it may be drawing at this moment
        if self._display is not None:
            self._display.stop()

    def count(self, done: int, more: int) -> None:
        """Adds to the completed bytes and to the total bytes."""
        with self._lock:
            self._done += done
            self.total += more

    @property
    def done(self) -> int:
        """Number of completed bytes."""
        return self._done + (self._written() if self._written else 0)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        console = Console(file=sys.stderr)
        if not console.is_interactive:  # this terminal cannot redraw a line
            return
        bar = self

        class Display(Progress):
            def get_renderables(self) -> Iterable[RenderableType]:
                for task in self.task_ids:
                    self.update(task, completed=bar.done, total=bar.total or None)
                return super().get_renderables()

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._display = Display(*columns, console=console, transient=True, redirect_stdout=False)
        self._display.add_task(self._task, total=None)
        self._display.start()


_shown: ContextVar[Bar | None] = ContextVar("shown", default=None)


@contextmanager
def progress_bar(task: str, nbytes: int = 0, written: Callable[[], int] | None = None) -> Iterator[None]:
    """Shows the progress of a task on the terminal of rank 0, after two seconds.

    A nested task adds to the outer bar. `nbytes` is the size of the task as far as it is known, and `expect`
    adds to it. `written` returns the completed bytes that `advance` does not count.
    """
    if _shown.get() is not None or not is_visible():
        expect(nbytes)
        yield
        return
    with Bar(task, written) as bar:
        token = _shown.set(bar)
        try:
            expect(nbytes)
            yield
        finally:
            _shown.reset(token)


def expect(nbytes: int) -> None:
    """Adds bytes to the total of the current task, if one is shown."""
    if bar := _shown.get():
        bar.count(0, nbytes)


def is_shown() -> bool:
    """Returns whether a task is shown."""
    return _shown.get() is not None


def advance(nbytes: int) -> None:
    """Adds completed bytes to the current task, if one is shown."""
    if bar := _shown.get():
        bar.count(nbytes, 0)


def for_threads() -> dict[str, Any]:
    """Returns arguments for `ThreadPoolExecutor` whose threads count for the current task."""
    initializer: Callable[[Bar | None], object] = _shown.set
    return {"initializer": initializer, "initargs": (_shown.get(),)}


def size_of(paths: Iterable[Path]) -> int:
    """Returns the total size of files in bytes while other processes may write or rename them.

    A file that was preallocated counts only with the disk blocks that hold data.
    """
    total = 0
    with suppress(OSError):
        for path in paths:
            status = path.stat()
            allocated = 512 * getattr(status, "st_blocks", status.st_size)
            total += min(status.st_size, allocated) if stat.S_ISREG(status.st_mode) else 0
    return total


def is_visible() -> bool:
    """Returns whether this process has a terminal and is rank 0."""
    has_terminal = sys.stderr is not None and sys.stderr.isatty()
    return has_terminal and environ.current().get("RANK", "0") == "0"
