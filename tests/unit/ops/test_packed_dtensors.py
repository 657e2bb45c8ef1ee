"""Packing recognises DTensors; tests/distributed/test_ops.py communicates them between ranks."""

from __future__ import annotations

from typing import Any

import torch

from accelerate.ops import Transport, to_full_tensors
from accelerate.ops.packed import gather_packed, reduce_packed
from accelerate.ops.verify import Call


class Mesh:
    device_type = "cpu"

    def __init__(self, *ranks: int) -> None:
        self.mesh = torch.tensor(ranks)


class Shared(torch.Tensor):
    """Looks like a distributed tensor."""

    device_mesh: Any

    def full_tensor(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).repeat(2)


class FakeTransport(Transport):
    """Rank 1 of four; the others have what it has. Ranks 0 and 1, and 2 and 3, share tensors."""

    size, rank = 4, 1

    def __init__(self) -> None:
        self.reduced: list[tuple[list[float], str]] = []

    def gather_object(self, obj: Any) -> list[Any]:
        return [0, 0, 2, 2]

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat(4)

    def reduce(self, tensor: torch.Tensor, how: str = "sum") -> torch.Tensor:
        self.reduced.append((tensor.tolist(), how))
        return tensor + 8


def shared(values: list[float], *ranks: int) -> Shared:
    tensor = torch.tensor(values).as_subclass(Shared)
    tensor.device_mesh = Mesh(*ranks)
    return tensor


def test_dtensors_are_replaced_by_full_tensors() -> None:
    plain = torch.ones(1)
    found = to_full_tensors({"a": [shared([1.0]), plain], "b": "text"})
    assert found["a"][0].tolist() == [1.0, 1.0]
    assert found["a"][1] is plain
    assert found["b"] == "text"


def test_a_value_of_all_ranks_is_stored_once() -> None:
    value, transport = shared([3.0], 0, 1, 2, 3), FakeTransport()
    assert gather_packed([value], transport, Call("op"))[0].tolist() == [3.0, 3.0]
    assert reduce_packed([value], "mean", 2.0, transport, Call("op"))[0].tolist() == [6.0, 6.0]
    assert not transport.reduced


def test_each_group_counts_once() -> None:
    transport, call = FakeTransport(), Call("op")
    value, plain = shared([3.0], 0, 1), torch.tensor([1.0])
    gathered = gather_packed([value, plain], transport, call)
    assert gathered[0].tolist() == [3.0] * 4
    assert gathered[1].tolist() == [1.0] * 4
    reduced = reduce_packed([value, plain], "mean", 1.0, transport, call)
    assert reduced[0].tolist() == [4.0, 4.0]
    assert reduced[1].tolist() == [9.0]
    assert transport.reduced == [([0.0, 0.0], "sum"), ([1.0], "mean")]
    assert reduce_packed([value], "max", 2.0, transport, call)[0].tolist() == [22.0, 22.0]
    assert transport.reduced[2:] == [([3.0, 3.0], "max")]
