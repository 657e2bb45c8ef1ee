"""The command `accelerate checkpoint`, which lists, verifies, compares and prunes checkpoints.

`accelerate report` uses `summarize_checkpoints` for its list of checkpoints.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any
from zipfile import is_zipfile

from accelerate.base import CheckpointError, convert_bytes, progress_bar, wrong_value
from accelerate.commands.utils import CustomArgumentParser, Subparsers, entry_point, make_parser

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


description = "List, verify, compare and prune the checkpoints that `Accelerator.save_state` writes."


@dataclass(frozen=True)
class CheckpointSummary:
    """Summary of one checkpoint, as a row of the table."""

    name: str
    complete: bool
    fault: str = ""  # the reason why it is not complete
    step: int | None = None
    epoch: int | None = None
    created: str = ""
    bytes: int | None = None
    processes: int | None = None
    path: str = ""
    tier: str = "durable"  # or "fast"
    holders: tuple[str, ...] = ()  # nodes that hold a checkpoint of the fast tier


def list_command(args: argparse.Namespace) -> None:
    """Prints the checkpoints below some folders, with the faults of incomplete ones."""
    _print_table(_find_checkpoints(args.folders, deep=False), args.json)


def verify_command(args: argparse.Namespace) -> None:
    """Compares all files with their checksums.

    Raises a `CheckpointError` if a checkpoint is incomplete or damaged.
    """
    rows = _find_checkpoints(args.folders, deep=True)
    _print_table(rows, args.json)
    if broken := [row.name for row in rows if not row.complete]:
        raise CheckpointError(f"Not complete and undamaged: {', '.join(map(printable, broken))}.")
    if not args.json:
        print(f"{len(rows)} of {len(rows)} are complete and undamaged.")


def prune_command(args: argparse.Namespace) -> None:
    """Deletes the oldest numbered checkpoints of a folder, or of `checkpoints` in it."""
    from accelerate.checkpointing import retention

    if args.keep < 1:
        reason = "the newest complete checkpoint is always kept"
        raise wrong_value("--keep", args.keep, reason, "use 1 or more")
    _check_folder(args.folder, "name one with checkpoints")
    inner = args.folder / "checkpoints"
    deleted = [str(path) for path in retention.prune(inner if inner.is_dir() else args.folder, args.keep)]
    if args.json:
        print(json.dumps({"deleted": deleted}))
    else:
        print("\n".join(f"deleted {path}" for path in deleted) or "There was nothing to delete.")


def diff_command(args: argparse.Namespace) -> None:
    first, second = _read_checkpoint(args.first), _read_checkpoint(args.second)
    in_both = first.keys() & second.keys()
    differences = dict.fromkeys(first.keys() - second.keys(), "only in the first")
    differences |= dict.fromkeys(second.keys() - first.keys(), "only in the second")
    differences |= {name: _format_difference(first[name], second[name]) for name in in_both}
    different = [{"name": name, "difference": text} for name, text in sorted(differences.items()) if text]
    if args.json:
        print(json.dumps(different, indent=1))
        return
    for entry in different:
        print(_join_lines(f"{entry['name']}:", entry["difference"]))
    print(f"{len(different)} of {len(differences)} entries differ.")


def _join_lines(name: str, text: str) -> str:
    """Returns both texts on one line, or on two lines if the terminal is too narrow."""
    line = f"{name} {text}"
    return line if len(line) <= get_terminal_size().columns else f"{name}\n    {text}"


def _format_difference(first: object, second: object) -> str:
    """Returns the difference of two values as text, which is empty if they are equal."""
    import torch

    if isinstance(first, OpaqueFile) and isinstance(second, OpaqueFile):
        return "" if first == second else "different files, by their checksums; contents are not compared"
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        same = type(first) is type(second) and repr(first) == repr(second)
        return "" if same else f"{_shorten(first)} and {_shorten(second)}"
    if first.shape != second.shape or first.dtype != second.dtype:
        return f"{list(first.shape)} {first.dtype} and {list(second.shape)} {second.dtype}"
    if torch.equal(first, second):
        return ""
    distance = (first.double() - second.double()).abs()
    return f"{int((distance != 0).sum())} of {first.numel()} elements, by {distance.max().item():.3g} at most"


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_folder(folder: Path, fix: str) -> None:
    if not os.path.isdir(folder):
        raise wrong_value("folder", str(folder), "there is no such folder", fix)


def _read_checkpoint(folder: Path) -> dict[str, Any]:
    """Returns all tensors and values of a checkpoint, by the file and the name in it."""
    from accelerate.checkpointing import files_under, manifest, shard_index

    _check_folder(folder, "name a checkpoint")
    if (folder / manifest.NAME).is_file():
        try:
            manifest.read(folder)
        except CheckpointError as error:
            raise CheckpointError(f"{folder} cannot be compared: {error}.") from error
    contents: dict[str, Any] = {}
    for name in files_under(folder):
        path = folder / name
        is_shard = path.suffix == SHARD_SUFFIX and (path.parent / shard_index.NAME).is_file()
        if name == manifest.NAME or is_shard:
            continue
        contents.update(_flatten(f"{name.removesuffix(f'/{shard_index.NAME}')}:", _read_file(path)))
    return contents


SHARD_SUFFIX = ".distcp"  # suffix of shard files, which are read with the metadata file of their folder


@dataclass(frozen=True)
class OpaqueFile:
    """Size and checksum of a file whose content is not read."""

    size: int
    checksum: str


def _read_file(path: Path) -> Any:
    """Returns the content of a file, or an `OpaqueFile` for an unknown format.

    For the metadata file of shards, these are the values of all shards. A file with objects that could run
    code is an `OpaqueFile`, too.
    """
    from accelerate.checkpointing import measure, shard_files, shard_index, target_of, to_tensor
    from accelerate.weights import read_safetensors, read_torch, refused_globals

    if path.name == shard_index.NAME:
        index = shard_index.read(path.parent, "")
        values = shard_files.read(index, {name: target_of(index.stored(name)) for name in index.paths}, {})
        return {key: to_tensor(values[name]) for name, key in index.paths.items()}
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    if path.suffix in (".bin", ".pt", ".pkl"):
        try:
            return read_torch(path)
        except CheckpointError:
            if not (is_zipfile(path) and refused_globals(path)):
                raise
    return OpaqueFile(*measure(path))


def _flatten(path: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        entries: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)) and len(value) <= 64:
        entries = enumerate(value)
    else:
        yield path.rstrip(".:"), value
        return
    for key, inner in entries:
        yield from _flatten(f"{path}{key}.", inner)


def _find_checkpoints(folders: Iterable[Path], *, deep: bool) -> list[CheckpointSummary]:
    """Returns the summaries of all checkpoints below some folders, and raises an error if one has none.

    Args:
        deep: Whether to compare the checksums of their files.
    """
    found = []
    for folder in folders:
        _check_folder(folder, "name one with checkpoints")
        with progress_bar("Verifying"):
            rows = summarize_checkpoints(folder, deep=deep)
        if not rows:
            raise CheckpointError(f"{folder} holds no checkpoint.")
        found += rows
    return found


def summarize_checkpoints(folder: Path, *, deep: bool) -> list[CheckpointSummary]:
    """Returns the summaries of all checkpoints below a folder.

    Args:
        deep: Whether to compare the checksums of their files.
    """
    from accelerate.checkpointing import manifest, retention

    rows = []
    for path in retention.checkpoints_below(Path(os.path.abspath(folder))):
        read, fault = retention.inspect(path, deep=deep)
        facts: dict[str, Any] = {}
        if read is not None:
            facts = {"step": read.num_updates, "epoch": read.epoch, "created": read.created}
            facts |= {"bytes": read.size, "processes": read.world_size}
            if manifest.TIER in read.run:
                facts |= {"tier": read.run[manifest.TIER], "holders": tuple(read.run[manifest.HOLDERS])}
        complete = read is not None and not fault
        rows.append(CheckpointSummary(path.name, complete, fault, path=str(path), **facts))
    return rows


def _print_table(rows: list[CheckpointSummary], as_json: bool) -> None:
    """Prints rows as JSON, or as tables that fit the terminal without truncation."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for number, (folder, group) in enumerate(_group_rows(rows, console)):
        if number:
            console.print()
        tier = " (fast tier)" if all(row.holders for row in group) else ""
        console.print(Text(f"{_relative(folder)}{tier}", "bold"), soft_wrap=True)
        console.print(_build_table(group, folder))
    for row in rows:
        if row.fault:
            print(_join_lines(f"{_relative(row.path)} is not complete:", f"{row.fault}."))


def _group_rows(
    rows: list[CheckpointSummary], console: Console
) -> Iterator[tuple[str, list[CheckpointSummary]]]:
    """Yields the rows of each table with the folder to which its names are relative.

    Rows with short paths are in one table. The others have one table for each folder.
    """
    top = os.path.commonpath([os.path.dirname(row.path) for row in rows])
    names = [printable(os.path.relpath(row.path, top)) for row in rows]
    unlimited = console.options.update(max_width=sys.maxsize)
    widest = max(map(len, [COLUMNS[0], *names]))
    max_width = console.width - console.measure(_build_table(rows, top), options=unlimited).maximum + widest
    short = [row for row, name in zip(rows, names, strict=True) if len(name) <= max_width]
    if short:
        yield top, short
    others = [row for row in rows if row not in short]
    for folder, group in groupby(others, lambda row: os.path.dirname(row.path)):
        yield folder, list(group)


COLUMNS = ("checkpoint", "step", "epoch", "saved (UTC)", "size", "ranks", "complete")
COLUMNS_OF_FAST_TIER = ("checkpoint", "step", "saved (UTC)", "size", "ranks", "complete", "nodes")


def _build_table(rows: list[CheckpointSummary], folder: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    is_fast = any(row.holders for row in rows)
    columns = COLUMNS_OF_FAST_TIER if is_fast else COLUMNS
    for name in columns:
        is_number = name in ("step", "epoch", "size", "ranks")
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=name != columns[-1 if is_fast else 0]
        )
    for row in rows:
        size = "" if row.bytes is None else convert_bytes(row.bytes)
        epoch = () if is_fast else (row.epoch,)
        values = (row.step, *epoch, format_time(row.created), size, row.processes)
        cells = [Text("" if value is None else str(value)) for value in values]
        state = Text("yes") if row.complete else Text("no", "red")
        name = printable(os.path.relpath(row.path, folder))
        nodes = (Text(", ".join(row.holders) or row.tier),) if is_fast else ()
        table.add_row(Text(name, overflow="fold"), *cells, state, *nodes)
    return table


def format_time(created: str) -> str:
    """Returns a time in UTC to the minute, or the text itself if it is not a time."""
    try:
        return datetime.fromisoformat(created).astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return created


def _relative(path: str) -> str:
    """Returns a printable path, relative to the working directory if it is below it."""
    relative = os.path.relpath(path)
    return printable(path if relative.startswith(os.pardir) else relative)


def printable(name: str) -> str:
    """Returns a name as it is, or as a quoted Python string if it has characters such as newlines."""
    return name if name.isprintable() else repr(name)


def checkpoint_command_parser(subparsers: Subparsers | None = None) -> CustomArgumentParser:
    """Returns the parser of ``accelerate checkpoint``, added to `subparsers` if given."""
    parser = make_parser("checkpoint", description, None, subparsers)
    actions = parser.add_subparsers(title="actions", metavar="<action>", required=True, dest="action")

    def add(action: str, summary: str, run: Callable[[argparse.Namespace], None], **paths: str) -> Any:
        child = actions.add_parser(action, help=summary, description=summary, allow_abbrev=False)
        for name, meaning in paths.items():
            child.add_argument(name, type=Path, help=meaning)
        child.set_defaults(func=run)
        return child

    top = "A checkpoint, or a folder with checkpoints in it, at any depth."
    sums = "Compare the files of all checkpoints below a folder with their checksums."
    two = {"first": "A checkpoint.", "second": "Another one."}
    oldest = "Delete the oldest numbered checkpoints of a folder; the newest complete one is kept."
    numbered = "The folder of numbered checkpoints, or the folder of the project."
    for child in (
        add("list", "Show all checkpoints below a folder.", list_command),
        add("verify", sums, verify_command),
    ):
        child.add_argument("folders", metavar="folder", type=Path, nargs="+", help=top)
    add("diff", "Show the differences between two checkpoints.", diff_command, **two)
    prune = add("prune", oldest, prune_command, folder=numbered)
    prune.add_argument("--keep", type=int, required=True, help="Number of checkpoints to keep.")
    for child in actions.choices.values():
        child.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


main = entry_point(checkpoint_command_parser, __name__)
