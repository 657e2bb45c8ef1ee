"""How far a long task is: a bar on the terminal of rank 0, for tasks that take more than two seconds."""

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
"""Seconds after which a task is shown."""


class Bar:
    """Counts the bytes of a task; a timer draws it, so that a short task costs no more than the timer."""

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
        self._timer.join()  # it may be drawing now
        if self._display is not None:
            self._display.stop()

    def count(self, done: int, more: int) -> None:
        """Add to the bytes that are done, and to those of the whole task."""
        with self._lock:
            self._done += done
            self.total += more

    @property
    def done(self) -> int:
        """Bytes that are done."""
        return self._done + (self._written() if self._written else 0)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        console = Console(file=sys.stderr)
        if not console.is_interactive:  # a terminal that cannot redraw a line
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
    """Show on the terminal how far a task is: on rank 0 only, and nothing for the first two seconds.

    A task within another one adds to the outer bar. `nbytes` is the size of the task as far as it is known,
    `expect` adds to it; `written` returns what is done beside the bytes that `advance` counts.
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
    """Add bytes to the task that is shown, if one is."""
    if bar := _shown.get():
        bar.count(0, nbytes)


def is_shown() -> bool:
    """Return whether a task is shown, so that its bytes are worth counting."""
    return _shown.get() is not None


def advance(nbytes: int) -> None:
    """Count bytes as done of the task that is shown, if one is."""
    if bar := _shown.get():
        bar.count(nbytes, 0)


def for_threads() -> dict[str, Any]:
    """Return arguments of `ThreadPoolExecutor` whose threads count for the task that is shown here."""
    initializer: Callable[[Bar | None], object] = _shown.set
    return {"initializer": initializer, "initargs": (_shown.get(),)}


def size_of(paths: Iterable[Path]) -> int:
    """Return the bytes that files hold, as far as they can be counted: others may write and rename them now.

    A file that got its whole size before its content counts as far as blocks of the disk hold it.
    """
    total = 0
    with suppress(OSError):
        for path in paths:
            status = path.stat()
            held = 512 * getattr(status, "st_blocks", status.st_size)
            total += min(status.st_size, held) if stat.S_ISREG(status.st_mode) else 0
    return total


def is_visible() -> bool:
    """Return whether a bar can be seen: on rank 0, with a terminal."""
    is_main = environ.current().get("RANK", "0") == "0"
    return is_main and sys.stderr is not None and sys.stderr.isatty()
