"""One screen for a run that failed: who failed first and how, what the others did, the likely cause."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate.base.errors import AccelerateError
from accelerate.base.text import spell_ranks
from accelerate.launch.failures import HANG_KIND, Failure, Outcome

REPORT = "failure.json"
_WIDTH = 80
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True)
class Cause:
    """A cause that failures of one look usually have.

    Attributes:
        pattern: found in the class names and the message of the error.
        cause: what it is, one sentence.
        mend: what to do, one sentence.
    """

    pattern: re.Pattern[str]
    cause: str
    mend: str


def _cause(pattern: str, cause: str, mend: str) -> Cause:
    return Cause(re.compile(pattern, re.IGNORECASE), cause, mend)


_LOST = _cause(
    r"connection refused|connection reset|connection closed by peer|connectFullMesh|NCCL|"
    r"timed? ?out|DistNetworkError|DistStoreError|socket",
    "The processes lost each other, or never met.",
    "If another rank failed first, mend that. Else check the address, firewalls and network interfaces "
    "(NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME).",
)

CAUSES: tuple[Cause, ...] = (
    _cause(
        rf"^{HANG_KIND}\b",
        "Ranks wait for a rank that is elsewhere, has ended, or calls another operation.",
        "Look at the line where the report sees that rank: all ranks must call the same operations in the "
        "same order. If it only takes long there, raise --hang_timeout.",
    ),
    _cause(
        r"re-initialize CUDA in forked|CUDA initiali[sz]ed before",
        "CUDA was used in the parent process before it forked.",
        "Use the 'spawn' start method for worker processes, and touch no GPU before processes are started.",
    ),
    _cause(
        r"OutOfMemoryError|out of memory|can't allocate memory|cannot allocate memory",
        "The device or the machine ran out of memory.",
        "Take a smaller batch (accelerate.find_executable_batch_size finds one), accumulate gradients, or "
        "train in bf16.",
    ),
    _cause(
        r"address already in use|EADDRINUSE",
        "Another program, or an earlier run that still lives, uses the port.",
        "Pass a free one with --main_process_port, or leave it out on one machine.",
    ),
    _cause(
        r"ModuleNotFoundError|No module named",
        "A package that the script imports is not installed in this environment.",
        "Install it with pip into the environment that runs `accelerate launch`.",
    ),
    _cause(
        r"shapes? cannot be multiplied|size mismatch|sizes of tensors must match|shape mismatch|"
        r"must match the size of tensor",
        "Tensors do not fit each other.",
        "Look at the shapes in the message; with several processes, check that all ranks pass the same ones.",
    ),
    _cause(
        r"Expected to have finished reduction in the prior iteration",
        "Parameters took no part in the loss, and DistributedDataParallel waits for their gradients.",
        "Freeze or remove them, or pass kwargs_handlers=[DistributedDataParallelKwargs("
        "find_unused_parameters=True)] to Accelerator.",
    ),
    _LOST,
)
"""Tried in order; the first that is found is named."""

_KILLED = _cause(
    "",
    "The operating system killed the process, most often because the machine ran out of memory.",
    "Look at `dmesg`, lower the number of workers or the batch size, or give the job more memory.",
)

_MISUSED = _cause(
    "",
    "The script refused its own arguments; argparse ends a program so.",
    "Read its message, above this screen, and mend the words behind the script's name.",
)
_BY_NUMBER = {-signal.SIGKILL: _KILLED, 2: _MISUSED}
"""What the operating system says of a process that left no Python error -> its cause."""


def render(outcome: Outcome, folder: Path, log_dir: str | None = None) -> str:
    """Write the screen.

    Args:
        outcome: how the run ended.
        folder: where the report for machines lies.
        log_dir: where the logs of the ranks lie, if they were kept.
    """
    cause = find_cause(outcome)
    lines = [" accelerate launch: the run failed ".center(_WIDTH, "=")]
    lines += _first(outcome)
    lines += _hang(outcome)
    lines += [f"{spell_ranks(ranks)}: {text}" for text, ranks in _others(outcome)]
    if cause is not None:
        lines += ["", f"Likely cause: {cause.cause}", f"What to do:   {cause.mend}"]
    lines += ["", *([f"Logs of the ranks: {log_dir}"] if log_dir else [])]
    lines += [f"Exit code: {outcome.code}. For machines: {folder / REPORT}", "=" * _WIDTH]
    return "\n".join(lines)


def write_report(outcome: Outcome, folder: Path) -> None:
    """Write `failure.json`: the same for machines."""
    cause = find_cause(outcome)
    report = {
        "exit_code": outcome.code,
        "first": asdict(outcome.failures[0]) if outcome.failures else None,
        "failures": [asdict(failure) for failure in outcome.failures],
        "exits": {str(rank): number for rank, number in outcome.exits.items()},
        "hang": outcome.hang or None,
        "cause": None if cause is None else cause.cause,
        "mend": None if cause is None else cause.mend,
    }
    (folder / REPORT).write_text(json.dumps(report, indent=2), encoding="utf-8")


def is_telling(outcome: Outcome) -> bool:
    """Whether there is more to say than the exit code, which a script may choose by `sys.exit`."""
    return bool(outcome.failures or outcome.exits) or outcome.code > 128


def find_cause(outcome: Outcome) -> Cause | None:
    """Return the likely cause of the first failure; `None` where none fits, or the error itself tells it."""
    silent = _silent_first(outcome)
    if outcome.failures and silent is None:
        first = outcome.failures[0]
        if AccelerateError.__name__ in first.kind:
            return None
        text = " ".join((*first.kind, first.headline))
        return next((cause for cause in CAUSES if cause.pattern.search(text)), None)
    number = outcome.exits[silent] if silent is not None else 128 - outcome.code
    return _BY_NUMBER.get(number)


def _silent_first(outcome: Outcome) -> int | None:
    """The rank that ended without a Python error and made the others fail; `None` without one."""
    recorded = {failure.rank for failure in outcome.failures}
    if any(not _LOST.pattern.search(failure.headline) for failure in outcome.failures):
        return None
    ended = (r for r, n in outcome.exits.items() if r not in recorded and n not in (0, -signal.SIGTERM))
    return next(ended, None)


def _first(outcome: Outcome) -> list[str]:
    silent = _silent_first(outcome)
    if silent is not None:
        return [f"rank {silent} failed first: {_spell(outcome.exits[silent])}, and left no Python error."]
    if not outcome.failures:
        return [f"The script ended by itself: {_spell(128 - outcome.code)}, and left no Python error."]
    first = outcome.failures[0]
    if HANG_KIND in first.kind:
        return [first.trace.rstrip()]
    if first.world_size == 1:
        return [first.headline]
    return [f"rank {first.rank} on {first.host} failed first:", first.trace.rstrip()]


def _hang(outcome: Outcome) -> list[str]:
    """What was reported about waiting ranks before the run failed, unless the failure says it."""
    if not outcome.hang or any(HANG_KIND in failure.kind for failure in outcome.failures):
        return []
    return ["", "Reported before:", outcome.hang, ""]


def _others(outcome: Outcome) -> list[tuple[str, list[int]]]:
    """What became of the ranks that did not fail first: one line for all that fared alike."""
    lead = _silent_first(outcome)
    first = outcome.failures[0] if outcome.failures and lead is None else None
    texts = {
        rank: "ended by the launcher" if number == -signal.SIGTERM else _spell(number)
        for rank, number in outcome.exits.items()
    }
    for failure in outcome.failures:
        alike = first is not None and _look(failure) == _look(first)
        same = "ended for it as well" if HANG_KIND in failure.kind else "the same error"
        texts[failure.rank] = same if alike else f"afterwards: {failure.headline}"
    lead = first.rank if first is not None else lead
    return _folded((text, rank) for rank, text in sorted(texts.items()) if rank != lead)


def _look(failure: Failure) -> tuple[str, str]:
    """What two failures share that are the same but for numbers, such as a rank in the message."""
    return failure.place, _NUMBERS.sub("#", failure.headline)


def _spell(number: int) -> str:
    if number >= 0:
        return f"exit code {number}"
    name = signal.Signals(-number).name
    hint = " (out of memory?)" if number == -signal.SIGKILL else ""
    return f"killed by signal {-number} ({name}){hint}"


def _folded(pairs: Iterable[tuple[str, int]]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for text, rank in pairs:
        groups.setdefault(text, []).append(rank)
    return list(groups.items())
