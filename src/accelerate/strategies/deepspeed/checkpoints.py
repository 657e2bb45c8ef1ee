"""An engine as one part of a checkpoint: DeepSpeed writes its files, which are sealed like all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.base.constants import MODEL_NAME
from accelerate.base.errors import CheckpointError
from accelerate.checkpointing.files import files_under
from accelerate.checkpointing.part import Apply, Load, Payload
from accelerate.checkpointing.parts import number
from accelerate.state.topology import Topology


def leave(content: Any, path: Path) -> None:
    """Write nothing: the file lies there already."""


@dataclass(frozen=True)
class EnginePart:
    """Model, optimizer and scheduler of one engine, in a folder of their own, as DeepSpeed lays it out.

    Attributes:
        index: place of its model among those of the run that have an engine.
        engine: DeepSpeed's.
        topology: who this process is.
        folder: the checkpoint, where it is to be saved.
    """

    index: int
    engine: Any
    topology: Topology
    folder: Path | None = None
    everywhere: bool = True

    @property
    def name(self) -> str:
        """The folder, which DeepSpeed calls a tag."""
        return number(MODEL_NAME, self.index, "")

    def collect(self) -> list[Payload]:
        """Let DeepSpeed write its files, on all ranks together; return those that this rank seals."""
        assert self.folder is not None
        first = self.index == 0
        before = set(files_under(self.folder))
        self.engine.save_checkpoint(str(self.folder), tag=self.name, save_latest=first)
        written = [name for name in files_under(self.folder) if name not in before or self._is_own(name)]
        return [Payload(name, None, leave) for name in self._share(written)]

    def _is_own(self, name: str) -> bool:
        return name.startswith(f"{self.name}/")

    def _share(self, names: Sequence[str]) -> Sequence[str]:
        """Deal the files among the processes of this machine."""
        return sorted(names)[self.topology.local_rank :: self.topology.local_size]

    def read(self, options: Load) -> Apply:
        """Return what lets DeepSpeed load its files, on all ranks together.

        Raises:
            CheckpointError: they are not there.
        """
        if not (options.folder / self.name).is_dir():
            raise CheckpointError(
                f"{options.folder} holds no {self.name}, in which DeepSpeed keeps an engine. It was saved "
                "by a run without DeepSpeed, or with fewer models: choose another checkpoint, or load its "
                "weights into the model before `prepare`."
            )
        return partial(self._apply, options)

    def _apply(self, options: Load) -> None:
        strict = options.model.get("strict", True)
        with options.fitting(self.name, "engine"):
            path, _ = self.engine.load_checkpoint(
                str(options.folder), tag=self.name, load_module_strict=strict
            )
            if path is None:
                raise CheckpointError(f"DeepSpeed found nothing to load in {options.folder / self.name}")
