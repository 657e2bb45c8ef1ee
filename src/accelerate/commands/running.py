"""Functions that run a command as a subprocess and print or return its output.

Tests of client libraries import them, and `accelerate test` re-exports two of them.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

PACKAGE = Path(__file__).resolve().parents[1]


class SubprocessCallException(Exception):
    """Error of a command that failed."""


def path_in_accelerate_package(*components: str) -> Path:
    """Returns a path inside the installed package.

    Args:
        *components: Parts of the path.
    """
    return PACKAGE.joinpath(*components)


def run_command(
    command: Sequence[str], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Runs a command and waits for it.

    Args:
        return_stdout: Whether to return the output.
        env: Environment of the command. None uses that of this process.

    Returns:
        The output with standard error, or None.

    Raises:
        SubprocessCallException: The command failed. The message has the output.
    """
    words = [str(word) for word in command]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    result = subprocess.run(words, env=env, text=True, errors="replace", check=False, **pipes)
    if result.returncode:
        raise SubprocessCallException(
            f"`{shlex.join(words)}` ended with exit code {result.returncode}. It printed:\n\n{result.stdout}"
        )
    return str(result.stdout) if return_stdout else None


def execute_subprocess_async(
    cmd: Sequence[str],
    env: Mapping[str, str] | None = None,
    stdin: int | IO[Any] | None = None,
    timeout: float | None = 180,
    quiet: bool = False,
    echo: bool = True,
) -> subprocess.CompletedProcess[list[str]]:
    """Runs a command and prints its output while it runs.

    Args:
        cmd: Command and its arguments.
        env: Environment of the command. None uses that of this process.
        stdin: Standard input of the command, as in `subprocess.Popen`.
        timeout: Timeout in seconds. None waits without limit.
        quiet: Whether to print nothing while it runs.
        echo: Whether to print the command itself.

    Returns:
        The exit code, and the lists of lines that the command printed.

    Raises:
        RuntimeError: The command failed or timed out. The message of a failure has the lines of standard
            error.
    """
    words = [str(word) for word in cmd]
    if echo:
        print("\nRunning: ", " ".join(words))
    output: subprocess.CompletedProcess[list[str]] = subprocess.CompletedProcess(words, 0, [], [])
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
