"""Checks whether an iterable dataset reads its rank, by its code and by the first samples of all ranks.

`prepare.py` asks `match_streams` before it shards a loader; `IterableDatasetShard` runs the `StreamCheck` in
the first pass over a dataset that it shards.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accelerate import rng
from accelerate.base import ConfigurationError, PreparationError
from accelerate.data_loader.background import RandomDrawDetector
from accelerate.data_loader.native_sharding import generator_states
from accelerate.data_loader.rank_aware import EXPLICIT, nested_datasets
from accelerate.ops import Transport

_NAMES = re.compile(r"_?get_(\w+_)?rank|process_index")
_VARIABLES = frozenset({"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"})
_LIBRARIES = frozenset({"torch", "torchdata", "datasets", "webdataset", "accelerate", "typing", "builtins"})
_WRAPPED = ("fget", "func", "__func__")
"""Attributes with the function of a property, a partial, and a static or class method."""
_SAMPLES = 4
"""Samples that are compared: shards may begin with equal samples."""


def reads_rank(dataset: Any) -> bool:
    """Returns whether the code of a dataset, or of a dataset or function in its attributes, names a rank."""
    visited: set[int] = set()
    return any(
        _names_rank(function, visited)
        for owner in nested_datasets(dataset)
        for function in _functions_of(owner)
    )


def _functions_of(owner: Any) -> Iterator[FunctionType]:
    """Yields the methods of an object, without those of libraries, and the functions in its attributes."""
    classes = [kind for kind in type(owner).__mro__ if _package(kind) not in _LIBRARIES]
    members = [member for kind in classes for member in vars(kind).values()]
    for member in [*members, *getattr(owner, "__dict__", {}).values()]:
        while isinstance(member, (property, staticmethod, classmethod, partial)):
            member = next(getattr(member, name) for name in _WRAPPED if hasattr(member, name))
        if isinstance(member, FunctionType):
            yield member


def _names_rank(function: FunctionType, visited: set[int]) -> bool:
    """Returns whether a function, or one of the same package that it calls, names a rank."""
    if id(function) in visited:
        return False
    visited.add(id(function))
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    if any(map(_NAMES.fullmatch, (name for code in codes for name in code.co_names))):
        return True
    if any(constant in _VARIABLES for code in codes for constant in code.co_consts if type(constant) is str):
        return True
    called = [function.__globals__.get(name) for code in codes for name in code.co_names]
    called += [cell.cell_contents for cell in function.__closure__ or () if cell != type(cell)()]
    return any(
        _names_rank(other, visited)
        for other in called
        if isinstance(other, FunctionType) and _package(other) == _package(function)
    )


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


# First samples


def match_streams(dataset: Any, transport: Transport) -> str | None:
    """Returns the reason why an iterable dataset is rank-aware, or None if it is not.

    Called on all ranks. If its code reads the rank, the first samples of copies of the dataset are compared
    over all ranks, read with equally seeded random generators.

    Raises:
        ConfigurationError: If its code names the rank, and its samples cannot be compared.
    """
    if not all(transport.gather_object(reads_rank(dataset))):
        return None
    beginnings = transport.gather_object(_read_beginning(dataset))
    if any(beginning == [] for beginning in beginnings):  # ranks other than 0 have nothing to read
        return None
    generators = transport.gather_object(generator_states(dataset))
    are_seeded = all(states == generators[0] for states in generators)
    differ = any(beginning != beginnings[0] for beginning in beginnings)
    if None in beginnings or (differ and not are_seeded):
        raise ConfigurationError(
            f"already_sharded=None: the code of {type(dataset).__name__} reads the rank, and whether it "
            f"yields the shard of its rank cannot be checked. {EXPLICIT}"
        )
    return f"by {type(dataset).__name__}, which reads its rank" if differ else None


def _read_beginning(dataset: Any) -> list[str] | None:
    """Returns the digests of the first samples, or None if the dataset cannot be copied.

    The list is empty if there are no samples, or if reading raises an error, as on ranks that are not meant
    to read.
    """
    try:
        copied = deepcopy(dataset, _shared_objects(dataset))
    except Exception:  # whatever an object without a copy raises: open files, locks, generators
        return None
    states = rng.capture()
    rng.set_seed(0)
    try:
        return [digest(sample) for sample in islice(copied, _SAMPLES)]
    except Exception:  # raised again when the loader reads the dataset
        return []
    finally:
        rng.restore(states)


def _shared_objects(dataset: Any) -> dict[int, Any]:
    """Returns, by their ids, the objects of the run in a dataset that are not copied with it."""
    kinds = (dist.ProcessGroup, DeviceMesh, torch.nn.Module)
    shared = {}
    for owner in nested_datasets(dataset):
        for value in getattr(owner, "__dict__", {}).values():
            if isinstance(value, kinds) or _package(type(value)) == "accelerate":
                shared[id(value)] = value
    return shared


def is_of_library(dataset: Any) -> bool:
    """Returns whether a dataset is an object of a library whose sharding is known."""
    return _package(type(dataset)) in _LIBRARIES


def digest(sample: Any) -> str:
    """Returns a digest of the numbers and strings in a sample, and of the types of other objects in it."""
    state = hashlib.blake2b(digest_size=16)

    def add(value: Any) -> None:
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
