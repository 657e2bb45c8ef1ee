"""Values in the store of a run, which its replica groups and the launcher share."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from accelerate.base import RecoveryError
from accelerate.launch import arrived_key, begun_key, committed_key, has_steps, read_life
from accelerate.logging import get_logger
from accelerate.ops import current_transport
from accelerate.recovery.run import Run

logger = get_logger(__name__)

Result = TypeVar("Result")

SEED = "seed"
"""Key of the seed of the run."""
PASSES = "{}/passes/{}"
"""Key in a life of the run of the number of passes over a loader for training that are over."""
LEFT = "{}/left/{}/{}"
"""Key in a life of the run that is set when a loop leaves a pass before its end."""
HELD = "{}/held/{}"
"""Key in a life of the run of the names of the checkpoints that a replica group holds."""


class RunValues:
    """Client of one rank for the store of the run.

    Args:
        run: Number of replica groups, and the addresses of the run.

    Attributes:
        life: Number of times that all replica groups had lost their state when this one began.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._store = run, run.connect()
        self.life = self.ask(self.read_life)

    def ask(self, read: Callable[[], Result]) -> Result:
        """Returns what rank 0 reads from the store.

        Called on all ranks of a replica group.
        """
        transport = current_transport()
        if transport.size == 1:
            return read()
        answer: Result = transport.broadcast_object(read() if transport.rank == 0 else None)
        return answer

    def read_life(self) -> int:
        """Returns the number of times that all replica groups have lost their state."""
        return read_life(self._store)

    def has_begun(self) -> bool:
        """Returns whether a replica group has state of a step."""
        return has_steps(self._store, self._run.replicas)

    def choose_seed(self) -> int:
        """Returns the seed of torch in the first replica group that calls this."""
        return int(self._store.compare_set(SEED, "", str(torch.initial_seed() % 2**31)))

    def num_passes_over(self, loader: int) -> int:
        """Returns the number of passes over a loader that are over."""
        key = PASSES.format(self.life, loader)
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def set_passes_over(self, loader: int, number: int) -> None:
        self._store.set(PASSES.format(self.life, loader), str(number))

    def note_left(self, loader: int, number: int) -> None:
        """Notes that the loop of a member has left a pass."""
        self._store.set(LEFT.format(self.life, loader, number), "1")

    def is_left(self, loader: int, number: int) -> bool:
        """Returns whether the loop of a member has left a pass."""
        return bool(self._store.check([LEFT.format(self.life, loader, number)]))

    def note_step(self, num_committed: int, *, is_first: bool) -> None:
        """Tells the launcher the number of committed steps, and all groups that there is a first one."""
        if is_first:
            self._store.set(begun_key(self.life), "1")
        self._store.set(committed_key(self._run.replica), str(num_committed))

    def wait_for_all(self, barrier: str) -> None:
        """Waits until all launched replica groups have arrived at a barrier, or until a timeout.

        Called on all ranks of a replica group.
        """
        if current_transport().rank == 0:
            self._store.set(arrived_key(self.life, barrier, self._run.replica), "1")
            try:
                names = [arrived_key(self.life, barrier, replica) for replica in range(self._run.replicas)]
                self._store.wait(names, timedelta(seconds=self._run.timeout))
            except dist.DistStoreError:
                logger.warning(
                    f"Not all replica groups have arrived within {self._run.timeout} s, and the run "
                    "continues without the others."
                )
        current_transport().barrier()

    def held_by_all(self, names: list[str]) -> list[str]:
        """Writes the names of the checkpoints of this replica group, and returns those that all groups hold.

        Raises:
            RecoveryError: Replica groups did not arrive within the timeout.
        """
        self._store.set(HELD.format(self.life, self._run.replica), json.dumps(names))
        keys = [HELD.format(self.life, replica) for replica in range(self._run.replicas)]
        try:
            self._store.wait(keys, timedelta(seconds=self._run.timeout))
        except dist.DistError as error:
            absent = [replica for replica, key in enumerate(keys) if not self._store.check([key])]
            raise RecoveryError(
                f"`load_state` waits for the replica groups {absent}, which did not call it within "
                f"{self._run.timeout} s. Call it in all of them, or increase --replica_timeout."
            ) from error
        held = [set(json.loads(self._store.get(key))) for key in keys]
        return [name for name in names if all(name in each for each in held)]
