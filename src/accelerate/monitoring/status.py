"""What a rank is doing now: one small file per rank, replaced as a whole, which the launcher reads."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from accelerate.base import environ

STATUS_VARIABLE = environ.MONITOR_FOLDER


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """The state of one rank."""

    rank: int
    world_size: int
    time: float  # when this was written, in seconds since the epoch
    pid: int = 0
    attempt: int = 0  # how often the launcher had restarted the processes
    ended: str = ""  # "finished", "failed" or "stopped"; a process that was killed writes nothing
    step: int = 0  # number of the last optimizer step, over all starts of the run
    seconds: float = 0.0  # of the last window of steps
    seconds_by: dict[str, float] = field(default_factory=dict)  # of the last window, by name of the phase
    steps_per_second: float = 0.0
    samples_per_second: float = 0.0  # of this rank
    memory: int = 0  # bytes
    peak_memory: int = 0  # bytes
    values: dict[str, float] = field(default_factory=dict)  # loss, learning_rate, gradient_norm
    last_checkpoint: str = ""  # its folder
    last_checkpoint_time: float = 0.0
    slowest: int = -1  # the rank with the most own work per step; -1 where none is known
    slowest_by: float = 0.0  # how much slower than the mean of the others, 0.25 for 25 %
    batch: int = 0  # batches of this pass over the first prepared loader
    num_batches: int = 0  # of the whole pass; 0 where the loader has no length
    seconds_left: float = 0.0  # until the end of the pass; 0 where it is not known
    conclusions: dict[str, str] = field(default_factory=dict)  # text by name

    def write(self, folder: Path) -> None:
        """Replace the file of this rank.

        Raises:
            OSError: The folder is gone, or the disk is full.
        """
        beside = folder / f".rank-{self.rank:05}.json.{os.getpid()}"
        try:
            beside.write_text(json.dumps(asdict(self)), encoding="utf-8")
            beside.replace(folder / f"rank-{self.rank:05}.json")
        except OSError:
            beside.unlink(missing_ok=True)
            raise


def read_statuses(folder: Path) -> list[RankStatus]:
    """Return the states that ranks have written, in the order of the ranks; damaged files are left out."""
    statuses = []
    for path in sorted(folder.glob("rank-*.json")):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            known = {entry.name: values[entry.name] for entry in fields(RankStatus) if entry.name in values}
            statuses.append(RankStatus(**known))
        except (OSError, ValueError, TypeError):  # replaced meanwhile, or written by another program
            continue
    return sorted(statuses, key=lambda status: status.rank)
