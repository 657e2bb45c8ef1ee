"""Values sent as int8, and means on one process; several are in tests/distributed/test_diloco.py."""

from __future__ import annotations

import pytest
import torch

from accelerate.ops.means import BLOCK, MeanGroup, from_int8, to_int8


def test_int8_is_rounded_to_the_scale_of_each_block() -> None:
    values = torch.randn(3, 2 * BLOCK) * torch.tensor([1e-3, 1.0, 1e3])[:, None]
    values[0, :BLOCK] = 0
    packed = to_int8(values)
    assert packed.dtype == torch.uint8
    assert packed.nbytes == values.numel() * 260 / 256
    again = from_int8(packed, torch.float32)
    largest = values.view(3, 2, BLOCK).abs().amax(2, keepdim=True)
    assert ((again - values).view(3, 2, BLOCK).abs() <= largest / 254 * 1.001).all()
    assert torch.equal(from_int8(packed[1], torch.float64), again[1].double())
    values[2, 0] = float("nan")
    assert from_int8(to_int8(values), torch.float32)[2, :BLOCK].isnan().all()


@pytest.mark.usefixtures("states")
def test_the_mean_of_one_process_is_its_tensor() -> None:
    group, tensor = MeanGroup("test"), torch.randn(3)
    for as_int8 in (False, True):
        mean = group.start(tensor, as_int8=as_int8)
        mean.advance()
        assert mean.wait() is tensor
        assert mean.wait() is tensor
    assert (group.size, group.bytes_sent) == (1, 0)
