"""Random samplers whose order depends on the seed and the epoch only, and is stored or computed.

The computed order is that of a keyed Feistel network, which permutes pairs of numbers (Luby and Rackoff, "How
to construct pseudorandom permutations from pseudorandom functions", 1988). Its two halves have the sizes of a
generalized network, and cycle walking restricts it to the indices: a number beyond the last index is permuted
again until it is an index (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from math import isqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import RandomSampler

from accelerate.base import wrong_value

BLOCK = 4096
"""Positions that are permuted in one call."""

_NETWORK_ROUNDS = 8
_GOLDEN_RATIO = -0x_61C8864680B583EB
"""2^64 over the golden ratio, as a signed number, which gives distinct keys for any seed."""
_REPETITION = 0x_94D049BB
"""Difference between the seeds of two permutations of a pass, larger than the number of any epoch."""


class SeedableRandomSampler(RandomSampler):
    """Random sampler whose order is a pure function of its seed and the epoch.

    After a complete pass the epoch advances by itself, so that the next pass has another order. `set_epoch`
    sets any epoch.

    Args:
        *args: As for `torch.utils.data.RandomSampler`.
        **kwargs: As for `torch.utils.data.RandomSampler`, and `data_seed` (int, default: the seed that torch
            was last given by `torch.manual_seed`).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        data_seed = kwargs.pop("data_seed", None)
        super().__init__(*args, **kwargs)
        self.initial_seed: int = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch
        # Each pass has its own generator, so that two passes at the same time are independent.
        self.generator = torch.Generator().manual_seed((self.initial_seed + epoch) % 2**64)
        yield from super().__iter__()
        self.end_pass(epoch)

    def end_pass(self, epoch: int) -> None:
        """Advances to the next epoch after a complete pass, unless another epoch was set meanwhile."""
        if self.epoch == epoch:
            self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, and with it the order, of the next pass."""
        self.epoch = epoch


class ConstantMemorySampler(SeedableRandomSampler):
    """Seedable random sampler without replacement that computes its indices, see `IndexPermutation`.

    A pass uses the same memory and starts equally fast at any position, for any number of samples.

    Args:
        *args: As for `torch.utils.data.RandomSampler`, without replacement.
        **kwargs: As for `SeedableRandomSampler`.

    Raises:
        ConfigurationError: `replacement=True`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.replacement:
            raise wrong_value(
                "replacement",
                True,
                "this sampler computes a permutation, and indices drawn with replacement are not one",
                "Set replacement=False or use_constant_memory_sampler=False",
            )

    def __iter__(self) -> Iterator[int]:
        return self.iter_from(0)

    def iter_from(self, position: int) -> Iterator[int]:
        """Begins a pass at any position, in constant time."""
        epoch, order = self.epoch, self.order()
        for start in range(position, len(self), BLOCK):
            yield from order(torch.arange(start, min(start + BLOCK, len(self)), device="cpu")).tolist()
        self.end_pass(epoch)

    def order(self) -> Callable[[Tensor], Tensor]:
        """Returns a function from positions in this epoch to indices, both int64 tensors on the CPU."""
        samples, seed = len(self.data_source), self.initial_seed + self.epoch
        first = IndexPermutation(samples, seed)
        if len(self) <= samples:
            return first

        def repeated(positions: Tensor) -> Tensor:  # `num_samples` of several permutations
            indices, repetitions = torch.empty_like(positions), positions.div(samples, rounding_mode="floor")
            for number in set(repetitions.flatten().tolist()):
                chosen = repetitions == number
                permutation = IndexPermutation(samples, seed + number * _REPETITION) if number else first
                indices[chosen] = permutation(positions[chosen] - number * samples)
            return indices

        return repeated


class IndexPermutation:
    """Permutation of `range(length)` that computes the index at any position in constant time.

    Args:
        seed: Seed of the permutation, of which the lowest 64 bits are used.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self._table: Tensor | None = None
        if (
            length <= BLOCK
        ):  # for few numbers, a network with this number of rounds yields some orders too often
            generator = torch.Generator().manual_seed(seed % 2**64)
            self._table = torch.randperm(length, generator=generator, device="cpu")
            return
        left = isqrt(length - 1) + 1
        self._sizes = (left, -(-length // left))  # numbers of the left and of the right half
        signed = (seed + 2**63) % 2**64 - 2**63
        numbers = torch.arange(1, _NETWORK_ROUNDS + 1, device="cpu")
        self._keys: list[int] = _mix(
            _mix(torch.full_like(numbers, signed)) + numbers * _GOLDEN_RATIO
        ).tolist()

    def __call__(self, positions: Tensor) -> Tensor:
        """Returns the indices at some positions.

        Args:
            positions: int64 on the CPU, from 0 to `length - 1`, of any shape.

        Returns:
            int64, of the same shape.
        """
        if self._table is not None:
            return self._table[positions]
        indices = self._permute(positions)
        while (outside := indices >= self.length).any():
            indices[outside] = self._permute(indices[outside])
        return indices

    def _permute(self, numbers: Tensor) -> Tensor:
        width = self._sizes[1]
        left = numbers.div(width, rounding_mode="floor")
        right = numbers - left * width
        for key, size in zip(self._keys, cycle(self._sizes), strict=False):
            # Shifted by one bit, so that the sum does not overflow.
            left, right = right, _mix(right + key).bitwise_right_shift_(1).add_(left).remainder_(size)
        return left.mul_(width).add_(right)


def _mix(numbers: Tensor) -> Tensor:
    """Returns the finalizer of MurmurHash3, of which each bit depends on all bits of a number."""
    numbers = _fold(numbers).mul_(-0x_00AE502812AA7333)
    numbers = _fold(numbers).mul_(-0x_3B314601E57A13AD)
    return _fold(numbers)


def _fold(numbers: Tensor) -> Tensor:
    """Combines the upper bits with the lower bits, without the sign, which torch's shift repeats."""
    return (numbers >> 33).bitwise_and_(0x_7FFF_FFFF).bitwise_xor_(numbers)
