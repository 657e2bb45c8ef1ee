"""The file `.metadata` of a folder of shards: which file holds which shard, as DCP's reader expects it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate.base import AccelerateError, CheckpointError, describe, listed
from accelerate.checkpointing.local_shards import Shape
from accelerate.checkpointing.metadata import read_metadata

if TYPE_CHECKING:  # torch's part of it takes most of a second to import
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
    )

NAME = ".metadata"

Place = tuple[Any, ...]
"""The keys on the way to a value in nested dictionaries: ("model", "layer.weight")."""


@dataclass(frozen=True)
class Entry:
    """One box of a tensor, or one value, in a file of shards.

    Attributes:
        place: of the tensor.
        shape: of the whole tensor; None for another value.
        dtype: of the tensor.
        offsets: where the box begins.
        sizes: of the box.
        file: in the folder.
        start: first byte in the file.
        length: bytes in the file.
    """

    place: Place
    shape: Shape | None = None
    dtype: torch.dtype | None = None
    offsets: Shape = ()
    sizes: Shape = ()
    file: str = ""
    start: int = 0
    length: int = 0


Report = list[list[Any]]
"""Entries as JSON holds them: the fields of each, in their order."""


def pack(entries: Sequence[Entry]) -> Report:
    """Return entries in the form in which they travel between processes."""
    return [
        [
            list(entry.place),
            entry.shape,
            None if entry.dtype is None else str(entry.dtype).removeprefix("torch."),
            entry.offsets,
            entry.sizes,
            entry.file,
            entry.start,
            entry.length,
        ]
        for entry in entries
    ]


def _unpack(report: Report) -> Iterator[Entry]:
    for place, shape, dtype, offsets, sizes, file, start, length in report:
        yield Entry(
            tuple(place),
            None if shape is None else tuple(shape),
            None if dtype is None else getattr(torch, dtype),
            tuple(offsets),
            tuple(sizes),
            file,
            start,
            length,
        )


def write(folder: Path, reports: Iterable[Report]) -> None:
    """Write the metadata of a folder whose files are all there.

    Args:
        folder: of the shards.
        reports: what `pack` returned on each process.

    Raises:
        CheckpointError: a tensor is not there as a whole, or twice.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

    stored: dict[str, Any] = {}
    places: dict[str, Place] = {}
    files: dict[MetadataIndex, Any] = {}
    for entry in (entry for report in reports for entry in _unpack(report)):
        key = ".".join(map(str, entry.place))
        places[key] = entry.place
        files[_index(key, entry, stored)] = _StorageInfo(entry.file, entry.start, entry.length)
    _check_whole(stored)
    content = Metadata(stored, planner_data=places, storage_data=files, storage_meta=StorageMeta())
    if hasattr(content, "version"):
        content.version = "1.0.0"
    with (folder / NAME).open("wb") as file:
        pickle.dump(content, file)


def _index(key: str, entry: Entry, stored: dict[str, Any]) -> MetadataIndex:
    """Note an entry; the index by which torch finds its bytes."""
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    if entry.shape is None:
        stored[key] = BytesStorageMetadata()
        return MetadataIndex(key)
    if key not in stored:
        assert entry.dtype is not None
        stored[key] = TensorStorageMetadata(TensorProperties(entry.dtype), torch.Size(entry.shape), [])
    chunks = stored[key].chunks
    chunks.append(ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes)))
    return MetadataIndex(key, torch.Size(entry.offsets), len(chunks) - 1)


def _check_whole(stored: Mapping[str, Any]) -> None:
    wrong = [
        key
        for key, entry in stored.items()
        if hasattr(entry, "chunks")
        and sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size)
    ]
    if wrong:
        raise CheckpointError(
            f"The parts of {listed(wrong)} do not make whole tensors: the processes hold others than they "
            "say. Save whole states: FSDP_STATE_DICT_TYPE=FULL_STATE_DICT"
        )


@dataclass(frozen=True)
class ShardIndex:
    """What lies where in a folder of shards.

    Attributes:
        folder: of the shards.
        metadata: as torch's reader takes it.
        places: place of each tensor and value -> its key.
    """

    folder: Path
    metadata: Metadata
    places: Mapping[Place, str]

    def entry(self, place: Place) -> TensorStorageMetadata | BytesStorageMetadata:
        """Return what is known of a tensor, or that there is another value."""
        return self.metadata.state_dict_metadata[self.places[place]]

    def shape(self, place: Place) -> Shape | None:
        """Return the shape of a tensor; None for another value."""
        size: Shape | None = getattr(self.entry(place), "size", None)
        return None if size is None else tuple(size)

    def needed(self, keys: Iterable[str]) -> dict[str, int]:
        """Return the files in which some keys lie, each with the bytes that it must have at least."""
        wanted = set(keys)
        files: dict[str, int] = {}
        for index, info in self.metadata.storage_data.items():
            if index.fqn in wanted:
                files[info.relative_path] = max(files.get(info.relative_path, 0), info.offset + info.length)
        return files

    def check_files(self, keys: Iterable[str]) -> None:
        """Compare the files in which some keys lie with what is said of them; nothing is read.

        Raises:
            CheckpointError: one is missing, or shorter.
        """
        problems = []
        for file, size in sorted(self.needed(keys).items()):
            path = self.folder / file
            if not path.is_file():
                problems.append(f"{self.folder.name}/{file} is missing")
            elif path.stat().st_size < size:
                problems.append(
                    f"{self.folder.name}/{file} has {path.stat().st_size} bytes, and at least {size} are "
                    "needed: it is cut off, or another file"
                )
        if problems:
            raise CheckpointError("; ".join(problems))


def read(folder: Path, root: str, *, trusted: bool = False) -> ShardIndex:
    """Read the metadata of a folder.

    Args:
        folder: of the shards.
        root: key under which everything lies; what was saved without one is taken as if.
        trusted: build whatever objects the file holds.

    Raises:
        CheckpointError: it is missing, damaged, or holds other objects.
    """
    name = f"{folder.name}/{NAME}"
    try:
        content = (folder / NAME).read_bytes()
        found = pickle.loads(content) if trusted else read_metadata(content)
        places = dict(found.planner_data or {})
        keys = list(found.state_dict_metadata)
        iter(found.storage_data.items())
    except FileNotFoundError as error:
        raise CheckpointError(f"{name} is missing") from error
    except AccelerateError as error:
        raise CheckpointError(f"{name} {error}") from error
    except Exception as error:  # a pickle that is cut off may raise anything
        raise CheckpointError(
            f"{name} cannot be read: it is damaged, or no metadata of shards ({describe(error)})"
        ) from error
    known = {key: tuple(places.get(key, (key,))) for key in keys}
    nested = all(len(place) > 1 and place[0] == root for place in known.values())
    by_place = {place if nested else (root, key): key for key, place in known.items()}
    if len(by_place) != len(known):
        raise CheckpointError(f"{name} gives several entries the same place")
    return ShardIndex(folder, found, by_place)
