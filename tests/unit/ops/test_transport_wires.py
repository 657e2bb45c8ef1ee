"""On which devices tensors travel, and what a wire does for itself."""

from __future__ import annotations

import pytest
import torch

from accelerate.ops import Transport
from accelerate.ops.transport import _carried_devices, _scatter_by_broadcast


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


class Second(Transport):
    """Process 1 of two; process 0 sends the numbers from 0."""

    size = 2
    rank = 1

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))


def test_a_wire_without_scatter_broadcasts_all_parts() -> None:
    out = torch.zeros(3)
    assert _scatter_by_broadcast(Second(), None, out, 0) is out
    assert out.tolist() == [3.0, 4.0, 5.0]
