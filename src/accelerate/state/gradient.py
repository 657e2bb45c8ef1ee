"""GradientState: does this step synchronise gradients, and which loader is being read."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

from accelerate.plugins import GradientAccumulationPlugin
from accelerate.state.shared import SharedDict, SharedState

Reference = weakref.ReferenceType[Any]


class GradientState(SharedState):
    """Where optimizers and schedulers look whether to step, and where loaders report.

    Loaders are held weakly, the innermost last: an evaluation in a training epoch is a second one on top.

    Args:
        gradient_accumulation_plugin: how gradients are accumulated; None keeps what is known.

    Attributes:
        sync_gradients: whether gradients are exchanged in this pass and the optimizer steps after it.
        plugin_kwargs: the fields of the plugin that are not at their defaults; may be edited.
    """

    _shared_state: ClassVar[dict[str, Any]] = SharedDict()

    sync_gradients: bool
    plugin_kwargs: dict[str, Any]
    _dataloader_references_ref: list[Reference | None]
    _is_xla_gradients_synced: bool

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        super().__init__()
        if not self.initialized:
            self.__dict__.update(
                sync_gradients=True,
                _dataloader_references_ref=[None],
                plugin_kwargs={"num_steps": 1},
                _is_xla_gradients_synced=False,
            )
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    @property
    def num_steps(self) -> int:
        """Number of passes for one optimizer step."""
        return self.plugin_kwargs.get("num_steps", 1)  # type: ignore[no-any-return]

    @property
    def adjust_scheduler(self) -> bool:
        """Whether schedulers also count the passes that do not step."""
        return self.plugin_kwargs.get("adjust_scheduler", True)  # type: ignore[no-any-return]

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of a loader ends an accumulation window early."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)  # type: ignore[no-any-return]

    @property
    def active_dataloader(self) -> Any:
        """The loader that is being read, the innermost of several; None when there is none."""
        reference = self._dataloader_references_ref[-1]
        return None if reference is None else reference()

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being read."""
        return self.active_dataloader is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the loader that is being read gave its last batch; False when there is none."""
        loader = self.active_dataloader
        return False if loader is None else bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """How many samples of the last batch are not filler, over all processes; -1 when not known."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Whether gradients on XLA devices were reduced already in this step."""
        return self._is_xla_gradients_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, is_synced: bool) -> None:
        self._is_xla_gradients_synced = is_synced

    @property
    def dataloader_references(self) -> list[Any]:
        """The loaders that are being read, outermost first, after a None for "no loader"."""
        return [None if reference is None else reference() for reference in self._dataloader_references_ref]

    @dataloader_references.setter
    def dataloader_references(self, references: Iterable[Any]) -> None:
        self._dataloader_references_ref = [None]
        for loader in references:
            if loader is not None:
                self._add_dataloader(loader)

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Say whether gradients are exchanged in this pass; called once for each pass."""
        self.sync_gradients = sync_gradients
        self._is_xla_gradients_synced = False

    def _add_dataloader(self, dataloader: Any) -> None:
        """Note that a loader begins to be read; it is the active one until it is removed or collected."""
        references = self._dataloader_references_ref
        references.append(weakref.ref(dataloader, lambda dead: _discard(references, dead)))

    def _remove_dataloader(self, dataloader: Any) -> None:
        """Note that a loader is no longer read; one that is not noted is left alone."""
        references = self._dataloader_references_ref
        for reference in reversed(references):
            if reference is not None and reference() is dataloader:
                _discard(references, reference)
                return

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientState, ()

    @staticmethod
    def _reset_state() -> None:
        """Forget everything: the next `GradientState` starts anew."""
        GradientState._shared_state.clear()

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, remainder={self.remainder}, "
            f"end_of_dataloader={self.end_of_dataloader}, plugin_kwargs={self.plugin_kwargs})"
        )


def _discard(references: list[Reference | None], gone: Reference) -> None:
    # By identity: two live references are equal when their loaders are.
    references[:] = [reference for reference in references if reference is not gone]
