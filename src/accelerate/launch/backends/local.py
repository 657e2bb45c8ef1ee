"""One process.

The script runs in a child that is started with `subprocess`, not by replacing this process: other programs
call `launch_command` as a function and expect it to return, and the launcher can say how the script ended.
The child costs a few milliseconds and no import of torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from accelerate.base import environ
from accelerate.base.errors import ConfigurationError
from accelerate.launch.command import local_command
from accelerate.launch.plan import LaunchPlan

FORWARDED = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
)

TERMINAL_KEYS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGQUIT") if hasattr(signal, name))


def exit_code(returned: int) -> int:
    """The exit code that a shell would show: 128 + number for a process that a signal ended."""
    return returned if returned >= 0 else 128 - returned


@contextmanager
def forwarded_signals(child: subprocess.Popen[Any]) -> Iterator[None]:
    """Send the signals that would end this process to the child instead; it decides how it ends."""

    def forward(number: int, frame: FrameType | None) -> None:
        if child.poll() is None and not _sent_by_terminal(number):
            child.send_signal(number)

    try:
        before = {number: signal.signal(number, forward) for number in FORWARDED}
    except ValueError:  # not the main thread: whoever owns it deals with signals
        before = {}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def _sent_by_terminal(number: int) -> bool:
    """Whether a key was pressed: the terminal then sends the signal to the child as well."""
    if number not in TERMINAL_KEYS or not sys.stdin or not sys.stdin.isatty():
        return False
    return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()


class LocalLauncher:
    """Runs the target as one child process."""

    def run(self, plan: LaunchPlan) -> int:
        """Start the target, forward signals to it, and return its exit code."""
        command = local_command(plan.target)
        try:
            child = subprocess.Popen(command, env={**environ.current(), **plan.environment})
        except OSError as error:
            raise ConfigurationError(f"{command[0]} cannot be started: {error.strerror}.") from error
        with forwarded_signals(child):
            return exit_code(child.wait())
