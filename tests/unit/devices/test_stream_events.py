"""Events with times in the current stream of a device, and devices that have none."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from accelerate.devices import BACKENDS, CPU, StreamEvents

HERE = torch.device("cpu")


class Event:
    """An event of a device, which fails with an error or took so many milliseconds."""

    def __init__(self, result: float | Exception = 0.0) -> None:
        self.result, self.recorded = result, []  # type: ignore[var-annotated]

    def record(self, stream: object) -> None:
        self.recorded.append(stream)

    def elapsed_time(self, last: Event) -> float:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


def make_events(captures: bool = False) -> StreamEvents:
    return StreamEvents(HERE, lambda: captures)


def test_milliseconds_are_seconds() -> None:
    assert make_events().seconds_between(Event(1500.0), Event()) == 1.5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [RuntimeError("npu backend doesn't support elapsedTime."), NotImplementedError("no")]
)
def test_a_device_without_times_has_no_seconds(error: Exception) -> None:
    assert make_events().seconds_between(Event(error), Event()) is None  # type: ignore[arg-type]


def test_an_error_of_the_device_is_raised() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        make_events().seconds_between(Event(RuntimeError("illegal memory access")), Event())  # type: ignore[arg-type]


def test_events_are_recorded_in_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    event = Event()
    StreamEvents(torch.device("cuda", 1), lambda: False).record(event)  # type: ignore[arg-type]
    assert event.recorded == ["stream of 1"]


def test_devices_without_streams_have_no_events() -> None:
    rows = [row for row in BACKENDS if not row.has_streams]
    assert CPU in rows
    assert [row.timed_events(HERE) for row in rows] == [None] * len(rows)


def test_a_device_whose_torch_has_no_events_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    assert make_events().make() is None


def test_an_error_of_the_driver_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: object) -> None:
        raise RuntimeError("the driver is too old")

    monkeypatch.setattr(torch.accelerator, "current_stream", fail)
    with pytest.raises(RuntimeError, match="too old"):
        make_events().make()


@pytest.mark.parametrize("captures", [False, True])
def test_the_module_reports_whether_a_graph_is_captured(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(is_current_stream_capturing=lambda: captures)
    backend = replace(CPU, has_streams=True)
    monkeypatch.setattr(type(backend), "torch_module", lambda self: module)
    monkeypatch.setattr(torch, "Event", lambda **arguments: Event())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: None)
    events = backend.timed_events(HERE)
    assert events is not None
    assert events.is_capturing() is captures
