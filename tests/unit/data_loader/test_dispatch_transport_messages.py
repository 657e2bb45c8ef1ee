"""Messages of a dispatched loader over a transport that only stores them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from accelerate.data_loader import BatchChannel, BatchSender, GlobalBatch, ReceivedBatch, receive_batches
from accelerate.ops import Transport

CPU = torch.device("cpu")


class StoringTransport(Transport):
    """Keeps what process 0 sends, for one other process to take."""

    def __init__(self, rank: int, queue: deque[Tensor], size: int = 3) -> None:
        self.rank, self.size, self.queue = rank, size, queue

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        if self.rank == source:
            self.queue.append(tensor.clone())
            return tensor
        return tensor.copy_(self.queue.popleft())

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, source: int = 0) -> Tensor:
        if parts is None:
            return out.copy_(self.queue.popleft())
        assert len(parts) == self.size
        assert all(part.shape == out.shape for part in parts)
        self.queue.append(parts[-1].clone())
        return out


def deliver(
    messages: list[list[GlobalBatch]], group_of: Sequence[int] = range(3)
) -> tuple[list[ReceivedBatch], list[Any]]:
    """Return what the last rank receives, and all sent tensors."""
    queue: deque[Tensor] = deque()
    sender = BatchSender(BatchChannel(StoringTransport(0, queue), group_of, CPU))
    for batches in messages:
        sender.send([sender.pack(batch) for batch in batches])
    sent = list(queue)
    return list(receive_batches(BatchChannel(StoringTransport(2, queue), group_of, CPU))), sent


def batch_of(number: int, *, size: int = 4, is_end: bool = False) -> GlobalBatch:
    return GlobalBatch([torch.full((size,), 10.0 * number + group) for group in range(3)], is_end)


def test_each_process_gets_its_part_of_all_rounds() -> None:
    arrivals, _ = deliver(
        [[batch_of(0)], [batch_of(1), batch_of(2, size=5), batch_of(3)], [batch_of(4, is_end=True)]]
    )
    assert [arrival.part.tolist() for arrival in arrivals] == [
        [10.0 * n + 2] * (5 if n == 2 else 4) for n in range(5)
    ]
    assert [arrival.is_last for arrival in arrivals] == [False] * 4 + [True]


def test_shapes_are_sent_only_when_they_change() -> None:
    batches = [[batch_of(0)], [batch_of(1), batch_of(2)], [batch_of(3, size=8)], [batch_of(4, size=8)], []]
    arrivals, sent = deliver(batches)
    assert len(arrivals) == 5
    heads = [message.tolist() for message in sent if message.dtype == torch.int64]
    assert [head[0] for head in heads] == [1, 0, 1, 0, 0]
    assert [head[1] for head in heads] == [1, 2, 1, 1, 0]
    assert [head[3] for head in heads if head[0] == 0] == [32, 32, 0]
    assert [head[2] for head in heads] == [0, 0, 0, 0, 1]


def test_ranks_may_share_a_group() -> None:
    arrivals, _ = deliver([[batch_of(0, is_end=True)]], [0, 1, 0])
    assert arrivals[0].part.tolist() == [0.0] * 4


def test_parts_of_one_message_do_not_share_memory() -> None:
    arrivals, _ = deliver([[batch_of(0), batch_of(1), batch_of(2, is_end=True)]])
    assert len({arrival.part.untyped_storage().data_ptr() for arrival in arrivals}) == 3
    assert all(arrival.part.untyped_storage().nbytes() == 16 for arrival in arrivals)


def test_parts_of_different_sizes() -> None:
    uneven = GlobalBatch([torch.zeros(100), torch.zeros(7), torch.ones(3)], True, (100, 7, 3))
    arrivals, _ = deliver([[batch_of(0), uneven]])
    assert [arrival.part.tolist() for arrival in arrivals] == [[2.0] * 4, [1.0] * 3]


def test_objects_are_sent_with_the_spec() -> None:
    batches = [GlobalBatch([None, None, {"text": f"batch {n}"}], n == 2) for n in range(3)]
    arrivals, _ = deliver([batches[:2], batches[2:]])
    assert [arrival.part["text"] for arrival in arrivals] == ["batch 0", "batch 1", "batch 2"]


def test_a_failure_is_raised_by_all() -> None:
    queue: deque[Tensor] = deque()
    sender = BatchSender(BatchChannel(StoringTransport(0, queue), range(3), CPU))
    sender.send([sender.pack(batch_of(0))])
    sender.fail(LookupError("sample 4 is lost"))
    arrivals = receive_batches(BatchChannel(StoringTransport(1, queue), range(3), CPU))
    assert next(arrivals).part.shape == (4,)
    with pytest.raises(LookupError, match="sample 4"):
        next(arrivals)


def test_one_receiver_needs_no_block_of_the_sender() -> None:
    queue: deque[Tensor] = deque()
    sender = BatchSender(BatchChannel(StoringTransport(0, queue, size=2), range(2), CPU))
    sender.send([sender.pack(batch_of(0))])
    sender.send([sender.pack(batch_of(1, is_end=True))])
    assert [message.dtype for message in queue] == [torch.int64, torch.uint8] * 2
    arrivals = list(receive_batches(BatchChannel(StoringTransport(1, queue, size=2), range(2), CPU)))
    assert [arrival.part.tolist() for arrival in arrivals] == [[1.0] * 4, [11.0] * 4]


def test_a_sender_without_other_ranks_sends_nothing() -> None:
    queue: deque[Tensor] = deque()
    sender = BatchSender(BatchChannel(StoringTransport(0, queue, size=1), range(1), CPU))
    sender.send([sender.pack(batch_of(0))])
    sender.fail(LookupError("gone"))
    assert not queue
