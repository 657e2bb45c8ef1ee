"""Datasets that rank 0 reads for all ranks, and that wait for what another thread puts in a queue."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from tests.stand_ins.cases import call_for_each
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator
from accelerate.diagnostics.digest import format_screen
from accelerate.launch import FOLDER_VARIABLE, KEY_VARIABLE, collect
from accelerate.state import PartialState
from accelerate.utils import patch_environment

Run = Callable[..., Any]
SIZE = 14  # three batches of two ranks, and two samples


class Queued(IterableDataset[int]):
    """Yields what a queue holds up to None, and raises an exception that it holds."""

    def __init__(self, items: Queue[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        while (item := self.items.get()) is not None:  # QUEUE
            if isinstance(item, Exception):
                raise item
            yield item


def feed(items: Queue[Any], end: Exception | None, pause: float = 0.0) -> None:
    for number in range(SIZE):
        time.sleep(pause)
        items.put(number)
    items.put(end)


def read_queue(in_thread: bool, end: Exception | None) -> list[Any]:
    """Return what a rank reads; only rank 0 has items in its queue."""
    accelerator = Accelerator()
    items: Queue[Any] = Queue()
    thread = threading.Thread(target=feed, args=(items, end, 0.01 * in_thread), daemon=True)
    if accelerator.is_main_process:
        thread.start()
        if not in_thread:
            thread.join()
    seen: list[Any] = []
    try:
        for batch in accelerator.prepare(DataLoader(Queued(items), batch_size=2)):
            seen.append(accelerator.gather_for_metrics(batch).tolist())
    except LookupError as error:
        seen.append(str(error))
    if accelerator.is_main_process:
        thread.join()
    return seen


def test_all_ranks_end_with_the_queue_of_rank_0(run: Run) -> None:
    batches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
    cases = [(False, None), (True, None)]  # whether a thread fills the queue meanwhile
    assert run(call_for_each, read_queue, cases) == [[batches, batches]] * 2


def test_an_error_after_the_queue_is_raised_at_the_same_batch(run: Run) -> None:
    gone = LookupError("the source is gone")
    first, second = run(call_for_each, read_queue, [(False, gone), (True, gone)])
    assert first == second
    for seen in first:
        assert seen[0] == [0, 1, 2, 3]
        assert seen[-1] == "the source is gone"


def wait_for_queue(ready: int) -> None:
    """Read a queue that holds some items, and gets no others."""
    with patch_environment(ACCELERATE_HANG_TIMEOUT="0"):  # ranks that start late are no fault here
        PartialState()
    accelerator = Accelerator()
    items: Queue[Any] = Queue()
    for number in range(ready):
        items.put(number)
    for _ in accelerator.prepare(DataLoader(Queued(items), batch_size=2)):  # READS
        pass


@pytest.mark.parametrize("ready", [0, 8])
def test_the_report_names_the_dataset_for_which_rank_0_waits(end: Run, tmp_path: Path, ready: int) -> None:
    env = {
        "ACCELERATE_HANG_TIMEOUT": "1",
        "ACCELERATE_HANG_ACTION": "abort",
        FOLDER_VARIABLE: str(tmp_path),
        KEY_VARIABLE: "as a launcher hands it down",
    }
    ended = end(wait_for_queue, ready, env=env)
    reads, queue = line_of("READS"), line_of("QUEUE")
    said = (
        rf"accelerate: hang: rank 1 waits in \w+ #\d+, FILE:{reads}, since \d+ s; rank 0 waits for the "
        rf"dataset of rank 0, FILE:{reads if ready else queue}, since .*line {queue}, in __iter__"
    )
    digest = format_screen(collect(tmp_path, 1), tmp_path).replace(__file__, "FILE")
    assert re.search(said, digest, re.DOTALL), f"{digest}\n{ended.outputs}"
    assert ended.codes == [1, 1]


def line_of(comment: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))
