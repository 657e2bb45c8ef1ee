"""The comparison before a collective, with the other process played."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.ops.transport import Transport
from accelerate.ops.verify import (
    DistributedOperationException,
    all_agree,
    chained_operation,
    must_verify,
    outline,
    verify_operation,
    verify_shapes,
)


class TwoProcesses(Transport):
    """This process and one other, whose answers are given."""

    size = 2
    verifies = True

    def __init__(self, other: Any) -> None:
        self.other = other

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor if self.other is None else tensor + 1])

    def gather_object(self, obj: Any) -> list[Any]:
        return [obj, self.other]


def test_equal_shapes_pass() -> None:
    verify_shapes("op", [torch.ones(2)], TwoProcesses(None))


def test_shapes_are_listed_by_process() -> None:
    other = ([1, 2, 5], "torch.float32", [1, 2, 5])
    with pytest.raises(DistributedOperationException) as refused:
        verify_shapes("accelerate.utils.operations.gather", torch.ones(1, 5), TwoProcesses(other))
    text = str(refused.value)
    assert "Operation: `accelerate.utils.operations.gather`\n" in text
    assert "Input shapes:\n  - Process 0: [1, 5]\n  - Process 1: [1, 2, 5]\n" in text


def test_dtypes_are_listed_when_only_they_differ() -> None:
    other = ([2], "torch.float16", [2])
    with pytest.raises(DistributedOperationException, match="Input dtypes:\n  - Process 0: torch.float32\n"):
        verify_shapes("op", torch.ones(2), TwoProcesses(other))


def test_outline_of_nested_data() -> None:
    data = {"a": (torch.ones(2), [torch.ones(1, 3)])}
    assert outline(data, lambda tensor: list(tensor.shape)) == {"a": [[2], [[1, 3]]]}


def test_outline_refuses_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match="was given str"):
        outline([torch.ones(1), "text"], torch.Tensor.dim)


def test_all_agree() -> None:
    assert all_agree("same", TwoProcesses(None))
    assert not all_agree("same", TwoProcesses("other"))


@pytest.mark.usefixtures("states")
def test_only_wires_where_it_is_cheap_are_verified_outside_debug_mode() -> None:
    from accelerate.state import PartialState

    transport = TwoProcesses(None)
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
        double()


def test_a_chained_operation_is_named_in_the_refusal() -> None:
    @chained_operation
    def outer() -> None:
        raise DistributedOperationException("shapes differ")

    with pytest.raises(DistributedOperationException, match="outer` could not be carried out. shapes differ"):
        outer()
