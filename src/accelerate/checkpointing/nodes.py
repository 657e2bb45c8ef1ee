"""Nodes of a run, and the folder on each of them in which its ranks keep recent checkpoints.

The ranks that access the same folder are a node. `find_nodes` verifies that the folder is on the node and not
on a network disk.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from accelerate.base import CheckpointError, ConfigurationError, describe, wrong_value
from accelerate.checkpointing import temporary
from accelerate.state import Consensus

NETWORK_DISKS = frozenset(
    (
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
    )
)
"""Types of file systems that several nodes share. Those of FUSE, such as `fuse.sshfs`, count too."""
IN_MEMORY = frozenset(("tmpfs", "ramfs"))
"""Types of file systems in memory."""
OPERATION = "accelerate.Accelerator"
"""Name of the call in error messages."""
LOCK = "fast"
"""Name in the hidden folder of a run, in which its generations are written."""


@dataclass(frozen=True)
class Nodes:
    """Nodes of a run, numbered by their first ranks."""

    folder: Path  # on the node of this rank
    rank: int
    ranks: Sequence[Sequence[int]]  # of each node
    hosts: Sequence[str]  # host name of each node
    staging: Sequence[str]  # hidden folder of each node, in which generations are written

    @property
    def own(self) -> int:
        """Index of the node of this rank."""
        return next(index for index, ranks in enumerate(self.ranks) if self.rank in ranks)

    @property
    def is_owner(self) -> bool:
        """True on the first rank of each node."""
        return self.ranks[self.own][0] == self.rank

    @property
    def own_staging(self) -> Path:
        return self.folder / self.staging[self.own]

    def partner(self, rank: int, node: int) -> int:
        """Returns the rank of a node that exchanges files with a rank of another node."""
        own = next(ranks for ranks in self.ranks if rank in ranks)
        return self.ranks[node][own.index(rank) % len(self.ranks[node])]


def find_nodes(folder: Path, node: int, consensus: Consensus, timeout: float) -> Nodes:
    """Creates the folder, and returns the nodes of the run.

    Called on all ranks.

    Args:
        folder: Folder of recent checkpoints, which may have another path on each node.
        node: Index of the node, as the launcher has set it.
        timeout: Timeout for all ranks to arrive, in seconds.

    Raises:
        ConfigurationError: The folder cannot be written, another run uses it, or it is on a network disk.
    """
    mark = f".rank-{consensus.rank}-{secrets.token_hex(8)}"
    answers = consensus.decide(OPERATION, _announce(folder, mark, node), list, timeout)
    try:
        if failure := next((answer["failure"] for answer in answers if answer["failure"]), ""):
            raise ConfigurationError(failure)
        seen = [rank for rank, answer in enumerate(answers) if (folder / answer["mark"]).exists()]
        groups = consensus.decide(OPERATION, seen, list, timeout)
    finally:
        with suppress(OSError):  # it could not be created
            (folder / mark).unlink()
    ranks = [group for rank, group in enumerate(groups) if group[0] == rank]
    for group in ranks:
        if len({answers[rank]["node"] for rank in group}) > 1:
            raise wrong_value(
                "fast_dir",
                str(folder),
                f"the ranks {group[0]} and {group[-1]} are on different nodes and access the same folder",
                "Choose a folder on a disk of the node, such as one in /dev/shm",
            )
    staging = folder / answers[groups[consensus.rank][0]]["staging"]
    staging.mkdir(exist_ok=True)
    first = [answers[group[0]] for group in ranks]
    return Nodes(
        folder,
        consensus.rank,
        ranks,
        [answer["host"] for answer in first],
        [answer["staging"] for answer in first],
    )


def _announce(folder: Path, mark: str, node: int) -> dict[str, Any]:
    """Creates a file by which other ranks recognize the folder, and describes this rank to them."""
    failure, staging = "", temporary.claim(LOCK, folder, temporary.SAVING)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_disk(folder)
        temporary.sweep(folder)
        _refuse_other_run(folder)
        (folder / mark).write_bytes(b"\0" * 4096)  # fails on a full disk
    except (CheckpointError, ConfigurationError) as error:
        failure = str(error)
    except OSError as error:
        failure = (
            f"fast_dir={str(folder)!r} cannot be written: {describe(error)}. Choose a folder on a disk of "
            "the node with space left, such as one in /dev/shm."
        )
    return {
        "failure": failure,
        "mark": mark,
        "node": node,
        "host": socket.gethostname(),
        "staging": staging.name,
    }


def _check_disk(folder: Path) -> None:
    """Raises if the folder is on a network disk."""
    kind = _kind_of_disk(folder)
    if kind in NETWORK_DISKS or kind.startswith("fuse."):
        raise wrong_value(
            "fast_dir",
            str(folder),
            f"it is on a network disk ({kind})",
            "Choose a folder on a disk of the node, such as one in /dev/shm",
        )


def _kind_of_disk(folder: Path) -> str:
    """Returns the type of the file system of a folder, or "" if it is not known."""
    path = os.path.realpath(folder)
    mounts = [
        part
        for part in psutil.disk_partitions(all=True)
        if os.path.commonpath([path, part.mountpoint]) == part.mountpoint
    ]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else ""


def _refuse_other_run(folder: Path) -> None:
    for other in temporary.find(folder, temporary.SAVING):
        if other.belongs_to(LOCK) and other.is_in_use and not other.is_own:
            raise wrong_value(
                "fast_dir",
                str(folder),
                f"process {other.pid} of another run uses it",
                "Use a separate folder for each run",
            )


def free_bytes(folder: Path) -> int:
    """Returns the bytes that a folder can take, which memory limits for a folder in memory."""
    free = shutil.disk_usage(folder).free
    return min(free, psutil.virtual_memory().available) if _kind_of_disk(folder) in IN_MEMORY else free
