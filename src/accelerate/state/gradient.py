"""State of gradient accumulation, with the loaders that are being read.

`Accelerator` sets it for each pass, and prepared optimizers, schedulers and loaders read it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, ClassVar

from accelerate.plugins import GradientAccumulationPlugin
from accelerate.state.driving_loader import DrivingLoader
from accelerate.state.shared import SharedDict, SharedState


class PassReference(weakref.ReferenceType[Any]):
    """Weak reference to a loader that is being read.

    Attributes:
        number: Number of the pass over it, counted from 1 over all loaders.
        outer: Numbers of the passes that had not ended when it began.
    """

    number: int
    outer: frozenset[int]


class GradientState(SharedState):
    """State of gradient accumulation, shared by all instances in a process.

    Optimizers and schedulers read from it whether to step, and loaders register here while they are read.
    Loaders are weakly referenced, the innermost last, because an evaluation within an epoch reads a second
    loader.

    Args:
        gradient_accumulation_plugin: Configuration of gradient accumulation. None keeps the current one, and
            by default each pass is an optimizer step.

    Attributes:
        sync_gradients: Whether gradients are synchronized in this pass and the optimizer steps after it.
        plugin_kwargs: Fields of the plugin that differ from their defaults. May be changed.
        only_pass: Number of the pass over the only loader that is being read, 0 if none is, and None if
            several are.
    """

    __slots__ = ("_own_kwargs",)

    _shared_state: ClassVar[dict[str, Any]] = SharedDict()

    sync_gradients: bool
    plugin_kwargs: dict[str, Any]
    _own_kwargs: dict[str, Any]
    only_pass: int | None
    _dataloader_references_ref: list[PassReference | None]
    _num_passes: int
    _driving: weakref.ref[Any] | None
    _is_xla_gradients_synced: bool

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        super().__init__()
        if not self.initialized:
            self.__dict__.update(
                sync_gradients=True,
                only_pass=0,
                _dataloader_references_ref=[None],
                _num_passes=0,
                _driving=None,
                plugin_kwargs={"num_steps": 1},
                _is_xla_gradients_synced=False,
            )
        if gradient_accumulation_plugin is not None:
            self.plugin_kwargs = gradient_accumulation_plugin.to_kwargs()

    def keep_kwargs(self) -> None:
        """Makes this instance keep its `plugin_kwargs` when a later `Accelerator` has others."""
        if self.initialized and type(self) is GradientState:
            self._own_kwargs = self.plugin_kwargs
            self.__class__ = _EarlierGradientState

    @property
    def num_steps(self) -> int:
        """Number of micro-batches of one optimizer step."""
        return self.plugin_kwargs.get("num_steps", 1)  # type: ignore[no-any-return]

    @property
    def global_batch_size(self) -> int | None:
        """Number of samples of one optimizer step on all ranks, or None if it depends on their number."""
        return self.plugin_kwargs.get("global_batch_size")

    @property
    def adjust_scheduler(self) -> bool:
        """True if schedulers also count passes without an optimizer step."""
        return self.plugin_kwargs.get("adjust_scheduler", True)  # type: ignore[no-any-return]

    @property
    def sync_with_dataloader(self) -> bool:
        """True if the last batch of a loader ends the accumulation of gradients early."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)  # type: ignore[no-any-return]

    @property
    def active_dataloader(self) -> Any:
        """Innermost loader that is being read, or None."""
        reference = self._dataloader_references_ref[-1]
        return None if reference is None else reference()

    @property
    def in_dataloader(self) -> bool:
        """True while a prepared loader is being read."""
        return self.active_dataloader is not None

    def follow(self, loader: Any) -> None:
        """Sets the loader that drives the loop while it is being read, which `windows` knows."""
        self._driving = None if loader is None else weakref.ref(loader)

    def find_pass(self, driver: DrivingLoader) -> int:
        """Returns the number of the pass that drives the loop, if several loaders are being read.

        Args:
            driver: It finds the loader if `follow` has not set it.
        """
        loaders, known = self.open_loaders(), self._driving and self._driving()
        if known is None or not any(loader is known for loader in loaders):
            driver.begin_micro_batch(loaders)
            known = driver.loader
        references = self._dataloader_references_ref
        others = [found for found in references if found is not None and found() is known]
        return others[-1].number if others else 0

    def is_behind(self, number: int) -> bool:
        """Returns whether the pass of this number has ended, and no other pass has begun since then."""
        others = self._dataloader_references_ref[1:]
        return all(other is None or other.number < number or number in other.outer for other in others)

    @property
    def end_of_dataloader(self) -> bool:
        """True after the last batch of the active loader, and False without a loader."""
        loader = self.active_dataloader
        return False if loader is None else bool(loader.end_of_dataloader)

    @property
    def remainder(self) -> int:
        """Samples in the last batch of all ranks without padding, 0 for a full batch, -1 if not known."""
        loader = self.active_dataloader
        return -1 if loader is None else int(loader.remainder)

    @property
    def is_xla_gradients_synced(self) -> bool:
        """True if gradients on XLA devices have been reduced in this step already."""
        return self._is_xla_gradients_synced

    @is_xla_gradients_synced.setter
    def is_xla_gradients_synced(self, is_synced: bool) -> None:
        self._is_xla_gradients_synced = is_synced

    @property
    def dataloader_references(self) -> list[Any]:
        """List of None, for no loader, and the loaders that are being read, the outermost first."""
        return [None if reference is None else reference() for reference in self._dataloader_references_ref]

    @dataloader_references.setter
    def dataloader_references(self, references: Iterable[Any]) -> None:
        self._dataloader_references_ref = [None]
        self._count_passes()
        for loader in references:
            if loader is not None:
                self._add_dataloader(loader)

    def open_loaders(self) -> list[Any]:
        """Returns the loaders that are being read, the outermost first."""
        return [] if self.only_pass == 0 else self.dataloader_references[1:]

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Sets whether gradients are synchronized in this pass.

        Called once for each pass.
        """
        self.sync_gradients = sync_gradients
        self._is_xla_gradients_synced = False

    def _add_dataloader(self, dataloader: Any) -> None:
        """Registers a loader, which is active until it is removed or garbage collected."""
        references = self._dataloader_references_ref
        reference = PassReference(dataloader, lambda dead: self._discard(references, dead))
        self._num_passes = reference.number = self._num_passes + 1
        reference.outer = frozenset(outer.number for outer in references if outer is not None)
        references.append(reference)
        self._count_passes()

    def _remove_dataloader(self, dataloader: object) -> None:
        """Removes a loader that is no longer read, if it is registered."""
        references = self._dataloader_references_ref
        for reference in reversed(references):
            if reference is not None and reference() is dataloader:
                self._discard(references, reference)
                return

    def _discard(self, references: list[PassReference | None], removed: object) -> None:
        # Compared by identity, because two live references are equal if their loaders are.
        references[:] = [reference for reference in references if reference is not removed]
        if self.initialized:  # a loader may be deleted after the state was reset
            self._count_passes()

    def _count_passes(self) -> None:
        """Sets `only_pass`."""
        _, *passes = self._dataloader_references_ref
        numbers = [0, *(each.number for each in passes if each is not None)]
        self.only_pass = numbers[-1] if len(numbers) < 3 else None

    def __reduce__(self) -> tuple[Any, ...]:
        return GradientState, ()

    @staticmethod
    def _reset_state() -> None:
        """Clears the state, so that the next `GradientState` has the defaults."""
        GradientState._shared_state.clear()

    def __repr__(self) -> str:
        return (
            f"GradientState(sync_gradients={self.sync_gradients}, remainder={self.remainder}, "
            f"end_of_dataloader={self.end_of_dataloader}, plugin_kwargs={self.plugin_kwargs})"
        )


class _EarlierGradientState(GradientState):
    """State of an `Accelerator` that was created before the newest one, with its own `plugin_kwargs`."""

    __slots__ = ()

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        return self._own_kwargs

    @plugin_kwargs.setter
    def plugin_kwargs(self, plugin_kwargs: dict[str, Any]) -> None:
        self._own_kwargs = plugin_kwargs


class GradientStates(weakref.WeakSet[GradientState]):
    """States of the Accelerators of a process, which share all but the `plugin_kwargs` of earlier ones."""
