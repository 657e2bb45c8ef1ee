"""Weights that rank 0 alone reads: it sends each to the other ranks when they all ask for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelerate.ops import Transport, current_transport, run_on_rank_0
from accelerate.weights import StoredWeights

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Opened:
    """The files of a model, as a rank knows of them.

    Attributes:
        path: of the files, on the rank that reads them.
        weights: that can be read; by all ranks together, where rank 0 sends them.
        own: the same, where this rank has opened the files; None: rank 0 sends.
    """

    path: Path
    weights: StoredWeights
    own: StoredWeights | None


@dataclass
class SentFile:
    """All files of a model as one, whose tensors come from rank 0: see `WeightFile`.

    Attributes:
        path: on rank 0.
        shapes: of all tensors, by name.
        dtypes: theirs.
        extra: names of what modules keep beside their tensors.
        transport: between the ranks.
        own: the opened files, on rank 0.
    """

    path: Path
    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]
    extra: Collection[str]
    transport: Transport
    own: StoredWeights | None = None

    def read(self, name: str, device: torch.device) -> Any:
        """Return one tensor, or what a module keeps beside its tensors; called on all ranks in one order."""
        value = run_on_rank_0(partial(self._read_here, name))
        if name in self.extra:
            return self.transport.broadcast_object(value)
        tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name]) if value is None else value
        return (self.transport.broadcast(tensor) if tensor.numel() else tensor).to(device)

    def locate(self, name: str) -> None:
        """Say that no rank maps tensors from the files: most do not have them."""

    def rest(self) -> None:
        """Let the files go on the rank that has opened them."""
        for file in () if self.own is None else {id(file): file for file in self.own.files.values()}.values():
            file.rest()

    def _read_here(self, name: str) -> Any:
        assert self.own is not None  # on rank 0
        value = (self.own.extra if name in self.extra else self.own.files)[name].read(name, CPU)
        return value.contiguous() if isinstance(value, Tensor) else value


def receive_weights(path: Path, open_files: Callable[[Path], StoredWeights]) -> Opened:
    """Return the weights of files that rank 0 alone reads; called on all ranks.

    Args:
        path: of the files, on rank 0.
        open_files: opens them.

    Raises:
        AccelerateError: rank 0 cannot open them; raised on all ranks.
    """
    transport = current_transport()
    own = run_on_rank_0(partial(open_files, path))
    described = None if own is None else (path, *_describe(own))
    first, shapes, dtypes, extra = transport.broadcast_object(described)
    sent = SentFile(first, shapes, dtypes, extra, transport, own)
    known = StoredWeights(dict.fromkeys(sent.shapes, sent), dict.fromkeys(sent.extra, sent))
    return Opened(first, known, own)


def _describe(own: StoredWeights) -> tuple[dict[str, torch.Size], dict[str, torch.dtype], list[str]]:
    """Return shapes and dtypes of all tensors, which are mapped from the files, and other names."""
    shapes = {name: own.shape(name) for name in own.files}
    return shapes, {name: own.read(name, CPU).dtype for name in own.files}, list(own.extra)
