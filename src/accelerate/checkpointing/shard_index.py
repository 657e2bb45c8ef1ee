"""The file `.metadata` of a folder of shards, as it is read: which file holds which shard."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.base import AccelerateError, CheckpointError, describe
from accelerate.checkpointing.local_shards import Place, Shape
from accelerate.checkpointing.metadata import read_metadata

if TYPE_CHECKING:  # torch's part of it takes most of a second to import
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

NAME = ".metadata"


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
