"""Timing events in the current stream of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class StreamEvents:
    """Factory and timer of events on one device.

    Args:
        device: Device with an index, or without one for the current device.
        is_capturing: Returns whether the current stream captures a graph.
    """

    def __init__(self, device: torch.device, is_capturing: Callable[[], bool]) -> None:
        import torch

        self.is_capturing = is_capturing
        self._device, self._make = device, torch.Event
        self._index, self._current_stream = device.index, torch.accelerator.current_stream

    def make(self) -> torch.Event | None:
        """Creates an event, or returns None where torch has none for the device."""
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
        """Returns the seconds between two completed events, or None where the device has no timing."""
        try:
            return float(first.elapsed_time(last)) / 1000
        except RuntimeError as error:
            if not is_unsupported(error):
                raise
            return None


def is_unsupported(error: RuntimeError) -> bool:
    """Returns whether the error says that a device lacks a function."""
    return isinstance(error, NotImplementedError) or "doesn't support" in str(error)
