"""Write and read in one folder together: what fails on one rank is an error on all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from accelerate.base import CheckpointError, describe, replace_files
from accelerate.checkpointing import Payload, shard_files
from accelerate.ops import current_transport
from accelerate.weights import write_torch


def run_on_all_ranks(action: Callable[[], Any]) -> Any:
    """Do something on all ranks, called on all of them.

    Returns:
        What it has returned on this one.

    Raises:
        CheckpointError: it has failed on one; on all.
    """
    result, failure = _attempt(action)
    _refuse(current_transport().gather_object(failure))
    return result


def _attempt(action: Callable[[], Any]) -> tuple[Any, str]:
    try:
        return action(), ""
    except Exception as error:  # raised again, on all ranks
        return None, describe(error)


def _refuse(failures: Sequence[str]) -> None:
    if failed := list(dict.fromkeys(text for text in failures if text)):
        raise CheckpointError("; ".join(failed))


def write_whole(path: Path, content: Any) -> None:
    """Write one file on the first rank; called on all ranks.

    Args:
        path: the file; its folder is made.
        content: what is written with `torch.save`.

    Raises:
        CheckpointError: it cannot be written; on all ranks.
    """

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_files([path]) as (temporary,):
            write_torch(content, temporary)

    run_on_all_ranks(write if current_transport().rank == 0 else lambda: None)


def write_shards(target: Path, state: shard_files.State) -> None:
    """Write a folder of shards beside its place, and put it there when all ranks have written theirs.

    Args:
        target: the folder; it is on a disk that all ranks see.
        state: what this rank has, in the same order on all ranks.

    Raises:
        CheckpointError: a file cannot be written; on all ranks. What was there before is unchanged.
    """
    transport = current_transport()
    payload = shard_files.payload(target.name, transport.rank, state)
    beside = transport.broadcast_object(target.with_name(f".{target.name}.{os.getpid()}"), 0)
    leads = transport.rank == 0
    try:
        run_on_all_ranks((lambda: beside.mkdir(parents=True)) if leads else lambda: None)
        written = _attempt(lambda: payload.write(payload.content, beside / Path(payload.name).name))
        answers = transport.gather_object(written)
        _refuse([failure for _, failure in answers])
        reports = [report for report, _ in answers]
        run_on_all_ranks((lambda: _finish(payload, reports, beside, target)) if leads else lambda: None)
    finally:
        if leads:
            shutil.rmtree(beside, ignore_errors=True)


def _finish(payload: Payload, reports: list[Any], beside: Path, target: Path) -> None:
    assert payload.finish is not None
    payload.finish(beside, reports)
    if target.exists():
        shutil.rmtree(target)
    os.replace(beside, target)
