"""Compares the first samples of an iterable dataset over all ranks.

`IterableDatasetShard` runs the `StreamCheck` in the first pass over a dataset that it shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch

from accelerate.base import PreparationError
from accelerate.data_loader.background import RandomDrawDetector
from accelerate.data_loader.native_sharding import generator_states
from accelerate.ops import Transport

_SAMPLES = 4
"""Samples that are compared: shards may begin with equal samples."""


def digest(sample: object) -> str:
    """Returns a digest of the numbers and strings in a sample, and of the types of other objects in it."""
    state = hashlib.blake2b(digest_size=16)

    def add(value: object) -> None:
        if isinstance(value, Mapping):
            value = list(value.items())
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = value.float().numpy() if value.dtype is torch.bfloat16 else value.numpy()
        if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind != "O":
            state.update(f"{value.shape}{value.dtype}".encode() + value.tobytes())
        elif isinstance(value, (list, tuple)):
            state.update(f"({len(value)}".encode())
            for item in value:
                add(item)
        elif isinstance(value, (str, bytes, int, float, complex, type(None))):
            state.update(f"{type(value).__name__}{value!r};".encode())
        else:
            state.update(type(value).__qualname__.encode())

    add(sample)
    return state.hexdigest()


@dataclass(eq=False)
class StreamCheck:
    """Comparison of the first samples of an iterable dataset over all ranks, in the first pass over it."""

    transport: Transport
    name: str
    is_done: bool = False

    def read(self, dataset: Any, source: Iterator[Any], limit: int) -> list[Any]:
        """Returns the first samples of the first pass, at most `limit`, and none in later passes.

        If reading draws random numbers, samples may differ for good reason, and are not compared.

        Raises:
            PreparationError: If ranks begin with different samples.
        """
        if self.is_done:
            return []
        self.is_done = True
        generators, detector = generator_states(dataset), RandomDrawDetector()
        detector.start()
        samples = list(islice(source, min(limit, _SAMPLES)))
        own = (detector.has_drawn(), generators, list(map(digest, samples)))
        facts = self.transport.gather_object(own)
        is_random = any(has_drawn or states != generators for has_drawn, states, _ in facts)
        firsts = [digests for *_, digests in facts]
        if not is_random and any(first != firsts[0] for first in firsts):
            raise PreparationError(
                f"{self.name} begins with different samples on different ranks, and with "
                "dispatch_batches=False each rank reads the whole dataset and keeps its part, so samples "
                "would be lost and repeated. If the dataset yields the shard of its rank, prepare its loader "
                "with already_sharded=True. Otherwise set dispatch_batches=True: rank 0 reads for all ranks."
            )
        return samples
