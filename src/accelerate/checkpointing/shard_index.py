"""The file `.metadata` of a folder of shards, as it is read: which file holds which shard."""

from __future__ import annotations

import pickle
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from accelerate.base import AccelerateError, CheckpointError, describe
from accelerate.checkpointing.local_shards import Place
from accelerate.checkpointing.metadata import read_metadata

if TYPE_CHECKING:  # torch's part of it takes most of a second to import
    from torch.distributed.checkpoint.metadata import Metadata

NAME = ".metadata"


@dataclass(frozen=True)
class ShardIndex:
    """The tensors and values in a folder of shards.

    Attributes:
        places: place of each tensor and value -> its key.
    """

    folder: Path
    metadata: Metadata
    places: Mapping[Place, str]

    def stored(self, place: Place) -> Tensor | None:
        """Return the shape and dtype of a tensor, on the meta device; None for another value."""
        entry: Any = self.metadata.state_dict_metadata[self.places[place]]
        if not hasattr(entry, "size"):
            return None
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def check_files(self, keys: Container[str]) -> None:
        """Compare the sizes of the files that hold some keys with the metadata; nothing is read."""
        needed: dict[str, int] = {}
        for index, info in self.metadata.storage_data.items():
            if index.fqn in keys:
                needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
        problems = []
        for file, size in sorted(needed.items()):
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
        root: key of everything; what was saved without one is read as if it had one.
        trusted: build whatever objects the file holds.
    """
    name = f"{folder.name}/{NAME}"
    try:
        content = (folder / NAME).read_bytes()
        metadata = pickle.loads(content) if trusted else read_metadata(content)
        places = dict(metadata.planner_data or {})
        keys = list(metadata.state_dict_metadata)
        iter(metadata.storage_data.items())
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
    return ShardIndex(folder, metadata, by_place)
