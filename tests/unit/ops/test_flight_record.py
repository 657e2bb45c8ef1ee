"""The ring of the last operations, and the transports that write it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from accelerate.ops import FlightRecorder, Transport, flight_recorder
from accelerate.ops.flight_record import MAX_ENTRIES, line_of
from accelerate.ops.transport import TorchTransport

HERE = str(Path(__file__))


@pytest.fixture(autouse=True)
def clean_ring() -> Iterator[None]:
    flight_recorder().reset()
    yield
    flight_recorder().reset()


class Echo(Transport):
    """A transport of three processes that answers with what the ring shows meanwhile."""

    size = 3
    rank = 2

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather_object(self, obj: object) -> list[object]:
        return [flight_recorder().running()]

    def barrier(self) -> None:
        raise OSError("lost")


def test_an_operation_is_noted_with_the_line_that_called_it() -> None:
    flight_recorder().begin("gather", None)
    line = sys._getframe().f_lineno - 1
    entry = flight_recorder().running()
    assert entry is not None
    assert (entry.sequence, entry.operation, entry.arguments) == (1, "gather", "")
    assert (entry.file, entry.line) == (HERE, line)
    assert 0 <= time.monotonic() - entry.started < 5
    flight_recorder().end()
    assert flight_recorder().running() is None
    assert flight_recorder().entries() == [entry]


def test_only_the_outermost_operation_counts() -> None:
    flight_recorder().begin("gather_for_metrics", None)
    flight_recorder().begin("gather", None)
    flight_recorder().end()
    assert [entry.operation for entry in flight_recorder().entries()] == ["gather_for_metrics"]
    assert flight_recorder().running() is not None
    flight_recorder().end()
    assert flight_recorder().running() is None


def test_an_additional_end_has_no_effect() -> None:
    flight_recorder().end()
    flight_recorder().begin("reduce", None)
    assert flight_recorder().running() is not None


def test_the_oldest_operations_are_dropped() -> None:
    for _ in range(MAX_ENTRIES + 3):
        flight_recorder().begin("barrier", None)
        flight_recorder().end()
    sequences = [entry.sequence for entry in flight_recorder().entries()]
    assert sequences == list(range(4, MAX_ENTRIES + 4))


def record_in_thread() -> None:
    flight_recorder().begin("reduce", None)
    flight_recorder().end()
    flight_recorder().end()


def test_other_threads_are_not_noted() -> None:
    flight_recorder().begin("gather", None)
    other = threading.Thread(target=record_in_thread)
    other.start()
    other.join()
    assert [entry.operation for entry in flight_recorder().entries()] == ["gather"]
    assert flight_recorder().running() is not None


def test_the_thread_that_resets_is_the_one_noted() -> None:
    ring = FlightRecorder()
    thread = threading.Thread(target=lambda: (ring.reset(), ring.begin("reduce", None)))
    thread.start()
    thread.join()
    ring.begin("gather", None)
    assert [entry.operation for entry in ring.entries()] == ["reduce"]


def test_recorded_operations_are_formatted_when_read() -> None:
    for facts in (("sum", 3), None, int, (torch.ones(2, 5).shape, torch.bfloat16)):
        flight_recorder().begin("gather", facts)
        flight_recorder().end()
    assert [entry.arguments for entry in flight_recorder().entries()] == [
        "('sum', 3)",
        "",
        "int",
        "[2, 5] bfloat16",
    ]


def test_a_transport_records_each_call() -> None:
    transport = Echo()
    (entry,) = transport.gather_object(5)
    line = sys._getframe().f_lineno - 1
    assert (entry.operation, entry.arguments, entry.file, entry.line) == ("gather_object", "int", HERE, line)
    assert flight_recorder().running() is None
    assert transport.gather(torch.ones(2)).tolist() == [1, 1]
    assert flight_recorder().entries()[-1].arguments == "[2] float32"


def test_a_call_that_fails_has_ended() -> None:
    transport = Echo()
    with pytest.raises(OSError, match="lost"):
        transport.barrier()
    assert flight_recorder().running() is None
    assert flight_recorder().entries()[-1].operation == "barrier"


def test_every_call_of_a_transport_is_recorded() -> None:
    calls = {name for name, member in vars(Transport).items() if callable(member) and name[0] != "_"}
    assert all(hasattr(vars(TorchTransport)[name], "__wrapped__") for name in calls)
    assert not any(hasattr(vars(Transport)[name], "__wrapped__") for name in calls)


def test_an_instruction_without_a_line() -> None:
    assert line_of(test_an_instruction_without_a_line.__code__, 10**6) == 0


def test_recording_computes_no_names_or_lines() -> None:
    record, calls = flight_recorder(), []
    record.begin("gather", None)
    record.end()
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    record.begin("gather", None)
    record.end()
    sys.setprofile(None)
    assert calls == ["begin", "wait_for_ranks", "switch", "calling_frame", "end", "resume", "switch"]
