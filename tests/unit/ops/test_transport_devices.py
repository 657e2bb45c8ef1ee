"""On which devices tensors are sent, and what a transport does for itself."""

from __future__ import annotations

import pytest
import torch

from accelerate.ops import Transport
from accelerate.ops.transport import supported_devices


@pytest.mark.parametrize(
    ("backends", "supported"),
    [
        ("cpu:gloo,cuda:gloo", {"cpu"}),
        ("cuda:nccl", {"cuda"}),
        ("cpu:gloo,cuda:nccl", {"cpu", "cuda"}),
        ("cpu:mpi", {"cpu"}),
        ("npu:hccl", {"npu"}),
    ],
)
def testsupported_devices(backends: str, supported: set[str]) -> None:
    assert supported_devices(backends) == supported


class Second(Transport):
    """Process 1 of two; process 0 sends the numbers from 0."""

    size = 2
    rank = 1

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        return tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))


def test_a_transport_without_scatter_broadcasts_all_parts() -> None:
    out = torch.zeros(3)
    assert Second().scatter(None, out) is out
    assert out.tolist() == [3.0, 4.0, 5.0]
