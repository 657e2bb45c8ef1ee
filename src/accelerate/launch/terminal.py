"""Live view of a launch, which shows the states of the ranks below the output of the processes.

The launcher replaces the terminal. The processes inherit pipes, and one thread copies their output to the
terminal, above the view. A line is copied when it is complete. An incomplete last line of a stream, such as a
progress bar, is shown in the view.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.base import environ, require
from accelerate.launch.children import blocked, say
from accelerate.launch.plan import LaunchPlan
from accelerate.monitoring import STATUS_VARIABLE, RunView, read_statuses, render

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.live import Live
    from rich.segment import Segment

REFRESH = 1.0
"""Seconds between two updates of the view."""
PAUSE = 0.2
"""Minimum seconds between two copies of output, after each of which the view is drawn again."""
CHUNK = 65536
OUT, ERR = 1, 2
NOT_TERMINALS = ("dumb", "unknown")
ESCAPE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)|[^\[\]])")
COLOR, ERASE_LINE = b"m", b"K"


def find_obstacle(variables: Mapping[str, str]) -> str | None:
    """Returns the reason why a live view is not possible, or None."""
    if os.name == "nt":
        return "it does not support Windows"
    if not os.isatty(ERR):
        return "standard error is not a terminal"
    if variables.get("TERM", "dumb") in NOT_TERMINALS:
        return f"the terminal cannot move its cursor (TERM={variables.get('TERM', '')})"
    return None


@contextmanager
def live_view(plan: LaunchPlan, folder: Path, title: str, *, is_quiet: bool = False) -> Iterator[LaunchPlan]:
    """Shows a run while the block runs it, and yields a plan whose ranks write their states.

    Args:

        plan: plan that the block runs.
        folder: folder of the launch for the states.
        title: title of the view.
        is_quiet: whether to omit the message that a launch without a terminal shows nothing.

    Raises:
        MissingPackageError: rich is not installed.
    """
    require("rich", "--monitor")
    if obstacle := find_obstacle(environ.current()):
        if not is_quiet:
            say(f"--monitor shows nothing: {obstacle}")
        yield plan
        return
    statuses = folder / "statuses"
    statuses.mkdir()
    screen = Screen(title, plan.local_processes, statuses)
    screen.open()
    try:
        yield replace(plan, environment={**plan.environment, STATUS_VARIABLE: str(statuses)})
    finally:
        screen.close()


@dataclass
class LineBuffer:
    """Output of the processes to one stream, until its lines are complete."""

    unfinished: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> bytes:
        """Returns the lines that are now complete."""
        end = data.rfind(b"\n") + 1
        lines = bytes(self.unfinished + data[:end]) if end else b""
        if end:
            self.unfinished.clear()
        self.unfinished += data[end:]
        if len(self.unfinished) > CHUNK:  # drops overwritten text of a progress bar
            del self.unfinished[: self.unfinished.rfind(b"\r", 0, -1) + 1]
        return lines

    @property
    def shown(self) -> str:
        """Text of the last line as a terminal shows it."""
        parts = bytes(self.unfinished).decode(errors="replace").split("\r")
        return next((part for part in reversed(parts) if part.strip()), "")


def remove_cursor_moves(data: bytes) -> bytes:
    """Removes escape sequences that move the cursor or clear the screen, but not colors."""

    def keep_harmless(match: re.Match[bytes]) -> bytes:
        return match[0] if match[1] in (COLOR, ERASE_LINE) else b""

    return ESCAPE.sub(keep_harmless, data)


@dataclass(frozen=True)
class Raw:
    """Output that is written to the terminal unchanged."""

    data: bytes

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        from rich.segment import Segment

        yield Segment(self.data.decode(errors="surrogateescape"))


class Screen:
    """Terminal of a launch, which replaces the streams that started processes inherit.

    Args:

        title: title of the view.
        num_ranks: number of processes of this node.
        statuses: folder in which the ranks write their states.
    """

    def __init__(self, title: str, num_ranks: int, statuses: Path) -> None:
        self._title, self._num_ranks, self._statuses = title, num_ranks, statuses
        self._began = time.time()
        self._ended = threading.Event()
        self._selector = selectors.DefaultSelector()
        self._replaced: dict[int, int] = {}  # descriptor -> duplicate of the original
        self._output = b""
        self._thread = threading.Thread(target=self._run, name="accelerate-view", daemon=True)
        self._error: Exception | None = None

    def open(self) -> None:
        """Replaces standard error, and standard output if it is the same terminal."""
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (OUT, ERR) if os.path.sameopenfile(OUT, ERR) else (ERR,):
            self._replaced[number] = os.dup(number)
            source, target = os.pipe()
            os.dup2(target, number)
            os.close(target)
            self._selector.register(source, selectors.EVENT_READ, LineBuffer())
        with blocked(signal.valid_signals()):  # the main thread handles all signals
            self._thread.start()

    def close(self) -> None:
        """Shows the remaining output and the last states, and restores the streams."""
        sys.stdout.flush()
        sys.stderr.flush()
        for number, original in self._replaced.items():
            os.dup2(original, number)
        self._ended.set()
        self._thread.join()
        for original in self._replaced.values():
            os.close(original)
        # a remaining process of the run still has them open
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()
        # after which there is no terminal
        if self._error is not None and not isinstance(self._error, OSError):
            say(f"the live view has ended: {type(self._error).__name__}: {self._error}")

    def _run(self) -> None:
        terminal = self._replaced[ERR]
        options = {"encoding": "utf-8", "errors": "surrogateescape", "closefd": False}
        try:
            with open(terminal, "w", **options) as file:  # type: ignore[call-overload]
                self._show(self._console(file))
        except Exception as error:  # the output of the processes must still be read
            self._error = error
            self._copy(terminal)

    def _console(self, file: object) -> Console:
        from rich.console import Console

        return Console(file=file, force_terminal=True, markup=False, highlight=False)  # type: ignore[arg-type]

    def _show(self, console: Console) -> None:
        """Copies output and draws the view until the streams end."""
        from rich.live import Live

        next_view = next_copy = 0.0
        with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
            console.show_cursor(True)  # a hidden cursor would stay hidden after SIGKILL
            while self._read(next_copy if self._output else next_view):
                now = time.monotonic()
                if self._output and now >= next_copy:
                    self._print(live)
                    next_copy = now + PAUSE
                if now >= next_view:
                    self._draw(live)
                    next_view = now + REFRESH
            self._output += b"".join(self._rest())
            self._print(live)
            self._draw(live)

    def _read(self, until: float) -> bool:
        """Reads available output until a deadline, and returns whether there may be more."""
        ready = self._selector.select(max(until - time.monotonic(), 0.0))
        for key, _ in ready:
            if data := os.read(key.fd, CHUNK):
                self._output += key.data.feed(data)
            else:
                self._output += self._finish(key)
        return bool(self._selector.get_map()) and not (self._ended.is_set() and not ready)

    def _finish(self, key: selectors.SelectorKey) -> bytes:
        """Closes a stream, and returns its incomplete last line."""
        if key.fd in self._selector.get_map():
            self._selector.unregister(key.fd)
            os.close(key.fd)
        rest = bytes(key.data.unfinished)
        key.data.unfinished.clear()
        return rest + b"\n" if rest.strip() else b""

    def _rest(self) -> list[bytes]:
        return [self._finish(key) for key in list(self._selector.get_map().values())]

    def _print(self, live: Live) -> None:
        """Writes the output above the view."""
        output, self._output = remove_cursor_moves(self._output), b""
        if output:
            self._measure(live)
            live.console.print(Raw(output), soft_wrap=True)

    def _measure(self, live: Live) -> None:
        """Sets the size of the terminal, which rich would query at the replaced streams."""
        live.console.size = os.get_terminal_size(self._replaced[ERR])

    def _draw(self, live: Live) -> None:
        self._measure(live)
        live.update(self._view(), refresh=True)

    def _view(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        keys = self._selector.get_map().values()
        bars = [
            Text.from_ansi(key.data.shown, overflow="ellipsis", no_wrap=True)
            for key in keys
            if key.data.shown
        ]
        states = read_statuses(self._statuses)
        run = RunView(self._title, states, self._num_ranks, self._began, time.time())
        return Group(*bars, render(run))

    def _copy(self, terminal: int) -> None:
        """Copies output unchanged, without a view."""
        while self._read(time.monotonic() + REFRESH):
            self._write(terminal)
        self._output += b"".join(self._rest())
        self._write(terminal)

    def _write(self, terminal: int) -> None:
        output, self._output = self._output, b""
        with suppress(OSError):  # the terminal is gone
            while output:
                output = output[os.write(terminal, output) :]
