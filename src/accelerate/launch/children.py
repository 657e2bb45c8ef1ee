"""Child processes of the launcher, which receive its signals and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate.base import ConfigurationError, environ

if TYPE_CHECKING:
    import psutil


def _existing(*names: str) -> tuple[int, ...]:
    """Returns the signals of these names that the system has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


REQUESTS = _existing("SIGUSR1", "SIGUSR2")
"""Signals that request an action of a program, and end a program without a handler."""

FORWARDED = _existing("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGBREAK")
TERMINAL_KEYS = _existing("SIGINT", "SIGQUIT")
HANGUP = _existing("SIGHUP")
CONSOLE_EVENTS = _existing("SIGINT", "SIGBREAK") if sys.platform == "win32" else ()
"""Signals that Windows sends to all processes of a console."""
SIGKILL = 9
"""Number of SIGKILL, also for reports on systems without this signal."""
GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
GRACE_SECONDS = 15
"""Default timeout for processes to end, in seconds. `GRACE_VARIABLE`, which torch reads too, overrides it."""

DESCENDANT_TIMEOUT = 2.0  # seconds for descendants to end after the child has ended
KILL_TIMEOUT = 5.0  # seconds for killed processes to end, which keep their ports and files until then
POLL_INTERVAL = 0.02


@contextmanager
def blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Blocks signals in this thread, and in processes that are started in the block.

    Signals that arrive meanwhile are delivered after the block, unless another thread of this process
    receives them.
    """
    if sys.platform == "win32":  # Windows has no such signals
        yield
    else:
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)


class RequestRecorder:
    """Recorder of requests that reach this process before its script sets its own handlers."""

    def __init__(self) -> None:
        self._received: set[int] = set()
        self._process = 0

    def install(self) -> None:
        """Sets the handler and unblocks the signals.

        Called once, in the main thread.
        """
        self._process = os.getpid()
        for number in REQUESTS:
            signal.signal(number, self.note)
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Records a signal, which has its default action in a fork of this process."""
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._received.add(number)

    def take(self) -> set[int]:
        """Returns the signal numbers received since the last call."""
        received, self._received = self._received, set()
        return received


NOTES = RequestRecorder()  # a process has one set of signal handlers


def grace() -> int:
    """Returns the seconds between the signal that requests processes to end and the one that kills them."""
    return environ.get_int_from_env([GRACE_VARIABLE], GRACE_SECONDS)


def exit_code(returned: int) -> int:
    """Returns the exit code that a shell would report, 128 + number for a signal."""
    return returned if returned >= 0 else 128 - returned


def say(text: str) -> None:
    """Prints a line to standard error, also from a signal handler, without taking a lock."""
    sys.stderr.flush()
    os.write(2, f"accelerate launch: {text}.\n".encode())


class ChildExit(NamedTuple):
    """Exit code of a child, and the signal after which it was killed."""

    code: int  # the exit code that a shell would report
    killed_after: int  # the signal after which it timed out and was killed, or 0


def run_child(
    command: Sequence[str],
    added: Mapping[str, str],
    replacements: Mapping[int, int] | None = None,
    blocked_at_start: Sequence[int] = (),
) -> ChildExit:
    """Runs a program until it ends.

    Raises a `ConfigurationError` if it cannot be started.

    Args:
        added: variables in addition to those of this process.
        replacements: received signal -> signal that is sent to the program instead.
        blocked_at_start: signals that are blocked until the program unblocks them.
    """
    terminator = ChildTerminator(replacements or {})
    # Set before the start, because a signal that is caught here has its default action in the program, even
    # if the shell that started this process ignores it.
    with caught_signals(terminator.on_signal):
        try:
            with blocked(blocked_at_start):
                child = subprocess.Popen(command, env={**environ.current(), **added})
        except OSError as error:
            raise ConfigurationError(f"{command[0]} cannot be started: {error.strerror}.") from error
        try:
            terminator.begin(child)
            returned = child.wait()
        finally:
            terminator.finish()
    return ChildExit(exit_code(returned), terminator.killed_after)


@contextmanager
def caught_signals(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[int] = (*FORWARDED, *REQUESTS)
) -> Iterator[None]:
    """Sets a signal handler in the main thread, and no handler in other threads.

    SIGHUP stays ignored where it was, as `nohup` requests for this process and those that it starts.
    """
    caught = [number for number in numbers if number not in ignored_for_good()]
    try:
        previous_handlers = {number: signal.signal(number, handler) for number in caught}
    except ValueError:
        previous_handlers = {}
    try:
        yield
    finally:
        for number, previous in previous_handlers.items():
            signal.signal(number, previous)


def ignored_for_good() -> tuple[int, ...]:
    """Returns the signals that `nohup` has this process ignore.

    A shell without job control makes programs in the background ignore SIGINT and SIGQUIT. The launcher does
    not ignore these, because users send them to end the run.
    """
    return tuple(number for number in HANGUP if signal.getsignal(number) == signal.SIG_IGN)


class ChildTerminator:
    """Terminator of a child and its descendants, which are killed after a timeout."""

    def __init__(self, replacements: Mapping[int, int]) -> None:
        self.killed_after = 0  # the signal after which the child was killed
        self._replacements = replacements  # received signal -> sent signal
        self._child: subprocess.Popen[Any] | None = None
        self._early: list[int] = []
        self._family: list[psutil.Process] = []
        self._timer: threading.Timer | None = None
        self._first = 0

    def begin(self, child: subprocess.Popen[Any]) -> None:
        """Registers the started child, and forwards the signals received before."""
        self._child = child
        while self._early:
            self._forward(child, self._early.pop(0), has_it=False)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forwards a signal, and starts the timeout after the first one that ends programs."""
        if self._child is None:
            self._early.append(number)
        elif self._child.poll() is None:
            self._forward(self._child, number, has_it=_sent_by_terminal(number))

    def _forward(self, child: subprocess.Popen[Any], number: int, has_it: bool) -> None:
        is_first = number not in REQUESTS and not self._first
        if is_first:
            self._first = number  # before the import of psutil, in which another signal may arrive
            self._family = _descendants(child.pid)
        sent = self._replacements.get(number, number)
        if sent != number or not has_it:
            send_signal(child, sent)
        if number not in REQUESTS:
            continue_stopped([child.pid, *(process.pid for process in self._family)])
        if is_first:
            seconds = grace()
            self._timer = threading.Timer(seconds, self._kill)
            self._timer.daemon = True
            self._timer.start()
            name = signal.Signals(number).name
            say(f"{name} received, ending the processes; what still runs after {seconds} s is killed")

    def _kill(self) -> None:
        assert self._child is not None
        self._family += _descendants(self._child.pid)
        killed = _kill_all(self._family)
        if self._child.poll() is None:
            self._child.kill()
            self.killed_after = self._first
            killed += 1
        processes = f"{killed} processes" if killed > 1 else f"{killed} process"
        say(f"{processes} did not end in time and {'was' if killed == 1 else 'were'} killed")

    def finish(self) -> None:
        """Ends the remaining descendants of a child that ended after a signal, and reports them."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer.join()
        left = _kill_all(self._family, DESCENDANT_TIMEOUT)
        _wait(self._family, KILL_TIMEOUT)
        more = f", {left} of which had outlived the first" if left else ""
        say(f"{signal.Signals(self._first).name} ended all processes{more}")


def send_signal(child: subprocess.Popen[Any], number: int) -> None:
    """Sends a signal to a process, which on Windows ends it."""
    if sys.platform == "win32":
        child.terminate()
    else:
        child.send_signal(number)


def continue_stopped(pids: Iterable[int], *, groups: bool = False) -> None:
    """Continues stopped processes or process groups, which cannot react to a signal."""
    if sys.platform != "win32":  # processes cannot be stopped on Windows
        import psutil  # needed only by a run that is ended early

        send = os.killpg if groups else os.kill
        for pid in pids:
            try:
                if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                    send(pid, signal.SIGCONT)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue


def _descendants(pid: int) -> list[psutil.Process]:
    import psutil

    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _kill_all(family: Sequence[psutil.Process], timeout: float = 0.0) -> int:
    """Kills the processes that still run after the timeout, and returns how many."""
    import psutil

    killed = 0
    for process in _wait(list(dict.fromkeys(family)), timeout):
        with suppress(psutil.NoSuchProcess):
            process.kill()
            killed += 1
    return killed


def _wait(processes: list[psutil.Process], timeout: float) -> list[psutil.Process]:
    """Waits until the processes have ended, and returns those that still run after the timeout.

    A zombie, whose new parent does not read how it ended, has ended.
    """
    deadline = time.monotonic() + timeout
    while (running := [process for process in processes if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL)
    return running


def _runs(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_trees(pids: Iterable[int]) -> None:
    """Kills processes that still run, with their descendants."""
    import psutil

    running: list[psutil.Process] = []
    for pid in pids:
        try:
            running += [*_descendants(pid), psutil.Process(pid)]
        except psutil.NoSuchProcess:
            continue
    _kill_all(running)
    _wait(running, KILL_TIMEOUT)


def _sent_by_terminal(number: int) -> bool:
    """Returns whether the terminal has sent the signal to the child as well, after a key press."""
    if sys.platform != "win32" and number in TERMINAL_KEYS and sys.stdin and sys.stdin.isatty():
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return number in CONSOLE_EVENTS
