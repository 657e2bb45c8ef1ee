"""Workers of prepared loaders can dump their stack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from accelerate.base import stack_dumps
from accelerate.data_loader import WorkersObserver, prepare_data_loader
from accelerate.state import services


class Offers(Dataset[float]):
    """Whether the worker can dump its stack, and the value that the function of the user has set."""

    noted = 0

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> float:
        import os

        return 10 * float(stack_dumps.offers(os.getpid())) + get_worker_info().dataset.noted


def tell(worker_id: int) -> None:
    get_worker_info().dataset.noted = 1 + worker_id


@pytest.mark.usefixtures("states")
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("init", [tell, pytest.param(None, marks=pytest.mark.slow)])
def test_workers_dump_their_stack_and_call_the_worker_init_fn(method: str, init: Any) -> None:
    loader = prepare_data_loader(
        DataLoader(Offers(), num_workers=1, worker_init_fn=init, multiprocessing_context=method)
    )
    assert [float(batch) for batch in loader] == [10 + bool(init)] * 2
    assert loader.worker_init_fn is init


@pytest.mark.usefixtures("states")
def test_each_start_of_workers_calls_the_observer() -> None:
    started: list[list[int]] = []

    class Observer(WorkersObserver):
        def follow(self, iterator: Any) -> None:
            started.append([w.pid for w in iterator._workers])

    services.put(WorkersObserver, Observer())
    data = torch.arange(2)
    assert len(list(prepare_data_loader(DataLoader(data, num_workers=1)))) == 2  # type: ignore[arg-type]
    assert len(list(prepare_data_loader(DataLoader(data)))) == 2  # type: ignore[arg-type]
    assert [len(pids) for pids in started] == [1]
