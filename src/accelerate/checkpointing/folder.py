"""A folder that is there as a whole or not at all: written beside its place, then renamed.

While a checkpoint is written it lies under a hidden name beside its place. One that takes the place of an
older folder of the same name moves that aside first; a crash between the two renames leaves the older one
under its hidden name, from where `recover` brings it back. Where the folder itself must stay, the same is
done with the files in it.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from accelerate.base.errors import CheckpointError
from accelerate.checkpointing import hidden, manifest
from accelerate.checkpointing.files import files_under, sync_folder

logger = logging.getLogger(__name__)  # also used where no run is set up

SECONDS_OF_A_REPLACEMENT = 1.0  # far more than two renames take
POLL = 0.01

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


@dataclass(frozen=True)
class Workplace:
    """Where a checkpoint is written until it is whole.

    Attributes:
        target: the folder that it becomes.
        folder: the folder it is written in.
        inside: whether `folder` lies in the target, which cannot be renamed: a mount, one that holds a mount,
            or the folder that the process works in.
    """

    target: Path
    folder: Path
    inside: bool = False

    def open(self) -> None:
        """Make the folder.

        Raises:
            CheckpointError: it cannot be made.
        """
        try:
            if self.target.exists() and not self.target.is_dir():
                raise NotADirectoryError(20, "it is a file", str(self.target))
            _make_parents(self.folder.parent)
            recover(self.target)
            hidden.sweep(self.folder.parent)
            self.folder.mkdir()
        except OSError as error:
            hidden.release(self.folder)
            raise CheckpointError(
                f"{self.target} cannot be written: {error}. Choose a folder that this process may write to, "
                "on a disk with space left."
            ) from error

    def publish(self) -> None:
        """Give the folder, complete with its manifest, its name; what was there before is removed.

        Raises:
            OSError: it could not be given its name, and what was there before is there still.
        """
        sync_folder(self.folder)
        parent = self.target if self.inside else self.target.parent
        aside = hidden.claim(self.target.name, parent, hidden.OLD)
        try:
            if self.inside:
                _exchange_files(self.folder, self.target, aside)
            else:
                _exchange(self.folder, self.target, aside)
                _clear_aside(aside, self.target)
        finally:
            hidden.release(aside)

    def discard(self) -> None:
        """Remove what was written so far, if it has not become the checkpoint."""
        shutil.rmtree(self.folder, ignore_errors=True)
        hidden.release(self.folder)


def place_of(target: Path) -> Path:
    """Return where a checkpoint lies: absolute, and behind the link where the name is one."""
    path = Path(os.path.abspath(target))
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def plan_workplace(target: Path) -> Workplace:
    """Choose where a checkpoint is written; nothing is made yet.

    Args:
        target: the folder that it becomes.
    """
    target = place_of(target)
    inside = target.is_dir() and (
        _holds_mount(target) or _works_in(target) or not os.access(target.parent, os.W_OK)
    )
    parent = target if inside else target.parent
    return Workplace(target, hidden.claim(target.name, parent, hidden.SAVING), inside)


def remove(folder: Path) -> None:
    """Remove a checkpoint: it is gone at once, whatever happens while its files are deleted.

    Raises:
        OSError: it cannot be.
    """
    hidden.dispose(folder, folder.name)


def recover(target: Path) -> None:
    """Bring back what an interrupted save had moved aside, if there is anything.

    Args:
        target: the checkpoint.
    """
    for aside in hidden.find(target, hidden.OLD):
        if not aside.is_needed:
            _undo_exchange_of_files(aside.path, target)
    for aside in hidden.find(target.parent, hidden.OLD):
        if aside.name != target.name:
            continue
        if aside.is_needed:
            _await(target)
        if not target.exists():
            _bring_back(aside.path, target)
        elif not aside.is_needed:
            _clear_aside(aside.path, target)


def recover_all(parent: Path) -> None:
    """Bring back all folders in a folder that interrupted saves had moved aside."""
    for name in {each.name for each in hidden.find(parent, hidden.OLD)}:
        recover(parent / name)


def _holds_mount(folder: Path) -> bool:
    return os.path.ismount(folder) or any(os.path.ismount(folder / name) for name in os.listdir(folder))


def _works_in(folder: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(folder)
    except FileNotFoundError:  # it was deleted
        return False


def _make_parents(folder: Path) -> None:
    """Make a folder and those above it, and bring their names to the disk."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in new:
        sync_folder(each.parent)


def _await(target: Path) -> None:
    """Give another process, which is just replacing a folder, the time to end that."""
    end = time.monotonic() + SECONDS_OF_A_REPLACEMENT
    while not target.exists() and time.monotonic() < end:
        time.sleep(POLL)


def _bring_back(aside: Path, target: Path) -> None:
    try:
        os.rename(aside, target)
    except OSError as error:
        if not target.exists():  # otherwise another process was faster
            logger.warning(
                f"{target} lies at {aside}, since a save was interrupted, and stays there: {error}."
            )
        return
    logger.warning(f"{target} was being replaced when a save was interrupted: the older one is back.")


def _exchange(folder: Path, target: Path, aside: Path) -> None:
    """Give a folder a name, and what had it another one; on an error all is as before.

    Args:
        folder: the new one.
        target: its name.
        aside: the name for what is there.
    """
    done: list[tuple[Path, Path]] = []
    try:
        for old, new in ((target, aside), (folder, target)):
            if old == folder or target.exists():
                os.rename(old, new)
                done.append((old, new))
        sync_folder(target.parent)
    except OSError:
        for old, new in reversed(done):
            os.rename(new, old)
        raise


def _clear_aside(aside: Path, target: Path) -> None:
    """Move what the user kept in a replaced checkpoint to the new one, and remove the rest."""
    if not aside.exists():
        return
    try:
        _move_others(aside, target, _own_files(aside))
        hidden.dispose(aside, target.name)
    except OSError as error:
        logger.warning(f"{target} is saved, and what it replaces could not be removed from {aside}: {error}.")


def _move_others(source: Path, target: Path, ours: set[str], prefix: str = "") -> None:
    """Move everything that is not part of a checkpoint and has no namesake."""
    for entry in sorted(source.iterdir()):
        name, there = prefix + entry.name, target / entry.name
        is_folder = entry.is_dir() and not entry.is_symlink()
        if is_folder and (there.is_dir() or _holds(ours, name)):
            _move_others(entry, there, ours, f"{name}/")
        elif name not in ours and not os.path.lexists(there):
            there.parent.mkdir(parents=True, exist_ok=True)
            os.rename(entry, there)


def _holds(files: Iterable[str], folder: str) -> bool:
    return any(file.startswith(f"{folder}/") for file in files)


def _own_files(folder: Path) -> set[str]:
    try:
        return {*manifest.read(folder).files, manifest.NAME}
    except CheckpointError:
        names = {
            path.relative_to(folder).as_posix() for pattern in _OWN_PATTERNS for path in folder.glob(pattern)
        }
        return {*names, manifest.NAME}


def _exchange_files(folder: Path, target: Path, aside: Path) -> None:
    """Put the files of one folder in the place of those of another; on an error all is as before.

    Args:
        folder: the new files.
        target: the folder that they come to.
        aside: for the files that are there. When that is gone, the exchange is done.
    """
    aside.mkdir()
    try:
        _shift(target, aside, _own_files(target))
        _shift(folder, target, files_under(folder))
        hidden.dispose(aside, target.name)
    except OSError:
        _undo_exchange_of_files(aside, target)
        raise


def _undo_exchange_of_files(aside: Path, target: Path) -> None:
    """Bring files back that were moved aside in the same folder."""
    _shift(aside, target, files_under(aside))
    hidden.dispose(aside, target.name)


def _shift(source: Path, target: Path, names: Iterable[str]) -> None:
    """Move files to another folder and bring their names to the disk, that of the manifest last."""
    files = [name for name in names if name != manifest.NAME and (source / name).is_file()]
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(source / name, target / name)
    for each in {target, *((target / name).parent for name in files)}:
        sync_folder(each)
    if (source / manifest.NAME).is_file():
        os.replace(source / manifest.NAME, target / manifest.NAME)
        sync_folder(target)
