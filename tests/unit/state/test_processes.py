"""ProcessControl on a class with a rank and a world size only."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from accelerate.base import ConfigurationError
from accelerate.state import ProcessControl


class Place(ProcessControl):
    device = torch.device("cpu")  # type: ignore[assignment]

    def __init__(self, rank: int, size: int, local_rank: int | None = None) -> None:
        self.process_index = rank  # type: ignore[misc]
        self.num_processes = size  # type: ignore[misc]
        self.local_process_index = rank if local_rank is None else local_rank  # type: ignore[misc]


def greet(name: str) -> str:
    """Greet."""
    return f"hello {name}"


def test_main_and_last_processes_are_recognized() -> None:
    first, third = Place(0, 4), Place(2, 4, 0)
    assert (first.is_main_process, first.is_local_main_process, first.is_last_process) == (True, True, False)
    assert (third.is_main_process, third.is_local_main_process, third.is_last_process) == (False, True, False)
    assert Place(3, 4).is_last_process
    assert Place(0, 1).is_last_process


@pytest.mark.parametrize(
    ("decorator", "arguments", "runs"),
    [
        ("on_main_process", {}, [True, False, False, False]),
        ("on_local_main_process", {}, [True, False, True, False]),
        ("on_last_process", {}, [False, False, False, True]),
        ("on_process", {"process_index": 2}, [False, False, True, False]),
        ("on_local_process", {"local_process_index": 1}, [False, True, False, True]),
    ],
)
def test_decorators(decorator: str, arguments: dict[str, int], runs: list[bool]) -> None:
    for rank, expected in enumerate(runs):
        place = Place(rank, 4, rank % 2)
        answer = "hello you" if expected else None
        decorate = getattr(place, decorator)
        assert decorate(greet, **arguments)("you") == answer
        assert decorate(**arguments)(greet)("you") == answer
        assert decorate(greet, **arguments).__doc__ == "Greet."


def test_methods_can_be_decorated() -> None:
    place = Place(1, 2)

    class Speaker:
        @place.on_main_process
        def first(self) -> str:
            return "first"

        @place.on_process(process_index=1)
        def second(self) -> str:
            return "second"

    assert Speaker().first() is None
    assert Speaker().second() == "second"


def test_a_function_that_no_process_runs_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Place(0, 2).on_process(greet, process_index=5)("you") is None
        assert Place(1, 2).on_process(greet, process_index=5)("you") is None
    assert [record.getMessage() for record in caplog.records] == [
        "greet is to run on process 5, but there are only 2: it will never run."
    ]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda place: place.on_process(greet), "process_index is missing"),
        (lambda place: place.on_local_process(), "local_process_index is missing"),
        (lambda place: place.on_process(greet, process_index=-1), "process_index=-1"),
        (lambda place: place.on_main_process(3), "function=3: it cannot be called"),
    ],
)
def test_wrong_arguments(call: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        call(Place(0, 2))


def test_print_once_for_each_machine(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(4):
        Place(rank, 4, rank % 2).print("rank", rank, sep="-", end=";")
    assert capsys.readouterr().out == "rank-0;rank-2;"
