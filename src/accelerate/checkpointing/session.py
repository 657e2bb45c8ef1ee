"""What the saves and loads of one run share: how ranks agree, the thread that writes, the user's hooks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from accelerate.checkpointing import loading, retention, saving
from accelerate.checkpointing.background import Background
from accelerate.checkpointing.loading import Source
from accelerate.checkpointing.part import Payload
from accelerate.checkpointing.saving import Request, Site
from accelerate.checkpointing.staging import StagingArea
from accelerate.logging import get_logger
from accelerate.ops import current_transport, open_consensus
from accelerate.state import Consensus, PartialState, rendezvous, services

logger = get_logger(__name__)

SaveHook = Callable[[list[nn.Module], list[dict[str, Any]], str], Any]
LoadHook = Callable[[list[nn.Module], str], Any]


STORE_TIMEOUT = timedelta(minutes=5)
"""How long one request to the store may take."""


class Session:
    """The checkpoints of one run.

    Args:
        patience: seconds that the ranks have to come together.

    Attributes:
        save_hooks: called with models, weights and folder before a save.
        load_hooks: called with models and folder before a load.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.save_hooks: OrderedDict[int, SaveHook] = OrderedDict()
        self.load_hooks: OrderedDict[int, LoadHook] = OrderedDict()
        self._staging = StagingArea()

    @property
    def consensus(self) -> Consensus:
        """How the ranks agree; every session of a process counts their decisions together."""
        return services.get(Consensus, _open_consensus)

    @property
    def background(self) -> Background:
        """What writes; the sessions of a process take turns in it, because they agree over one consensus."""
        return services.get(Background, Background)

    @staticmethod
    def add_hook(hooks: OrderedDict[int, Any], hook: Callable[..., Any]) -> RemovableHandle:
        """Append a hook; the handle takes it away again."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def choose_number(self, parent: Path, wanted: int) -> int:
        """Return the number of the next checkpoint: the wanted one, or the next one above all that exist.

        Args:
            parent: the folder of the numbered checkpoints; that of rank 0 counts.
            wanted: the number that is due; that of rank 0 counts.
        """

        def choose(said: Sequence[int]) -> int:
            taken = retention.taken_numbers(parent)
            return said[0] if said[0] not in taken else max(taken) + 1

        number = int(self.consensus.decide(saving.CALL, wanted, choose, self.patience))
        if number != wanted:
            logger.warning(
                f"{parent} holds a checkpoint {wanted} already: this run goes on with number {number}. "
                "A project folder for each run keeps them apart."
            )
        return number

    def open_site(self, request: Request) -> Site:
        """Make the folder of a save; called on all ranks."""
        return saving.open_site(request, self.consensus)

    def prepare_write(
        self, site: Site, payloads: Sequence[Payload], *, blocking: bool
    ) -> Callable[[], object]:
        """Return what writes and commits, at once or in the background; called on all ranks.

        Args:
            site: where.
            payloads: the files of this rank.
            blocking: return only when the checkpoint is committed.
        """
        if not blocking and not self.consensus.is_threaded:
            logger.warning_once("This run has no store to agree over in the background: saves block.")
            blocking = True
        if blocking:
            return partial(saving.write, site, payloads)
        staged = self._staging.stage(payloads)
        return partial(self.background.start, partial(saving.write, site, staged, threads=1))

    def wait(self) -> None:
        """Return when no save is running any more.

        Raises:
            CheckpointError: the last one in the background has failed; once, on all ranks.
        """
        self.background.wait()

    def candidates(self, folder: Path | None, parent: Path | None) -> Iterator[Source]:
        """Yield the checkpoints that may be loaded, the first choice first; called on all ranks.

        Args:
            folder: the one that the user named; None for the newest numbered one.
            parent: the folder of the numbered checkpoints.
        """
        topology = PartialState().topology
        place = loading.Place(topology.local_rank, topology.local_size)
        if folder is not None:
            yield from loading.open_checkpoint(folder, self.consensus, place, self.patience)
        elif parent is not None:
            yield from loading.open_newest(parent, self.consensus, place, self.patience)


def _open_consensus() -> Consensus:
    # All ranks open theirs in the same order; the store may still hold values from before a reset.
    purpose = f"checkpoints/{services.next_number('checkpoints')}"
    return open_consensus(current_transport(), rendezvous.connect_channel(purpose, STORE_TIMEOUT))
