"""Objects and numbers of all processes, with the other process played."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.ops import (
    Call,
    DistributedOperationException,
    Head,
    Transport,
    broadcast_object,
    gather_objects,
    share_numbers,
)
from accelerate.state import PartialState

CALL = Call("accelerate.utils.operations.gather_object")
SMALL, LARGE = {"a": [1, 2]}, list(range(9000))


class Mirror(Transport):
    """Two processes; the other one sends what this one sends, and notes how often something travels."""

    size = 2

    def __init__(self, with_head: bool) -> None:
        self.travels = 0
        self.verifies = with_head
        self.head = Head(2, lambda joined, sent: joined.copy_(self.gather(sent))) if with_head else None

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.travels += 1
        return torch.cat([tensor, tensor])

    def gather_object(self, obj: Any) -> list[Any]:
        self.travels += 1
        return [obj, obj]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        self.travels += 1
        return tensor

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        self.travels += 1
        return obj


@pytest.mark.parametrize(
    ("obj", "with_head", "travels"), [(SMALL, True, 1), (LARGE, True, 2), (LARGE, False, 1)]
)
def test_objects_travel_with_the_head_where_they_fit(obj: Any, with_head: bool, travels: int) -> None:
    wire = Mirror(with_head)
    assert gather_objects(obj, wire, CALL) == [obj, obj]
    assert wire.travels == travels


@pytest.mark.parametrize(("obj", "with_head"), [(SMALL, True), (LARGE, True), (LARGE, False)])
def test_the_source_of_a_broadcast_keeps_its_object(obj: Any, with_head: bool) -> None:
    assert broadcast_object(obj, 0, Mirror(with_head), CALL) is obj


@pytest.mark.parametrize("with_head", [True, False])
@pytest.mark.parametrize("numbers", [[], [3, -4], list(range(3000))])
def test_numbers(with_head: bool, numbers: list[int]) -> None:
    assert share_numbers(numbers, Mirror(with_head), CALL) == [numbers, numbers]


@pytest.mark.usefixtures("states")
def test_a_wire_without_head_compares_in_debug_mode() -> None:
    wire = Mirror(False)
    gather_objects(SMALL, wire, CALL)
    assert wire.travels == 1
    PartialState().debug = True
    gather_objects(SMALL, wire, CALL)
    assert wire.travels == 3
    wire.gather = lambda tensor: torch.cat([tensor, tensor + 1])  # type: ignore[method-assign]
    with pytest.raises(DistributedOperationException):
        gather_objects(SMALL, wire, CALL)
