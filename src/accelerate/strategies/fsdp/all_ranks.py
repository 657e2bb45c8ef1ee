"""Write in one folder from all ranks: what fails on one rank is an error on all."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.base import replace_files
from accelerate.checkpointing import Payload, shard_files
from accelerate.ops import current_transport, run_on_all_ranks, run_on_rank_0
from accelerate.weights import write_torch


def write_whole(path: Path, content: Any) -> None:
    """Write one file on the first rank; called on all ranks."""

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_files([path]) as (temporary,):
            write_torch(content, temporary)

    run_on_rank_0(write)


def write_shards(target: Path, state: shard_files.State) -> None:
    """Write a folder of shards beside its place, and put it there when all ranks have written theirs.

    Args:
        target: the folder; it is on a disk that all ranks see.

    Raises:
        CheckpointError: a file cannot be written; on all ranks. What was there before is unchanged.
    """
    transport = current_transport()
    payload = shard_files.payload(target.name, transport.rank, state)
    beside = transport.broadcast_object(target.with_name(f".{target.name}.{os.getpid()}"), 0)
    try:
        run_on_rank_0(partial(beside.mkdir, parents=True))
        report = run_on_all_ranks(lambda: payload.write(payload.content, beside / Path(payload.name).name))
        reports = transport.gather_object(report)
        run_on_rank_0(lambda: _finish(payload, reports, beside, target))
    finally:
        if transport.rank == 0:
            shutil.rmtree(beside, ignore_errors=True)


def _finish(payload: Payload, reports: list[Any], beside: Path, target: Path) -> None:
    assert payload.finish is not None
    payload.finish(beside, reports)
    if target.exists():
        shutil.rmtree(target)
    os.replace(beside, target)
