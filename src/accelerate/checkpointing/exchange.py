"""Transfer of files between the nodes of a run, over a gloo process group.

Each file is sent from the memory of its page cache, and received in that of a new file, without a buffer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate.checkpointing.changes import describe_failure
from accelerate.checkpointing.saving import WRITE_TIMEOUT
from accelerate.state import Consensus

PARTIAL = ".part"
"""Suffix of the name of a file that is being received."""
TIMEOUT = timedelta(minutes=5)
"""Timeout for one transfer."""


class Transfer(NamedTuple):
    """File that one rank sends to another one."""

    name: str
    size: int  # in bytes
    source: int
    target: int


def open_group() -> Any:
    """Returns a process group of all ranks for transfers, or None if there is one rank.

    Called on all ranks.
    """
    is_distributed = dist.is_initialized() and dist.get_world_size() > 1
    return dist.new_group(backend="gloo", timeout=TIMEOUT) if is_distributed else None


def exchange(
    transfers: Sequence[Transfer],
    group: dist.ProcessGroup,
    source: Path,
    target: Path,
    consensus: Consensus,
    operation: str,
    verify: Callable[[Transfer, Path], None] | None = None,
) -> list[str]:
    """Sends and receives files, and returns the errors of all ranks, an empty text for a rank without one.

    Called on all ranks. No file is sent if a rank cannot allocate what it receives.

    Args:
        source: Folder of the files that this rank sends.
        target: Folder of the files that this rank receives, which appear in it when they are complete.
        operation: Name of the call in error messages.
        verify: Function that raises if a received file is damaged.
    """
    rank, contents = consensus.rank, dict[int, Tensor]()
    received = [transfer for transfer in transfers if transfer.target == rank]

    def open_files() -> None:
        for number, transfer in enumerate(transfers):
            if transfer.source == rank:
                contents[number] = _map(source / transfer.name, transfer.size, shared=False)
            elif transfer.target == rank:
                path = _partial(target, transfer)
                path.parent.mkdir(parents=True, exist_ok=True)
                _allocate(path, transfer.size)
                contents[number] = _map(path, transfer.size, shared=True)

    def send_and_receive() -> None:
        works = [
            dist.isend(content, group=group, tag=number, group_dst=transfers[number].target)
            if transfers[number].source == rank
            else dist.irecv(content, group=group, tag=number, group_src=transfers[number].source)
            for number, content in contents.items()
            if transfers[number].size
        ]
        for work in works:
            work.wait()  # type: ignore[union-attr]  # all ranks are in the group
        for transfer in received:
            if verify is not None:
                verify(transfer, _partial(target, transfer))
            _partial(target, transfer).replace(target / transfer.name)

    for action in (open_files, send_and_receive):
        failures: list[str] = consensus.decide(operation, describe_failure(action), list, WRITE_TIMEOUT)
        if any(failures):
            break
    return failures


def _partial(target: Path, transfer: Transfer) -> Path:
    """Returns the path of a file while it is received."""
    return target / f"{transfer.name}{PARTIAL}"


def _map(path: Path, size: int, *, shared: bool) -> Tensor:
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8)


def _allocate(path: Path, size: int) -> None:
    """Creates a file with memory for all of its bytes, because a write to a full disk ends the process."""
    with path.open("wb") as file:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            file.truncate(size)
