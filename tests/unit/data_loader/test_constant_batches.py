"""Division of global batches of a constant size into micro-batches."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from accelerate.data_loader import SkipBatchSampler, prepare_data_loader
from accelerate.data_loader.constant_batches import ConstantBatchShard, StepPlan, StepRecord

sizes = st.integers(min_value=1, max_value=40)


def shards(
    samples: int, batch_size: int, batches: int, parts: int, *, drop_last: bool = False, skipped: int = 0
) -> list[ConstantBatchShard]:
    base: BatchSampler = BatchSampler(SequentialSampler(range(samples)), batch_size, drop_last)
    if skipped:
        base = SkipBatchSampler(base, skipped)
    size = batch_size * batches
    return [ConstantBatchShard(base, parts, part, global_batch_size=size) for part in range(parts)]


@given(samples=sizes, parts=sizes, largest=sizes)
def test_micro_batches_have_each_sample_once_in_sizes_that_differ_by_one(
    samples: int, parts: int, largest: int
) -> None:
    plan = StepPlan.even(samples, parts, largest)
    steps = range(plan.num_micro_batches)
    spans = [plan.span(step, part) for step in steps for part in range(parts)]
    assert [index for span in spans for index in range(samples)[span]] == list(range(samples))
    lengths = {span.stop - span.start for span in spans}
    assert max(lengths) <= largest
    assert max(lengths) - min(lengths) <= 1
    weights = [plan.part(step, part).weight for step in steps for part in range(parts)]
    assert sum(weights) == pytest.approx(parts)
    assert [plan.part(step, 0).is_last for step in steps] == [False] * (len(steps) - 1) + [True]
    assert sum(plan.part(step, 0).batches for step in steps) == -(-samples // largest)


@settings(max_examples=200)
@given(
    samples=st.integers(0, 60),
    batch_size=st.integers(1, 6),
    batches=st.integers(1, 5),
    parts=st.integers(1, 6),
    drop_last=st.booleans(),
    skipped=st.integers(0, 4),
)
def test_all_processes_read_the_indices_of_each_step(
    samples: int, batch_size: int, batches: int, parts: int, drop_last: bool, skipped: int
) -> None:
    readers = shards(samples, batch_size, batches, parts, drop_last=drop_last, skipped=skipped)
    passes = [list(reader) for reader in readers]
    assert {len(batches_of_one) for batches_of_one in passes} == {len(readers[0])}
    size, rest = batch_size * batches, samples - skipped * batch_size
    step: list[int] = []
    steps = []
    for number, current in enumerate(zip(*passes, strict=True)):
        record = readers[0].padding_record
        assert isinstance(record, StepRecord)
        counts = record.get(number, (readers[0].batch_size,) * parts)
        assert all(len(batch) == max(real, 1) for batch, real in zip(current, counts, strict=True))
        step += [index for batch, real in zip(current, counts, strict=True) for index in batch[:real]]
        if record.part(number, 0).is_last:
            steps.append(step)
            step = []
    assert not step
    end = max(rest, 0) if not drop_last else max(rest, 0) // size * size
    order = list(range(skipped * batch_size, skipped * batch_size + end))
    assert steps == [order[start : start + size] for start in range(0, len(order), size)]


@given(samples=st.integers(1, 50), parts=st.integers(1, 4), number=st.integers(0, 60))
def test_a_late_start_reads_the_rest(samples: int, parts: int, number: int) -> None:
    for late, whole in zip(shards(samples, 3, 4, parts), shards(samples, 3, 4, parts), strict=True):
        assert list(late.iter_from(number)) == list(whole)[number:]


def test_a_full_step_that_divides_evenly_has_the_batches_of_the_sampler() -> None:
    passes = [list(shard) for shard in shards(24, 2, 6, 3)]
    assert passes[1][:2] == [[2, 3], [8, 9]]
    assert shards(24, 2, 6, 3)[0].padding_record == {}
    assert shards(24, 2, 6, 3)[0].total_batch_size == 6
    assert shards(24, 2, 6, 5)[0].total_batch_size is None


def test_the_rest_of_an_order_is_not_drawn_again() -> None:
    drawn = count()

    class Order(RandomSampler):
        def __iter__(self):  # type: ignore[no-untyped-def]
            next(drawn)
            return super().__iter__()

    shard = ConstantBatchShard(BatchSampler(Order(range(10)), 2, False), 2, 0, global_batch_size=4)
    assert sum(map(len, shard)) == 5
    assert next(drawn) == 1


@pytest.mark.parametrize("batch_size", [3, 16, None])
def test_other_loaders_keep_their_batches(states: object, batch_size: int | None) -> None:
    loader = DataLoader(range(12), batch_size=batch_size)  # type: ignore[arg-type, var-annotated]
    prepared = prepare_data_loader(loader, num_processes=2, process_index=0, global_batch_size=8)
    assert prepared.plan.global_batch_size is None  # type: ignore[attr-defined]
