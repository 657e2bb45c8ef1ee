"""Loader whose batches are divided among the replica groups that take part in a step.

By default the batches of a step do not depend on the members: they are those of a run in which all launched
replica groups take part. Each member takes the batches of one or several replica groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from accelerate.base import CheckpointError, wrong_value
from accelerate.data_loader import (
    DataLoaderStateMixin,
    Position,
    StepPlan,
    data_groups,
    skip_before_sharding,
    skip_first_batches,
)
from accelerate.ops import current_transport
from accelerate.recovery.membership import Members
from accelerate.state import GradientState, run_observers, step_clock

if TYPE_CHECKING:
    from accelerate.recovery.session import Recovery


class RecoveryLoader(DataLoaderStateMixin):
    """Loader for training and evaluation in a run with replica groups.

    A micro-batch is a batch of each rank of one replica group. Micro-batches are numbered in the order of a
    run in which all launched replica groups take part.

    Args:
        number: Number of the loader in the run, which is the same on all replica groups.
        shards: Prepared loader of each launched replica group, with the batches of this rank.
        divide: Returns the prepared loader of this rank for some members.
        shrinks: Whether each member computes equally many micro-batches with fewer members, too. Otherwise a
            step has the micro-batches of all launched replica groups.

    Attributes:
        position: Position in the current pass for training, in which micro-batches of all groups are counted.
        num_passes: Number of passes for training that this process has begun.
    """

    tracker: None = None  # the prepared loaders have their own

    def __init__(
        self,
        number: int,
        shards: Sequence[Any],
        divide: Callable[[Members], Any],
        recovery: Recovery,
        shrinks: bool = False,
    ) -> None:
        self.number, self.shards = number, list(shards)
        self.gradient_state = GradientState()
        self.position, self.num_passes = Position(), 0
        self._divide, self._shrinks = divide, shrinks
        self._evaluation: tuple[Members, Any] | None = None
        self._recovery = recovery
        self._after = Position()  # after the current step

    @property  # type: ignore[misc]  # never assigned
    def __class__(self) -> Any:
        """The class of torch's loader, for `isinstance`."""
        return DataLoader

    def __getattr__(self, name: str) -> Any:
        shards = self.__dict__.get("shards")
        if not shards:
            raise AttributeError(name)
        return getattr(shards[0], name)

    def __len__(self) -> int:
        return len(self.shards[0])

    @property
    def seen(self) -> int:
        """Number of micro-batches before the current step in the current pass."""
        return self.position.seen

    def __iter__(self) -> Iterator[Any]:
        return self._read_steps() if self._recovery.is_training else self._read_evaluation()

    # Training

    def _read_steps(self) -> Iterator[Any]:
        number, self.num_passes = self.num_passes, self.num_passes + 1
        if not self._recovery.begin_pass(self, number):
            return
        if number > self.position.epoch:  # an iterator over the pass before is still open
            self.position = Position(number)
        readers: dict[Any, Any] = {}
        observers, read_to = run_observers(), None
        self.begin()
        try:
            while True:
                began = time.perf_counter()
                members = self._recovery.begin_step(self)
                step_clock.add_recovery("members", time.perf_counter() - began)
                if number < self.position.epoch:  # the others have ended the pass meanwhile
                    self._recovery.decline_step()
                    return
                if self.position.seen >= self._num_micro_batches or self._recovery.is_left(self, number):
                    if self._recovery.end_data():
                        self.position = Position(self.position.epoch + 1)
                        return
                    continue
                plan, began, before = self._plan_step(members), time.perf_counter(), self.position
                pieces = plan.pieces_of(members.index, members.size) or [0]
                sources = [self._source(piece % plan.parts, members) for piece in pieces]
                if set(readers) != set(sources) or read_to != before:
                    _close(readers)
                    readers.update((source, self._open(source)) for source in dict.fromkeys(sources))
                read_to = self._after = before._replace(seen=before.seen + plan.samples)
                for piece, source in zip(pieces, sources, strict=True):
                    with observers.reading_ahead():
                        batch = next(readers[source])
                    is_last = piece == pieces[-1]
                    self.end_of_dataloader = is_last and self._after.seen >= self._num_micro_batches
                    batch_number, replica = divmod(before.seen + piece, len(self.shards))
                    self._recovery.begin_micro_batch(
                        (before.epoch, batch_number, replica),
                        is_own=self._shrinks or piece % plan.parts == members.index,
                        is_last=is_last,
                        loss_scale=self._loss_scale(plan, source == members),
                    )
                    yield batch
                    observers.before_read(self)
                self._recovery.check_step()
                if self.position == before:  # the step was not committed, and is repeated
                    step_clock.add_recovery("lost", time.perf_counter() - began)
        except GeneratorExit:
            self._recovery.leave_pass(self, number)
            raise
        finally:
            _close(readers)
            self._recovery.end_pass()
            self.end()

    @cached_property
    def _num_micro_batches(self) -> int:
        if self._shrinks:
            return len(self._divide(Members(0, 1)))
        return len(self) * len(self.shards)

    def _plan_step(self, members: Members) -> StepPlan:
        """Returns the division of the next micro-batches among the launched groups, or among the members."""
        size = members.size if self._shrinks else len(self.shards)
        count = self.gradient_state.num_steps * size
        rest = self._num_micro_batches - self.position.seen
        if rest < count + size * self._shrinks:  # each member has one in the last step
            count = rest
        return StepPlan(range(count + 1), size)

    def _source(self, part: int, members: Members) -> Members | int:
        """Returns the key of the reader of a part of the plan."""
        return Members(part, members.size) if self._shrinks else part

    def _open(self, source: Members | int) -> Iterator[Any]:
        if isinstance(source, Members):
            shard = self._divide(source)
            num_groups = shard.plan.groups // source.size
            shard.set_epoch(self.position.epoch)
            return iter(skip_before_sharding(shard, self.position.seen * num_groups))
        shard = self.shards[source]
        shard.set_epoch(self.position.epoch)
        number = self.position.seen // len(self.shards)
        return iter(skip_first_batches(shard, number) if number else shard)

    def _loss_scale(self, plan: StepPlan, is_own: bool) -> float:
        """Returns the factor of a loss, with which those of a step add up to their mean."""
        if not self._shrinks:
            return 1.0 / plan.parts
        return self.gradient_state.num_steps / plan.samples if is_own else 0.0

    def advance(self) -> None:
        """Moves the position behind the batches of the current step, which is committed."""
        self.position = self._after

    # Evaluation

    def _read_evaluation(self) -> Iterator[Any]:
        """Reads the batches of this rank among those of the current members."""
        members = self._recovery.evaluating_members
        if self._evaluation is None or self._evaluation[0] != members:
            self._evaluation = members, self._divide(members)
        batches = iter(self._evaluation[1])
        return islice(batches, 1) if self._recovery.is_behind else batches

    # State

    def state_dict(self) -> dict[str, int]:
        """Returns the position after the last committed step."""
        return {"epoch": self.position.epoch, "position": self.position.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Sets the position at which the next pass begins."""
        if state["position"] % len(self.shards) and not self._shrinks:
            raise CheckpointError(
                f"The checkpoint is behind micro-batch {state['position']}, which does not end a step of "
                f"{len(self.shards)} replica groups. Pass --replica_batch shrink, as when it was saved."
            )
        self.position = Position(state["epoch"], state["position"])
        self.num_passes = self.position.epoch


def _close(readers: dict[Any, Any]) -> None:
    """Ends passes before others begin, because a loader counts its epochs when a pass ends."""
    while readers:
        readers.popitem()[1].close()


def check_loader(loader: Any) -> None:
    """Raises an error for a loader whose order other replica groups cannot follow."""
    if isinstance(loader.dataset, IterableDataset):
        raise wrong_value(
            "dataset",
            type(loader.dataset).__name__,
            "a stream has no position at which another replica group can continue",
            "Use a dataset with a length and indices, or leave --replicas out",
        )
    sampler = getattr(loader, "sampler", None)
    if (batches := getattr(loader, "batch_sampler", None)) is not None:  # it may leave the sampler unused
        sampler = batches.sampler if type(batches) is BatchSampler else batches
    if type(sampler) not in (RandomSampler, SequentialSampler) and not callable(
        getattr(sampler, "set_epoch", None)
    ):
        raise wrong_value(
            "sampler",
            type(sampler).__name__,
            "its order must be the same on all replica groups",
            "Use shuffle=True, or a sampler whose order depends on its `set_epoch`",
        )


def prepare_replicated(
    number: int,
    loader: Iterable[Any],
    recovery: Recovery,
    prepare: Callable[..., Any],
    options: Mapping[str, Any],
) -> RecoveryLoader:
    """Returns a loader that divides the batches of a step among the members.

    Args:
        number: Number of the loader in the run.
        loader: A torch loader.
        prepare: Returns the prepared loader for keyword arguments of `prepare_data_loader`.
        options: The keyword arguments of a run of one group.
    """
    check_loader(loader)
    mesh, data_seed = options["torch_device_mesh"], options["data_seed"]
    groups, group = data_groups(mesh, current_transport().size, current_transport().rank)
    of_shard = {
        **options,
        "rng_types": [],
        "dispatch_batches": False,
        "even_batches": True,
        "use_seedable_sampler": True,
        "data_seed": recovery.seed if data_seed is None else data_seed,
        "use_stateful_dataloader": False,
        "torch_device_mesh": None,
        "already_sharded": False,
    }

    def prepare_shard(replica: int, replicas: int) -> Any:
        numbers = {"num_processes": replicas * groups, "process_index": replica * groups + group}
        return prepare(loader, **of_shard | numbers)

    def divide(members: Members) -> Any:
        shard = prepare_shard(members.index, members.size)
        shard.plan = replace(shard.plan, replicates=current_transport().size > groups)
        return shard

    shards = [prepare_shard(replica, recovery.num_replicas) for replica in range(recovery.num_replicas)]
    return RecoveryLoader(number, shards, divide, recovery, shrinks=recovery.shrinks_batch)
