"""Different numbers of rows per rank, with the other rank simulated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accelerate.ops import Transport
from accelerate.ops.collectives import first_rows, gather_rows, row_shape_and_dtype
from accelerate.ops.verify import Call


class Two(Transport):
    """Two processes; the other one sends what this one sends."""

    size = 2

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor])


def test_filled_rows_are_cut_again() -> None:
    data = {"a": torch.tensor([1, 2, 3]), "b": (torch.tensor([[4]]),)}
    counts = iter([(3, 2), (1, 2)])
    joined: Any = gather_rows(data, counts, Two(), Call("op"))
    assert joined["a"].tolist() == [1, 2, 3, 1, 2]
    assert joined["b"][0].tolist() == [[4], [4], [0]]


def test_first_rows_are_cut_and_more_rows_than_there_are_refused() -> None:
    tensor = torch.arange(3)
    assert first_rows(tensor, 3) is tensor
    assert first_rows(tensor, 1).tolist() == [0]
    for wrong in (tensor, torch.tensor(1)):
        with pytest.raises(ValueError, match="counts=4: this process has"):
            first_rows(wrong, 4)


def test_facts() -> None:
    assert row_shape_and_dtype(torch.zeros(5, 2)) == ([2], "torch.float32")
