"""Failure report of a run, with the rank that failed first, the other ranks and the likely cause.

`accelerate launch` prints it as one screen of text, and writes `failure.json` with the same content.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from accelerate.base import AccelerateError, spell_ranks
from accelerate.diagnostics.hang_report import group_ranks
from accelerate.launch import (
    HANG_KIND,
    SIGKILL,
    Failure,
    Kind,
    Outcome,
    Suspect,
    find_first,
    grace,
    shortened,
)

REPORT = "failure.json"
MAX_LINES = 60
_MAX_OTHERS = 8  # lines about ranks that did not fail first
_MIN_TRACE = 20  # lines of the traceback that a hang report leaves
_WIDTH = 80
_MAX_LINE_LENGTH = 400
_MAX_HEADLINE_LENGTH = 200
_NUMBERS = re.compile(r"\d+")
_NO_MODULE = re.compile(r"No module named '?(?P<name>[\w.]+)")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in .*(?:\n    (?P<source>.*))?', re.M)
_OURS = str(Path(__file__).parents[1])
_LIBRARIES = re.compile(
    rf"^({re.escape(_OURS)}|{re.escape(sysconfig.get_path('stdlib'))})|[/\\](site|dist)-packages[/\\]|^<frozen"
)


class Cause(NamedTuple):
    """Usual cause of errors whose class names and message match a pattern, with its fix."""

    pattern: str
    cause: str
    fix: str


CAUSES: tuple[Cause, ...] = (
    Cause(
        rf"^{HANG_KIND}\b",
        "Ranks wait for a rank that runs other code, has ended, or calls another operation.",
        "Look at the line where the report sees that rank: all ranks must call the same operations in the "
        "same order. If it only takes long there, raise --hang_timeout.",
    ),
    Cause(
        r"re-initialize CUDA in forked|CUDA initiali[sz]ed before",
        "CUDA was used in the parent process before it forked.",
        "Use the 'spawn' start method for worker processes, and use no GPU before processes are started.",
    ),
    Cause(
        r"OutOfMemoryError|out of memory|can't allocate memory|cannot allocate memory",
        "The device or the machine ran out of memory.",
        "Take a smaller batch (accelerate.find_executable_batch_size finds one), accumulate gradients, or "
        "train in bf16.",
    ),
    Cause(
        r"address already in use|EADDRINUSE",
        "Another program, or an earlier run that has not ended, uses the port.",
        "Pass a free one with --main_process_port, or leave it out on one machine.",
    ),
    Cause(
        r"ModuleNotFoundError|No module named",
        "A package that the script imports is not installed in this environment.",
        "Install it with pip into the environment that runs `accelerate launch`.",
    ),
    Cause(
        r"shapes? cannot be multiplied|size mismatch|sizes of tensors must match|shape mismatch|"
        r"must match the size of tensor",
        "Tensors do not fit each other.",
        "Look at the shapes in the message; with several processes, check that all ranks pass the same ones.",
    ),
    Cause(
        r"Expected to have finished reduction in the prior iteration",
        "Parameters took no part in the loss, and DistributedDataParallel waits for their gradients.",
        "Freeze or remove them, or pass kwargs_handlers=[DistributedDataParallelKwargs("
        "find_unused_parameters=True)] to Accelerator.",
    ),
    Cause(
        r"Watchdog caught collective operation timeout",
        "A rank did not call the collective within the timeout: it was slow, ended, or called another one.",
        "See where each rank waits, and let all ranks call the same operations in the same order. If one "
        "only takes long, pass InitProcessGroupKwargs(timeout=...).",
    ),
    Cause(
        r"too many open files|received 0 items of ancdata",
        "The process has reached its limit of open files, which tensors of DataLoader workers use, too.",
        "Raise the limit (ulimit -n), or call torch.multiprocessing.set_sharing_strategy('file_system').",
    ),
    Cause(
        r"insufficient shared memory|killed by signal: Bus error",
        "DataLoader workers have used up the shared memory.",
        "Enlarge /dev/shm (docker run --shm-size=8g), or use fewer workers.",
    ),
    Cause(
        r"expected all tensors to be on the same device",
        "The script has created or kept a tensor on another device than the model.",
        "Create it with device=accelerator.device, or move it with .to(accelerator.device). Prepared loaders "
        "move their batches.",
    ),
    Cause(
        r"device-side assert triggered",
        "An index is out of range in a kernel, such as a label or a token that the model does not have.",
        "Run the script on the CPU, or with CUDA_LAUNCH_BLOCKING=1, where the error has the line.",
    ),
)
"""Causes in the order in which their patterns are tried."""

_KILLED = Cause(
    "",
    "The operating system killed the process, most often because the machine ran out of memory.",
    "Look at `dmesg`, lower the number of workers or the batch size, or give the job more memory.",
)

_MISUSED = Cause(
    "",
    "The script rejected its arguments; argparse ends a program with this exit code.",
    "Read its message above this report, and correct the arguments after the name of the script.",
)
_CAUSE_OF_EXIT_CODE = {-SIGKILL: _KILLED, 2: _MISUSED}
"""Exit code, or negative signal number, of a process without a Python error -> its cause."""

_ENDED_EARLY = Cause(
    "",
    "A rank ended while another still called an operation that needs all ranks.",
    "Let all ranks make the same number of steps: leave a loop on all of them at the same step "
    "(set_trigger and check_trigger, or should_stop).",
)
_CONNECTION_LOST = Cause(
    "",
    "The processes lost their connections, or never connected. Those of this node have no other error.",
    "If the run has other nodes, read their reports first. Otherwise check the address, firewalls and "
    "network interfaces (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).",
)


def format_screen(outcome: Outcome, folder: Path, log_dir: str | None = None) -> str:
    """Returns the report as text of at most 60 lines with one traceback.

    Args:
        folder: Folder of `failure.json`.
        log_dir: Folder with the logs of the ranks, if they were kept.
    """
    cause, first = find_cause(outcome), find_first(outcome)
    heading, text = _describe_first(outcome, first)
    where = f"the whole text is in {folder / REPORT}"
    others = [f"{spell_ranks(ranks)}: {line}" for line, ranks in _describe_others(outcome, first).items()]
    more = len(others) - _MAX_OTHERS
    if more > 0:
        others[_MAX_OTHERS:] = [f"... and {more} more such lines; {where}"]
    tail = others
    if cause is not None:
        tail += ["", f"Likely cause: {cause.cause}", f"What to do:   {cause.fix}"]
    tail += ["", *([f"Logs of the ranks: {log_dir}"] if log_dir else [])]
    tail += [f"Exit code: {outcome.code}. For machines: {folder / REPORT}", "=" * _WIDTH]
    num_lines = MAX_LINES - 1 - len(heading) - len(tail)
    is_in_text = not outcome.hang or (first is not None and first.kind == Kind.HANG)
    hang = [] if is_in_text else ["", "Reported before:", *outcome.hang.splitlines(), ""]
    hang = _truncate(hang, num_lines - min(len(text), _MIN_TRACE), where)
    text = _truncate(text, num_lines - len(hang), where)
    lines = [" accelerate launch: the run failed ".center(_WIDTH, "="), *heading, *text, *hang, *tail]
    return "\n".join(shortened(line, _MAX_LINE_LENGTH) for line in lines)


def write_report(outcome: Outcome, folder: Path) -> None:
    """Writes `failure.json`, which has the content of the screen and all failures."""
    cause, first = find_cause(outcome), find_first(outcome)
    report = {
        "exit_code": outcome.code,
        "first_rank": None if first is None else first.rank,
        "first": None if first is None or first.failure is None else asdict(first.failure),
        "failures": [asdict(failure) for failure in outcome.failures],
        "exits": {str(rank): number for rank, number in outcome.seen.codes.items()},
        "killed_by_launcher": list(outcome.seen.killed),
        "hang": outcome.hang or None,
        "cause": None if cause is None else cause.cause,
        "fix": None if cause is None else cause.fix,
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2), encoding="utf-8")


def is_informative(outcome: Outcome) -> bool:
    """Returns whether a report has more than an exit code, which the script may have chosen by `sys.exit`."""
    return bool(outcome.failures or any(outcome.seen.codes.values())) or outcome.code > 128


def find_cause(outcome: Outcome) -> Cause | None:
    """Returns the likely cause of the first failure.

    None if no pattern matches, or if the error message itself has the cause and the fix.
    """
    first = find_first(outcome)
    if first is None:
        return None if outcome.seen.killed else _CAUSE_OF_EXIT_CODE.get(128 - outcome.code)
    if first.kind == Kind.LEFT:
        return _ENDED_EARLY
    if first.failure is None:
        return _CAUSE_OF_EXIT_CODE.get(outcome.seen.codes[first.rank])
    if AccelerateError.__name__ in first.failure.kind:
        return None
    text = " ".join((*first.failure.kind, first.failure.headline))
    if (near := _find_near_module(first.failure.headline)) is not None:
        return near
    known = next((cause for cause in CAUSES if re.search(cause.pattern, text, re.IGNORECASE)), None)
    return _CONNECTION_LOST if known is None and first.kind == Kind.LOST else known


def _find_near_module(headline: str) -> Cause | None:
    """Returns the cause of an import of a module that a package on disk lacks, which pip cannot install."""
    match = _NO_MODULE.search(headline)
    if match is None or "." not in match["name"]:
        return None
    package, _, name = match["name"].rpartition(".")
    folders = [Path(root or ".", *package.split(".")) for root in ("", *sys.path)]
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        return None
    modules = {path.stem for path in folder.glob("[a-zA-Z]*.py")}
    near = get_close_matches(name, modules | {path.parent.name for path in folder.glob("*/*.py")}, n=1)
    hint = f" The nearest name is {package}.{near[0]}." if near else ""
    return Cause(
        "", f"The package {package} in {folder.absolute()} has no module {name}.{hint}", "Correct the name."
    )


def _describe_first(outcome: Outcome, first: Suspect | None) -> tuple[list[str], list[str]]:
    """Returns lines about the first failure that are always printed, and lines that may be truncated."""
    if first is None:
        if outcome.seen.killed:
            return [f"The script was {_describe_kill(outcome)}."], []
        return [
            f"The script ended by itself: {_format_exit(128 - outcome.code)}, and left no Python error."
        ], []
    if first.kind == Kind.LEFT:
        return [_describe_early_exit(outcome)], []
    failure = first.failure
    if failure is None:
        exit_text = _format_exit(outcome.seen.codes[first.rank])
        return [f"rank {first.rank} failed first: {exit_text}, and left no Python error."], []
    if HANG_KIND in failure.kind:
        return [], failure.trace.rstrip().splitlines()
    if failure.world_size == 1:
        return [shortened(failure.headline)], []
    return [f"rank {failure.rank} on {failure.host} failed first:"], failure.trace.rstrip().splitlines()


def _describe_early_exit(outcome: Outcome) -> str:
    waiting = [failure for failure in outcome.failures if HANG_KIND not in failure.kind]
    line = next((f" {line}" for line in map(_user_line, waiting) if line), "")
    ended = spell_ranks(outcome.finished)
    them = "it" if len(outcome.finished) == 1 else "them"
    waiting_ranks = [failure.rank for failure in outcome.failures]
    waiting_text = f"{spell_ranks(sorted(waiting_ranks))} waited for {them}{line}"
    return f"{ended} finished and left (exit code 0); {waiting_text}."


def _user_line(failure: Failure) -> str:
    """Returns the innermost line of a traceback that is not in a library."""
    frames = [frame for frame in _FRAME.finditer(failure.trace) if not _LIBRARIES.search(frame["file"])]
    if not frames:
        return ""
    source = f": {frames[-1]['source'].strip()}" if frames[-1]["source"] else ""
    return f"in {frames[-1]['file']}:{frames[-1]['line']}{source}"


def _describe_others(outcome: Outcome, first: Suspect | None) -> dict[str, list[int]]:
    """Returns the ranks that did not fail first, by a line that describes how they ended."""
    texts = {rank: _describe_exit(outcome, rank, number) for rank, number in outcome.seen.codes.items()}
    lines: dict[tuple[str, str], str] = {}
    if first is not None and first.failure is not None:
        is_hang = HANG_KIND in first.failure.kind
        lines[_signature(first.failure)] = "ended for it as well" if is_hang else "the same error"
    for failure in outcome.failures:
        line = f"afterwards: {shortened(failure.headline, _MAX_HEADLINE_LENGTH)}"
        texts[failure.rank] = lines.setdefault(_signature(failure), line)
    left = outcome.finished if first is not None and first.kind == Kind.LEFT else []
    named = {*left, *([first.rank] if first is not None else outcome.seen.killed)}
    return group_ranks((text, rank) for rank, text in sorted(texts.items()) if rank not in named)


def _describe_exit(outcome: Outcome, rank: int, number: int) -> str:
    """Describes the exit of a rank that recorded no failure."""
    if rank in outcome.seen.killed:
        return _describe_kill(outcome)
    if rank in outcome.seen.asked and number in (0, -outcome.seen.asked_by):
        return "ended by the launcher"
    return _format_exit(number) if number else "finished (exit code 0)"


def _describe_kill(outcome: Outcome) -> str:
    name = signal.Signals(outcome.seen.asked_by).name
    return f"killed by the launcher: did not end within {grace()} s after {name}"


def _signature(failure: Failure) -> tuple[str, str]:
    """Returns a value that is equal for failures which differ only in numbers, such as a rank."""
    return failure.place, _NUMBERS.sub("#", failure.headline)


def _format_exit(number: int) -> str:
    if number >= 0:
        return f"exit code {number}"
    name = signal.Signals(-number).name
    hint = " (out of memory?)" if number == -SIGKILL else ""
    return f"killed by signal {-number} ({name}){hint}"


def _truncate(lines: Sequence[str], num_lines: int, where: str) -> list[str]:
    """Replaces lines in the middle by a line with their number."""
    if len(lines) <= num_lines:
        return list(lines)
    before = (num_lines - 1) // 2
    after = before + len(lines) - num_lines + 1
    mark = f"    ... {after - before:,} lines are left out here; {where} ..."
    return [*lines[:before], mark, *lines[after:]]
