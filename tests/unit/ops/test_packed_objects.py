"""Objects and numbers of all processes, with the other rank simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.ops import DistributedOperationException, Transport
from accelerate.ops.base import Header
from accelerate.ops.packed import broadcast_object, gather_integers, gather_objects
from accelerate.ops.verify import Call
from accelerate.state import PartialState

CALL = Call("accelerate.utils.operations.gather_object")
SMALL, LARGE = {"a": [1, 2]}, list(range(9000))


class Mirror(Transport):
    """Two processes; the other one sends what this one sends, and counts the collectives."""

    size = 2

    def __init__(self, with_header: bool) -> None:
        self.collectives = 0
        self.verifies = with_header
        self.header = Header(2, lambda joined, sent: joined.copy_(self.gather(sent))) if with_header else None

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.collectives += 1
        return torch.cat([tensor, tensor])

    def gather_object(self, obj: Any) -> list[Any]:
        self.collectives += 1
        return [obj, obj]

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        self.collectives += 1
        return tensor

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        self.collectives += 1
        return obj


@pytest.mark.parametrize(
    ("obj", "with_header", "collectives"), [(SMALL, True, 1), (LARGE, True, 2), (LARGE, False, 1)]
)
def test_objects_are_sent_with_the_header_where_they_fit(
    obj: Any, with_header: bool, collectives: int
) -> None:
    transport = Mirror(with_header)
    assert gather_objects(obj, transport, CALL) == [obj, obj]
    assert transport.collectives == collectives


@pytest.mark.parametrize(("obj", "with_header"), [(SMALL, True), (LARGE, True), (LARGE, False)])
def test_the_source_of_a_broadcast_keeps_its_object(obj: Any, with_header: bool) -> None:
    assert broadcast_object(obj, 0, Mirror(with_header), CALL) is obj


@pytest.mark.parametrize("with_header", [True, False])
@pytest.mark.parametrize("numbers", [[], [3, -4], list(range(3000))])
def test_integers_of_all_ranks_are_gathered(with_header: bool, numbers: list[int]) -> None:
    assert gather_integers(numbers, Mirror(with_header), CALL) == [numbers, numbers]


@pytest.mark.usefixtures("states")
def test_a_transport_without_a_header_compares_in_debug_mode() -> None:
    transport = Mirror(False)
    gather_objects(SMALL, transport, CALL)
    assert transport.collectives == 1
    PartialState().debug = True
    gather_objects(SMALL, transport, CALL)
    assert transport.collectives == 3
    transport.gather = lambda tensor: torch.cat([tensor, tensor + 1])  # type: ignore[method-assign]
    with pytest.raises(DistributedOperationException):
        gather_objects(SMALL, transport, CALL)
