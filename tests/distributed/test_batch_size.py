"""Several processes agree on the batch size, also when one runs out while the others wait for it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate.diagnostics import find_executable_batch_size, memory
from accelerate.ops import gather, reduce, reduce_async
from accelerate.state import PartialState

Run = Callable[..., list[Any]]


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def search(failing_rank: int | None, when: str, timeout: float) -> dict[str, Any]:
    """Train with batches of 8, of which at most 4 fit on one rank, or on all when it is None."""
    memory.STUCK_TIMEOUT = timeout
    state = PartialState()
    sizes, groups, kept_alive = [], [], []
    before = reduce_async([1.0], "sum", "test").wait()  # opens a group of its own

    @find_executable_batch_size(starting_batch_size=8)
    def train(batch_size: int, bias: int) -> int:
        sizes.append(batch_size)
        groups.append(weakref.ref(dist.group.WORLD))  # no id: a new group may have the address of the old one
        full = batch_size > 4 and failing_rank in (None, state.process_index)
        if full and when == "before":
            run_out()
        if when != "alone":
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).to(state.device))
            kept_alive.append(model)
            loss = model(torch.ones(batch_size, 2, device=state.device)).sum()
            if full:
                run_out()
            loss.backward()
        elif full:
            run_out()
        return batch_size + bias

    found = train(10)
    total = reduce(torch.tensor(float(found)), "sum").item()
    again = train(20)
    return {
        "found": (found, again),
        "total": total,
        "sizes": sizes,
        "kept group": groups[0]() is groups[1](),
        "threads": [thread.name for thread in threading.enumerate() if "attempt" in thread.name],
        "gathered": gather(torch.tensor([state.process_index])).tolist(),
        "in the background": [before, reduce_async([1.0], "sum", "test").wait()],
    }


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("failing_rank", "when", "kept"),
    [
        pytest.param(1, "before", False, marks=pytest.mark.slow),
        (0, "in the middle", False),
        (None, "in the middle", True),
        (1, "alone", True),
    ],
)
def test_all_ranks_retry_with_a_smaller_batch(
    run: Run, failing_rank: int | None, when: str, kept: bool
) -> None:
    timeout = 1.0 if not kept else 20.0
    for result in run(search, failing_rank, when, timeout, processes=3):
        assert result["found"] == (14, 24)
        assert result["total"] == 42.0
        assert result["sizes"] == [8, 4, 4]
        assert result["kept group"] is kept
        assert result["threads"] == []
        assert result["gathered"] == [0, 1, 2]
        assert result["in the background"] == [[3.0], [3.0]]


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


def test_all_ranks_raise_the_error_at_batch_size_zero(run: Run) -> None:
    assert all(text.startswith("No executable batch size found, reached zero.") for text in run(find_nothing))
