"""Folder of a checkpoint, which is written under a hidden name beside the target and then renamed.

`Saver` creates a `StagingFolder` and publishes it. Loading and retention call `recover`.

By the hidden name, other processes detect that the checkpoint is being written. A folder that replaces an
older one swaps names with it. If the file system cannot swap, the older one is moved aside first. A crash
after that leaves it under its hidden name, and `recover` renames it back. If the target must stay or cannot
be renamed, the same is done with the files in it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import random
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, cast

from accelerate.base import FSDP_MODEL_NAME, OPTIMIZER_NAME, CheckpointError, sync_folder
from accelerate.checkpointing import manifest, temporary
from accelerate.checkpointing.manifest import files_under
from accelerate.checkpointing.temporary import HiddenFolder

logger = logging.getLogger(__name__)  # also used where no run is set up

REPLACEMENT_TIMEOUT = 1.0  # seconds, far more than two renames take
POLL_INTERVAL = 0.01  # seconds
CANNOT_RENAME = (errno.EXDEV, errno.EACCES) if sys.platform == "win32" else (errno.EXDEV,)
"""Errors of a rename of a folder whose files can be moved. On Windows a file in it may be open."""
_NUMBERED = re.compile(r"checkpoint_(\d+)")
ATTEMPTS = 20  # to become the only process that writes a checkpoint

# Names of the files of a checkpoint without a manifest.
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
    """Folder in which a checkpoint is written until it is complete.

    It is inside the target if the target cannot be renamed because it is a mount point, has one, or is the
    working directory of this process.
    """

    target: Path  # the checkpoint folder
    folder: Path  # the hidden folder
    inside: bool = False

    def open(self) -> None:
        """Creates the folder, and removes what interrupted saves have left."""
        try:
            if self.target.exists() and not self.target.is_dir():
                raise NotADirectoryError(20, "it is a file", str(self.target))
            new = [parent for parent in self.folder.parents if not parent.exists()]
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            for parent in new:
                sync_folder(parent.parent)
            recover(self.target)
            temporary.sweep(self.target.parent)
            temporary.sweep(self.target)
            self._make_exclusively()
        except (CheckpointError, OSError) as error:
            temporary.release(self.folder)
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{self.target} cannot be written: {error}. Choose a folder that this process may write to, "
                "on a disk with space left."
            ) from error

    def _make_exclusively(self) -> None:
        """Creates the folder unless another process writes the same checkpoint.

        Each process looks for others before and after. If two begin at the same moment, at least one detects
        the other. If both do, both try again after random pauses.
        """
        for _ in range(ATTEMPTS):
            _refuse_writers(self.target)
            self.folder.mkdir()
            if not _writers(self.target):
                return
            self.folder.rmdir()
            time.sleep(POLL_INTERVAL * (1 + random.random()))
        _refuse_writers(self.target)
        raise CheckpointError(f"{self.target}: other processes begin to write it again and again. Try later.")

    def publish(self) -> None:
        """Renames the complete folder to the target, or leaves the target unchanged after an error."""
        sync_folder(self.folder)
        if self.inside or not self._replaces_target():
            aside = temporary.claim(self.target.name, self.target, temporary.OLD)
            try:
                exchange_files(self.folder, self.target, aside)
            finally:
                temporary.release(aside)

    def _replaces_target(self) -> bool:
        """Renames the folder, or returns False if the target cannot be renamed, as on overlayfs."""
        aside = temporary.claim(self.target.name, self.target.parent, temporary.OLD)
        try:
            exchange_folders(self.folder, self.target, aside)
            clear_aside(aside, self.target)
        except OSError as error:
            if error.errno not in CANNOT_RENAME:
                raise
            return False
        finally:
            temporary.release(aside)
        return True

    def discard(self) -> None:
        """Removes the folder unless it was published."""
        shutil.rmtree(self.folder, ignore_errors=True)
        temporary.release(self.folder)


def name_of(number: int) -> str:
    """Returns the name of the folder of a numbered checkpoint."""
    return f"checkpoint_{number}"


def number_of(name: str) -> int | None:
    """Returns the number of a checkpoint, or None if it has another name."""
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else None


def absolute_path(target: Path) -> Path:
    """Returns the absolute path of a checkpoint, with a link resolved."""
    path = Path(os.path.abspath(target))
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def plan_staging_folder(target: Path) -> StagingFolder:
    """Returns the staging folder for a target, which is not created yet."""
    target = absolute_path(target)
    inside = target.is_dir() and (
        _has_mount_point(target) or _is_working_directory(target) or not os.access(target.parent, os.W_OK)
    )
    parent = target if inside else target.parent
    return StagingFolder(target, temporary.claim(target.name, parent, temporary.SAVING), inside)


def remove(folder: Path) -> None:
    """Removes a checkpoint, which is renamed before its files are deleted."""
    try:
        temporary.dispose(folder, folder.name)
    except OSError as error:
        if error.errno not in CANNOT_RENAME:  # it cannot be renamed, as in a lower layer of overlayfs
            raise
        (folder / manifest.NAME).unlink(missing_ok=True)  # from here on it is not complete
        shutil.rmtree(folder)


def recover(target: Path) -> None:
    """Restores the checkpoint that an interrupted save has moved aside, if there is one."""
    for aside in temporary.find(target, temporary.OLD):
        if aside.is_in_use:
            _wait_for(aside.path, exists=False)
        else:
            undo_exchange_of_files(aside.path, target)
    for aside in temporary.find(target.parent, temporary.OLD):
        if not aside.belongs_to(target.name):
            continue
        if aside.is_needed:
            _wait_for(target, exists=True)
        if not target.exists():
            _restore(aside.path, target)
        elif not aside.is_needed:
            clear_aside(aside.path, target)


def recover_all(parent: Path) -> None:
    """Restores the checkpoints in a folder, each of which may have been moved aside."""
    for aside in temporary.find(parent, temporary.OLD):
        if aside.has_whole_name and not aside.belongs_to(parent.name):
            recover(parent / aside.name)


def is_changing(target: Path) -> bool:
    """Returns whether the files of a folder that must stay are being replaced."""
    return any(aside.is_in_use for aside in temporary.find(target, temporary.OLD))


def _writers(target: Path) -> list[HiddenFolder]:
    """Returns the hidden folders of other processes that are writing this checkpoint."""
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
            "use a separate folder for each run, or end one of them. A process that was killed does not "
            "count; one on another node counts until it has written nothing for "
            f"{temporary.SECONDS_OF_A_RUNNING_SAVE:.0f} s."
        )


def _has_mount_point(folder: Path) -> bool:
    return os.path.ismount(folder) or any(os.path.ismount(folder / name) for name in os.listdir(folder))


def _is_working_directory(folder: Path) -> bool:
    try:
        return Path.cwd().is_relative_to(folder)
    except FileNotFoundError:  # the working directory was deleted
        return False


def _wait_for(folder: Path, *, exists: bool) -> None:
    """Waits for another process that is replacing a folder."""
    end = time.monotonic() + REPLACEMENT_TIMEOUT
    while folder.exists() != exists and time.monotonic() < end:
        time.sleep(POLL_INTERVAL)


def _restore(aside: Path, target: Path) -> None:
    try:
        manifest.renew(aside)
        os.rename(aside, target)
    except OSError as error:
        if not target.exists():  # another process has not restored it
            logger.warning(f"{target} is at {aside}, since a save was interrupted, and stays there: {error}.")
        return
    logger.warning(f"{target} was being replaced when a save was interrupted: the older one is back.")


def exchange_folders(folder: Path, target: Path, aside: Path) -> None:
    """Renames a folder to the target, and the previous target to `aside`, or undoes both after an error.

    The target exists at every moment if the file system can swap names.
    """
    undo: list[Callable[[], None]] = []

    def rename(old: Path, new: Path) -> None:
        os.rename(old, new)
        undo.append(partial(os.rename, new, old))

    try:
        if not target.exists():
            rename(folder, target)
        elif _swap_with_target(folder, target, aside):
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


def _swap_with_target(folder: Path, target: Path, aside: Path) -> bool:
    """Swaps the names of the new folder and the target, and returns whether the system can.

    The new folder is renamed to `aside` first, which is not needed after a crash while the target exists.
    """
    os.rename(folder, aside)
    try:
        swap(aside, target)
    except OSError:  # this system or file system cannot swap
        os.rename(aside, folder)
        return False
    return True


def _renew(folder: Path) -> None:
    """Changes the stamp of a folder, so that a process that reads it notices the replacement."""
    try:
        manifest.renew(folder)
    except OSError as error:
        logger.warning(f"{folder} is restored, and a run that reads it may not notice: {error}.")


def clear_aside(aside: Path, target: Path) -> None:
    """Moves the user's own files from a replaced checkpoint to the new one, and removes the rest."""
    if not aside.exists():
        return
    try:
        _move_user_files(aside, target, _checkpoint_files(aside))
        temporary.dispose(aside, target.name)
    except OSError as error:
        logger.warning(f"{target} is saved, and what it replaces could not be removed from {aside}: {error}.")


def _move_user_files(source: Path, target: Path, ours: set[str], prefix: str = "") -> None:
    """Moves all files that are not part of a checkpoint and whose names the target does not have."""
    for entry in sorted(source.iterdir()):
        name, moved = prefix + entry.name, target / entry.name
        has_ours = any(file.startswith(f"{name}/") for file in ours)
        if _is_folder(entry) and (_is_folder(moved) or has_ours):
            _move_user_files(entry, moved, ours, f"{name}/")
        elif name not in ours and not os.path.lexists(moved):
            moved.parent.mkdir(parents=True, exist_ok=True)
            os.rename(entry, moved)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _checkpoint_files(folder: Path) -> set[str]:
    """Returns the names of the files of a checkpoint, except those in linked folders outside of it."""
    try:
        names = {*manifest.read(folder).files}
    except CheckpointError:
        names = {
            path.relative_to(folder).as_posix() for pattern in _OWN_PATTERNS for path in folder.glob(pattern)
        }
    outside = {parent for parent in map(os.path.dirname, names) if _leads_out(folder, parent)}
    return {*(name for name in names if os.path.dirname(name) not in outside), manifest.NAME}


def _leads_out(folder: Path, inner: str) -> bool:
    """Returns whether the path of a folder leaves the folder above it, by its name or by a link."""
    root = os.path.realpath(folder)
    return os.path.commonpath((root, os.path.realpath(folder / inner))) != root


def exchange_files(folder: Path, target: Path, aside: Path) -> None:
    """Replaces the files of the target by those of a folder, or undoes it after an error.

    The exchange is complete when `aside` is gone.
    """
    aside.mkdir()
    try:
        _move_files(target, aside, _checkpoint_files(target))
        _move_files(folder, target, files_under(folder))
        temporary.dispose(aside, target.name)
    except (OSError, CheckpointError):
        undo_exchange_of_files(aside, target)
        raise


def undo_exchange_of_files(aside: Path, target: Path) -> None:
    """Moves the replaced files back to the target."""
    _renew(aside)
    _move_files(aside, target, files_under(aside))
    temporary.dispose(aside, target.name)


def _move_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Moves files to another folder and flushes their names to disk, the manifest last."""
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
    """Swaps the names of two folders or files atomically, or raises an OSError if the system cannot."""
    if _renameat2 is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(first))
    at_cwd, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE
    if _renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(first), None, str(second))


def _find_renameat2() -> Callable[..., int] | None:
    """Returns the system call of Linux, or None on other systems and with an old C library."""
    call: Any = None
    if sys.platform == "linux":
        call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return cast("Callable[..., int] | None", call)


_renameat2 = _find_renameat2()


SAVED = {
    r"(?:pytorch_)?model(?:_\d+)?\.(?:bin|safetensors)": "Model weights saved in {path}",
    rf"{FSDP_MODEL_NAME}_\d+": "Model weights saved in {path}",
    r"optimizer(?:_\d+)?\.bin": "Optimizer state saved in {path}",
    rf"{OPTIMIZER_NAME}_\d+": "Optimizer state saved in {path}",
    r"scheduler(?:_\d+)?\.bin": "Scheduler state saved in {path}",
    r"sampler(?:_(\d+))?\.bin": "Sampler state for dataloader {number} saved in {path}",
    r"scaler\.pt": "Gradient scaler state saved in {path}",
    r"random_states_\d+\.pkl": "Random states saved in {path}",
    r"custom_checkpoint_(\d+)\.pkl": "Saving the state of {kind} to {path}",
}
"""Line for each file, or folder of shards, by the pattern of its name, in the order of the lines."""
LOADED = ("model weights", "optimizer states", "scheduler states", "dataloader sampler states")


def saved_lines(target: Path, names: Sequence[str], custom: Sequence[str]) -> list[str]:
    """Returns the lines for the files that a rank has saved.

    Args:
        names: Paths of the files in it.
    """
    tops = list(dict.fromkeys(name.partition("/")[0] for name in names))
    lines = []
    for pattern, text in SAVED.items():
        for top in tops:
            if match := re.fullmatch(pattern, top):
                number = int(match[1] or 0) if match.re.groups else 0
                kind = custom[number] if number < len(custom) else "an object"
                lines.append(text.format(path=target / top, number=number, kind=kind))
    return lines


def loaded_lines(folder: Path, has_scaler: bool, custom: Sequence[str]) -> list[str]:
    """Returns the lines for a checkpoint that was loaded."""
    return [
        *(f"All {objects} loaded successfully" for objects in LOADED),
        *(["GradScaler state loaded successfully"] if has_scaler else []),
        "All random states loaded successfully",
        f"Loading in {len(custom)} custom states",
        *(
            f"Loading the state of {kind} from {folder / f'custom_checkpoint_{index}.pkl'}"
            for index, kind in enumerate(custom)
        ),
    ]
