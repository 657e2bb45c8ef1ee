"""A program as a child: signals reach it, and nothing of it outlives the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from accelerate.base import environ
from accelerate.base.errors import ConfigurationError

FORWARDED = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)
PASSED_ON = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""Signals that ask a program for something, and do not end it unless it does not know them."""

TERMINAL_KEYS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGQUIT") if hasattr(signal, name))
GRACE_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
GRACE_SECONDS = 15
"""How long processes may take to end by themselves; the variable, which torch reads too, says otherwise."""

RANK_VARIABLE = "RANK"
PATIENCE = 2.0
"""Seconds that descendants get to notice that the child has ended."""


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


def run_child(
    command: Sequence[str], added: Mapping[str, str], instead: Mapping[int, int] | None = None
) -> int:
    """Run a program to its end.

    Args:
        command: its words.
        added: variables it gets in addition to those of this process.
        instead: signal that reaches this process -> signal that is sent to the program in its place.

    Returns:
        The exit code that a shell would show.

    Raises:
        ConfigurationError: it cannot be started.
    """
    try:
        child = subprocess.Popen(command, env={**environ.current(), **added})
    except OSError as error:
        raise ConfigurationError(f"{command[0]} cannot be started: {error.strerror}.") from error
    with forwarded_signals(child, instead or {}):
        return exit_code(child.wait())


@contextmanager
def forwarded_signals(child: subprocess.Popen[Any], instead: Mapping[int, int]) -> Iterator[None]:
    """Send the signals that would end this process to the child instead, and see to it that it ends."""
    ending = Ending(child, instead)
    try:
        with _handling(ending.on_signal, (*FORWARDED, *PASSED_ON)):
            yield
    finally:
        ending.finish()


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None], numbers: Iterable[int]) -> Iterator[None]:
    """Let a handler take signals; in another thread than the main one, whoever owns that deals with them."""
    try:
        before = {number: signal.signal(number, handler) for number in numbers}
    except ValueError:
        before = {}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Ending:
    """Ends a child and its descendants: asks first, and kills what is left after a while.

    Args:
        child: a running program.
        instead: signal received -> signal sent.
    """

    def __init__(self, child: subprocess.Popen[Any], instead: Mapping[int, int]) -> None:
        self._child = child
        self._instead = instead
        self._family: list[Any] = []
        self._timer: threading.Timer | None = None
        self._first = 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal; after the first one the child has a limited time."""
        if self._child.poll() is not None:
            return
        if number in PASSED_ON:
            self._child.send_signal(self._instead.get(number, number))
            return
        is_first, self._first = not self._first, self._first or number
        if is_first:
            self._family = _descendants(self._child.pid)
        sent = self._instead.get(number, number)
        if sent != number or not _sent_by_terminal(number):
            self._child.send_signal(sent)
        if is_first:
            self._start_clock(number)

    def _start_clock(self, number: int) -> None:
        seconds = grace()
        self._timer = threading.Timer(seconds, self._kill)
        self._timer.daemon = True
        self._timer.start()
        name = signal.Signals(number).name
        say(f"{name} received, ending the processes; what still runs after {seconds} s is killed")

    def _kill(self) -> None:
        killed = _kill_all([*_descendants(self._child.pid), *self._family])
        if self._child.poll() is None:
            self._child.kill()
            killed += 1
        say(f"{killed} process{'es' if killed > 1 else ''} did not end in time and {_were(killed)} killed")

    def finish(self) -> None:
        """The child has ended: if a signal asked for it, end what it left behind, and say how it went."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer.join()
        left = _kill_all(self._family, PATIENCE)
        more = f", {left} of which had outlived the first" if left else ""
        say(f"{signal.Signals(self._first).name} ended all processes{more}")


@contextmanager
def signals_passed_on() -> Iterator[None]:
    """Pass the signals that do not end a run on to the processes of an agent that runs in this one."""
    with _handling(_pass_on, PASSED_ON):
        yield


def _pass_on(number: int, frame: FrameType | None) -> None:
    import psutil

    name, reached = signal.Signals(number).name, 0
    for child in psutil.Process().children():
        try:
            if RANK_VARIABLE in child.environ():  # others, such as a tracker of resources, it would end
                child.send_signal(number)
                reached += 1
        except psutil.Error:  # it has ended, or was about to
            continue
    say(f"{name} received and passed on to {reached} process{'' if reached == 1 else 'es'}")


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def _descendants(pid: int) -> list[Any]:
    import psutil  # only a launch that is ended early pays for it

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
    if number not in TERMINAL_KEYS or not sys.stdin or not sys.stdin.isatty():
        return False
    return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
