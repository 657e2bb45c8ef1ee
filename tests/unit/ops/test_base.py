"""The calls of a transport on one process, the dtypes of sums, and the header of collectives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from accelerate.ops.base import (
    Header,
    as_supported,
    header_width,
    reducible_dtype,
)


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


def test_unsupported_dtypes_are_sent_as_bytes_of_the_same_memory() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.int16)
    view = as_supported(tensor)
    assert view.dtype == torch.uint8
    assert view.data_ptr() == tensor.data_ptr()
    assert as_supported(view) is view


def echo(change: Callable[[torch.Tensor], None] = lambda rows: None) -> Callable[..., None]:
    """A gather in which all others send what this process sends, but for a change."""

    def gather(joined: torch.Tensor, sent: torch.Tensor) -> None:
        rows = joined.view(-1, sent.numel())
        rows.copy_(sent.expand_as(rows))
        change(rows)

    return gather


@pytest.mark.parametrize("size", [1, 2, 3, 31, 64, 1000, 100_000])
def test_the_header_has_a_bounded_width_for_each_number_of_ranks(size: int) -> None:
    width = header_width(size)
    assert 1024 <= width <= 8192
    assert width % 16 == 0
    assert header_width(2) == 8192


def test_equal_signatures_match_and_payloads_are_received() -> None:
    header = Header(3, echo())
    header.put(b"hello")
    assert header.exchange(-5, 5)
    assert header.lengths() == [5, 5, 5]
    assert [bytes(part) for part in header.payloads()] == [b"hello"] * 3
    assert header.rows.shape == (3, header.capacity)
    assert header.rows[2, :5].tolist() == list(b"hello")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_different_signature_of_one_rank_is_detected(rank: int) -> None:
    def change(rows: torch.Tensor) -> None:
        rows[rank, 7] ^= 1

    assert not Header(3, echo(change)).exchange(2**63 - 1)


def test_windows_show_the_payload_as_elements() -> None:
    header = Header(2, echo())
    sent, rows = header.views(16, 32, torch.int64)
    sent.copy_(torch.tensor([5, -6]))
    assert header.exchange(0)
    assert rows.tolist() == [[5, -6]] * 2
    assert header.views(16, 32, torch.int64)[0] is sent
    for start in range(0, 16 * 300, 16):
        with torch.inference_mode():
            window, _ = header.views(start, start + 16, torch.float32)
        window.fill_(1.0)


def test_a_head_made_for_inference_is_used_outside_it() -> None:
    with torch.inference_mode():
        header = Header(2, echo())
    header.payload.copy_(torch.ones(header.capacity))
    assert header.exchange(1)
    assert header.rows.sum().item() == 2 * header.capacity
