"""Padding that needs no other process; communication is tested with several processes."""

from __future__ import annotations

import pytest
import torch

from accelerate.ops import CannotPadNestedTensorWarning, pad_across_processes, pad_input_tensors
from accelerate.ops.collectives import _pad


@pytest.mark.usefixtures("states")
def test_padding_of_one_process_returns_the_tensor_itself() -> None:
    tensor = torch.ones(2)
    assert pad_across_processes(tensor) is tensor


@pytest.mark.usefixtures("states")
def test_nested_tensors_stay_with_one_warning() -> None:
    pair = [torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged) for _ in range(2)]
    with pytest.warns(CannotPadNestedTensorWarning) as caught:
        back = pad_across_processes({"a": pair[0], "b": [pair[1]]})
    assert len(caught) == 1
    assert (back["a"] is pair[0], back["b"][0] is pair[1]) == (True, True)


def test_padding_keeps_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    _pad(x, 0, 3, 0, False).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("batch_size", "parts", "length"), [(3, 4, 4), (5, 4, 8), (8, 4, 8), (1, 3, 3), (4, 1, 4)]
)
def test_the_last_sample_is_repeated(batch_size: int, parts: int, length: int) -> None:
    padded = pad_input_tensors({"x": torch.arange(batch_size)}, batch_size, parts)["x"].tolist()
    assert padded == list(range(batch_size)) + [batch_size - 1] * (length - batch_size)


def test_tensors_of_another_size_are_unchanged() -> None:
    data = {"x": torch.ones(2, 3), "mask": torch.ones(7), "step": torch.tensor(1)}
    padded = pad_input_tensors(data, 3, 2, dim=1)
    assert padded["x"].shape == (2, 4)
    assert padded["mask"] is data["mask"]
    assert padded["step"] is data["step"]
