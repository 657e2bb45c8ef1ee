"""The calls of a transport on one process."""

from __future__ import annotations

import pytest
import torch

from accelerate.ops import Transport
from accelerate.ops.base import check_scatter_parts


def test_one_process_scatters_to_itself() -> None:
    out = torch.zeros(2)
    assert Transport().scatter([torch.ones(2)], out) is out
    assert out.tolist() == [1.0, 1.0]


def test_parts_are_one_for_each_process() -> None:
    parts = [torch.zeros(1), torch.ones(1)]
    assert check_scatter_parts(parts, 2) is parts
    with pytest.raises(ValueError, match="parts=2: there are 3 processes"):
        check_scatter_parts(parts, 3)
