"""A folder that appears when it is whole: written under a hidden name beside the target, then renamed.

The hidden name shows other processes that the checkpoint is being written. A folder that replaces an older
one swaps names with it. Where the file system cannot swap, the older one is moved aside first; a crash after
that leaves it under its hidden name, and `recover` renames it back. Where the folder itself must stay, or
cannot be renamed, the same is done with the files in it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, cast

from accelerate.base import CheckpointError, sync_folder
from accelerate.checkpointing import manifest, temporary
from accelerate.checkpointing.manifest import files_under
from accelerate.checkpointing.temporary import HiddenFolder

logger = logging.getLogger(__name__)  # also used where no run is set up

SECONDS_OF_A_REPLACEMENT = 1.0  # far more than two renames take
POLL = 0.01
NOT_RENAMED = (errno.EXDEV, errno.EACCES) if sys.platform == "win32" else (errno.EXDEV,)
"""What renaming a folder answers where its files can be moved: on Windows, if any file in it is open."""
ATTEMPTS = 20  # to be the only process that writes a checkpoint

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
class StagingFolder:
    """Where a checkpoint is written until it is whole.

    Where the target cannot be renamed (a mount, one that holds a mount, or the folder that the process works
    in), the folder is `inside` of it.
    """

    target: Path  # the folder that it becomes
    folder: Path  # the folder it is written in
    inside: bool = False

    def open(self) -> None:
        try:
            if self.target.exists() and not self.target.is_dir():
                raise NotADirectoryError(20, "it is a file", str(self.target))
            _make_parents(self.folder.parent)
            recover(self.target)
            temporary.sweep(self.target.parent)
            temporary.sweep(self.target)
            self._make_alone()
        except (CheckpointError, OSError) as error:
            temporary.release(self.folder)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{self.target} cannot be written: {error}. Choose a folder that this process may write to, "
                "on a disk with space left."
            ) from error

    def _make_alone(self) -> None:
        """Make the folder where no other process writes the same checkpoint.

        Each looks for others before and after: of two that begin at the same moment at least one sees the
        other, and where both do, both try again after pauses of different length.
        """
        for _ in range(ATTEMPTS):
            _refuse_writers(self.target)
            self.folder.mkdir()
            if not _writers(self.target):
                return
            self.folder.rmdir()
            time.sleep(POLL * (1 + random.random()))
        _refuse_writers(self.target)
        raise CheckpointError(f"{self.target}: other processes begin to write it again and again. Try later.")

    def publish(self) -> None:
        """Rename the folder, complete with its manifest, to the target; on failure what was there stays."""
        sync_folder(self.folder)
        if self.inside or not self._takes_the_name():
            aside = temporary.claim(self.target.name, self.target, temporary.OLD)
            try:
                exchange_files(self.folder, self.target, aside)
            finally:
                temporary.release(aside)

    def _takes_the_name(self) -> bool:
        """Rename the folder; False where the old one cannot be, as in a lower layer of overlayfs."""
        aside = temporary.claim(self.target.name, self.target.parent, temporary.OLD)
        try:
            exchange_folders(self.folder, self.target, aside)
            clear_aside(aside, self.target)
        except OSError as error:
            if error.errno not in NOT_RENAMED:
                raise
            return False
        finally:
            temporary.release(aside)
        return True

    def discard(self) -> None:
        """Remove what was written so far, if it has not become the checkpoint."""
        shutil.rmtree(self.folder, ignore_errors=True)
        temporary.release(self.folder)


def absolute_path(target: Path) -> Path:
    """Return the absolute path of a checkpoint, resolved where it is a link."""
    path = Path(os.path.abspath(target))
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def plan_staging_folder(target: Path) -> StagingFolder:
    """Choose where a checkpoint is written; nothing is made yet."""
    target = absolute_path(target)
    inside = target.is_dir() and (
        _holds_mount(target) or _works_in(target) or not os.access(target.parent, os.W_OK)
    )
    parent = target if inside else target.parent
    return StagingFolder(target, temporary.claim(target.name, parent, temporary.SAVING), inside)


def remove(folder: Path) -> None:
    """Remove a checkpoint: it loses its name first, then its files are deleted."""
    try:
        temporary.dispose(folder, folder.name)
    except OSError as error:
        if error.errno not in NOT_RENAMED:  # it cannot be renamed, as in a lower layer of overlayfs
            raise
        (folder / manifest.NAME).unlink(missing_ok=True)  # from here on it is not complete
        shutil.rmtree(folder)


def recover(target: Path) -> None:
    """Restore what an interrupted save had moved aside, if there is anything."""
    for aside in temporary.find(target, temporary.OLD):
        if aside.is_in_use:
            _await(aside.path, there=False)
        else:
            undo_exchange_of_files(aside.path, target)
    for aside in temporary.find(target.parent, temporary.OLD):
        if not aside.belongs_to(target.name):
            continue
        if aside.is_needed:
            _await(target, there=True)
        if not target.exists():
            _bring_back(aside.path, target)
        elif not aside.is_needed:
            clear_aside(aside.path, target)


def recover_all(parent: Path) -> None:
    """Restore the folders in a folder; what belongs to the folder itself is restored when it is loaded."""
    for aside in temporary.find(parent, temporary.OLD):
        if aside.has_whole_name and not aside.belongs_to(parent.name):
            recover(parent / aside.name)


def is_changing(target: Path) -> bool:
    """Whether the files of a folder that must stay are being exchanged for others."""
    return any(aside.is_in_use for aside in temporary.find(target, temporary.OLD))


def _writers(target: Path) -> list[HiddenFolder]:
    """Return the hidden folders of other processes that are writing this checkpoint."""
    hidden = [
        *temporary.find(target.parent, temporary.SAVING),
        *temporary.find(target, temporary.SAVING, temporary.OLD),
    ]
    return [
        writer
        for writer in hidden
        if writer.belongs_to(target.name) and writer.is_in_use and not writer.is_own
    ]


def _refuse_writers(target: Path) -> None:
    for writer in _writers(target):
        since = datetime.fromtimestamp(writer.since, timezone.utc).isoformat() if writer.since else ""
        raise CheckpointError(
            f"{target} is being written by another process: process {writer.pid} on {writer.host}"
            f"{since and f', since {since}'}. Runs that save to one folder replace each other's checkpoints: "
            "give each run a folder of its own, or end one of them. A process that was killed does not "
            "count; one on another machine counts until it has written nothing for "
            f"{temporary.SECONDS_OF_A_RUNNING_SAVE:.0f} s."
        )


def _holds_mount(folder: Path) -> bool:
    return os.path.ismount(folder) or any(os.path.ismount(folder / name) for name in os.listdir(folder))


def _works_in(folder: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(folder)
    except FileNotFoundError:  # it was deleted
        return False


def _make_parents(folder: Path) -> None:
    """Make a folder and those above it, and bring their names to the disk."""
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for parent in new:
        sync_folder(parent.parent)


def _await(folder: Path, *, there: bool) -> None:
    """Wait for another process that is replacing a folder."""
    end = time.monotonic() + SECONDS_OF_A_REPLACEMENT
    while folder.exists() != there and time.monotonic() < end:
        time.sleep(POLL)


def _bring_back(aside: Path, target: Path) -> None:
    try:
        manifest.renew(aside)
        os.rename(aside, target)
    except OSError as error:
        if not target.exists():  # otherwise another process was faster
            logger.warning(f"{target} is at {aside}, since a save was interrupted, and stays there: {error}.")
        return
    logger.warning(f"{target} was being replaced when a save was interrupted: the older one is back.")


def exchange_folders(folder: Path, target: Path, aside: Path) -> None:
    """Rename a folder to the target, and the present target to `aside`; where that fails, all is as before.
    Where the file system can swap names, the target exists without interruption."""
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
    """Swap the names of the new folder and the old one, where the system can. The new one is renamed to
    `aside` first: after a crash, that is not needed as long as the target exists."""
    os.rename(folder, aside)
    try:
        swap(aside, target)
    except OSError:  # not every system, nor every file system, can
        os.rename(aside, folder)
        return False
    return True


def _renew(folder: Path) -> None:
    """Change the stamp of a folder: a process that reads it notices that another one had its name."""
    try:
        manifest.renew(folder)
    except OSError as error:
        logger.warning(f"{folder} is restored, and a run that reads it may not notice: {error}.")


def clear_aside(aside: Path, target: Path) -> None:
    """Move the user's own files from a replaced checkpoint to the new one, and remove the rest."""
    if not aside.exists():
        return
    try:
        _move_others(aside, target, _own_files(aside))
        temporary.dispose(aside, target.name)
    except OSError as error:
        logger.warning(f"{target} is saved, and what it replaces could not be removed from {aside}: {error}.")


def _move_others(source: Path, target: Path, ours: set[str], prefix: str = "") -> None:
    """Move everything that is not part of a checkpoint and whose name the target does not have."""
    for entry in sorted(source.iterdir()):
        name, moved = prefix + entry.name, target / entry.name
        holds_ours = any(file.startswith(f"{name}/") for file in ours)
        if _is_folder(entry) and (_is_folder(moved) or holds_ours):
            _move_others(entry, moved, ours, f"{name}/")
        elif name not in ours and not os.path.lexists(moved):
            moved.parent.mkdir(parents=True, exist_ok=True)
            os.rename(entry, moved)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _own_files(folder: Path) -> set[str]:
    """Return the names of the files of a checkpoint, without those that a link leads out of its folder."""
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
    root = os.path.realpath(folder)
    return os.path.commonpath((root, os.path.realpath(folder / inner))) != root


def exchange_files(folder: Path, target: Path, aside: Path) -> None:
    """Replace the files of the target by those of a folder; when `aside` is gone, the exchange is done.
    Where it fails, all is as before."""
    aside.mkdir()
    try:
        _shift(target, aside, _own_files(target))
        _shift(folder, target, files_under(folder))
        temporary.dispose(aside, target.name)
    except (OSError, CheckpointError):
        undo_exchange_of_files(aside, target)
        raise


def undo_exchange_of_files(aside: Path, target: Path) -> None:
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
    for changed in {target, *((target / name).parent for name in files)}:
        sync_folder(changed)
    if (source / manifest.NAME).is_file():
        os.replace(source / manifest.NAME, target / manifest.NAME)
        sync_folder(target)


def swap(first: Path, second: Path) -> None:
    """Swap the names of two folders or files in one step; an OSError where the system cannot."""
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(first))
    at_cwd, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    if _renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(first), None, str(second))


def _find_renameat2() -> Callable[..., int] | None:
    """Return Linux's call of that name; None on other systems, and where the C library is too old."""
    call: Any = None
    if sys.platform == "linux":
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return cast("Callable[..., int] | None", call)


_renameat2 = _find_renameat2()
