"""gather_for_metrics over any prepared loader returns each sample exactly once."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from tests.stand_ins.streams import SizedStream, Stream
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import IterableDatasetShard, prepare_data_loader
from accelerate.utils import send_to_device

Run = Callable[..., list[Any]]


class Growing(BatchSampler):
    """Batches of 1, 2, 3, ... samples."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[list[int]]:
        start, size = 0, 1
        while start < self.samples:
            yield list(range(start, min(start + size, self.samples)))
            start, size = start + size, size + 1

    def __len__(self) -> int:
        return len(list(iter(self)))


def make_loader(kind: str, samples: int, batch: int) -> DataLoader[Any]:
    data = torch.arange(samples)
    if kind == "growing":
        return DataLoader(data, batch_sampler=Growing(samples))  # type: ignore[arg-type]
    if kind == "batch sampler":
        return DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), batch, False))  # type: ignore[arg-type]
    if kind == "ready batches":
        return DataLoader(list(data.split(batch)), batch_size=None)  # type: ignore[arg-type]
    if kind == "stream":
        return DataLoader(Stream(torch.arange(samples)), batch_size=batch)
    if kind == "sized stream":
        return DataLoader(SizedStream(torch.arange(samples)), batch_size=batch)
    return DataLoader(data, batch_size=batch, shuffle=kind == "shuffled")  # type: ignore[arg-type]


def evaluate(kind: str, samples: int, batch: int, settings: dict[str, Any]) -> list[Any]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**settings))
    loader = accelerator.prepare(make_loader(kind, samples, batch))
    seen: list[int] = []
    nested: list[int] = []
    words: list[str] = []
    for part in loader:
        seen += accelerator.gather_for_metrics(part).tolist()
        tree = accelerator.gather_for_metrics({"a": part, "b": [part * 2, (part.float(),)]})
        assert torch.equal(tree["a"] * 2, tree["b"][0])
        nested += tree["b"][1][0].long().tolist()
        words += accelerator.gather_for_metrics([str(number) for number in part.tolist()])
    return [seen, nested, [int(word) for word in words]]


KINDS = ("plain", "shuffled", "batch sampler", "growing", "ready batches", "stream", "sized stream")
SPLIT_KINDS = tuple(kind for kind in KINDS if kind not in ("growing", "ready batches"))
SIZES = ((11, 3), (12, 3), (1, 4), (2, 4), (13, 5))


def evaluate_all(settings: dict[str, Any], kinds: tuple[str, ...]) -> dict[tuple[str, int, int], list[Any]]:
    results = {}
    for kind in kinds:
        for samples, batch in SIZES:
            if settings.get("split_batches"):
                batch = 6
            results[kind, samples, batch] = evaluate(kind, samples, batch, settings)
    return results


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ({}, KINDS),
        pytest.param({"split_batches": True}, SPLIT_KINDS, marks=pytest.mark.slow),
        ({"dispatch_batches": True}, ("plain", "batch sampler", "growing", "ready batches", "stream")),
        ({"dispatch_batches": False}, ("stream", "sized stream")),
        pytest.param({"even_batches": False}, ("stream", "sized stream"), marks=pytest.mark.slow),
        ({"even_batches": False, "dispatch_batches": True}, ("plain", "batch sampler", "growing", "stream")),
        ({"even_batches": False, "dispatch_batches": False}, ("stream", "sized stream")),
        pytest.param(
            {"even_batches": False, "dispatch_batches": True, "split_batches": True},
            ("plain", "stream"),
            marks=pytest.mark.slow,
        ),
        ({"even_batches": False, "dispatch_batches": False, "split_batches": True}, ("stream",)),
    ],
    ids=[
        "default",
        "split",
        "dispatch",
        "sharded streams",
        "uneven streams",
        "uneven dispatch",
        "uneven sharded streams",
        "uneven split dispatch",
        "uneven split sharded streams",
    ],
)
def test_gather_for_metrics_returns_each_sample_once(
    run: Run, processes: int, settings: dict[str, Any], kinds: tuple[str, ...]
) -> None:
    for results in run(evaluate_all, settings, kinds, processes=processes, timeout=120):
        for (kind, samples, batch), collected in results.items():
            for numbers in collected:
                if kind == "shuffled":
                    numbers = sorted(numbers)
                assert numbers == list(range(samples)), (kind, samples, batch)


def evaluate_inside_training() -> tuple[list[int], list[bool]]:
    """An evaluation inside a training epoch sees its own loader, and the training loader again after it."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    train, test = accelerator.prepare(
        DataLoader(torch.arange(12), batch_size=2),  # type: ignore[arg-type]
        DataLoader(torch.arange(5), batch_size=2),  # type: ignore[arg-type]
    )
    seen: list[int] = []
    ends = []
    for number, _ in enumerate(train):
        if number == 1:
            for part in test:
                seen += accelerator.gather_for_metrics(part).tolist()
        ends.append(accelerator.gradient_state.end_of_dataloader)
    return seen, ends


def gather_inside_training(in_training: dict[str, Any], in_evaluation: dict[str, Any]) -> list[list[int]]:
    """The lengths of losses, outputs and labels that an evaluation inside a training epoch gathers."""
    accelerator = Accelerator()
    training, evaluation = (
        prepare_data_loader(DataLoader(range(samples), batch_size=2), put_on_device=True, **settings)  # type: ignore[arg-type]
        for samples, settings in ((8, in_training), (7, in_evaluation))
    )
    lengths = []
    outer = iter(training)
    next(outer)
    for labels in evaluation:
        values = (torch.ones(2), labels * 2, labels)
        lengths.append([len(accelerator.gather_for_metrics(value)) for value in values])
    return lengths


def test_evaluation_inside_training_gathers_each_sample_once_for_every_kind_of_loader(run: Run) -> None:
    cases = [(outer, inner) for outer in (SHARD, DISPATCH) for inner in (SHARD, DISPATCH)]
    for results in run(call_for_each, gather_inside_training, cases):
        assert results == [[[4, 4, 4], [3, 3, 3]]] * 4


def test_nested_loaders(run: Run) -> None:
    for seen, ends in run(evaluate_inside_training):
        assert seen == [0, 1, 2, 3, 4]
        assert ends == [False, False, True]


def gather_means() -> list[list[float]]:
    """Values that are not one per sample are gathered whole, also for the last, filled batch."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(9.0), batch_size=5))  # type: ignore[arg-type]
    return [accelerator.gather_for_metrics(part.mean()).tolist() for part in loader]


def test_a_value_per_rank_is_not_cut(run: Run) -> None:
    means = run(gather_means)
    assert all(len(values) == 2 for values in means[0])


def warnings_about_means(samples: int, trains: bool, library: str | None = None) -> list[str]:
    from accelerate.logging import get_logger

    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign,assignment]
    get_logger("accelerate.accelerator.metrics").logger.addHandler(handler)
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(float(samples)), batch_size=2))  # type: ignore[arg-type]
    accelerator.gather_for_metrics(torch.tensor(1.0))
    call = accelerator.gather_for_metrics
    if library is not None:
        names: dict[str, Any] = {}
        exec(compile("def call(ask, value):\n    return ask(value)", library, "exec"), names)
        call = functools.partial(names["call"], accelerator.gather_for_metrics)
    with torch.set_grad_enabled(trains):
        for batch in loader:
            call(batch.mean())
            call({"rank": accelerator.process_index})
    return [record.getMessage() for record in said]


@pytest.mark.parametrize(
    ("samples", "trains", "warnings"),
    [
        (8, False, 0),
        pytest.param(6, False, 1, marks=pytest.mark.slow),
        (7, False, 1),
        pytest.param(7, True, 0, marks=pytest.mark.slow),
    ],
)
def test_a_mean_is_only_warned_of_where_ranks_evaluate_other_numbers_of_samples(
    run: Run, samples: int, trains: bool, warnings: int
) -> None:
    first, second = run(warnings_about_means, samples, trains)
    assert (len(first), len(second)) == (warnings, 0)


def test_a_mean_that_an_installed_library_gathers_is_not_warned_of(run: Run) -> None:
    assert run(warnings_about_means, 7, False, "/usr/lib/site-packages/library/trainer.py") == [[], []]
    assert run(warnings_about_means, 7, False, "/home/me/trainer.py")[0] != []


def gather_with_uneven_ends(samples: int, own_shard: bool = False) -> tuple[list[int], str]:
    """Without filling, parts of any length are joined; a rank without a batch is named instead of a hang."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    data: Any = torch.arange(samples)
    if own_shard:
        rank, stream = accelerator.process_index, Stream(torch.arange(samples))
        data = IterableDatasetShard(stream, 3, False, 2, rank, even_batches=False)
    loader = accelerator.prepare(DataLoader(data, batch_size=3))
    seen: list[int] = []
    try:
        for part in loader:
            seen += accelerator.gather_for_metrics(part).tolist()
            assert len(accelerator.gather_for_metrics(torch.zeros(1))) == 2
    except RuntimeError as error:
        return seen, str(error)
    return seen, ""


def test_uneven_ends(run: Run) -> None:
    for own_shard in (False, True):
        ranks = run(call_for_each, gather_with_uneven_ends, [(11, own_shard), (8, own_shard)])
        even, ((seen, message), (others, silence)) = zip(*ranks, strict=True)
        assert even == ((list(range(11)), ""),) * 2
        assert seen == others == list(range(6))
        assert "ranks [1] have no batch" in message
        assert silence == ""


def average() -> list[Any]:
    """Means of 5 and 4 samples: the mean of the means is 3.6, that of the samples 4."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare(DataLoader(torch.arange(9.0), batch_size=5))  # type: ignore[arg-type]
    (batch,) = loader
    answers = [accelerator.weighted_mean(batch.mean(), len(batch))]
    tree = accelerator.weighted_mean(
        {"mean": batch.mean(), "pair": [torch.stack([batch.min(), batch.max()]).double()]},
        torch.tensor(len(batch)),
    )
    return [*answers, tree["mean"], *tree["pair"][0].tolist()]


def test_a_weighted_mean_is_that_of_all_samples(run: Run) -> None:
    for mean, again, least, most in run(average):
        assert mean.item() == again.item() == 4.0
        assert mean.dtype == torch.float32
        assert least == pytest.approx((5 * 0 + 4 * 5) / 9)
        assert most == pytest.approx((5 * 4 + 4 * 8) / 9)


@torch.no_grad()
def gather_what_is_not_per_sample() -> tuple[list[Any], int]:
    from accelerate.logging import get_logger

    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign,assignment]
    get_logger("accelerate.accelerator.metrics").logger.addHandler(handler)
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(9.0), batch_size=5))  # type: ignore[arg-type]
    answers: list[Any] = []
    for batch in loader:
        rank = torch.tensor(float(accelerator.process_index))
        data = {"samples": batch, "mean": rank, "classes": [rank.repeat(3)], "more": (batch * 2,)}
        found = accelerator.gather_for_metrics(data)
        answers.append([found["samples"], found["mean"], found["classes"][0], found["more"][0]])
        answers.append(accelerator.gather_for_metrics({"rank": accelerator.process_index}))
        answers.append(accelerator.gather_for_metrics(["one", "two"]))
    texts = [record.getMessage() for record in said]
    assert all("accelerator.weighted_mean(value, weight)" in text for text in texts)
    return [item.tolist() if torch.is_tensor(item) else item for item in answers[0]] + answers[1:], len(texts)


def test_values_that_are_not_per_sample_are_gathered_fully_with_one_warning(run: Run) -> None:
    (first, warnings), (second, _) = run(gather_what_is_not_per_sample)
    numbers = list(map(float, range(9)))
    expected = [numbers, [0.0, 1.0], [0.0] * 3 + [1.0] * 3, [2 * number for number in numbers]]
    expected += [[{"rank": 0}, {"rank": 1}], ["one", "two"] * 2]  # type: ignore[list-item]
    assert first == second == expected
    assert warnings == 1


@torch.no_grad()
def gather_objects() -> list[dict[str, Any]]:
    """Objects of 7 samples, of which the last batch of rank 1 has one and one as padding."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(7), batch_size=2))  # type: ignore[arg-type]
    gathered: list[dict[str, Any]] = []
    for batch in loader:
        numbers = batch.tolist()
        boxes = [{"boxes": torch.full((number + 1, 4), number)} for number in numbers]
        names = [str(number) for number in numbers]
        named = [{**box, "name": name} for box, name in zip(boxes, names, strict=True)]
        trees = {
            "objects": boxes,
            "objects with other values": named,
            "tuple of lists": (boxes, names),
            "tuple of tensors and lists": (batch, names, torch.tensor(float(accelerator.process_index))),
            "dictionary of lists": {"names": names, "boxes": (boxes,)},
        }
        requested = {"rows": batch, "tensors": list(batch), "objects, on request": boxes}
        gathered.append({name: accelerator.gather_for_metrics(tree) for name, tree in trees.items()})
        for name, tree in requested.items():
            gathered[-1][name] = accelerator.gather_for_metrics(tree, use_gather_object=True)
    return send_to_device(gathered, "cpu")


def test_objects_and_structures_of_them_are_gathered_once(run: Run) -> None:
    for gathered in run(gather_objects):
        for numbers, found in zip(([0, 1, 2, 3], [4, 5, 6]), gathered, strict=True):
            names = [str(number) for number in numbers]
            boxes = [{"boxes": torch.full((number + 1, 4), number)} for number in numbers]
            named = [{**box, "name": name} for box, name in zip(boxes, names, strict=True)]
            expected = {
                "objects": boxes,
                "objects with other values": named,
                "tuple of lists": (boxes, names),
                "tuple of tensors and lists": (torch.tensor(numbers), names, torch.tensor([0.0, 1.0])),
                "dictionary of lists": {"names": names, "boxes": (boxes,)},
                "rows": list(torch.tensor(numbers)),
                "tensors": list(torch.tensor(numbers)),
                "objects, on request": boxes,
            }
            assert {name: str(value) for name, value in expected.items()} == {
                name: str(value) for name, value in found.items()
            }


@torch.no_grad()
def gather_of_two_loaders() -> tuple[list[list[int]], list[list[int]], str]:
    """Two loaders in one loop, and one beside the loop over another one."""
    accelerator = Accelerator()
    first, second = accelerator.prepare(
        DataLoader(torch.arange(8), batch_size=2),  # type: ignore[arg-type]
        DataLoader(torch.arange(5), batch_size=2),  # type: ignore[arg-type]
    )
    zipped: list[list[int]] = [[], []]
    for batch, other in zip(first, second, strict=True):
        zipped[0] += accelerator.gather_for_metrics((batch * 2, batch))[1].tolist()
        zipped[1] += accelerator.gather_for_metrics((other * 2, other.view(-1, 1)[:, 0]))[1].tolist()
    beside: list[list[int]] = [[], []]
    evaluation = iter(second)
    for batch in first:
        other = next(evaluation)
        beside[1] += accelerator.gather_for_metrics({"y": other})["y"].tolist()
        beside[0] += accelerator.gather_for_metrics({"y": batch})["y"].tolist()
    message = ""
    for pair in zip(first, second, strict=True):
        try:
            accelerator.gather_for_metrics(pair)
        except RuntimeError as error:
            message = str(error)
    return zipped, beside, message


def test_data_is_cut_by_the_loader_that_it_is_from(run: Run) -> None:
    for zipped, beside, message in run(gather_of_two_loaders):
        assert zipped == beside == [list(range(8)), list(range(5))]
        assert "Gather the outputs of each loader in a call of its own" in message


def gather_by_chance() -> list[list[float]]:
    """Two classes on both ranks, and by chance two samples on one of them."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = accelerator.prepare(DataLoader(torch.arange(5.0), batch_size=3))  # type: ignore[arg-type]
    return [accelerator.gather_for_metrics(torch.ones(2)).tolist() for _ in loader]


def test_a_length_that_fits_by_chance_is_not_that_of_samples(run: Run) -> None:
    assert run(gather_by_chance) == [[[1.0] * 4]] * 2


def gather_repeated(cases: tuple[tuple[str, int, dict[str, Any]], ...]) -> list[Any]:
    """Means that are repeated for each row of a full batch, in a tree and as objects, and the samples."""
    found = []
    for kind, samples, settings in cases:
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**settings))
        loader = accelerator.prepare(make_loader(kind, samples, 8))
        full, means, words, seen = 0, [], [], []
        for batch in loader:
            full = full or len(batch)
            mean = batch.float().mean()
            tree = {"loss": mean.repeat(full), "rows": [batch], "classes": torch.ones(5, device=batch.device)}
            gathered = accelerator.gather_for_metrics(tree)
            means.append(gathered["loss"])
            seen += gathered["rows"][0].tolist()
            words += accelerator.gather_for_metrics([str(float(mean))] * full)
            assert len(gathered["classes"]) == 5 * accelerator.num_processes
        assert list(map(float, words)) == pytest.approx(torch.cat(means).tolist())
        found.append((torch.cat(means).double().mean().item(), sorted(seen)))
    return found


DISPATCH, SHARD = {"dispatch_batches": True}, {"dispatch_batches": False}
REPEATED: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("plain", 66, DISPATCH),
    ("plain", 56, {}),
    ("plain", 68, {**DISPATCH, "split_batches": True}),
    ("plain", 62, {"even_batches": False}),
    ("batch sampler", 66, DISPATCH),
    ("stream", 66, {}),
    ("stream", 56, SHARD),
    ("stream", 68, {**SHARD, "split_batches": True}),
    ("sized stream", 66, {}),
    ("sized stream", 64, SHARD),
    ("ready batches", 60, {}),
)


def test_a_mean_repeated_for_each_row_counts_as_often_as_there_are_samples(run: Run) -> None:
    for found in run(gather_repeated, REPEATED, processes=2, timeout=120):
        for case, (mean, seen) in zip(REPEATED, found, strict=True):
            assert seen == list(range(case[1])), case
            assert mean == pytest.approx((case[1] - 1) / 2), case


def double(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples).repeat_interleave(2)


def keep_even(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([sample for sample in samples if sample % 2 == 0])


@torch.no_grad()
def gather_collated() -> list[list[int]]:
    """Rows that a collate function makes of 14 samples, of which the last global batch has 2 as padding."""
    found = []
    for collate in (double, keep_even):
        accelerator = Accelerator()
        loader = accelerator.prepare(DataLoader(torch.arange(14), batch_size=4, collate_fn=collate))  # type: ignore[arg-type]
        found.append([row for rows in loader for row in accelerator.gather_for_metrics(rows).tolist()])
    return found


def test_rows_that_a_collate_function_makes_are_not_lost(run: Run) -> None:
    for doubled, even in run(gather_collated):
        assert sorted(doubled) == sorted([*range(14), *range(14)])
        assert set(even) == set(range(0, 14, 2))


@torch.no_grad()
def repeat_for_split_batches(samples: int, dispatch: bool) -> torch.Tensor:
    """What transformers' Trainer gathers, which repeats a loss for each row of the global batch."""
    config = DataLoaderConfiguration(split_batches=True, dispatch_batches=dispatch)
    accelerator = Accelerator(dataloader_config=config)
    loader = accelerator.prepare(DataLoader(torch.arange(float(samples)), batch_size=6))  # type: ignore[arg-type]
    losses = [accelerator.gather_for_metrics(batch.mean().repeat(6)) for batch in loader]
    return torch.cat(losses)


def test_values_repeated_for_split_batches_count_as_often_as_there_are_samples(run: Run) -> None:
    for sharded, dispatched in run(call_for_each, repeat_for_split_batches, [(26, False), (26, True)]):
        assert len(sharded) == len(dispatched) == 2 * 26
        # The last means of sharded loaders are those of padded batches.
        assert dispatched.mean().item() == pytest.approx(12.5)


def gather_around_breaks(workers: int) -> list[list[int]]:
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(11), batch_size=3, num_workers=workers))  # type: ignore[arg-type]
    passes = []
    for stop in (1, 2, None, 1, None):
        seen: list[int] = []
        for number, batch in enumerate(loader, 1):
            seen += accelerator.gather_for_metrics(batch).tolist()
            if number == stop:
                break
        passes.append(seen)
        whole = accelerator.gather_for_metrics(torch.arange(4))  # of no batch any more
        assert len(whole) == 8
    return passes


def test_an_early_break_does_not_change_later_epochs(run: Run) -> None:
    whole = list(range(11))
    passes = [whole[:6], whole, whole, whole[:6], whole]
    assert run(call_for_each, gather_around_breaks, [0, 2]) == [[passes, passes]] * 2


def evaluate_on_a_mesh(settings: dict[str, Any]) -> list[Any]:
    """Ranks along the tensor axis are given the same batches."""
    accelerator = Accelerator()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    found = []
    for samples, batch in ((11, 3), (12, 3), (1, 4), (13, 5)):
        loader = prepare_data_loader(
            DataLoader(torch.arange(samples), batch_size=batch),  # type: ignore[arg-type]
            put_on_device=True,
            torch_device_mesh=mesh,
            **settings,
        )
        tensors: list[int] = []
        objects: list[str] = []
        for part in loader:
            tensors += accelerator.gather_for_metrics(part).tolist()
            objects += accelerator.gather_for_metrics([str(number) for number in part.tolist()])
        found.append((samples, tensors, [int(each) for each in objects]))
    return found


def test_ranks_that_share_a_batch_count_once(run: Run) -> None:
    settings = [{}, {"dispatch_batches": True}]
    for found in run(call_for_each, evaluate_on_a_mesh, settings, processes=4, timeout=120):
        for setting, results in zip(settings, found, strict=True):
            for samples, tensors, objects in results:
                assert tensors == objects == list(range(samples)), setting
