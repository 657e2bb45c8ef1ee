"""Gathering for metrics and weighted means where there is one process, and what is refused anywhere."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.base import ConfigurationError

pytestmark = pytest.mark.usefixtures("states")


@pytest.mark.parametrize("drop_last", [False, True])
def test_values_repeated_for_each_sample_are_cut_to_the_last_batch(drop_last: bool) -> None:
    """So loops weigh the losses of batches: 4, 4 and 3 times."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(11.0), batch_size=4, drop_last=drop_last))  # type: ignore[arg-type]
    losses, samples, names, whole = [], [], [], []
    for batch in loader:
        found = accelerator.gather_for_metrics({"loss": batch.mean().repeat(4), "samples": (batch,)})
        losses.append(found["loss"])
        samples.append(found["samples"][0])
        names += accelerator.gather_for_metrics(["name"] * 4)
        whole += [accelerator.gather_for_metrics(torch.ones(5)), accelerator.gather_for_metrics(["a", "b"])]
    count = 8 if drop_last else 11
    assert torch.cat(samples).tolist() == list(range(count))
    assert torch.cat(losses).mean().item() == pytest.approx((count - 1) / 2)
    assert names == ["name"] * count
    assert [len(each) for each in whole] == [5, 2] * len(loader)
    assert len(accelerator.gather_for_metrics(torch.ones(4))) == 4  # of no batch any more


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(11.0))


@pytest.mark.parametrize("dispatch", [None, True, False])
def test_repeated_values_of_a_stream_without_length_are_cut_to_its_last_batch(dispatch: bool | None) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=4))
    losses = [accelerator.gather_for_metrics(batch.mean().repeat(4)) for batch in loader]
    assert torch.cat(losses).mean().item() == 5
    whole = accelerator.prepare(DataLoader(Stream(), batch_size=4, collate_fn=join_in_one_row))
    assert [len(accelerator.gather_for_metrics(torch.ones(4))) for _ in whole] == [4, 4, 4]


def join_in_one_row(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples)[None]


def test_repeated_values_are_cut_to_short_batches_in_the_middle() -> None:
    accelerator = Accelerator(cpu=True)
    order: Any = [[0, 1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    loader = accelerator.prepare(DataLoader(torch.arange(11.0), batch_sampler=order))  # type: ignore[arg-type]
    losses = [accelerator.gather_for_metrics(batch.mean().repeat(4)) for batch in loader]
    assert torch.cat(losses).mean().item() == 5


class ByLength:
    """Batches of at most 4 samples."""

    batch_size, drop_last = 4, False

    def __iter__(self) -> Iterator[list[int]]:
        return iter(([0, 1], [2, 3, 4, 5], [6, 7, 8, 9], [10, 11, 12, 13]))

    def __len__(self) -> int:
        return 4


class WrongLength(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(12.0))

    def __len__(self) -> int:
        return 13


@pytest.mark.parametrize(
    ("loader", "rows"),
    [
        (DataLoader(torch.arange(14.0), batch_sampler=ByLength()), 14),  # type: ignore[arg-type]
        (DataLoader(WrongLength(), batch_size=4), 12),
        (DataLoader(torch.arange(14.0), batch_size=4, collate_fn=lambda x: torch.stack(x + x)), 28),  # type: ignore[arg-type]
    ],
    ids=["batches of different sizes", "wrong length", "doubled"],
)
def test_rows_of_the_last_batch_are_not_cut(loader: Any, rows: int) -> None:
    accelerator = Accelerator(cpu=True)
    assert sum(len(accelerator.gather_for_metrics(batch)) for batch in accelerator.prepare(loader)) == rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("weight", [3, 2.5, Fraction(1, 2), torch.tensor(4), torch.tensor([1.0, 2.0])])
def test_weighted_mean_of_one_process_returns_its_value(dtype: torch.dtype, weight: Any) -> None:
    if isinstance(weight, Fraction):
        weight = float(weight)
    value = {"a": torch.tensor([1.5, -2.0]).to(dtype), "b": [torch.tensor([[4.0, 8.0]]).to(dtype)]}
    mean = Accelerator(cpu=True).weighted_mean(value, weight)
    assert torch.equal(mean["a"], value["a"])
    assert torch.equal(mean["b"][0], value["b"][0])
    assert mean["a"].dtype == dtype


def test_means_of_integers_are_floating_point() -> None:
    mean = Accelerator(cpu=True).weighted_mean(torch.tensor(3), 2)
    assert (mean.item(), mean.dtype) == (3.0, torch.float32)


def test_the_mean_of_weight_zero_is_nan() -> None:
    assert Accelerator(cpu=True).weighted_mean(torch.tensor(3.0), 0).isnan()


@pytest.mark.parametrize("weight", ["5", None, [1, 2], torch.ones(3), torch.ones(2, 2)])
def test_a_weight_that_does_not_fit_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigurationError, match="weight="):
        Accelerator(cpu=True).weighted_mean(torch.tensor([1.0, 2.0]), weight)


def test_values_are_tensors() -> None:
    with pytest.raises(TypeError):
        Accelerator(cpu=True).weighted_mean({"loss": 2.0}, 1)
