"""The comparison before a collective, with the other rank simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.ops import (
    DistributedOperationException,
    Transport,
    chained_operation,
    flight_recorder,
    verify_operation,
)
from accelerate.ops.base import Header
from accelerate.ops.verify import (
    Call,
    CallSummary,
    checking_header,
    map_leaves,
    mismatch_error,
    must_verify,
    operation,
    summarize,
    verify_shapes,
)


class TwoProcesses(Transport):
    """This process and one other: it does the same, or something else that it tells."""

    size = 2
    verifies = True

    def __init__(self, other: CallSummary | None = None) -> None:
        self.other = other

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor if self.other is None else tensor + 1])

    def gather_object(self, obj: Any) -> list[Any]:
        return [obj, self.other]


GATHER = "accelerate.utils.operations.gather"


def make_summary(**facts: Any) -> CallSummary:
    usual = {"operation": GATHER, "arguments": "", "compared": [2], "dtypes": "torch.float32", "shapes": [2]}
    return CallSummary(**{**usual, "location": "/home/me/train.py:4", **facts})


def test_equal_shapes_pass() -> None:
    verify_shapes("op", [torch.ones(2)], TwoProcesses())


def test_shapes_are_listed_by_process() -> None:
    with pytest.raises(DistributedOperationException) as raised:
        verify_shapes(
            GATHER, torch.ones(1, 5), TwoProcesses(make_summary(compared=[1, 2, 5], shapes=[1, 2, 5]))
        )
    text = str(raised.value)
    assert f"Operation: `{GATHER}`\n" in text
    assert "Input shapes:\n  - Process 0: [1, 5]\n  - Process 1: [1, 2, 5]\n" in text
    assert "Called from:\n  - Process 0: an unknown line\n  - Process 1: /home/me/train.py:4\n" in text


def test_different_operations_are_listed() -> None:
    barrier = make_summary(operation="wait", compared=None, dtypes=None, shapes=None)
    text = str(mismatch_error([make_summary(), barrier]))
    assert f"Operation:\n  - Process 0: `{GATHER}`\n  - Process 1: `wait`\n" in text
    assert "Input shapes:\n  - Process 0: [2]\n  - Process 1: no tensors\n" in text
    assert "Input shapes" not in str(mismatch_error([barrier, barrier._replace(operation="other")]))


@pytest.mark.usefixtures("states")
def test_the_line_of_the_user_is_named() -> None:
    flight_recorder().reset()

    @operation
    def talk() -> CallSummary:
        return summarize(Call("op"))

    assert talk().location == "an unknown line"  # one process: nothing is noted
    flight_recorder().begin("talk", None)
    try:
        assert summarize(Call("op")).location.startswith(f"{__file__}:")
    finally:
        flight_recorder().end()
        flight_recorder().reset()


def test_a_transport_without_a_header_is_given_one() -> None:
    transport = TwoProcesses()
    header = checking_header(transport)
    assert isinstance(header, Header)
    assert checking_header(transport) is header
    assert header.exchange(7)
    transport.other = make_summary()
    assert not header.exchange(7)


def test_outline_of_nested_data() -> None:
    data = {"a": (torch.ones(2), [torch.ones(1, 3)])}
    assert map_leaves(data, lambda tensor: list(tensor.shape)) == {"a": [[2], [[1, 3]]]}


def test_outline_refuses_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="was given str"):
        map_leaves([torch.ones(1), "text"], torch.Tensor.dim)


@pytest.mark.usefixtures("states")
def test_only_transports_where_it_is_cheap_are_verified_outside_debug_mode() -> None:
    from accelerate.state import PartialState

    transport = TwoProcesses()
    assert must_verify(transport)
    transport.verifies = False
    assert not must_verify(transport)
    PartialState().debug = True
    assert must_verify(transport)
    assert not must_verify(Transport())


@pytest.mark.usefixtures("states")
def test_a_verified_function_keeps_its_name_and_result() -> None:
    @verify_operation
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    assert double.__name__ == "double"
    assert double(torch.ones(1)).tolist() == [2.0]
    assert double(tensor=torch.ones(1)).tolist() == [2.0]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        double()  # type: ignore[call-arg]


@pytest.mark.usefixtures("states")
def test_a_chained_operation_is_named_in_the_refusal() -> None:
    @chained_operation
    def outer() -> None:
        raise DistributedOperationException("shapes differ")

    with pytest.raises(DistributedOperationException, match="outer` could not be carried out. shapes differ"):
        outer()
