"""Put a folder, or its files, in the place of another: on an error all is as before.

What was there moves to a hidden name first. A crash in between leaves it there, from where `folder.recover`
takes it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from accelerate.base import CheckpointError
from accelerate.checkpointing import manifest, temporary
from accelerate.checkpointing.files import files_under, swap, sync_folder

logger = logging.getLogger(__name__)  # also used where no run is set up

# What the files of a checkpoint are called, for folders that have no manifest.
_OWN_PATTERNS = (
    "model*.safetensors*",
    "pytorch_model*.bin*",
    "optimizer*.bin",
    "scheduler*.bin",
    "sampler*.bin",
    "stream_*.bin",
    "dl_state_dict*.bin",
    "scaler.pt",
    "random_states_*.pkl",
    "custom_checkpoint_*.pkl",
    "pytorch_model_fsdp_*/*.distcp",
    "pytorch_model_fsdp_*/.metadata",
    "optimizer_*/*.distcp",
    "optimizer_*/.metadata",
)


def exchange_folders(folder: Path, target: Path, aside: Path) -> None:
    """Give a folder a name, and what had it another one.

    Where the file system can swap names, there is a folder of that name at every moment.

    Args:
        folder: the new one.
        target: its name.
        aside: the name for what is there.

    Raises:
        OSError: all is as before.
    """
    undo: list[Callable[[], None]] = []

    def rename(old: Path, new: Path) -> None:
        os.rename(old, new)
        undo.append(partial(os.rename, new, old))

    try:
        if not target.exists():
            rename(folder, target)
        elif _swaps(folder, target, aside):
            undo += [partial(os.rename, aside, folder), partial(swap, aside, target)]
        else:
            rename(target, aside)
            rename(folder, target)
        sync_folder(target.parent)
    except OSError:
        if undo and aside.exists():
            _renew(aside)
        for step in reversed(undo):
            step()
        raise


def _swaps(folder: Path, target: Path, aside: Path) -> bool:
    """Try to let the new folder and the old one have each other's names.

    The new one takes the name `aside` first: whatever lies there when a process ends is not needed as long
    as there is a folder of the name `target`.
    """
    os.rename(folder, aside)
    try:
        swap(aside, target)
    except OSError:  # not every system, nor every file system, can
        os.rename(aside, folder)
        return False
    return True


def _renew(folder: Path) -> None:
    """Let those who are reading notice that another folder was there for a moment."""
    try:
        manifest.renew(folder)
    except OSError as error:
        logger.warning(f"{folder} comes back, and a run that reads it may not notice: {error}.")


def clear_aside(aside: Path, target: Path) -> None:
    """Move what the user kept in a replaced checkpoint to the new one, and remove the rest."""
    if not aside.exists():
        return
    try:
        _move_others(aside, target, _own_files(aside))
        temporary.dispose(aside, target.name)
    except OSError as error:
        logger.warning(f"{target} is saved, and what it replaces could not be removed from {aside}: {error}.")


def _move_others(source: Path, target: Path, ours: set[str], prefix: str = "") -> None:
    """Move everything that is not part of a checkpoint and has no namesake."""
    for entry in sorted(source.iterdir()):
        name, there = prefix + entry.name, target / entry.name
        is_folder = entry.is_dir() and not entry.is_symlink()
        if is_folder and (_is_folder(there) or _holds(ours, name)):
            _move_others(entry, there, ours, f"{name}/")
        elif name not in ours and not os.path.lexists(there):
            there.parent.mkdir(parents=True, exist_ok=True)
            os.rename(entry, there)


def _is_folder(path: Path) -> bool:
    """Whether there is a folder, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _holds(files: Iterable[str], folder: str) -> bool:
    return any(file.startswith(f"{folder}/") for file in files)


def _own_files(folder: Path) -> set[str]:
    """Return the files of a checkpoint; those that a link makes seem to be in its folder are none of them."""
    try:
        names = {*manifest.read(folder).files}
    except CheckpointError:
        names = {
            path.relative_to(folder).as_posix() for pattern in _OWN_PATTERNS for path in folder.glob(pattern)
        }
    outside = {parent for parent in map(os.path.dirname, names) if _leads_out(folder, parent)}
    return {*(name for name in names if os.path.dirname(name) not in outside), manifest.NAME}


def _leads_out(folder: Path, inner: str) -> bool:
    """Whether the path of a folder in another one leaves that, by its name or by a link."""
    root, place = os.path.realpath(folder), os.path.realpath(folder / inner)
    return os.path.commonpath((root, place)) != root


def exchange_files(folder: Path, target: Path, aside: Path) -> None:
    """Put the files of one folder in the place of those of another.

    Args:
        folder: the new files.
        target: the folder that they come to.
        aside: for the files that are there. When that is gone, the exchange is done.

    Raises:
        OSError: all is as before.
        CheckpointError: the same; a link in the target leads out of it.
    """
    aside.mkdir()
    try:
        _shift(target, aside, _own_files(target))
        _shift(folder, target, files_under(folder))
        temporary.dispose(aside, target.name)
    except (OSError, CheckpointError):
        undo_exchange_of_files(aside, target)
        raise


def undo_exchange_of_files(aside: Path, target: Path) -> None:
    """Bring files back that were moved aside in the same folder."""
    _renew(aside)
    _shift(aside, target, files_under(aside))
    temporary.dispose(aside, target.name)


def _shift(source: Path, target: Path, names: Iterable[str]) -> None:
    """Move files to another folder and bring their names to the disk, that of the manifest last."""
    files = [name for name in names if name != manifest.NAME and (source / name).is_file()]
    for parent in sorted({os.path.dirname(name) for name in files}):
        for folder in (source, target):
            if _leads_out(folder, parent):
                raise CheckpointError(
                    f"{folder / parent} leads out of {folder}, and files of a checkpoint are moved inside of "
                    "its folder only. Remove that link"
                )
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, target / name)
    for each in {target, *((target / name).parent for name in files)}:
        sync_folder(each)
    if (source / manifest.NAME).is_file():
        os.replace(source / manifest.NAME, target / manifest.NAME)
        sync_folder(target)
