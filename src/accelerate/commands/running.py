"""Run commands, and show what they print while they run."""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO

PACKAGE = Path(__file__).resolve().parents[1]


class SubprocessCallException(Exception):
    """A command failed."""


@dataclass
class Output:
    """The exit code of a command, and the lines that it printed to each stream."""

    returncode: int = 0
    stdout: list[str] = field(default_factory=list)
    stderr: list[str] = field(default_factory=list)


def path_in_accelerate_package(*components: str) -> Path:
    """Return a path inside the installed package.

    Args:
        *components: Parts of the path.
    """
    return PACKAGE.joinpath(*components)


def run_command(
    command: Sequence[str], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a command and wait for it.

    Args:
        command: Its words.
        return_stdout: Whether what it printed is returned.
        env: Its environment; None: that of this process.

    Returns:
        What it printed, errors among it, or None.

    Raises:
        SubprocessCallException: It failed; the text has what it printed.
    """
    words = [str(word) for word in command]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(words, env=env, text=True, errors="replace", check=False, **pipes)
    if done.returncode:
        raise SubprocessCallException(
            f"`{shlex.join(words)}` ended with exit code {done.returncode}. It printed:\n\n{done.stdout}"
        )
    return str(done.stdout) if return_stdout else None


def execute_subprocess_async(
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float | None = 180,
    quiet: bool = False,
    echo: bool = True,
) -> Output:
    """Run a command and show what it prints while it runs.

    Args:
        cmd: Its words.
        env: Its environment; None: that of this process.
        stdin: Where it reads from, as `subprocess.Popen` takes it.
        timeout: How many seconds it may take; None: any.
        quiet: Show nothing while it runs.
        echo: Show the command itself.

    Returns:
        Its exit code and the lines that it printed.

    Raises:
        RuntimeError: It failed, or took too long; the text has the lines of errors.
    """
    words = [str(word) for word in cmd]
    if echo:
        print("\nRunning: ", " ".join(words))
    output = Output()
    pipes: Any = {"stdin": stdin, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, env=env, text=True, errors="replace", **pipes) as process:
        streams = (
            (process.stdout, output.stdout, sys.stdout, "stdout:", quiet),
            (process.stderr, output.stderr, sys.stderr, "stderr:", quiet),
        )
        readers = [threading.Thread(target=_copy, args=stream) for stream in streams]
        for reader in readers:
            reader.start()
        try:
            output.returncode = process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise RuntimeError(f"'{' '.join(words)}' took longer than {timeout} s and was ended") from error
        finally:
            for reader in readers:
                reader.join()
    if output.returncode:
        errors = "\n".join(output.stderr)
        raise RuntimeError(
            f"'{' '.join(words)}' failed with returncode {output.returncode}. Its errors:\n{errors}"
        )
    return output


def _copy(source: IO[str], lines: list[str], screen: TextIO, label: str, quiet: bool) -> None:
    for line in source:
        lines.append(line.rstrip())
        if not quiet:
            print(label, lines[-1], file=screen)
