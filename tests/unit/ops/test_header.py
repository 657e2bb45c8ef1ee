"""The head with which collectives begin; the other processes are played."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from accelerate.ops import Head, width_of


def echo(change: Callable[[torch.Tensor], None] = lambda rows: None) -> Callable[..., None]:
    """A wire on which all others send what this process sends, but for a change."""

    def gather(joined: torch.Tensor, sent: torch.Tensor) -> None:
        rows = joined.view(-1, sent.numel())
        rows.copy_(sent.expand_as(rows))
        change(rows)

    return gather


@pytest.mark.parametrize("size", [1, 2, 3, 31, 64, 1000, 100_000])
def test_width(size: int) -> None:
    width = width_of(size)
    assert 1024 <= width <= 8192
    assert width % 16 == 0
    assert width_of(2) == 8192


def test_equal_marks_agree_and_payloads_arrive() -> None:
    head = Head(3, echo())
    head.put(b"hello")
    assert head.exchange(-5, 5)
    assert head.lengths() == [5, 5, 5]
    assert [bytes(part) for part in head.payloads()] == [b"hello"] * 3
    assert head.rows.shape == (3, head.room)
    assert head.rows[2, :5].tolist() == list(b"hello")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_one_other_mark_is_found(rank: int) -> None:
    def change(rows: torch.Tensor) -> None:
        rows[rank, 7] ^= 1

    assert not Head(3, echo(change)).exchange(2**63 - 1)


def test_windows_show_the_payload_as_elements() -> None:
    head = Head(2, echo())
    sent, rows = head.windows(16, 32, torch.int64)
    sent.copy_(torch.tensor([5, -6]))
    assert head.exchange(0)
    assert rows.tolist() == [[5, -6]] * 2
    assert head.windows(16, 32, torch.int64)[0] is sent
    for start in range(0, 16 * 300, 16):
        with torch.inference_mode():
            window, _ = head.windows(start, start + 16, torch.float32)
        window.fill_(1.0)


def test_a_head_made_for_inference_is_used_outside_it() -> None:
    with torch.inference_mode():
        head = Head(2, echo())
    head.slot.copy_(torch.ones(head.room))
    assert head.exchange(1)
    assert head.rows.sum().item() == 2 * head.room
