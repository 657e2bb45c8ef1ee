"""The dtypes in which tensors are sent and reduced."""

from __future__ import annotations

import pytest
import torch

from accelerate.ops.base import as_supported, finish_reduction, reducible_dtype


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
    assert reducible_dtype(given) == wide


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
    total = torch.ones(1, dtype=reducible_dtype(given))
    assert finish_reduction(total, how, 2, torch.ones(1).to(given)).dtype == dtype


def test_a_half_mean_does_not_overflow() -> None:
    given = torch.tensor([60000.0], dtype=torch.float16)
    mean = finish_reduction(given.float() * 2, "mean", 2, given)
    assert mean.tolist() == given.tolist()


def test_unsupported_dtypes_are_sent_as_bytes_of_the_same_memory() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.int16)
    view = as_supported(tensor)
    assert view.dtype == torch.uint8
    assert view.data_ptr() == tensor.data_ptr()
    assert as_supported(view) is view
