"""The comparison of ranks over a store: in a tree, without waiting, old summaries left out."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from accelerate.monitoring import PHASES, RankExchange, StepTimes
from accelerate.state import StoreChannel, as_dataclass

MODULE = "accelerate.monitoring.rank_comparison"


def times(seconds: float) -> StepTimes:
    return StepTimes(1, seconds, dict.fromkeys(PHASES, 0.0) | {"forward": seconds}, 0)


def exchanges(size: int) -> list[RankExchange]:
    channel = StoreChannel(HashStore(), "times", {"ACCELERATE_RUN_KEY": "key"})
    return [RankExchange(channel, as_dataclass, rank, size) for rank in range(size)]


def look_all(ranks: list[RankExchange], seconds: dict[int, float], step: int) -> None:
    for exchange in reversed(ranks):
        exchange.exchange(step, times(seconds.get(exchange.rank, 0.1)))


def test_all_ranks_read_which_rank_is_slow() -> None:
    ranks = exchanges(40)
    for step in range(5):
        look_all(ranks, {33: 0.2}, step)
    assert ranks[0].times is not None
    assert ranks[0].times.slow == {"33": pytest.approx(1.0)}
    assert ranks[0].times.compute["most"] == pytest.approx(0.2)
    for exchange in ranks:
        straggler = exchange.straggler
        assert straggler is not None
        assert (straggler.rank, straggler.slowdown, straggler.since) == (33, pytest.approx(1.0), 0)


def test_a_rank_that_posts_nothing_is_left_out() -> None:
    ranks = exchanges(4)
    look_all(ranks[:3], {}, 1)
    assert ranks[0].missing == 1
    assert ranks[0].result.straggler == -1


def test_a_summary_that_no_other_one_follows_becomes_old(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, now = exchanges(3), 100.0
    monkeypatch.setattr(f"{MODULE}.time.monotonic", lambda: now)
    look_all(ranks, {2: 9.0}, 1)
    now += 61.0
    look_all(ranks[:2], {}, 2)
    assert ranks[0].missing == 1
    assert ranks[0].times is not None
    assert ranks[0].times.slowest != 2


def test_values_of_other_programs_are_left_out() -> None:
    store = HashStore()
    channel = StoreChannel(store, "times", {"ACCELERATE_RUN_KEY": "key"})
    store.set("times/1", "{}")
    exchange = RankExchange(channel, as_dataclass, 0, 2)
    exchange.exchange(1, times(0.1))
    assert exchange.missing == 1


@pytest.mark.parametrize(("size", "seconds"), [(2, 2.0), (2000, 5.0), (4096, 10.0), (100_000, 10.0)])
def test_many_ranks_compare_less_often(size: int, seconds: float) -> None:
    assert RankExchange(exchanges(1)[0].channel, as_dataclass, 0, size).interval == seconds
