"""What a complete checkpoint holds: the file that is written last, and read first."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from accelerate.base import CheckpointError
from accelerate.checkpointing.fields import FORMAT, MANIFEST, check_fields, shorten, spell_name
from accelerate.checkpointing.files import ALGORITHM, FileRecord, checksum_of, measure, write_text

NAME = MANIFEST
SAVE = "save"
"""The fact of a run by which all manifests of one save are known, on whatever machine they lie."""
_SEAL = "seal"
NANOSECONDS_OF_A_TICK = 2 * 10**9  # the coarsest clock that file systems have


@dataclass(frozen=True)
class Manifest:
    """Contents of one checkpoint folder.

    Attributes:
        files: all files but this one, by path.
        world_size: number of processes that saved it.
        step: `Accelerator.step` at that time.
        epoch: number of the epoch that the first loader was in.
        iteration: number of the checkpoint under automatic naming; None for a folder that the user named.
        created: when, as ISO 8601 in UTC.
        software: name and version of what wrote it.
        torch: version of torch.
        run: further facts of the run, plain values.
        algorithm: of the checksums.
        format: version of this layout.
    """

    files: Mapping[str, FileRecord]
    world_size: int
    step: int = 0
    epoch: int = 0
    iteration: int | None = None
    created: str = ""
    software: str = ""
    torch: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str = ALGORITHM
    format: int = FORMAT

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(record.size for record in self.files.values())

    def write(self, folder: Path) -> None:
        """Write this into a folder whose files all lie on the disk.

        Raises:
            CheckpointError: `read` would refuse it.
        """
        write_text(folder / NAME, self.spell())

    def spell(self) -> str:
        """Return this as JSON, with a checksum of itself.

        Raises:
            CheckpointError: `read` would refuse it.
        """
        content = {**vars(self), "files": {name: asdict(record) for name, record in self.files.items()}}
        for record in content["files"].values():
            del record["name"]
        check_fields(json.loads(json.dumps(content)))
        return json.dumps({**content, _SEAL: _seal_of(content)}, indent=1)


def read(folder: Path) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        CheckpointError: there is none, it is damaged, or a field is not what it should be; what is wrong is
            said without the folder's name.
    """
    path = folder / NAME
    if not path.is_file():
        raise CheckpointError(f"there is no {NAME}: the save did not end, or other software wrote it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        seal = content.pop(_SEAL)
        version = content["format"]
        expected = _seal_of(content)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{NAME} is damaged ({error})") from error
    except OSError as error:
        raise CheckpointError(f"{NAME} cannot be read: {error}") from error
    if type(version) is not int or version != FORMAT:
        raise CheckpointError(
            f"{NAME} has format {shorten(version)}, and this version reads format {FORMAT}: load it with the "
            "version of accelerate that saved it, or a later one"
        )
    if seal != expected:
        raise CheckpointError(f"{NAME} is damaged: its content does not fit its checksum")
    check_fields(content)
    files = {name: FileRecord(name, **record) for name, record in content.pop("files").items()}
    return Manifest(files=files, **content)


def stamp(folder: Path) -> str:
    """Return what tells a checkpoint from any other that had or will have its name.

    It is that of the content of its manifest, which names the save, and changes with `renew`; empty where
    there is no manifest.
    """
    path = folder / NAME
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return f"{os.fstat(file.fileno()).st_mtime_ns}-{checksum_of(file.read())}"
    except OSError:  # it was just removed, or cannot be read: `read` says why
        return ""


def renew(folder: Path) -> None:
    """Give a checkpoint another stamp: another one had its name for a moment, and may have been read.

    Raises:
        OSError: it could not be.
    """
    path = folder / NAME
    if path.is_file():
        facts = path.stat()
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + NANOSECONDS_OF_A_TICK))


def problems(
    folder: Path, manifest: Manifest, names: Iterable[str] | None = None, *, deep: bool
) -> list[str]:
    """Say what is wrong with the files of a checkpoint, one line each.

    Args:
        folder: the checkpoint.
        manifest: of this folder.
        names: the files to look at; None for all.
        deep: read them whole and compare checksums; otherwise sizes only.
    """
    found = (
        _problem(folder, manifest.files[name], deep) for name in (manifest.files if names is None else names)
    )
    return [problem for problem in found if problem]


def _problem(folder: Path, record: FileRecord, deep: bool) -> str:
    path, name = folder / record.name, spell_name(record.name)
    try:
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != record.size:
            return f"{name} has {size} bytes instead of {record.size}: it is cut off, or another file"
        if deep and measure(path)[1] != record.checksum:
            return f"{name} does not fit its checksum: it is damaged, or another file"
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return f"{name} cannot be read: {error}"
    return ""


def _seal_of(content: Mapping[str, Any]) -> str:
    return checksum_of(json.dumps(content, sort_keys=True).encode())
