"""Interface of the replica groups of a run, of which most runs have one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

    from accelerate.strategies import Prepared

Result = TypeVar("Result")

Request: TypeAlias = Literal["save", "stop"]


class DrivenAccumulation(Protocol):
    """Accumulation of gradients whose micro-batches a loader may begin.

    Attributes:
        is_driven: Whether a loader begins them, and not `Accelerator.accumulate`.
        loss_factor: Factor of their losses, besides that of the window.
    """

    is_driven: bool
    loss_factor: float

    def begin_window(self, *, is_first: bool, is_last: bool) -> None:
        """Begins a micro-batch of a step with several."""


class ReplicaGroups:
    """Replica groups of a run, each of which can end while the others continue.

    This class is for a run of one group. Its methods change nothing.

    Attributes:
        repeats_steps: Whether a step is repeated if a group has ended.
        num_replicas: Number of groups that were launched.
        is_leader: Whether this group writes checkpoints and prints.
    """

    repeats_steps: bool = False
    num_replicas: int = 1
    is_leader: bool = True

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def drive(self, accumulation: DrivenAccumulation) -> None:
        """Sets the accumulation whose micro-batches the loaders of the groups begin."""

    def prepare_loader(
        self, loader: Iterable[Any], prepare: Callable[..., Any], options: Mapping[str, Any]
    ) -> Any:
        """Returns a prepared loader, and adds it to the prepared objects.

        Args:
            loader: A torch loader.
            prepare: Returns the prepared loader for keyword arguments of `prepare_data_loader`.
            options: The keyword arguments of a run of one group.
        """
        prepared = prepare(loader, **options)
        self._prepared.add_loader(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets the groups decide together whether a prepared optimizer takes a step."""

    def prepare_scheduler(self, scheduler: object) -> None:
        """Lets a prepared scheduler count the batches of all groups."""

    def check_use(self, name: str, value: object) -> None:
        """Raises an error for an option or a method that does not work with the groups now."""

    def held_by_all(self, names: list[str]) -> list[str]:
        """Returns the names that all groups pass."""
        return names

    def own_folder(self, folder: Path) -> Path:
        """Returns the folder of this group in a folder of the node."""
        return folder

    def run(self, collective: Callable[[], Result], alone: Callable[[], Result] | None = None) -> Result:
        """Runs a collective over the ranks of all groups that take part in steps.

        Args:
            collective: The collective.
            alone: Runs it within this group after another one has ended. None is `collective`.
        """
        return collective()

    def read_request(self, name: Request, is_requested: bool) -> bool:
        """Returns whether to save or to stop, which all groups do after the same step.

        Args:
            name: "save", which is True once for each request, or "stop".
            is_requested: Whether this group has been asked, since the last call or before.
        """
        return is_requested
