"""Loader whose batches are divided among the replica groups that take part in a step.

The batches of a step do not depend on the members: they are those of a run in which all launched replica
groups take part. Each member takes the batches of one or several replica groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from accelerate.data_loader import DataLoaderStateMixin, skip_first_batches
from accelerate.state import GradientState

if TYPE_CHECKING:
    from accelerate.recovery.membership import Members
    from accelerate.recovery.session import Recovery


class RecoveryLoader(DataLoaderStateMixin):
    """Loader for training and evaluation in a run with replica groups.

    Args:
        number: Number of the loader in the run, which is the same on all replica groups.
        shards: Prepared loader of each launched replica group, with the batches of this rank.
        evaluate: Returns the prepared loader of this rank for the members of an evaluation.
        recovery: The replica groups.

    Attributes:
        epoch: Number of the current pass for training, from 0.
        position: Number of batches of each replica group that are trained in this pass.
        num_passes: Number of passes for training that this process has begun.
    """

    def __init__(
        self,
        number: int,
        shards: Sequence[Any],
        evaluate: Callable[[Members], Any],
        recovery: Recovery,
    ) -> None:
        self.number, self.shards = number, list(shards)
        self.gradient_state = GradientState()
        self.epoch = self.position = self.num_passes = 0
        self._evaluate = evaluate
        self._evaluation: tuple[Members, Any] | None = None
        self._recovery = recovery
        self._count = 0  # batches of each replica group in the current step

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

    def __iter__(self) -> Iterator[Any]:
        return self._read_steps() if self._recovery.is_training else self._read_evaluation()

    # Training

    def _read_steps(self) -> Iterator[Any]:
        number, self.num_passes = self.num_passes, self.num_passes + 1
        if not self._recovery.begin_pass(self, number):
            return
        if number > self.epoch:  # the loop has left the pass before by itself
            self.epoch, self.position = number, 0
        readers: dict[int, Any] = {}
        read_to = (-1, -1)
        self.begin()
        try:
            while True:
                members = self._recovery.begin_step(self)
                if number < self.epoch:  # the others have ended the pass meanwhile
                    self._recovery.decline_step()
                    return
                if self.position >= len(self):
                    if self._recovery.end_data():
                        self.epoch, self.position = self.epoch + 1, 0
                        return
                    continue
                own = range(members.index, len(self.shards), members.size)
                if set(readers) != set(own) or read_to != (self.epoch, self.position):
                    _close(readers)
                    readers.update((replica, self._open(replica)) for replica in own)
                first = self.position
                self._count = min(self.gradient_state.num_steps, len(self) - first)
                for offset in range(self._count):
                    for replica in own:
                        batch = next(readers[replica])
                        is_last = offset == self._count - 1 and replica == own[-1]
                        self.end_of_dataloader = is_last and first + self._count >= len(self)
                        micro_batch = (self.epoch, first + offset, replica)
                        self._recovery.begin_micro_batch(micro_batch, is_last=is_last)
                        yield batch
                self._recovery.check_step()
                read_to = self.epoch, first + self._count
        finally:
            _close(readers)
            self._recovery.end_pass()
            self.end()

    def _open(self, index: int) -> Iterator[Any]:
        shard = self.shards[index]
        shard.set_epoch(self.epoch)
        return iter(skip_first_batches(shard, self.position) if self.position else shard)

    def advance(self) -> None:
        """Moves the position behind the batches of the current step, which is committed."""
        self.position += self._count

    # Evaluation

    def _read_evaluation(self) -> Iterator[Any]:
        """Reads the batches of this rank among those of the current members."""
        members = self._recovery.evaluating_members
        if self._evaluation is None or self._evaluation[0] != members:
            self._evaluation = members, self._evaluate(members)
        batches = iter(self._evaluation[1])
        return islice(batches, 1) if self._recovery.is_behind else batches

    # State

    def state_dict(self) -> dict[str, int]:
        """Returns the position after the last committed step."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Sets the position at which the next pass begins."""
        self.epoch, self.position = state["epoch"], state["position"]
        self.num_passes = self.epoch


def _close(readers: dict[int, Any]) -> None:
    """Ends passes before others begin, because a loader counts its epochs when a pass ends."""
    while readers:
        readers.popitem()[1].close()
