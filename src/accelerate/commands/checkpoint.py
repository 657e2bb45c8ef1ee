"""`accelerate checkpoint`: look at checkpoints, verify, compare and prune them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

from accelerate.base.errors import CheckpointError, wrong_value
from accelerate.base.text import convert_bytes
from accelerate.commands.utils import make_parser, run_command

if TYPE_CHECKING:
    from accelerate.checkpointing.manifest import Manifest

description = "List, verify, compare and prune the checkpoints that `Accelerator.save_state` writes."


def checkpoint_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """The parser of ``accelerate checkpoint``.

    Args:
        subparsers: of `accelerate`; ``None`` for a parser of its own.
    """
    parser = make_parser("checkpoint", description, subparsers)
    actions = parser.add_subparsers(title="actions", metavar="<action>", required=True, dest="action")
    for action, summary, add_arguments, run in (
        ("list", "Show the numbered checkpoints of a folder.", _add_folder, list_command),
        ("verify", "Compare all files with their checksums.", _add_folder, verify_command),
        (
            "diff",
            "Say what differs between two checkpoints, and how much.",
            _add_two,
            diff_command,
        ),
        ("prune", "Delete the oldest checkpoints; the newest complete one stays.", _add_prune, prune_command),
    ):
        one = actions.add_parser(action, help=summary, description=summary, allow_abbrev=False)
        add_arguments(one)
        one.add_argument("--json", action="store_true", help="Print JSON, for machines.")
        one.set_defaults(func=run)
    return parser  # type: ignore[no-any-return]


def _add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, help="A checkpoint, the folder of numbered ones, or the folder of the project."
    )


def _add_two(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=Path, help="A checkpoint.")
    parser.add_argument("second", type=Path, help="Another one.")


def _add_prune(parser: argparse.ArgumentParser) -> None:
    _add_folder(parser)
    parser.add_argument("--keep", type=int, required=True, help="How many checkpoints stay.")


@dataclass(frozen=True)
class Row:
    """What is shown of one checkpoint."""

    name: str
    complete: bool
    fault: str = ""
    step: int | None = None
    epoch: int | None = None
    created: str = ""
    bytes: int | None = None
    processes: int | None = None


def list_command(args: argparse.Namespace) -> None:
    """Show the checkpoints of a folder, with what is wrong with the incomplete ones."""
    _show([_row(path, read, fault) for path, read, fault in _survey(args.folder, deep=False)], args.json)


def verify_command(args: argparse.Namespace) -> None:
    """Compare all files with their checksums.

    Raises:
        CheckpointError: one does not fit.
    """
    rows = [_row(path, read, fault) for path, read, fault in _survey(args.folder, deep=True)]
    _show(rows, args.json)
    if broken := [row.name for row in rows if not row.complete]:
        raise CheckpointError(f"Not complete and undamaged: {', '.join(broken)}.")


def prune_command(args: argparse.Namespace) -> None:
    """Delete the oldest numbered checkpoints.

    Raises:
        ConfigurationError: none would stay.
    """
    from accelerate.checkpointing import retention

    if args.keep < 1:
        raise wrong_value("--keep", args.keep, "the newest complete checkpoint always stays", "use 1 or more")
    parent = _parent(args.folder)
    gone = [str(path) for path in retention.prune(parent, args.keep)]
    if args.json:
        print(json.dumps({"deleted": gone}))
    else:
        print("\n".join(f"deleted {path}" for path in gone) or "There was nothing to delete.")


def diff_command(args: argparse.Namespace) -> None:
    """Say what differs between two checkpoints, and how much."""
    first, second = _contents(args.first), _contents(args.second)
    found = [
        {"name": name, "difference": difference}
        for name in sorted({*first, *second})
        if (difference := _difference(first.get(name, _ABSENT), second.get(name, _ABSENT)))
    ]
    if args.json:
        print(json.dumps(found, indent=1))
        return
    for entry in found:
        print(f"{entry['name']}: {entry['difference']}")
    print(f"{len(found)} of {len({*first, *second})} entries differ.")


_ABSENT = object()


def _difference(first: Any, second: Any) -> str:
    """Describe how two values differ; empty when they do not."""
    import torch

    if first is _ABSENT or second is _ABSENT:
        return "only in the second" if first is _ABSENT else "only in the first"
    if isinstance(first, Sealed) and isinstance(second, Sealed):
        return "" if first == second else "another file, by its checksum; its content is not compared"
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        same = type(first) is type(second) and repr(first) == repr(second)
        return "" if same else f"{_short(first)} and {_short(second)}"
    if first.shape != second.shape or first.dtype != second.dtype:
        return f"{list(first.shape)} {first.dtype} and {list(second.shape)} {second.dtype}"
    if torch.equal(first, second):
        return ""
    apart = (first.double() - second.double()).abs()
    return f"{int((apart != 0).sum())} of {first.numel()} elements, by {apart.max().item():.3g} at most"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _contents(folder: Path) -> dict[str, Any]:
    """All tensors and values of a checkpoint, by file and place in it."""
    from accelerate.checkpointing import catalogue, manifest
    from accelerate.checkpointing.files import files_under

    if not os.path.isdir(folder):
        raise wrong_value("folder", str(folder), "there is no such folder", "name a checkpoint")
    if (folder / manifest.NAME).is_file():
        try:
            manifest.read(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{folder} cannot be compared: {error}.") from error
    found: dict[str, Any] = {}
    for name in files_under(folder):
        path = folder / name
        if name == manifest.NAME or (path.suffix == SHARDS and (path.parent / catalogue.NAME).is_file()):
            continue
        read = _read_shards if path.name == catalogue.NAME else _reader(path.suffix)
        found.update(_flat(f"{name.removesuffix(f'/{catalogue.NAME}')}:", read(path)))
    return found


SHARDS = ".distcp"
"""Ending of files of shards, which are read by way of the catalogue beside them."""


@dataclass(frozen=True)
class Sealed:
    """A file of which nothing is known but whether it is the same as another."""

    size: int
    checksum: str


def _seal(path: Path) -> Sealed:
    from accelerate.checkpointing.files import measure

    return Sealed(*measure(path))


def _reader(suffix: str) -> Callable[[Path], Any]:
    """What reads a file with this ending."""
    from accelerate.weights.files import read_safetensors

    readers = {".safetensors": read_safetensors, **dict.fromkeys((".bin", ".pt", ".pkl"), _read_saved)}
    return readers.get(suffix, _seal)


def _read_saved(path: Path) -> Any:
    """Read what `torch.save` wrote, unless it holds objects that could run code."""
    from accelerate.weights.files import read_torch, refused_globals

    try:
        return read_torch(path)
    except CheckpointError:
        if is_zipfile(path) and refused_globals(path):
            return _seal(path)
        raise


def _read_shards(path: Path) -> dict[str, Any]:
    """Read the whole tensors and the other values of a folder of shards, whose catalogue is given."""
    import torch
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from accelerate.checkpointing import catalogue, slabs
    from accelerate.checkpointing.spread import whole

    found = catalogue.read(path.parent, "")
    memory = {
        place: torch.empty(entry.size, dtype=entry.properties.dtype)
        for place in found.places
        if isinstance(entry := found.entry(place), TensorStorageMetadata)
    }
    targets = {place: whole(memory[place]) if place in memory else None for place in found.places}
    values: dict[Any, Any] = {**slabs.read(found, targets, {}), **memory}
    return {key: values[place] for place, key in found.places.items()}


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _flat(f"{path}{key}.", each)
    elif isinstance(value, (list, tuple)) and len(value) <= 64:
        for index, each in enumerate(value):
            yield from _flat(f"{path}{index}.", each)
    else:
        yield path.rstrip(".:"), value


def _parent(folder: Path) -> Path:
    """The folder that holds numbered checkpoints: the given one, or `checkpoints` in it."""
    inner = folder / "checkpoints"
    if not os.path.isdir(folder):
        raise wrong_value("folder", str(folder), "there is no such folder", "name one with checkpoints")
    return inner if inner.is_dir() else folder


def _survey(folder: Path, *, deep: bool) -> list[tuple[Path, Manifest | None, str]]:
    from accelerate.checkpointing import manifest, retention

    parent = _parent(folder)
    if (parent / manifest.NAME).is_file():
        return [(parent, *retention.look_at(parent, deep=deep))]
    found = [(each.path, each.manifest, each.fault) for each in retention.survey(parent, deep=deep)]
    if not found:
        raise CheckpointError(f"{parent} holds no checkpoint.")
    return found


def _row(path: Path, read: Manifest | None, fault: str) -> Row:
    if read is None:
        return Row(path.name, False, fault)
    step = max(read.run.get("updates", []), default=0) or read.step
    return Row(path.name, not fault, fault, step, read.epoch, read.created, read.size, read.world_size)


def _show(rows: list[Row], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table()
    for name in ("checkpoint", "step", "epoch", "saved", "size", "processes", "state"):
        table.add_column(name, no_wrap=True)
    for row in rows:
        facts = (row.step, row.epoch, row.created, None if row.bytes is None else convert_bytes(row.bytes))
        shown = ["" if fact is None else str(fact) for fact in (*facts, row.processes)]
        table.add_row(row.name, *map(escape, shown), "complete" if row.complete else "not complete")
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    for row in rows:
        if row.fault:
            print(f"{row.name} is not complete: {row.fault}.")


def main() -> None:
    """Run as ``python -m accelerate.commands.checkpoint``."""
    args = checkpoint_command_parser().parse_args()
    run_command(args.func, args)


if __name__ == "__main__":
    main()
