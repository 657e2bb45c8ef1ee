"""`accelerate checkpoint`: look at checkpoints, verify, compare and prune them."""

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
from accelerate.commands.utils import CustomArgumentParser, entry_point, parser_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


description = "List, verify, compare and prune the checkpoints that `Accelerator.save_state` writes."


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
    path: str = ""


def list_command(args: argparse.Namespace) -> None:
    """Show the checkpoints below a folder, with what is wrong with the incomplete ones."""
    _show(_survey(args.folder, deep=False), args.json)


def verify_command(args: argparse.Namespace) -> None:
    """Compare all files with their checksums; a `CheckpointError` where one does not fit."""
    rows = _survey(args.folder, deep=True)
    _show(rows, args.json)
    if broken := [row.name for row in rows if not row.complete]:
        raise CheckpointError(f"Not complete and undamaged: {', '.join(broken)}.")
    if not args.json:
        print(f"{len(rows)} of {len(rows)} are complete and undamaged.")


def prune_command(args: argparse.Namespace) -> None:
    """Delete the oldest numbered checkpoints of a folder, or of `checkpoints` in it."""
    from accelerate.checkpointing import retention

    if args.keep < 1:
        raise wrong_value("--keep", args.keep, "the newest complete checkpoint always stays", "use 1 or more")
    _check_folder(args.folder, "name one with checkpoints")
    inner = args.folder / "checkpoints"
    deleted = [str(path) for path in retention.prune(inner if inner.is_dir() else args.folder, args.keep)]
    if args.json:
        print(json.dumps({"deleted": deleted}))
    else:
        print("\n".join(f"deleted {path}" for path in deleted) or "There was nothing to delete.")


def diff_command(args: argparse.Namespace) -> None:
    first, second = _contents(args.first), _contents(args.second)
    differences = dict.fromkeys(first.keys() - second.keys(), "only in the first")
    differences |= dict.fromkeys(second.keys() - first.keys(), "only in the second")
    differences |= {name: _difference(first[name], second[name]) for name in first.keys() & second.keys()}
    different = [{"name": name, "difference": text} for name, text in sorted(differences.items()) if text]
    if args.json:
        print(json.dumps(different, indent=1))
        return
    for entry in different:
        print(_beside(f"{entry['name']}:", entry["difference"]))
    print(f"{len(different)} of {len(differences)} entries differ.")


def _beside(name: str, text: str) -> str:
    """Return both on one line, or on two where the terminal is too narrow."""
    line = f"{name} {text}"
    return line if len(line) <= get_terminal_size().columns else f"{name}\n    {text}"


def _difference(first: Any, second: Any) -> str:
    """Describe how two values differ; empty when they do not."""
    import torch

    if isinstance(first, OpaqueFile) and isinstance(second, OpaqueFile):
        return "" if first == second else "another file, by its checksum; its content is not compared"
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        same = type(first) is type(second) and repr(first) == repr(second)
        return "" if same else f"{_short(first)} and {_short(second)}"
    if first.shape != second.shape or first.dtype != second.dtype:
        return f"{list(first.shape)} {first.dtype} and {list(second.shape)} {second.dtype}"
    if torch.equal(first, second):
        return ""
    distance = (first.double() - second.double()).abs()
    return f"{int((distance != 0).sum())} of {first.numel()} elements, by {distance.max().item():.3g} at most"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_folder(folder: Path, fix: str) -> None:
    if not os.path.isdir(folder):
        raise wrong_value("folder", str(folder), "there is no such folder", fix)


def _contents(folder: Path) -> dict[str, Any]:
    """All tensors and values of a checkpoint, by file and name in it."""
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
        if name == manifest.NAME or (path.suffix == SHARDS and (path.parent / shard_index.NAME).is_file()):
            continue
        contents.update(_flat(f"{name.removesuffix(f'/{shard_index.NAME}')}:", _read(path)))
    return contents


SHARDS = ".distcp"  # ending of files of shards, which are read by way of the metadata beside them


@dataclass(frozen=True)
class OpaqueFile:
    """A file that is compared by size and checksum alone."""

    size: int
    checksum: str


def _read(path: Path) -> Any:
    """Read a file, with the metadata of shards all of them; one of another format is only measured.

    So is one with objects that could run code.
    """
    from accelerate.checkpointing import measure, memory_for, rejoin, shard_files, shard_index
    from accelerate.weights import read_safetensors, read_torch, refused_globals

    if path.name == shard_index.NAME:
        index = shard_index.read(path.parent, "")
        values = shard_files.read(index, {name: memory_for(index.stored(name)) for name in index.paths}, {})
        return {key: rejoin(values[name]) for name, key in index.paths.items()}
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    if path.suffix in (".bin", ".pt", ".pkl"):
        try:
            return read_torch(path)
        except CheckpointError:
            if not (is_zipfile(path) and refused_globals(path)):
                raise
    return OpaqueFile(*measure(path))


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        entries: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)) and len(value) <= 64:
        entries = enumerate(value)
    else:
        yield path.rstrip(".:"), value
        return
    for key, inner in entries:
        yield from _flat(f"{path}{key}.", inner)


def _survey(folder: Path, *, deep: bool) -> list[Row]:
    """Describe all checkpoints below a folder; `deep` compares the checksums of their files."""
    _check_folder(folder, "name one with checkpoints")
    with progress_bar("Verifying"):
        rows = find_rows(folder, deep=deep)
    if not rows:
        raise CheckpointError(f"{folder} holds no checkpoint.")
    return rows


def find_rows(folder: Path, *, deep: bool) -> list[Row]:
    """Describe all checkpoints below a folder, none where there are none."""
    from accelerate.checkpointing import retention

    rows = []
    for path in retention.checkpoints_below(Path(os.path.abspath(folder))):
        manifest, fault = retention.look_at(path, deep=deep)
        facts: dict[str, Any] = {}
        if manifest is not None:
            step = max(manifest.run.get("updates", []), default=0) or manifest.step
            facts = {"step": step, "epoch": manifest.epoch, "created": manifest.created}
            facts |= {"bytes": manifest.size, "processes": manifest.world_size}
        complete = manifest is not None and not fault
        rows.append(Row(path.name, complete, fault, path=str(path), **facts))
    return rows


def _show(rows: list[Row], as_json: bool) -> None:
    """Print rows as tables that fit their terminal, and in which nothing is cut off."""
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for number, (folder, group) in enumerate(_groups(rows, console)):
        if number:
            console.print()
        console.print(Text(_relative(folder), "bold"), soft_wrap=True)
        console.print(_table(group, folder))
    for row in rows:
        if row.fault:
            print(_beside(f"{_relative(row.path)} is not complete:", f"{row.fault}."))


def _groups(rows: list[Row], console: Console) -> Iterator[tuple[str, list[Row]]]:
    """Yield the rows of each table, and the folder to which its names are relative.

    Paths that are short enough share a table; of the others there is one for each folder.
    """
    top = os.path.commonpath([os.path.dirname(row.path) for row in rows])
    names = [os.path.relpath(row.path, top) for row in rows]
    unlimited = console.options.update(max_width=sys.maxsize)
    widest = max(map(len, [COLUMNS[0], *names]))
    room = console.width - console.measure(_table(rows, top), options=unlimited).maximum + widest
    short = [row for row, name in zip(rows, names, strict=True) if len(name) <= room]
    if short:
        yield top, short
    others = [row for row in rows if row not in short]
    for folder, group in groupby(others, lambda row: os.path.dirname(row.path)):
        yield folder, list(group)


COLUMNS = ("checkpoint", "step", "epoch", "saved (UTC)", "size", "ranks", "complete")


def _table(rows: list[Row], folder: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        is_number = name in ("step", "epoch", "size", "ranks")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name != "checkpoint")
    for row in rows:
        size = "" if row.bytes is None else convert_bytes(row.bytes)
        facts = (row.step, row.epoch, minute_of(row.created), size, row.processes)
        shown = [Text("" if fact is None else str(fact)) for fact in facts]
        state = Text("yes") if row.complete else Text("no", "red")
        table.add_row(Text(os.path.relpath(row.path, folder), overflow="fold"), *shown, state)
    return table


def minute_of(created: str) -> str:
    """Return a time as tables show it; text that is none as it is."""
    try:
        return datetime.fromisoformat(created).astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return created


def _relative(path: str) -> str:
    """Return a path below the working directory relative to it; another path as it is."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


@parser_of("checkpoint", description)
def checkpoint_command_parser(parser: CustomArgumentParser) -> None:
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
    oldest = "Delete the oldest numbered checkpoints of a folder; the newest complete one stays."
    numbered = "The folder of numbered checkpoints, or the folder of the project."
    add("list", "Show all checkpoints below a folder.", list_command, folder=top)
    add("verify", sums, verify_command, folder=top)
    add("diff", "Say what differs between two checkpoints, and how much.", diff_command, **two)
    prune = add("prune", oldest, prune_command, folder=numbered)
    prune.add_argument("--keep", type=int, required=True, help="How many checkpoints stay.")
    for child in actions.choices.values():
        child.add_argument("--json", action="store_true", help="Print JSON, for machines.")


main = entry_point(checkpoint_command_parser, __name__)
