"""Which transport is chosen, and in which dtypes and on which devices tensors travel."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from accelerate.ops.transport import (
    Transport,
    _as_carried,
    _carried_devices,
    _finished_reduction,
    _reducible_dtype,
    current_transport,
)
from accelerate.state import PartialState


@pytest.mark.parametrize(
    ("backends", "carried"),
    [
        ("cpu:gloo,cuda:gloo", {"cpu"}),
        ("cuda:nccl", {"cuda"}),
        ("cpu:gloo,cuda:nccl", {"cpu", "cuda"}),
        ("cpu:mpi", {"cpu"}),
        ("npu:hccl", {"npu"}),
    ],
)
def test_carried_devices(backends: str, carried: set[str]) -> None:
    assert _carried_devices(backends) == carried


@pytest.mark.parametrize(
    ("given", "wide"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float8_e5m2, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
        (torch.bool, torch.int64),
        (torch.uint8, torch.int64),
        (torch.int32, torch.int64),
    ],
)
def test_sums_are_formed_in_a_wide_dtype(given: torch.dtype, wide: torch.dtype) -> None:
    assert _reducible_dtype(given) == wide


@pytest.mark.parametrize(
    ("given", "how", "dtype"),
    [
        (torch.float16, "mean", torch.float16),
        (torch.complex64, "mean", torch.complex64),
        (torch.int32, "sum", torch.int64),
        (torch.int32, "max", torch.int32),
        (torch.bool, "sum", torch.int64),
        (torch.bool, "min", torch.bool),
        (torch.int64, "mean", torch.float32),
    ],
)
def test_dtype_of_a_reduction(given: torch.dtype, how: str, dtype: torch.dtype) -> None:
    total = torch.ones(1, dtype=_reducible_dtype(given))
    assert _finished_reduction(total, how, 2, torch.ones(1).to(given)).dtype == dtype


def test_a_half_mean_does_not_overflow() -> None:
    given = torch.tensor([60000.0], dtype=torch.float16)
    mean = _finished_reduction(given.float() * 2, "mean", 2, given)
    assert mean.tolist() == given.tolist()


def test_odd_dtypes_travel_as_bytes_of_the_same_memory() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.int16)
    view = _as_carried(tensor)
    assert view.dtype == torch.uint8
    assert view.data_ptr() == tensor.data_ptr()
    assert _as_carried(view) is view


def test_one_process_hands_everything_back() -> None:
    tensor = torch.tensor(3)
    transport = Transport()
    assert transport.gather(tensor) is tensor
    assert transport.reduce(tensor, "mean") is tensor
    assert transport.broadcast(tensor, 0) is tensor


@pytest.mark.usefixtures("states")
def test_the_transport_is_decided_once_and_dropped_on_reset() -> None:
    first = current_transport()
    assert type(first) is Transport
    assert current_transport() is first
    PartialState._reset_state()
    assert PartialState._shared_state == {}
    assert current_transport() is not first


@pytest.mark.usefixtures("states")
def test_copies_are_the_current_transport() -> None:
    transport = current_transport()
    assert copy.deepcopy(transport) is transport
    assert pickle.loads(pickle.dumps(transport)) is transport


def test_unpickling_without_a_state_opens_none() -> None:
    assert type(pickle.loads(pickle.dumps(Transport()))) is Transport
    assert PartialState._shared_state == {}
