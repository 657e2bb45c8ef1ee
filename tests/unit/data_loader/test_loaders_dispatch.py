"""The parts of a dispatched loader that need no second process."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.stand_ins.streams import Stream
from torch.utils.data import DataLoader

from accelerate import data_loader
from accelerate.base import PreparationError
from accelerate.data_loader import (
    DataLoaderDispatcher,
    GlobalBatchBuilder,
    ShardPlan,
    count_samples,
    cut_batch,
    pack,
    prepare_data_loader,
    unpack,
)

CPU = torch.device("cpu")


def test_samples_are_counted_and_cut_in_any_batch() -> None:
    batch = {"scale": torch.tensor(2.0), "x": torch.arange(4), "names": list("abcd"), "shape": (2, 2), "k": 4}
    assert count_samples(batch) == 4
    assert count_samples(["a", "b"]) == 2
    assert count_samples("abc") is None
    cut = cut_batch(batch, slice(1, 3), 4)
    assert cut["x"].tolist() == [1, 2]
    assert cut_batch([list("abcd"), (1, 2, 3, 4)], slice(1, 3), 4) == [["b", "c"], (2, 3)]
    assert (cut["scale"].item(), cut["names"], cut["shape"], cut["k"]) == (2.0, ["b", "c"], (2, 2), 4)


def rows(count: int, width: int = 2, **others: Any) -> dict[str, Any]:
    return {"x": torch.arange(count * width).view(count, width), **others}


def boxes(count: int) -> list[Any]:
    return [{"boxes": torch.ones(number + 1, 4)} for number in range(count)]


WEIGHTS = {"weights": torch.arange(10.0), "number": torch.tensor(2), "mask": None, "name": "a"}
ENDS = {
    "equal leaves": ([rows(4, **WEIGHTS)] * 3 + [rows(3, **WEIGHTS)], (4, 3), (4, 4)),
    "as long as all samples": (
        [rows(4, w=torch.arange(7))] * 3 + [rows(3, w=torch.arange(7))],
        (4, 3),
        (4, 3),
    ),
    "other numbers": (
        [rows(4, n=torch.tensor(n)) for n in (4, 4, 4)] + [rows(3, n=torch.tensor(3))],
        (4, 3),
        (4, 3),
    ),
    "other widths": ([rows(4), rows(4), rows(4, 3), rows(3, 5)], (4, 3), (4, 3)),
    "one of another width": ([rows(4), rows(4), rows(3, 5)], (2, 1), (2, 2)),
    "lists of samples": ([rows(4, t=boxes(4)), rows(4, t=boxes(4)), rows(2, t=boxes(2))], (2, 0), (2, 4)),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_last_batches_may_have_samples_of_any_shape_and_other_leaves(end: str) -> None:
    batches, counts, sizes = ENDS[end]
    *_, last = GlobalBatchBuilder(2, nominal_rows=4).build(iter(batches))
    assert last.counts == counts
    assert tuple(len(part["x"]) for part in last.parts) == sizes
    for part in last.parts:
        assert "t" not in part or len(part["t"]) == len(part["x"])
        assert "w" not in part or len(part["w"]) == 7
        assert "weights" not in part or all(part[name] is value for name, value in WEIGHTS.items())


def images(count: int, start: int, height: int = 0) -> list[torch.Tensor]:
    return [torch.full((3, height or 4 + number, 4), float(start + number)) for number in range(count)]


def detections(count: int, start: int, height: int = 0) -> tuple[Any, ...]:
    return tuple(images(count, start, height)), tuple(
        {"boxes": torch.ones(n, 4), "id": torch.tensor(n)} for n in range(start, start + count)
    )


SAMPLE_LISTS = {
    "labels": lambda n, start: (images(n, start), torch.arange(start, start + n)),
    "one shape": lambda n, start: (images(n, start, 4), torch.arange(start, start + n)),
    "texts": lambda n, start: {"images": images(n, start, 4), "texts": [str(start + i) for i in range(n)]},
    "detections": detections,
    "detections of one shape": lambda n, start: detections(n, start, 4),
}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", SAMPLE_LISTS)
def test_a_list_of_samples_is_cut_and_padded_like_the_labels(kind: str, split: bool) -> None:
    layout: Any = SAMPLE_LISTS[kind]
    batches = [layout(4, 0), layout(4, 4), layout(3, 8)]
    built = list(GlobalBatchBuilder(2, split=split, nominal_rows=2 if split else 4).build(iter(batches)))
    found = []
    for batch in built:
        for part in batch.parts:
            samples, others = part.values() if isinstance(part, dict) else part
            assert type(samples) is type(batches[0]["images"] if kind == "texts" else batches[0][0])
            assert all(image.shape[0] == 3 for image in samples)
            numbers = [int(image[0, 0, 0]) for image in samples]
            labels = [other["id"] if isinstance(other, dict) else other for other in others]
            assert numbers == [int(label) for label in labels]
            found.append(numbers)
    assert sum(found, [])[:12] == [*range(11), 0]
    assert built[-1].counts == (2, 1)
    assert [len(numbers) for numbers in found[-2:]] == [2, 2]


def test_a_list_of_inputs_with_a_row_for_each_sample_is_no_list_of_samples() -> None:
    def features(count: int) -> Any:
        return [torch.ones(count, 4), torch.ones(count, 2)], [torch.zeros(count), torch.zeros(count)]

    *_, last = GlobalBatchBuilder(2, nominal_rows=4).build(iter(map(features, (4, 4, 4, 3))))
    assert last.counts == (4, 3)
    assert [[len(tensor) for part in parts for tensor in part] for parts in last.parts] == [[4] * 4] * 2


def nested(count: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(number + 1) for number in range(count)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "layout", [nested, lambda count: torch.eye(count, 4).to_sparse()], ids=["nested", "sparse"]
)
def test_batches_of_other_layouts_are_read_and_cut(states: None, layout: Any) -> None:
    loader = DataLoader(list(range(5)), batch_size=2, collate_fn=lambda samples: layout(len(samples)))
    assert [batch.size(0) for batch in prepare_data_loader(loader)] == [2, 2, 1]
    *_, last = GlobalBatchBuilder(2).build(iter(map(layout, (3, 3, 3, 2))))
    assert [part.size(0) for part in last.parts] == [3, 3]
    sent = pack(last, 1)
    received = unpack(pickle.loads(sent.spec), sent.chunk)
    assert received.layout == last.parts[1].layout
    assert received.size(0) == 3


@pytest.mark.parametrize("width", [2, 3])
def test_split_batches_are_padded_with_samples_of_their_shape(width: int) -> None:
    *_, last = GlobalBatchBuilder(2, split=True).build(iter([rows(4), rows(3, width)]))
    assert [part["x"].shape for part in last.parts] == [(2, width)] * 2


def of_samples(start: int, count: int) -> dict[str, Any]:
    numbers = range(start, start + count)
    boxes = [torch.arange(number + 1) for number in numbers]
    return {
        "x": torch.tensor(numbers),
        "targets": [{"boxes": each, "image": number} for number, each in zip(numbers, boxes, strict=True)],
        "ragged": boxes,
        "scalars": [torch.tensor(number) for number in numbers],
        "pairs": tuple((number, "text", None) for number in numbers),
        "views": [torch.arange(start, start + count)] * 4,
        "state": (torch.arange(start, start + count), None, 1.5, "text"),
    }


@pytest.mark.parametrize("end", [4, 3, 1])
def test_lists_with_one_structure_for_each_sample_are_split_with_their_samples(end: int) -> None:
    batches = GlobalBatchBuilder(2, split=True).build(iter([of_samples(0, 4), of_samples(4, end)]))
    for batch in batches:
        for part in batch.parts:
            numbers, size = part["x"].tolist(), len(part["x"])
            assert [target["image"] for target in part["targets"]] == numbers
            assert [len(target["boxes"]) - 1 for target in part["targets"]] == numbers
            assert [len(each) - 1 for each in part["ragged"]] == numbers
            assert [int(each) for each in part["scalars"]] == numbers
            assert [each[0] for each in part["pairs"]] == numbers
            assert [len(view) for view in part["views"]] == [size] * 4
            assert part["state"][0].tolist() == numbers
            assert part["state"][1:] == (None, 1.5, "text")


def test_an_object_that_cannot_be_sliced_is_refused_with_the_fix() -> None:
    batches_of_all = GlobalBatchBuilder(2).build(iter([object(), object(), object()]))
    assert len(next(batches_of_all).parts) == 2
    with pytest.raises(PreparationError, match="slice_fn_for_dispatch"):
        next(batches_of_all)
    assert len(list(GlobalBatchBuilder(2, drop_last=True).build(iter([object(), object(), object()])))) == 1


def test_the_position_is_noted_before_reading_on() -> None:
    read: list[int] = []
    noted: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        for number in range(4):
            read.append(number)
            yield torch.tensor([number])

    list(GlobalBatchBuilder(2).build(batches(), lambda: noted.append(len(read))))
    assert noted == [2, 4, 4]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("size", [1, 7, 12])
def test_the_length_of_a_dispatched_loader_is_its_number_of_batches(
    states: None, drop_last: bool, split: bool, size: int
) -> None:
    batches = DataLoader(torch.arange(size), batch_size=3, drop_last=drop_last)  # type: ignore[arg-type]
    batches_of_all = list(GlobalBatchBuilder(3, split, drop_last).build(iter(batches)))
    for group in range(3):
        loader = DataLoaderDispatcher(
            torch.arange(size), split_batches=split, _drop_last=drop_last, batch_size=3, drop_last=drop_last
        )
        loader.plan = ShardPlan("dispatch", 3, group, split=split)
        assert len(loader) == len(batches_of_all)


def test_one_process_dispatches_to_itself(states: None) -> None:
    loader: Any = DataLoaderDispatcher(Stream(5), batch_size=2)
    seen = [(batch.tolist(), loader.end_of_dataloader) for batch in loader]
    assert seen == [([0, 1], False), ([2, 3], False), ([4], True)]
    assert loader.gradient_state.active_dataloader is None
    assert loader.total_batch_size == 2


def test_xla_loader_reads_ahead_without_losing_the_end(states: None, monkeypatch: pytest.MonkeyPatch) -> None:
    class MpDeviceLoader:
        """Like torch_xla's: reads everything it can before it gives the first batch."""

        def __init__(self, loader: Any, device: Any) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            return iter(list(self.loader))

    parallel_loader = ModuleType("torch_xla.distributed.parallel_loader")
    parallel_loader.MpDeviceLoader = MpDeviceLoader  # type: ignore[attr-defined]
    for name in ("torch_xla", "torch_xla.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, parallel_loader.__name__, parallel_loader)
    runtime = ModuleType("torch_xla.runtime")
    runtime.is_spmd = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
    monkeypatch.setattr(data_loader, "is_torch_xla_available", lambda: True)
    data_loader.wrapper_for_xla.cache_clear()
    kind = data_loader.MpDeviceLoaderWrapper
    data = DataLoader(list(range(5)), batch_size=2)
    loader: Any = prepare_data_loader(data, torch.device("xla:0"), 1, 0, put_on_device=True)
    assert isinstance(loader, kind)
    assert loader.target == torch.device("xla:0")
    assert [(batch.tolist(), loader.end_of_dataloader) for batch in loader] == [
        ([0, 1], False),
        ([2, 3], False),
        ([4], True),
    ]
    assert len(loader) == 3
    late = data_loader.skip_first_batches(loader, 2)
    assert isinstance(late, kind)
    assert [batch.tolist() for batch in late] == [[4]]
    data_loader.wrapper_for_xla.cache_clear()


def test_the_xla_loader_is_only_there_with_torch_xla() -> None:
    with pytest.raises(AttributeError, match="MpDeviceLoaderWrapper"):
        _ = data_loader.MpDeviceLoaderWrapper
