"""Gathering for metrics and weighted means where there is one process, and what is refused anywhere."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from tests.stand_ins.streams import Stream
from torch.utils.data import DataLoader, IterableDataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.base import ConfigurationError, StateError

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


@pytest.mark.parametrize("dispatch", [None, True, False])
def test_repeated_values_of_a_stream_without_length_are_cut_to_its_last_batch(dispatch: bool | None) -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    samples = Stream(torch.arange(11.0))
    loader = accelerator.prepare(DataLoader(samples, batch_size=4))
    losses = [accelerator.gather_for_metrics(batch.mean().repeat(4)) for batch in loader]
    assert torch.cat(losses).mean().item() == 5
    whole = accelerator.prepare(DataLoader(samples, batch_size=4, collate_fn=join_in_one_row))
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


OBJECTS: dict[str, tuple[Any, bool, Any]] = {
    "objects with as many rows as a full batch": ([torch.ones(2, 4)], False, 1),
    "objects, on request": ([torch.ones(2, 4)], True, 1),
    "dictionaries": ([{"boxes": torch.ones(2, 4)}], False, 1),
    "dictionaries with other values": ([{"boxes": torch.ones(2, 4), "name": "a"}], False, 1),
    "lists": ([[torch.ones(2, 4)]], False, 1),
    "a tuple of lists": (([{"boxes": torch.ones(2, 4)}], ["a"]), False, 2),
    "a tuple of tensors and lists, on request": ((torch.ones(1), ["a"]), True, 2),
    "a tuple of tensors and lists": ((torch.ones(1), ["a"]), False, 2),
    "a dictionary of lists": ({"boxes": [{"x": torch.ones(2, 4)}], "n": torch.ones(1)}, False, 2),
    "repeated objects": ([{"loss": torch.ones(2, 4)}] * 2, True, [{"loss": torch.ones(2, 4)}]),
    "repeated objects in a tuple": (([{"x": 1}] * 2, torch.ones(2)), False, ([{"x": 1}], torch.ones(1))),
}


def test_objects_with_tensors_are_not_cut() -> None:
    """The last batch has one of two samples."""
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(torch.arange(3.0), batch_size=2))  # type: ignore[arg-type]
    wrong = {}
    for number, _ in enumerate(loader):
        for name, (data, as_objects, expected) in OBJECTS.items():
            gathered = accelerator.gather_for_metrics(data, use_gather_object=as_objects)
            whole = data if number == 0 or isinstance(expected, int) else expected
            if str(gathered) != str(whole):
                wrong[number, name] = gathered
    assert not wrong


def test_data_is_cut_by_the_loader_that_it_is_from() -> None:
    accelerator = Accelerator(cpu=True)
    first, second = accelerator.prepare(
        DataLoader(torch.arange(8.0), batch_size=4),  # type: ignore[arg-type]
        DataLoader(torch.arange(6.0), batch_size=4),  # type: ignore[arg-type]
    )
    gathered: list[list[int]] = [[], [], []]
    for batch, other in zip(first, second, strict=True):
        results = [(batch.sum().repeat(4), batch), (other.sum().repeat(4), other), torch.ones(len(batch))]
        for lengths, data in zip(gathered, results, strict=True):
            lengths.append(len(accelerator.gather_for_metrics(data)[0 if isinstance(data, tuple) else ...]))
    assert gathered == [[4, 4], [4, 2], [4, 4]]

    gathered = [[], []]
    evaluation = iter(second)
    for batch in first:
        gathered[0].append(
            len(accelerator.gather_for_metrics(batch.sum().repeat(4) + batch.view(2, 2)[0, 0]))
        )
        other = next(evaluation)
        gathered[1].append(
            len(accelerator.gather_for_metrics({"loss": torch.ones(4), "y": other[1:]})["loss"])
        )
    assert gathered == [[4, 4], [4, 2]]


def test_samples_of_two_loaders_with_different_padding_are_refused() -> None:
    accelerator = Accelerator(cpu=True)
    loaders = accelerator.prepare(
        DataLoader(torch.arange(8.0), batch_size=4),  # type: ignore[arg-type]
        DataLoader(torch.arange(6.0), batch_size=4),  # type: ignore[arg-type]
    )
    pairs = zip(*loaders, strict=True)
    assert len(accelerator.gather_for_metrics(next(pairs))[0]) == 4
    with pytest.raises(StateError, match="Gather the outputs of each loader in a call of its own"):
        accelerator.gather_for_metrics(next(pairs))


def test_data_that_may_be_of_two_loaders_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    training, evaluation = accelerator.prepare(
        DataLoader(torch.arange(7.0), batch_size=4),  # type: ignore[arg-type]
        DataLoader(torch.arange(6.0), batch_size=4),  # type: ignore[arg-type]
    )
    for _ in training:  # a loop inside another one
        losses = [accelerator.gather_for_metrics(batch.mean().repeat(4)) for batch in evaluation]
        assert sum(map(len, losses)) == 6
    for _ in zip(training, evaluation, strict=True):
        for rows in (1, 2, 3):
            accelerator.gather_for_metrics(torch.ones(rows))
        accelerator.gather_for_metrics(torch.tensor(1.0))
    assert not caplog.records
    for _ in zip(training, evaluation, strict=True):
        accelerator.gather_for_metrics(torch.ones(4))
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_loader_releases_its_latest_batch() -> None:
    accelerator = Accelerator(cpu=True)
    loader: Any = accelerator.prepare(DataLoader(torch.arange(8.0), batch_size=4))  # type: ignore[arg-type]
    for batch in loader:
        assert loader.latest_batch is batch
        assert copy.copy(loader).latest_batch is None
    assert loader.latest_batch is None
    for _ in loader:
        break
    assert loader.latest_batch is None


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
