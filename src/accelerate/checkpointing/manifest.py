"""Manifest of a checkpoint, which lists the sizes and checksums of its files.

`Saver.commit` writes it as the last file. Loading, retention and `accelerate checkpoint` read it first.
Reading verifies its own checksum and the types of all fields.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from accelerate.base import CheckpointError, advance, refuse_outside, replace_files, sync_file

NAME = "manifest.json"
FORMAT = 1
ALGORITHM = "xxh3_64"
SAVE = "save"  # key in `run` of the name of the save, equal on all nodes
FOLDERS_OF_SAVE = "folders"  # key in `run` of the files of each folder, if the ranks wrote several
TIER = "tier"  # key in `run` of the tier, which is `FAST` in the fast tier, and absent otherwise
FAST = "fast"
HOLDERS = "holders"  # key in `run` of the nodes that hold the folders of the save
PROJECT = "project"  # key in `run` of the folder of the project
NEXT_DURABLE = "next_durable"  # key in `run` of the number of the next durable checkpoint
_SEAL = "seal"
CLOCK_TICK_NS = 2 * 10**9  # the coarsest clock of a file system


def map_file(path: Path) -> mmap.mmap:
    """Returns the read-only memory map of a file that is not empty, which may be larger than the memory."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def map_writable(path: Path) -> mmap.mmap:
    """Returns the memory map of a file that is not empty, to which changes are not written.

    The kernel refuses it for a file that is larger than the memory.
    """
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


MapFile = Callable[[Path], mmap.mmap]
"""Function that returns the memory map of a file."""


@dataclass(frozen=True)
class Manifest:
    """Facts about a checkpoint and its files.

    Besides the keys above, `run` has "sync_gradients" and "num_steps" of the current window, the counters of
    optimizers and schedulers (`accelerator/state_items.py`), and "gradient_order", the order of the buckets
    of each model.
    """

    files: Mapping[str, FileRecord]  # all files but this one, by path
    world_size: int
    step: int = 0
    epoch: int = 0  # of the first loader
    iteration: int | None = None  # number under automatic naming; None for a folder that the user named
    created: str = ""  # ISO 8601 in UTC
    software: str = ""
    torch: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)  # further facts of the run, plain values
    algorithm: str = ALGORITHM
    format: int = FORMAT

    @property
    def size(self) -> int:
        return sum(record.size for record in self.files.values())

    @property
    def num_updates(self) -> int:
        """Number of optimizer steps of the run that saved it."""
        return max(self.run.get("updates", []), default=0) or self.step

    def write(self, folder: Path) -> None:
        """Writes the manifest to a folder whose files are on disk."""
        with replace_files([folder / NAME]) as (temporary,):
            temporary.write_text(self.encode(), encoding="utf-8")

    def encode(self) -> str:
        """Returns the manifest as JSON with its own checksum."""
        content = {**vars(self), "files": encode_records(self.files)}
        check_fields(json.loads(json.dumps(content)))
        return json.dumps({**content, _SEAL: _seal_of(content)}, indent=1)


def read(folder: Path, *, whole: bool = False) -> Manifest:
    """Reads the manifest of a folder, whose name is not in the messages of errors.

    Args:
        whole: Whether to return the files of all folders of the save. False returns those that this folder
            must have.
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
    files, folders = content.pop("files"), content.get("run", {}).get(FOLDERS_OF_SAVE, [])
    files = _files_held(folder, files, folders, whole)
    return Manifest(files=files, **content)


def _files_held(
    folder: Path, files: dict[str, Any], folders: list[dict[str, Any]], whole: bool
) -> dict[str, FileRecord]:
    """Returns the files that a folder must have.

    If the ranks wrote several folders, these are the files of those folders that were copied here.
    """
    held = [records for records in folders if whole or all((folder / name).is_file() for name in records)]
    names = dict.fromkeys(chain(*held)) if held else files
    versions = {name: [FileRecord(name, **each[name]) for each in folders if name in each] for name in names}
    return {
        name: replace(records[0], others=tuple(records[1:])) if records else FileRecord(name, **files[name])
        for name, records in versions.items()
    }


def stamp(folder: Path) -> str:
    """Returns a text that differs between the checkpoints of one name, or "" without a manifest."""
    path = folder / NAME
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return f"{os.fstat(file.fileno()).st_mtime_ns}-{checksum_of(file.read())}"
    except OSError:  # it was just removed, or cannot be read, for which `read` raises an error
        return ""


def renew(folder: Path) -> None:
    """Changes the stamp of a checkpoint, because another one had its name for a moment."""
    path = folder / NAME
    if path.is_file():
        facts = path.stat()
        os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns + CLOCK_TICK_NS))


def problems(
    folder: Path,
    manifest: Manifest,
    names: Iterable[str] | None = None,
    *,
    deep: bool,
    map_file: MapFile = map_file,
) -> list[str]:
    """Returns one line for each file that is missing or differs from its record.

    Args:
        names: Files to verify. None for all.
        deep: Whether checksums are compared, and not only sizes.
        map_file: Returns the content of a file.
    """
    records = (manifest.files[name] for name in (manifest.files if names is None else names))
    mismatch = partial(_mismatch, folder, map_file if deep else None)
    # A file has a record in each folder of the save, one of which it must equal.
    problems = ((mismatch(record), record.others) for record in records)
    return [problem for problem, others in problems if problem and all(map(mismatch, others))]


def _mismatch(folder: Path, map_file: MapFile | None, record: FileRecord) -> str:
    path, name = folder / record.name, record.name if record.name.isprintable() else repr(record.name)
    try:
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        if size != record.size:
            return f"{name} has {size} bytes instead of {record.size}: it is truncated, or another file"
        if map_file is not None and measure(path, map_file)[1] != record.checksum:
            return f"{name} does not fit its checksum: it is damaged, or another file"
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return f"{name} cannot be read: {error}"
    return ""


def _seal_of(content: Mapping[str, Any]) -> str:
    return checksum_of(json.dumps(content, sort_keys=True).encode())


LARGEST = 2**63 - 1
_CHECKSUM = re.compile(r"[0-9a-f]{16}")


class FieldRule(NamedTuple):
    """Expected value of a field of a manifest."""

    expected: str
    fits: Callable[[Any], bool]
    required: bool = False


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


_COUNT = FieldRule("a whole number of 0 or more", _is_count)
_TEXT = FieldRule("printable text", _is_text)

_FIELDS = {
    "format": FieldRule(f"the number {FORMAT}", lambda value: type(value) is int and value == FORMAT),
    "algorithm": FieldRule(f"{ALGORITHM!r}, the only kind of checksum", lambda value: value == ALGORITHM),
    "files": FieldRule(
        "a JSON object of file names and records", lambda value: isinstance(value, dict), True
    ),
    "world_size": FieldRule(
        "a whole number of 1 or more", lambda value: _is_count(value) and value > 0, True
    ),
    "step": _COUNT,
    "epoch": _COUNT,
    "iteration": FieldRule(
        "a whole number of 0 or more, or null", lambda value: value is None or _is_count(value)
    ),
    "created": _TEXT,
    "software": _TEXT,
    "torch": _TEXT,
    "run": FieldRule("a JSON object", lambda value: isinstance(value, dict)),
}
_RECORD = {
    "size": _COUNT._replace(required=True),
    "checksum": FieldRule(
        "16 hexadecimal digits", lambda value: _is_text(value) and bool(_CHECKSUM.fullmatch(value)), True
    ),
    "rank": _COUNT,
}
_LISTS_OF_COUNTS = FieldRule(
    "a list of lists of whole numbers of 0 or more",
    lambda value: isinstance(value, list) and all(map(_are_counts, value)),
)
_RUN = {
    TIER: _TEXT,
    PROJECT: FieldRule("text", lambda value: isinstance(value, str)),
    NEXT_DURABLE: _COUNT,
    HOLDERS: FieldRule(
        "a list of nodes", lambda value: isinstance(value, list) and all(map(_is_text, value))
    ),
    "sync_gradients": FieldRule("true or false", lambda value: isinstance(value, bool)),
    "num_steps": _COUNT,
    "updates": FieldRule("a list of whole numbers of 0 or more", _are_counts),
    "updates_at_call": _LISTS_OF_COUNTS,
    "gradient_order": _LISTS_OF_COUNTS,
    SAVE: _TEXT,
    FOLDERS_OF_SAVE: FieldRule(
        "a list of JSON objects of file names and records",
        lambda value: isinstance(value, list) and all(isinstance(each, dict) for each in value),
    ),
}


def check_fields(content: Mapping[str, Any]) -> None:
    """Raises for a manifest, without its checksum, with a missing, unknown or wrong field or file name."""
    _check(content, _FIELDS, "")
    _check_records(content["files"], "files")
    known = {name: value for name, value in content.get("run", {}).items() if name in _RUN}
    _check(known, _RUN, "run.")
    for records in known.get(FOLDERS_OF_SAVE, []):
        _check_records(records, f"run.{FOLDERS_OF_SAVE}")


def _check_records(records: Mapping[str, Any], where: str) -> None:
    for name, record in records.items():
        if reason := refuse_name(name):
            raise CheckpointError(f"{NAME} names the file {shorten(name)}, which {reason}")
        field = f"{where}[{shorten(name)}]"
        if not isinstance(record, dict):
            raise _wrong(field, record, "a JSON object of size, checksum and rank")
        _check(record, _RECORD, f"{field}.")


def refuse_name(name: object) -> str | None:
    """Returns why a name cannot be the name of a file of a checkpoint, or None if it can."""
    if reason := refuse_outside(name):
        return reason
    assert isinstance(name, str)
    if "\\" in name:
        return "contains a backslash, which separates folders on some systems"
    if PurePosixPath(name).as_posix() != name:
        return "is not written as a plain path: it has empty components, or components '.'"
    if name == NAME:
        return "is the manifest itself"
    return None


def shorten(value: object) -> str:
    """Formats a value of a file for an error message."""
    return _REPR.repr(value)


_REPR = reprlib.Repr()
_REPR.maxlevel = 2
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


def _check(content: Mapping[str, Any], rules: Mapping[str, FieldRule], prefix: str) -> None:
    for name, rule in rules.items():
        if name not in content:
            if rule.required:
                raise CheckpointError(f"{NAME} has no field {prefix}{name}, which holds {rule.expected}")
        elif not rule.fits(content[name]):
            raise _wrong(f"{prefix}{name}", content[name], rule.expected)
    if unknown := [name for name in content if name not in rules]:
        raise CheckpointError(
            f"{NAME} has a field {prefix}{shorten(unknown[0])} that format {FORMAT} does not have: "
            "other software wrote it"
        )


def _wrong(field: str, value: object, expected: str) -> CheckpointError:
    return CheckpointError(f"{NAME} has {field}={shorten(value)}, and {expected} is expected")


_STRIDE = 1 << 22  # bytes that are hashed at a time, while other threads run


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file."""

    name: str  # path in the folder, with `/`
    size: int  # in bytes
    checksum: str  # xxh3 of the content, 64 bits, in hexadecimal
    rank: int = 0
    others: tuple[FileRecord, ...] = ()  # records of the file in the other folders of the save


def encode_records(records: Mapping[str, FileRecord]) -> dict[str, dict[str, Any]]:
    """Returns records by name, for JSON."""
    return {name: {"size": r.size, "checksum": r.checksum, "rank": r.rank} for name, r in records.items()}


def seal(folder: Path, name: str, rank: int = 0) -> FileRecord:
    """Flushes a written file to disk and returns its record."""
    sync_file(folder / name)
    size, checksum = measure(folder / name)
    return FileRecord(name, size, checksum, rank)


def measure(path: Path, map_file: MapFile = map_file) -> tuple[int, str]:
    """Returns the size and the checksum of a file."""
    import xxhash

    digest, size = xxhash.xxh3_64(), path.stat().st_size
    if not size:
        return 0, digest.hexdigest()
    with memoryview(map_file(path)) as view:
        for start in range(0, len(view), _STRIDE):
            with view[start : start + _STRIDE] as part:
                digest.update(part)
                advance(len(part))
        return len(view), digest.hexdigest()


def checksum_of(data: bytes) -> str:
    import xxhash

    return xxhash.xxh3_64_hexdigest(data)


def files_under(folder: Path) -> Iterator[str]:
    """Iterates over the paths of all files below a folder, sorted, relative and with `/`."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix()
