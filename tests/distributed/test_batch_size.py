"""Several processes agree on the batch size, or end with one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate.base import StateError
from accelerate.diagnostics import find_executable_batch_size, memory
from accelerate.ops import gather, reduce, reduce_async
from accelerate.state import PartialState, process_group

Run = Callable[..., list[Any]]


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def search(failing_rank: int | None, trains: bool) -> dict[str, Any]:
    """Train with batches of 8, of which at most 4 fit on one rank, or on all when it is None."""
    state = PartialState()
    sizes, kept_alive = [], []
    group = dist.group.WORLD
    before = reduce_async([1.0], "sum", "test").wait()  # opens a group of its own

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int, bias: int) -> int:
        sizes.append(batch_size)
        if trains:
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).to(state.device))
            kept_alive.append(model)
            loss = model(torch.ones(batch_size, 2, device=state.device)).sum()
        if batch_size > 4 and failing_rank in (None, state.process_index):
            run_out()
        if trains:
            loss.backward()
        return batch_size + bias

    found = train(10)
    total = reduce(torch.tensor(float(found)), "sum").item()
    again = train(20)
    return {
        "found": (found, again),
        "total": total,
        "sizes": sizes,
        "kept group": dist.group.WORLD is group,
        "gathered": gather(torch.tensor([state.process_index])).tolist(),
        "in the background": [before, reduce_async([1.0], "sum", "test").wait()],
    }


@pytest.mark.cpu_only
@pytest.mark.parametrize(("failing_rank", "trains"), [(None, True), (1, False)])
def test_all_ranks_retry_with_a_smaller_batch(run: Run, failing_rank: int | None, trains: bool) -> None:
    for result in run(search, failing_rank, trains, processes=3):
        assert result["found"] == (14, 24)
        assert result["total"] == 42.0
        assert result["sizes"] == [8, 4, 4]
        assert result["kept group"]
        assert result["gathered"] == [0, 1, 2]
        assert result["in the background"] == [[3.0], [3.0]]


def run_out_while_others_wait() -> str:
    memory.STUCK_TIMEOUT = 1.0
    state = PartialState()

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        if state.process_index == 1:
            run_out()
        reduce(torch.ones(1), "sum")

    with pytest.raises(StateError) as caught:
        train()
    dist.destroy_process_group()  # as at the end of the process, which ends the wait of the other ranks
    return str(caught.value)


@pytest.mark.cpu_only
def test_ranks_that_wait_for_one_that_ran_out_end_with_one_error(run: Run) -> None:
    *texts, last = run(run_out_while_others_wait, processes=3)
    for text in texts:
        assert text.startswith("Ranks [1] ran out of memory with a batch size of 8, and the other ranks wait")
    assert last == texts[0] or last.startswith("The process that hosts the store")  # rank 0 may have ended
    assert all("starting_batch_size=4" in text for text in (*texts, last))


def run_out_after_rank_0_has_ended() -> str:
    state = PartialState()
    if state.process_index == 0:
        return ""
    store: Any = process_group.connect_store()

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        with pytest.raises(dist.DistNetworkError):
            store.wait(["never written"])
        run_out()

    with pytest.raises(StateError) as caught:
        train()
    return str(caught.value)


@pytest.mark.cpu_only
def test_ranks_that_run_out_after_the_store_has_ended_say_so(run: Run) -> None:
    _, text = run(run_out_after_rank_0_has_ended)
    assert text.startswith("The process that hosts the store of the run, rank 0 or the launcher, has ended")
    assert "starting_batch_size=4" in text


def run_out_after_different_collectives() -> str:
    state = PartialState()

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> None:
        if state.process_index == 0:
            dist.broadcast(torch.ones(1, device=state.device), 0, async_op=True)
        run_out()

    with pytest.raises(StateError) as caught:
        train()
    return str(caught.value)


def test_ranks_with_other_numbers_of_collectives_do_not_retry(run: Run) -> None:
    (text,) = set(run(run_out_after_different_collectives))
    assert text.startswith("Ranks [0, 1] ran out of memory with a batch size of 8")


def fail_on_one_rank() -> str:
    state = PartialState()

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int) -> int:
        if state.process_index == 1:
            raise KeyError("column")
        return batch_size

    try:
        train()
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_an_error_of_one_process_reaches_the_others(run: Run) -> None:
    first, second = run(fail_on_one_rank)
    assert second == "KeyError: 'column'"
    assert first == "StateError: The attempt failed on another rank. Rank 1: KeyError: 'column'"


def find_nothing() -> str:
    PartialState()

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> None:
        if PartialState().process_index == 0:
            run_out()

    with pytest.raises(RuntimeError) as refused:
        train()
    return str(refused.value)


@pytest.mark.cpu_only  # the simulated device does not count collectives
def test_all_ranks_raise_the_error_at_batch_size_zero(run: Run) -> None:
    assert all(text.startswith("No executable batch size found, reached zero.") for text in run(find_nothing))
