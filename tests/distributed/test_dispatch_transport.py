"""Dispatched batches that are sent through shared memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.stand_ins.cases import call_for_each
from tests.stand_ins.streams import Stream
from torch.utils.data import DataLoader

from accelerate.data_loader import dispatch_transport, memory_pools, prepare_data_loader
from accelerate.state import PartialState

Run = Callable[..., list[Any]]


def dispatch(loader: DataLoader[Any], **config: Any) -> Any:
    PartialState()
    return prepare_data_loader(loader, put_on_device=True, dispatch_batches=True, **config)


LARGE_SIZES = [3, 300_000, 2_000_000, 300_000, 7, 2_000_000, 5_000_000, 300_000]


def read_large(shares: bool) -> list[tuple[bool, list[Any], bool]]:
    """Batches of very different size, all kept until the end, in two passes of which the first breaks off."""
    if not shares:
        memory_pools.process_home = lambda: f"machine {PartialState().process_index}"  # type: ignore[assignment]
    samples = [
        {"x": torch.arange(size) * (place + 1), "y": torch.full((5,), place)}
        for place, size in enumerate(np.repeat(LARGE_SIZES, 3).tolist())
    ]
    prepared = dispatch(DataLoader(Stream(samples), batch_size=None))
    cut_off = [batch for batch, _ in zip(prepared, range(3), strict=False)]
    kept = [*cut_off, *prepared]
    seen = [(len(batch["x"]), batch["x"].sum().item(), batch["y"].tolist()) for batch in kept]
    whole = all(torch.equal(batch["x"], torch.arange(len(batch["x"])) * batch["x"][1]) for batch in kept)
    return [whole, seen, prepared._channel._memory is not None]  # type: ignore[return-value]


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_batches_in_shared_memory_equal_broadcast_batches(run: Run, processes: int) -> None:
    shared = run(read_large, True, processes=processes)
    sent = run(read_large, False, processes=processes)
    assert [is_shared for _, _, is_shared in shared] == [True] * processes
    assert [is_shared for _, _, is_shared in sent] == [False] * processes
    assert [rank[:2] for rank in shared] == [rank[:2] for rank in sent]
    assert all(is_whole for is_whole, *_ in shared)


def keep_stacked(split: bool) -> list[Any]:
    """Batches that are stacked in memory which is used again; all of three passes are kept."""
    samples = [{"x": torch.full((70_000,), float(number)), "y": number} for number in range(22)]
    prepared = dispatch(DataLoader(Stream(samples), batch_size=2), split_batches=split)
    kept = [batch for _ in range(3) for batch in prepared]
    memory = prepared._channel._memory
    assert memory._starts or PartialState().process_index
    assert all(memory.find(batch["x"]) is None for batch in kept)
    assert all((batch["x"] == batch["y"].unsqueeze(1)).all() for batch in kept)
    return [batch["y"].tolist() for batch in kept]


def test_stacked_batches_never_change(run: Run) -> None:
    for ranks in zip(*run(call_for_each, keep_stacked, [False, True]), strict=True):  # whether they are split
        global_batches = [[*first, *second] for first, second in zip(*ranks, strict=True)]
        assert [number for numbers in global_batches for number in numbers] == [*range(22)] * 3


def read_behind(mark: Path) -> tuple[list[bool], int]:
    """Rank 1 keeps its sixth batch until rank 0 has its ninth; also returns how many blocks rank 0 keeps."""
    samples = [torch.full((dispatch_transport.AHEAD // 4 // 8,), place) for place in range(64)]
    prepared = dispatch(DataLoader(Stream(samples), batch_size=None))
    rank = PartialState().process_index
    seen = []
    for place, batch in enumerate(prepared):
        if rank == 0 and place == 8:
            mark.touch()
        while rank == 1 and place == 5 and not mark.exists():
            time.sleep(0.01)
        seen.append(bool((batch == 2 * place + rank).all()))
    return seen, len(prepared._channel._sent)


def test_rank_0_sends_ahead_of_a_slow_rank_without_overwriting(run: Run, tmp_path: Path) -> None:
    (first, kept), (second, _) = run(read_behind, tmp_path / "mark")
    assert first == second == [True] * 32
    assert kept <= 4
