"""Whole structures over a transport, with the other ranks simulated; tests/distributed has real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.ops import Transport, to_full_tensors
from accelerate.ops.base import Header
from accelerate.ops.packed import broadcast_packed, gather_packed, reduce_packed
from accelerate.ops.verify import Call

CALL = Call("op")


class Three(Transport):
    """Three processes that all have what this one has; records what is sent."""

    size = 3

    def __init__(self, with_header: bool) -> None:
        self.sent: list[tuple[str, int]] = []
        self.verifies = with_header
        if with_header:
            self.header = Header(3, lambda joined, sent: joined.copy_(self.gather(sent)))

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent.append(("gather", tensor.numel() * tensor.itemsize))
        return torch.cat([tensor.reshape(1) if tensor.ndim == 0 else tensor] * 3)

    def reduce(self, tensor: torch.Tensor, how: str = "sum") -> torch.Tensor:
        self.sent.append(("reduce", tensor.numel() * tensor.itemsize))
        return tensor.detach() * 3 if how == "sum" else tensor.detach().clone()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        self.sent.append(("broadcast", tensor.numel() * tensor.itemsize))
        return tensor


def structure(scale: int) -> dict[str, Any]:
    return {
        "rows": torch.arange(6.0 * scale).reshape(2, -1).T,
        "scalar": torch.tensor(2),
        "more": (torch.ones(scale, dtype=torch.bfloat16), torch.zeros(0, 4), torch.full((1, scale), 3)),
    }


def leaves(data: dict[str, Any]) -> list[torch.Tensor]:
    return [data["rows"], data["scalar"], *data["more"]]


@pytest.mark.parametrize(
    ("with_header", "scale", "calls"),
    [(True, 2, 1), (True, 2000, 2), (True, 20_000, 4), (False, 2, 1), (False, 20_000, 3)],
)
def test_gather(with_header: bool, scale: int, calls: int) -> None:
    transport, data = Three(with_header), structure(scale)
    joined = gather_packed(data, transport, CALL)
    assert list(joined) == list(data)
    assert type(joined["more"]) is tuple
    for whole, part in zip(leaves(joined), leaves(data), strict=True):
        expected = torch.cat([part.reshape(1) if part.ndim == 0 else part] * 3)
        assert torch.equal(whole, expected)
        assert whole.dtype == part.dtype
    assert len(transport.sent) == calls


@pytest.mark.parametrize("how", ["sum", "mean"])
@pytest.mark.parametrize(
    ("with_header", "scale", "calls"), [(True, 2, ["gather"]), (True, 2000, 4), (False, 2, 3)]
)
def test_reduce(with_header: bool, scale: int, calls: Any, how: str) -> None:
    transport, data = Three(with_header), structure(scale)
    before = [leaf.clone() for leaf in leaves(data)]
    total = reduce_packed(data, how, 2.0, transport, CALL)
    for result, part in zip(leaves(total), before, strict=True):
        assert torch.equal(result, (part * 3 if how == "sum" else part) * 2.0)
        assert result.shape == part.shape
    assert all(torch.equal(a, b) for a, b in zip(leaves(data), before, strict=True))
    kinds = [kind for kind, _ in transport.sent]
    assert kinds == calls if isinstance(calls, list) else len(kinds) == calls


@pytest.mark.parametrize(("with_header", "scale"), [(True, 2), (True, 2000), (False, 2), (False, 20_000)])
@pytest.mark.parametrize("source", [0, 1])
def test_broadcast_keeps_the_tensors(with_header: bool, scale: int, source: int) -> None:
    transport, data = Three(with_header), structure(scale)
    assert all(
        a is b
        for a, b in zip(leaves(broadcast_packed(data, source, transport, CALL)), leaves(data), strict=True)
    )


def test_results_need_no_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    for with_header in (True, False):
        assert not gather_packed([weight, weight], Three(with_header), CALL)[0].requires_grad
        assert not reduce_packed(weight, "sum", 2.0, Three(with_header), CALL).requires_grad


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
