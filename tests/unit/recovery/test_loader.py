"""Division of a pass among members that change, with steps that are repeated."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, SubsetRandomSampler

from accelerate.base import CheckpointError, ConfigurationError
from accelerate.data_loader import prepare_data_loader
from accelerate.plugins import GradientAccumulationPlugin
from accelerate.recovery.loader import RecoveryLoader, check_loader
from accelerate.recovery.membership import Members
from accelerate.state import GradientState

pytestmark = pytest.mark.usefixtures("states")
SIZE = 3


class Member:
    """One replica group of several ranks, of which one reads."""

    is_training = True

    def __init__(self, replicas: int, groups: int, rank: int, batches: int, *, shrinks: bool) -> None:
        self.members = Members(0, 1)
        self.scales: list[float] = []
        self.numbers: list[tuple[int, int, int]] = []
        self.is_last = self.has_ended = False
        source = DataLoader(range(batches * SIZE), batch_size=SIZE, shuffle=True)  # type: ignore[arg-type, var-annotated]

        def prepare(size: int, index: int) -> Any:
            return prepare_data_loader(
                source,
                num_processes=size * groups,
                process_index=index * groups + rank,
                use_seedable_sampler=True,
                data_seed=3,
                already_sharded=False,
                rng_types=[],
            )

        shards = [prepare(replicas, replica) for replica in range(replicas)]
        self.loader = RecoveryLoader(
            0,
            shards,
            lambda members: prepare(members.size, members.index),
            self,
            shrinks,  # type: ignore[arg-type]
        )
        self.batches: Iterator[Any] = iter(self.loader)

    def begin_pass(self, loader: Any, number: int) -> bool:
        return True

    def begin_step(self, loader: Any) -> Members:
        return self.members

    def begin_micro_batch(self, number: Any, *, is_own: bool, is_last: bool, loss_scale: float) -> None:
        self.numbers.append(number)
        self.scales.append(loss_scale)
        self.is_last = is_last

    def check_step(self) -> None:
        pass

    def end_data(self) -> bool:
        self.has_ended = True
        return True

    def is_left(self, loader: Any, number: int) -> bool:
        return False

    def leave_pass(self, loader: Any, number: int) -> None:
        pass

    def end_pass(self) -> None:
        pass

    def read_step(self, members: Members) -> list[int]:
        """Read the batches of a step, and return the samples that count."""
        self.members, self.is_last = members, False
        samples: list[int] = []
        while not self.is_last and (batch := next(self.batches, None)) is not None:
            samples += batch.tolist() if self.scales[-1] else []
        return samples


def read_pass(
    chance: random.Random, replicas: int, groups: int, batches: int, *, shrinks: bool
) -> tuple[list[list[int]], list[float]]:
    """Read a pass with random members and failed steps, and return samples and sum of scales of each step."""

    def build(rank: int) -> Member:
        return Member(replicas, groups, rank, batches, shrinks=shrinks)

    present: dict[tuple[int, int], Member] = {}
    state = {"epoch": 0, "position": 0}
    steps: list[list[int]] = []
    totals: list[float] = []
    while True:
        size = chance.randint(1, replicas)
        keys = [(index, rank) for index in range(size) for rank in range(groups)]
        for key in [key for key in present if key not in keys]:
            present.pop(key).batches.close()  # type: ignore[attr-defined]
        for key in keys:
            if key not in present:
                present[key] = build(key[1])
                present[key].loader.load_state_dict(state)
        marks = {key: len(present[key].scales) for key in keys}
        read = [present[key].read_step(Members(key[0], size)) for key in keys]
        if any(present[key].has_ended for key in keys):
            assert all(present[key].has_ended for key in keys)
            assert not any(read)
            return steps, totals
        if chance.random() < 0.3:  # the step is not committed
            continue
        for key in keys:
            present[key].loader.advance()
        state = present[0, 0].loader.state_dict()
        steps.append([sample for samples in read for sample in samples])
        totals.append(sum(sum(present[index, 0].scales[marks[index, 0] :]) for index in range(size)))


@pytest.mark.parametrize("shrinks", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_committed_steps_have_each_sample_once(shrinks: bool, seed: int) -> None:
    chance = random.Random(seed)
    replicas, groups, num_steps = chance.randint(1, 4), chance.choice([1, 1, 2]), chance.randint(1, 3)
    GradientState(GradientAccumulationPlugin(num_steps=num_steps))
    batches = replicas * groups * chance.randint(1, 7)
    steps, totals = read_pass(chance, replicas, groups, batches, shrinks=shrinks)
    assert sorted(sample for step in steps for sample in step) == list(range(batches * SIZE))
    if shrinks:  # each step takes the mean over its micro-batches
        assert totals == pytest.approx([num_steps] * len(totals))
    else:
        sizes = [len(step) for step in steps]
        assert set(sizes[:-1]) <= {num_steps * replicas * groups * SIZE}


def test_constant_steps_do_not_depend_on_the_members() -> None:
    GradientState(GradientAccumulationPlugin(num_steps=2))
    passes = [read_pass(random.Random(seed), 3, 1, 21, shrinks=False)[0] for seed in range(4)]
    assert len({tuple(tuple(sorted(step)) for step in steps) for steps in passes}) == 1


def test_the_position_of_a_shrunken_step_needs_shrinking_steps() -> None:
    loader = Member(3, 1, 0, 9, shrinks=False).loader
    loader.load_state_dict({"epoch": 0, "position": 6})
    with pytest.raises(CheckpointError, match="behind micro-batch 5, which does not end a step of 3"):
        loader.load_state_dict({"epoch": 0, "position": 5})


@pytest.mark.parametrize("shrinks", [False, True])
def test_readers_continue_after_a_committed_step(shrinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    open_reader = RecoveryLoader._open
    monkeypatch.setattr(
        RecoveryLoader, "_open", lambda self, source: opened.append(source) or open_reader(self, source)
    )
    member = Member(2, 1, 0, 12, shrinks=shrinks)
    steps = []
    for _ in range(3):
        steps.append(member.read_step(Members(0, 1)))
        member.loader.advance()
    assert len(opened) == len(set(opened))
    step = member.read_step(Members(0, 1))
    assert member.read_step(Members(0, 1)) == step  # it was not committed, and is read again
    assert len(opened) == 2 * len(set(opened))
    assert len({sample for each in [*steps, step] for sample in each}) == sum(map(len, [*steps, step]))
    member.batches.close()  # type: ignore[attr-defined]


class Buckets:
    """A batch sampler with an order of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[1, 0], [3, 2]])

    def __len__(self) -> int:
        return 2


class BucketsOfEpoch(Buckets):
    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch."""


@pytest.mark.parametrize("replacement", [False, True])
def test_a_batch_sampler_needs_an_order_that_other_groups_follow(replacement: bool) -> None:
    data: Any = range(4)
    for order in (RandomSampler(data, replacement), SequentialSampler(data)):
        check_loader(DataLoader(data, batch_sampler=BatchSampler(order, 2, drop_last=False)))
    check_loader(DataLoader(data, batch_sampler=BucketsOfEpoch()))
    with pytest.raises(ConfigurationError, match="sampler='Buckets': its order must be the same"):
        check_loader(DataLoader(data, batch_sampler=Buckets()))
    with pytest.raises(ConfigurationError, match="sampler='SubsetRandomSampler'"):
        check_loader(DataLoader(data, batch_sampler=BatchSampler(SubsetRandomSampler([0, 1]), 2, False)))
