"""The contract of every transport, for each class in one process."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelerate.ops import Transport
from accelerate.ops.transport import NeuronTransport, TorchTransport, XlaTransport
from accelerate.state import process_group

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
]


class FakeXla(ModuleType):
    """The part of `torch_xla.core.xla_model` in use, for one replica; it writes down what was called."""

    REDUCE_SUM, REDUCE_MAX, REDUCE_MIN = "sum", "max", "min"

    def __init__(self) -> None:
        super().__init__("torch_xla.core.xla_model")
        self.calls: list[Any] = []

    def all_gather(self, value: torch.Tensor, dim: int) -> torch.Tensor:
        self.calls.append(("all_gather", dim))
        return value.clone()

    def all_reduce(self, kind: str, value: torch.Tensor) -> torch.Tensor:
        self.calls.append(("all_reduce", kind))
        return value.clone()

    def collective_broadcast(self, tensors: list[torch.Tensor], root_ordinal: int) -> None:
        self.calls.append(("collective_broadcast", root_ordinal))

    def mesh_reduce(self, tag: str, value: Any, join: Callable[[list[Any]], Any]) -> Any:
        self.calls.append(("mesh_reduce", tag))
        return join([pickle.loads(pickle.dumps(value))])

    def rendezvous(self, tag: str) -> None:
        self.calls.append(("rendezvous", tag))

    def mark_step(self) -> None:
        self.calls.append("mark_step")


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    process_group.close_group()


@pytest.fixture
def xla(monkeypatch: pytest.MonkeyPatch) -> FakeXla:
    fake = FakeXla()
    monkeypatch.setitem(sys.modules, "torch_xla", ModuleType("torch_xla"))
    monkeypatch.setitem(sys.modules, "torch_xla.core", ModuleType("torch_xla.core"))
    monkeypatch.setitem(sys.modules, "torch_xla.core.xla_model", fake)
    return fake


@pytest.fixture(params=[Transport, TorchTransport, NeuronTransport, XlaTransport])
def transport(request: pytest.FixtureRequest, group: None, xla: FakeXla) -> Iterator[Transport]:
    info = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
    transport = request.param() if request.param is Transport else request.param(info)
    yield transport
    vars(transport).clear()  # a second process group closes its port with the last reference to it


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tolist() == b.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_keeps_every_dtype(transport: Transport, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0, 2.0]]).to(dtype)
    assert same(transport.gather(tensor), tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_broadcast_returns_its_argument(transport: Transport, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0, 2.0]]).to(dtype)
    before = tensor.clone()
    assert transport.broadcast(tensor, 0) is tensor
    assert same(tensor, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_all_keeps_every_dtype(transport: Transport, dtype: torch.dtype) -> None:
    tensor = torch.tensor([0.0, 1.0, 2.0]).to(dtype)
    assert same(transport.all_to_all(tensor, [3], [3]), tensor)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0), (2, 3)], ids=str)
def test_collectives_keep_any_shape(transport: Transport, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    assert transport.gather(tensor).flatten().tolist() == tensor.flatten().tolist()
    assert transport.gather(tensor).shape[1:] == tensor.shape[1:]
    assert transport.reduce(tensor).shape == tensor.shape
    assert transport.broadcast(tensor, 0).shape == tensor.shape


def test_collectives_keep_tensors_of_any_layout(transport: Transport) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert same(transport.gather(tensor), tensor)
    assert same(transport.reduce(tensor), tensor)
    assert same(transport.broadcast(tensor, 0), torch.arange(6.0).reshape(2, 3).T)


def test_collectives_accept_parameters(transport: Transport) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    assert transport.broadcast(weight, 0) is weight
    assert transport.gather(weight).tolist() == [1.0, 1.0]
    assert transport.reduce(weight, "mean").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("how", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_reduce_keeps_floating_dtypes(transport: Transport, how: str, dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.5, 2.5], dtype=dtype)
    assert same(transport.reduce(tensor, how), tensor)


def test_reduce_leaves_its_argument_alone(transport: Transport) -> None:
    tensor = torch.tensor([1.0, 2.0])
    transport.reduce(tensor, "mean")
    assert tensor.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.bool, torch.float32], ids=str)
def test_scatter_fills_and_returns_its_argument(transport: Transport, dtype: torch.dtype) -> None:
    part = torch.tensor([0, 1, 2]).to(dtype)
    out = torch.zeros(6, dtype=dtype)[::2]
    assert transport.scatter([part], out) is out
    assert same(out, part)


@pytest.mark.parametrize("parts", [None, []])
def test_scatter_needs_one_part_for_each_process(transport: Transport, parts: Any) -> None:
    with pytest.raises(ValueError, match="there are 1 processes. Give one part for each of them."):
        transport.scatter(parts, torch.zeros(1))


def test_collectives_keep_objects(transport: Transport) -> None:
    thing = {"name": "x", "values": [1, 2]}
    assert transport.gather_object(thing) == [thing]
    assert transport.broadcast_object(thing, 0) is thing


def test_barrier_returns(transport: Transport) -> None:
    assert transport.barrier() is None


def test_a_copy_is_the_transport_of_the_reader(transport: Transport) -> None:
    assert type(pickle.loads(pickle.dumps(transport))) is Transport


@pytest.mark.parametrize("kind", [TorchTransport, NeuronTransport, XlaTransport])
def test_an_unknown_reduction_is_named(kind: type[Any], group: None, xla: FakeXla) -> None:
    info = SimpleNamespace(num_processes=1, process_index=0, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="how='median': no such reduction. Use one of sum, mean, max, min."):
        kind(info).reduce(torch.ones(1), "median")


def test_xla_calls(xla: FakeXla) -> None:
    info = SimpleNamespace(num_processes=4, process_index=1, device=torch.device("cpu"))
    transport = XlaTransport(info)
    assert transport.reduce(torch.tensor([4, 6]), "mean").tolist() == [1.0, 1.5]
    transport.reduce(torch.ones(1), "max")
    transport.gather(torch.ones(1))
    transport.broadcast(torch.ones(1), 2)
    transport.barrier()
    assert [call for call in xla.calls if call != "mark_step"] == [
        ("all_reduce", "sum"),
        ("all_reduce", "max"),
        ("all_gather", 0),
        ("collective_broadcast", 2),
        ("rendezvous", "accelerate.barrier"),
    ]
    assert xla.calls.count("mark_step") == 4
