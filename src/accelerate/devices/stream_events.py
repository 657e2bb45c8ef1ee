"""Events with times in the current stream of a device that torch drives with streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class StreamEvents:
    """Events of one device.

    Args:
        device: With or without an index; without one it is the current device.
        is_capturing: Asks the device's torch module whether the current stream captures a graph.
    """

    def __init__(self, device: torch.device, is_capturing: Callable[[], bool]) -> None:
        import torch

        self.is_capturing = is_capturing
        self._device, self._make = device, torch.Event
        self._index, self._current_stream = device.index, torch.accelerator.current_stream

    def make(self) -> torch.Event | None:
        """Make an event; None where torch has none for the device."""
        event = self._make(device=self._device, enable_timing=True)
        try:
            self.record(event)
        except RuntimeError as error:
            if not is_unsupported(error):
                raise
            return None
        return event

    def record(self, event: torch.Event) -> None:
        event.record(self._current_stream(self._index))

    def seconds_between(self, first: torch.Event, last: torch.Event) -> float | None:
        """Return the seconds between two events that are done; None where the device measures none."""
        try:
            return float(first.elapsed_time(last)) / 1000
        except RuntimeError as error:
            if not is_unsupported(error):
                raise
            return None


def is_unsupported(error: RuntimeError) -> bool:
    """Return whether torch says that a device lacks a function."""
    return isinstance(error, NotImplementedError) or "doesn't support" in str(error)
