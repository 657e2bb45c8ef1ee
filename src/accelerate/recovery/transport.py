"""Collectives over the ranks of all members, outside of passes for training."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelerate.ops import Transport, at_least_1d, finish_reduction, reducible_dtype

if TYPE_CHECKING:
    from accelerate.recovery.membership import Members, Membership


class MemberLostError(Exception):
    """Raised inside a collective when a member has ended."""


class MemberTransport(Transport):
    """Transport over the ranks of all members, in the order of the replica groups."""

    def __init__(self, membership: Membership, members: Members, group: Transport) -> None:
        self._membership, self._members, self._group = membership, members, group
        self.size = members.size * group.size
        self.rank = members.index * group.size + group.rank
        self.is_broken = False

    def gather(self, tensor: Tensor) -> Tensor:
        own = self._group.gather(at_least_1d(tensor.detach())).contiguous()
        # Each member adds its bytes to zeros, so that sums are the only collective that may fail.
        parts = own.new_zeros((self._members.size, *own.shape))
        parts[self._members.index] = own
        if self.is_broken or not self._membership.sum(parts.reshape(-1).view(torch.uint8)):
            self.is_broken = True
            raise MemberLostError
        return parts.flatten(0, 1)

    def gather_object(self, obj: object) -> list[Any]:
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([len(data)])).tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = self.gather(padded.unsqueeze(0))
        return [
            pickle.loads(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)
        ]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        rows = self.gather(tensor.unsqueeze(0))
        return tensor if self.rank == source else tensor.detach().copy_(rows[source])

    def broadcast_object(self, obj: object, source: int = 0) -> Any:
        objects = self.gather_object(obj if self.rank == source else None)
        return obj if self.rank == source else objects[source]

    def reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        rows = self.gather(tensor.detach().to(reducible_dtype(tensor.dtype)).unsqueeze(0))
        total: Tensor = rows.amax(0) if how == "max" else rows.amin(0) if how == "min" else rows.sum(0)
        return finish_reduction(total, how, self.size, tensor)

    def barrier(self) -> None:
        self.gather(torch.zeros(1))
