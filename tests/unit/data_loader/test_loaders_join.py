"""Batches of ranks whose shares differ in length, over a transport that simulates the other rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from accelerate.base import PreparationError
from accelerate.data_loader import DatasetJoin, LastMark, PaddingSource
from accelerate.ops import Transport


class Other(Transport):
    """This rank is 0; rank 1 has batches of these sizes."""

    size = 2

    def __init__(self, sizes: list[int]) -> None:
        self.sizes: Iterator[int] = iter(sizes)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, torch.tensor([next(self.sizes, 0)])])


def batches(*sizes: int) -> Iterator[torch.Tensor]:
    """Batches of numbers that count up."""
    start = 0
    for size in sizes:
        yield torch.arange(start, start + size)
        start += size


def take(mine: Iterator[Any], theirs: list[int], **options: Any) -> tuple[list[Any], dict[int, Any]]:
    ranks = DatasetJoin(
        Other(theirs), [0, 1], PaddingSource(), **{"pads_short": True, "drop_last": False, **options}
    )
    padding_record: dict[int, Any] = {}
    mark = LastMark()
    batches = ranks.take(mine, mark, None, lambda state, ended: None, 0, padding_record)
    taken = [(batch, mark.is_last) for batch in batches]
    return [
        (getattr(batch, "tolist", lambda b=batch: b)(), is_last) for batch, is_last in taken
    ], padding_record


def test_a_rank_that_has_run_out_is_filled_from_its_first_batch() -> None:
    taken, padding_record = take(batches(3, 1), [3, 3, 2])
    assert taken == [([0, 1, 2], False), ([3, 0, 1], False), ([0, 1], True)]
    assert padding_record == {1: (1, 3), 2: (0, 2)}


def test_a_share_smaller_than_its_padding_is_repeated() -> None:
    taken, _ = take(batches(1), [4, 4])
    assert taken == [([0] * 4, False), ([0] * 4, True)]


def test_a_short_batch_of_another_width_is_filled_from_itself() -> None:
    mine = [torch.zeros(2, 1), torch.ones(1, 3)]
    taken, padding_record = take(iter(mine), [2, 2])
    assert taken[1] == ([[1.0] * 3] * 2, True)
    assert padding_record == {1: (1, 2)}


def test_ready_made_batches_keep_their_size() -> None:
    taken, padding_record = take(batches(3, 1), [1, 5, 4], pads_short=False)
    assert taken == [([0, 1, 2], False), ([3], False), ([0, 1, 2], True)]
    assert padding_record == {0: (3, 1), 1: (1, 5), 2: (0, 4)}


def test_drop_last_ends_with_the_first_rank_that_does() -> None:
    taken, _ = take(batches(2, 2, 2), [2, 2], drop_last=True)
    assert taken == [([0, 1], False), ([2, 3], True)]
    assert take(batches(), [2, 2], drop_last=True) == ([], {})


@pytest.mark.parametrize(("mine", "theirs", "empty"), [((), [2], [0]), ((2,), [], [1])])
def test_an_empty_shard_is_an_error_on_every_rank(
    mine: tuple[int, ...], theirs: list[int], empty: list[int]
) -> None:
    with pytest.raises(PreparationError, match=rf"shards \[{empty[0]}\] of 2 are empty"):
        take(batches(*mine), theirs)


def test_empty_shards_on_all_ranks_are_no_error() -> None:
    assert take(batches(), []) == ([], {})


def test_batches_that_cannot_be_counted_are_one_each() -> None:
    taken, padding_record = take(iter(["a", "b"]), [1, 1, 1])
    assert taken == [("a", False), ("b", False), ("a", True)]
    assert padding_record == {2: (0, 1)}


def test_ranks_of_one_group_count_once() -> None:
    ranks = DatasetJoin(Other([2, 2]), [0, 0], PaddingSource(), pads_short=True, drop_last=False)
    padding_record: dict[int, Any] = {}
    list(ranks.take(batches(2, 2), LastMark(), None, lambda state, ended: None, 0, padding_record))
    assert padding_record == {1: (2,)}


def test_the_state_of_a_batch_is_that_after_it() -> None:
    read: list[int] = []

    def source() -> Iterator[torch.Tensor]:
        for number, batch in enumerate(batches(1, 1, 1)):
            read.append(number)
            yield batch
        read.append(-1)

    kept: list[Any] = []
    ranks = DatasetJoin(Other([1, 1, 1]), [0, 1], PaddingSource(), pads_short=True, drop_last=False)
    for _ in ranks.take(source(), LastMark(), lambda: list(read), lambda *state: kept.append(state), 0, {}):
        pass
    assert kept == [([0], False), ([0, 1], False), ([0, 1, 2, -1], False)]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 1)])
def test_a_shard_that_ends_first_keeps_the_state_in_front_of_its_last_batch(sizes: tuple[int, ...]) -> None:
    read: list[int] = []
    source = (read.append(number) or batch for number, batch in enumerate(batches(*sizes)))
    kept: list[Any] = []
    ranks = DatasetJoin(Other([2, 2, 2, 2]), [0, 1], PaddingSource(), pads_short=True, drop_last=False)
    for _ in ranks.take(source, LastMark(), lambda: list(read), lambda *state: kept.append(state), 0, {}):
        pass
    assert kept == [([0], False), ([0], True), ([0], True), ([0, 1], False)]


def test_a_shard_that_had_ended_keeps_the_state_of_the_checkpoint() -> None:
    kept: list[Any] = []
    first = PaddingSource([next(batches(2))])
    ranks = DatasetJoin(Other([2, 2]), [0, 1], first, pads_short=True, drop_last=False)
    taken = ranks.take(
        iter(()), LastMark(), lambda: "now", lambda *state: kept.append(state), 5, {}, ended="before"
    )
    assert [batch.tolist() for batch in taken] == [[0, 1], [0, 1]]
    assert kept == [("before", True), ("now", False)]
