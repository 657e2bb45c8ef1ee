"""The engine as one part of a checkpoint: Megatron-LM writes its files, which are sealed like all others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.base import CheckpointError
from accelerate.checkpointing import Change, Load, Payload, Stage, files_under
from accelerate.state import Topology

FOLDER = "megatron"
"""The folder of Megatron-LM's files in a checkpoint."""


def leave(content: Any, path: Path) -> None:
    """Write nothing: the file lies there already."""


@dataclass(frozen=True)
class MegatronPart:
    """Model, optimizer and scheduler, as Megatron-LM lays them out.

    Attributes:
        engine: ours.
        topology: who this process is.
        folder: the checkpoint, where it is to be saved.
    """

    engine: Any
    topology: Topology
    folder: Path | None = None

    def collect(self, leads: bool = True) -> list[Payload]:
        """Let Megatron-LM write its files, on all ranks together; return those that this rank seals."""
        assert self.folder is not None
        place = self.folder / FOLDER
        self.engine.save_checkpoint(place)
        mine = sorted(files_under(place))[self.topology.local_rank :: self.topology.local_size]
        return [Payload(f"{FOLDER}/{name}", None, leave) for name in mine]

    def read(self, options: Load) -> Change:
        """Return what lets Megatron-LM load its files, on all ranks together.

        Raises:
            CheckpointError: they are not there.
        """
        if not (options.folder / FOLDER).is_dir():
            raise CheckpointError(
                f"{options.folder} holds no {FOLDER}, in which Megatron-LM keeps model and optimizer. It was "
                "saved by a run without Megatron-LM: choose another checkpoint."
            )
        return Change(partial(self._apply, options), f"Megatron-LM's engine ({FOLDER})", stage=Stage.LAST)

    def _apply(self, options: Load) -> None:
        with options.fitting(FOLDER, "engine"):
            self.engine.load_checkpoint(options.folder / FOLDER)
        options.confirm()
