"""Child processes of the launcher: signals reach them, and they end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from accelerate.base import ConfigurationError, environ


def _existing(*names: str) -> tuple[int, ...]:
    """The signals of these names that this system has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


REQUESTS = _existing("SIGUSR1", "SIGUSR2")
"""Signals that ask a program for something, and end one that has no handler."""

FORWARDED = _existing("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGBREAK")
TERMINAL_KEYS = _existing("SIGINT", "SIGQUIT")
HANGUP = _existing("SIGHUP")
CONSOLE_EVENTS = _existing("SIGINT", "SIGBREAK") if sys.platform == "win32" else ()
"""Signals that Windows sends to all processes of a console at once."""
SIGKILL = 9
"""Its number, also for the reports of a system that has no such signal."""
GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
GRACE_SECONDS = 15
"""How long processes may take to end by themselves; the variable, which torch reads too, says otherwise."""

PATIENCE = 2.0  # seconds that descendants get to notice that the child has ended


@contextmanager
def blocked(numbers: Iterable[int]) -> Iterator[None]:
    """Block signals in this thread; a process that is started in the block begins with them blocked.

    Those that arrive meanwhile are delivered after it, unless another thread of this process takes them.
    """
    if sys.platform == "win32":  # it has no such signals
        yield
    else:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RequestNotes:
    """Notes the requests that reach this process before its script asks for them or sets handlers."""

    def __init__(self) -> None:
        self._noted: set[int] = set()
        self._process = 0

    def install(self) -> None:
        """Set the handler, and unblock the signals. Called once, in the main thread."""
        self._process = os.getpid()
        for number in REQUESTS:
            signal.signal(number, self.note)
        if sys.platform != "win32":
            signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal; in a fork of this process it does what it does by default."""
        if os.getpid() != self._process:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._noted.add(number)

    def take(self) -> set[int]:
        """Return the numbers that were noted since the last call."""
        noted, self._noted = self._noted, set()
        return noted


NOTES = RequestNotes()  # of this process: handlers are one per process


def grace() -> int:
    """Seconds between the signal that asks processes to end and the one that kills them."""
    return environ.get_int_from_env([GRACE_VARIABLE], GRACE_SECONDS)


def exit_code(returned: int) -> int:
    """The exit code that a shell would show: 128 + number for a process that a signal ended."""
    return returned if returned >= 0 else 128 - returned


def say(text: str) -> None:
    """Tell the user, from a signal handler too: no lock is taken."""
    sys.stderr.flush()
    os.write(2, f"accelerate launch: {text}.\n".encode())


class End(NamedTuple):
    """How a child ended."""

    code: int  # the exit code that a shell would show
    killed_after: int  # the signal after which it did not end in time and was killed; 0: it ended by itself


def run_child(
    command: Sequence[str],
    added: Mapping[str, str],
    instead: Mapping[int, int] | None = None,
    blocked_at_start: Sequence[int] = (),
) -> End:
    """Run a program to its end; a `ConfigurationError` where it cannot be started.

    Args:
        added: variables it gets in addition to those of this process.
        instead: signal received -> signal that is sent to the program instead.
        blocked_at_start: signals that it has to unblock itself.
    """
    ending = Ending(instead or {})
    # Set before the start: a signal that is caught here has its default action in the program, even where the
    # shell that started this process had it ignored.
    with taken_signals(ending.on_signal):
        try:
            with blocked(blocked_at_start):
                child = subprocess.Popen(command, env={**environ.current(), **added})
        except OSError as error:
            raise ConfigurationError(f"{command[0]} cannot be started: {error.strerror}.") from error
        try:
            ending.begin(child)
            returned = child.wait()
        finally:
            ending.finish()
    return End(exit_code(returned), ending.killed_after)


@contextmanager
def taken_signals(
    handler: Callable[[int, FrameType | None], None], numbers: Iterable[int] = (*FORWARDED, *REQUESTS)
) -> Iterator[None]:
    """Let a handler take signals in the main thread; in another thread no handler can be set.

    SIGHUP stays ignored where it was: that is what `nohup` asks for, in this process and in those it starts.
    """
    taken = [number for number in numbers if number not in ignored_for_good()]
    try:
        before = {number: signal.signal(number, handler) for number in taken}
    except ValueError:
        before = {}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def ignored_for_good() -> tuple[int, ...]:
    """The signals that `nohup` has this process ignore.

    A shell without job control has programs in its background ignore SIGINT and SIGQUIT. The launcher does
    not ignore these: they are sent to it to end the run.
    """
    return tuple(number for number in HANGUP if signal.getsignal(number) == signal.SIG_IGN)


class Ending:
    """Ends a child and its descendants: asks first, and kills what is left after a while."""

    def __init__(self, instead: Mapping[int, int]) -> None:
        self.killed_after = 0  # the signal after which the child had to be killed
        self._instead = instead  # signal received -> signal sent
        self._child: subprocess.Popen[Any] | None = None
        self._early: list[int] = []
        self._family: list[Any] = []
        self._timer: threading.Timer | None = None
        self._first = 0

    def begin(self, child: subprocess.Popen[Any]) -> None:
        """The child runs: forward what was received before."""
        self._child = child
        while self._early:
            self._forward(child, self._early.pop(0), has_it=False)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal; after the first one that ends programs, the child has a limited time."""
        if self._child is None:
            self._early.append(number)
        elif self._child.poll() is None:
            self._forward(self._child, number, has_it=_sent_by_terminal(number))

    def _forward(self, child: subprocess.Popen[Any], number: int, has_it: bool) -> None:
        is_first = number not in REQUESTS and not self._first
        if is_first:
            self._first, self._family = number, _descendants(child.pid)
        sent = self._instead.get(number, number)
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
        killed = _kill_all([*_descendants(self._child.pid), *self._family])
        if self._child.poll() is None:
            self._child.kill()
            self.killed_after = self._first
            killed += 1
        processes = f"{killed} processes" if killed > 1 else f"{killed} process"
        say(f"{processes} did not end in time and {'was' if killed == 1 else 'were'} killed")

    def finish(self) -> None:
        """The child has ended: if a signal asked for it, end what it left behind, and say how it went."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer.join()
        left = _kill_all(self._family, PATIENCE)
        more = f", {left} of which had outlived the first" if left else ""
        say(f"{signal.Signals(self._first).name} ended all processes{more}")


def send_signal(child: subprocess.Popen[Any], number: int) -> None:
    """Send a signal to a process. On Windows nothing can be asked for this way: the process is ended."""
    if sys.platform == "win32":
        child.terminate()
    else:
        child.send_signal(number)


def continue_stopped(pids: Iterable[int], *, groups: bool = False) -> None:
    """Continue stopped processes, or their groups: they cannot do what a signal asks for."""
    if sys.platform != "win32":  # no process is stopped there
        import psutil  # only a run that is ended early needs it

        send = os.killpg if groups else os.kill
        for pid in pids:
            try:
                if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                    send(pid, signal.SIGCONT)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue


def _descendants(pid: int) -> list[Any]:
    import psutil

    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _kill_all(family: Sequence[Any], patience: float = 0.0) -> int:
    import psutil

    killed = 0
    _, running = psutil.wait_procs(list(dict.fromkeys(family)), timeout=patience)
    for process in running:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                process.kill()
                killed += 1
        except psutil.NoSuchProcess:
            continue
    return killed


def _sent_by_terminal(number: int) -> bool:
    """Whether a key was pressed: the terminal then sends the signal to the child as well."""
    if sys.platform != "win32" and number in TERMINAL_KEYS and sys.stdin and sys.stdin.isatty():
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    return number in CONSOLE_EVENTS
