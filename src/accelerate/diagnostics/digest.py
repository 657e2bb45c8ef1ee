"""One screen for a run that failed: who failed first and how, what the others did, the likely cause."""

from __future__ import annotations

import json
import re
import signal
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict
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
MOST_LINES = 60
_MOST_OTHERS = 8
_LEAST_TRACE = 20
_WIDTH = 80
_LONGEST_LINE = 400
_LONGEST_HEADLINE = 200
_NUMBERS = re.compile(r"\d+")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in .*(?:\n    (?P<source>.*))?', re.M)
_OURS = str(Path(__file__).parents[1])
_LIBRARIES = re.compile(
    rf"^({re.escape(_OURS)}|{re.escape(sysconfig.get_path('stdlib'))})|[/\\](site|dist)-packages[/\\]|^<frozen"
)


class Cause(NamedTuple):
    """The usual cause of errors whose class names and message match a pattern, and how to fix it."""

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
        "Use the 'spawn' start method for worker processes, and touch no GPU before processes are started.",
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
)
"""Tried in order; the first that is found is named."""

_KILLED = Cause(
    "",
    "The operating system killed the process, most often because the machine ran out of memory.",
    "Look at `dmesg`, lower the number of workers or the batch size, or give the job more memory.",
)

_MISUSED = Cause(
    "",
    "The script refused its own arguments; argparse ends a program so.",
    "Read its message, above this screen, and correct the words behind the script's name.",
)
_BY_NUMBER = {-SIGKILL: _KILLED, 2: _MISUSED}
"""What the operating system says of a process that left no Python error -> its cause."""

_LEFT = Cause(
    "",
    "A rank ended while another still called an operation that needs all ranks.",
    "Let all ranks make the same number of steps: leave a loop on all of them at the same step "
    "(set_trigger and check_trigger, or should_stop).",
)
_LOST = Cause(
    "",
    "The processes lost each other, or never met. Those of this machine were there, and have no other error.",
    "Where there are other machines, read their screens first. Else check the address, firewalls and network "
    "interfaces (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).",
)


def render(outcome: Outcome, folder: Path, log_dir: str | None = None) -> str:
    """Write the screen: at most 60 lines with one traceback.

    `folder` holds the report for machines, `log_dir` the logs of the ranks, if they were kept.
    """
    cause, first = find_cause(outcome), find_first(outcome)
    heading, text = _first(outcome, first)
    where = f"the whole text is in {folder / REPORT}"
    others = [f"{spell_ranks(ranks)}: {line}" for line, ranks in _others(outcome, first).items()]
    more = len(others) - _MOST_OTHERS
    if more > 0:
        others[_MOST_OTHERS:] = [f"... and {more} more such lines; {where}"]
    tail = others
    if cause is not None:
        tail += ["", f"Likely cause: {cause.cause}", f"What to do:   {cause.fix}"]
    tail += ["", *([f"Logs of the ranks: {log_dir}"] if log_dir else [])]
    tail += [f"Exit code: {outcome.code}. For machines: {folder / REPORT}", "=" * _WIDTH]
    room = MOST_LINES - 1 - len(heading) - len(tail)
    is_said = not outcome.hang or (first is not None and first.kind == Kind.HANG)
    hang = [] if is_said else ["", "Reported before:", *outcome.hang.splitlines(), ""]
    hang = _cut(hang, room - min(len(text), _LEAST_TRACE), where)
    text = _cut(text, room - len(hang), where)
    lines = [" accelerate launch: the run failed ".center(_WIDTH, "="), *heading, *text, *hang, *tail]
    return "\n".join(shortened(line, _LONGEST_LINE) for line in lines)


def write_report(outcome: Outcome, folder: Path) -> None:
    """Write `failure.json`: the same for machines."""
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


def is_telling(outcome: Outcome) -> bool:
    """Whether there is more to say than the exit code, which a script may choose by `sys.exit`."""
    return bool(outcome.failures or any(outcome.seen.codes.values())) or outcome.code > 128


def find_cause(outcome: Outcome) -> Cause | None:
    """Return the likely cause of the first failure; `None` where none fits, or the error itself tells it."""
    first = find_first(outcome)
    if first is None:
        return None if outcome.seen.killed else _BY_NUMBER.get(128 - outcome.code)
    if first.kind == Kind.LEFT:
        return _LEFT
    if first.failure is None:
        return _BY_NUMBER.get(outcome.seen.codes[first.rank])
    if AccelerateError.__name__ in first.failure.kind:
        return None
    text = " ".join((*first.failure.kind, first.failure.headline))
    known = next((cause for cause in CAUSES if re.search(cause.pattern, text, re.IGNORECASE)), None)
    return _LOST if known is None and first.kind == Kind.LOST else known


def _first(outcome: Outcome, first: Suspect | None) -> tuple[list[str], list[str]]:
    """What is said of the first failure: lines that are shown whole, and a text that may be cut."""
    if first is None:
        if outcome.seen.killed:
            return [f"The script was {_killed(outcome)}."], []
        return [f"The script ended by itself: {_spell(128 - outcome.code)}, and left no Python error."], []
    if first.kind == Kind.LEFT:
        return [_leaving(outcome)], []
    failure = first.failure
    if failure is None:
        spelled = _spell(outcome.seen.codes[first.rank])
        return [f"rank {first.rank} failed first: {spelled}, and left no Python error."], []
    if HANG_KIND in failure.kind:
        return [], failure.trace.rstrip().splitlines()
    if failure.world_size == 1:
        return [shortened(failure.headline)], []
    return [f"rank {failure.rank} on {failure.host} failed first:"], failure.trace.rstrip().splitlines()


def _leaving(outcome: Outcome) -> str:
    waiting = [failure for failure in outcome.failures if HANG_KIND not in failure.kind]
    line = next((f" {line}" for line in map(_own_line, waiting) if line), "")
    gone = spell_ranks(outcome.finished)
    them = "it" if len(outcome.finished) == 1 else "them"
    waited = [failure.rank for failure in outcome.failures]
    return f"{gone} finished and left (exit code 0); {spell_ranks(sorted(waited))} waited for {them}{line}."


def _own_line(failure: Failure) -> str:
    """The last line of a traceback that is no library's."""
    frames = [frame for frame in _FRAME.finditer(failure.trace) if not _LIBRARIES.search(frame["file"])]
    if not frames:
        return ""
    source = f": {frames[-1]['source'].strip()}" if frames[-1]["source"] else ""
    return f"in {frames[-1]['file']}:{frames[-1]['line']}{source}"


def _others(outcome: Outcome, first: Suspect | None) -> dict[str, list[int]]:
    """What became of the ranks that did not fail first: one line for all that fared alike."""
    texts = {rank: _fate(outcome, rank, number) for rank, number in outcome.seen.codes.items()}
    looks: dict[tuple[str, str], str] = {}
    if first is not None and first.failure is not None:
        is_hang = HANG_KIND in first.failure.kind
        looks[_look(first.failure)] = "ended for it as well" if is_hang else "the same error"
    for failure in outcome.failures:
        said = f"afterwards: {shortened(failure.headline, _LONGEST_HEADLINE)}"
        texts[failure.rank] = looks.setdefault(_look(failure), said)
    left = outcome.finished if first is not None and first.kind == Kind.LEFT else []
    named = {*left, *([first.rank] if first is not None else outcome.seen.killed)}
    return group_ranks((text, rank) for rank, text in sorted(texts.items()) if rank not in named)


def _fate(outcome: Outcome, rank: int, number: int) -> str:
    """What became of a rank that wrote nothing down."""
    if rank in outcome.seen.killed:
        return _killed(outcome)
    if rank in outcome.seen.asked and number in (0, -outcome.seen.asked_by):
        return "ended by the launcher"
    return _spell(number) if number else "finished (exit code 0)"


def _killed(outcome: Outcome) -> str:
    name = signal.Signals(outcome.seen.asked_by).name
    return f"killed by the launcher: did not end within {grace()} s after {name}"


def _look(failure: Failure) -> tuple[str, str]:
    """What two failures share that are the same but for numbers, such as a rank in the message."""
    return failure.place, _NUMBERS.sub("#", failure.headline)


def _spell(number: int) -> str:
    if number >= 0:
        return f"exit code {number}"
    name = signal.Signals(-number).name
    hint = " (out of memory?)" if number == -SIGKILL else ""
    return f"killed by signal {-number} ({name}){hint}"


def _cut(lines: Sequence[str], room: int, where: str) -> list[str]:
    """Leave lines out in the middle, and say so."""
    if len(lines) <= room:
        return list(lines)
    before = (room - 1) // 2
    after = before + len(lines) - room + 1
    mark = f"    ... {after - before:,} lines are left out here; {where} ..."
    return [*lines[:before], mark, *lines[after:]]
