"""Which of the failures of a run is its cause: by their kinds, then by their times.

A rank that fails closes its connections. So the others fail too, and one of them may write its error down
before the rank that failed first does.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from accelerate.base import AccelerateError
from accelerate.launch.failures import HANG_KIND, Failure, Outcome


class Kind(IntEnum):
    """What a failure is, the most likely cause first."""

    OWN = 1
    """An error of the script, or of a worker of its data loader."""
    SILENT = 2
    """An exit code, or a signal that the launcher did not send, without a Python error."""
    LEFT = 3
    """Exit code 0 while others needed the rank."""
    HANG = 4
    """Ended as ranks waited for each other."""
    OF_OTHERS = 5
    """An error that says what another rank did, or did not."""
    LOST = 6
    """A connection to another rank broke, or an operation with it timed out."""
    AFTER = 7
    """An error of a rank that the launcher had told to end."""


@dataclass(frozen=True)
class Suspect:
    """One rank whose end may be the cause.

    Attributes:
        kind: what its failure is.
        rank: of the process.
        failure: what it wrote down; `None` where it wrote nothing.
    """

    kind: Kind
    rank: int
    failure: Failure | None = None


_CONNECTION = re.compile(
    r"gloo|NCCL|TCPStore|connectFullMesh|connection closed by peer|DistBackendError|DistNetworkError|"
    r"DistStoreError|DistQueue\w+Error",
    re.IGNORECASE,
)
_ANY_CONNECTION = re.compile(
    r"connection refused|connection reset|broken pipe|timed? ?out|timeout|socket", re.IGNORECASE
)
"""Said of connections of the script too, such as a download: it counts where torch.distributed raised it."""
_DISTRIBUTED = re.compile(r'File "[^"]*torch/distributed/')
_OF_OTHERS = re.compile(r"did not come within|did not end their attempt|on another process|does not answer")
_READ_BY_ANOTHER = re.compile(
    r"^RuntimeError: the loader failed on process \d+, which reads for all:$", re.MULTILINE
)
"""In the traceback of the others: they raise what the process raised that reads for them."""


def find_suspects(outcome: Outcome) -> list[Suspect]:
    """Return all that may have made the run fail, the most likely first.

    Args:
        outcome: how the run ended.
    """
    recorded = {failure.rank for failure in outcome.failures}
    found = [Suspect(_kind(failure, outcome), failure.rank, failure) for failure in outcome.failures]
    if any(suspect.kind in (Kind.HANG, Kind.OF_OTHERS, Kind.LOST) for suspect in found):
        found += [Suspect(Kind.LEFT, rank) for rank in outcome.finished]
    silent = {
        rank: number
        for rank, number in outcome.seen.codes.items()
        if number and rank not in recorded and not _is_by_launcher(rank, number, outcome)
    }
    found += [Suspect(Kind.AFTER if rank in outcome.seen.asked else Kind.SILENT, rank) for rank in silent]

    def place(suspect: Suspect) -> tuple[int, float]:
        # Signals before exit codes: a script that loses another rank may end itself with a code.
        moment = suspect.failure.moment if suspect.failure else float(silent.get(suspect.rank, 0) > 0)
        return suspect.kind, moment

    return sorted(found, key=place)


def find_first(outcome: Outcome) -> Suspect | None:
    """Return what made the run fail; `None` where no rank did.

    Args:
        outcome: how the run ended.
    """
    return next(iter(find_suspects(outcome)), None)


def _kind(failure: Failure, outcome: Outcome) -> Kind:
    if failure.rank in outcome.seen.asked and failure.moment > outcome.seen.asked_at:
        return Kind.AFTER
    if HANG_KIND in failure.kind:
        return Kind.HANG
    if _READ_BY_ANOTHER.search(failure.trace):
        return Kind.OF_OTHERS
    if AccelerateError.__name__ in failure.kind:
        return Kind.OF_OTHERS if _OF_OTHERS.search(failure.headline) else Kind.OWN
    text = " ".join((failure.kind[0], failure.headline))
    lost = _CONNECTION.search(text) or (
        _ANY_CONNECTION.search(text) and _DISTRIBUTED.search(failure.trace) is not None
    )
    return Kind.LOST if lost else Kind.OWN


def _is_by_launcher(rank: int, number: int, outcome: Outcome) -> bool:
    return rank in outcome.seen.killed or (rank in outcome.seen.asked and number == -outcome.seen.asked_by)
