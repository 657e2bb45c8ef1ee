"""A folder that is there as a whole or not at all: written beside its place, then renamed.

While a checkpoint is written it lies under a hidden name beside its place. One that takes the place of an
older folder of the same name moves that aside first; a crash between the two renames leaves the older one
under its hidden name, from where `recover` brings it back.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from accelerate.base.errors import CheckpointError
from accelerate.checkpointing import manifest
from accelerate.checkpointing.files import files_under, sync_folder

logger = logging.getLogger(__name__)  # also used where no run is set up

SAVING, OLD, DOOMED = "saving", "old", "deleting"
DAYS_TO_KEEP_STRANGERS = 7
_count = itertools.count()

# What the files of a checkpoint are called, for folders that have no manifest.
_OWN_PATTERNS = (
    "model*.safetensors*",
    "pytorch_model*.bin*",
    "optimizer*.bin",
    "scheduler*.bin",
    "sampler*.bin",
    "dl_state_dict*.bin",
    "scaler.pt",
    "random_states_*.pkl",
    "custom_checkpoint_*.pkl",
)


@dataclass(frozen=True)
class Workplace:
    """Where a checkpoint is written until it is whole.

    Attributes:
        target: the folder that it becomes.
        folder: the folder it is written in.
        inside: whether `folder` lies in the target, which cannot be renamed: a mount, or the folder that the
            process works in.
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
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            recover(self.target)
            sweep(self.folder.parent)
            self.folder.mkdir()
        except OSError as error:
            raise CheckpointError(
                f"{self.target} cannot be written: {error}. Choose a folder that this process may write to."
            ) from error

    def publish(self) -> None:
        """Give the folder, complete with its manifest, its name."""
        sync_folder(self.folder)
        if self.inside:
            _publish_inside(self.folder, self.target)
        elif self.target.exists():
            _replace(self.folder, self.target)
        else:
            os.rename(self.folder, self.target)
            sync_folder(self.target.parent)

    def discard(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self.folder, ignore_errors=True)


def plan_workplace(target: Path) -> Workplace:
    """Choose where a checkpoint is written; nothing is made yet.

    Args:
        target: the folder that it becomes.
    """
    target = Path(os.path.abspath(target))
    inside = target.is_dir() and (
        os.path.ismount(target) or Path.cwd().is_relative_to(target) or not os.access(target.parent, os.W_OK)
    )
    if inside:
        logger.warning(
            f"{target} cannot be replaced as a whole: files in it are replaced one by one, and a crash in "
            "that moment costs the checkpoint that was there. Save to a folder inside it to be safe."
        )
    parent = target if inside else target.parent
    return Workplace(target, parent / _hidden(target.name, SAVING), inside)


def remove(folder: Path) -> None:
    """Remove a checkpoint: it is gone at once, whatever happens while its files are deleted."""
    doomed = folder.parent / _hidden(folder.name, DOOMED)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def recover(target: Path) -> None:
    """Bring the folder back that an interrupted save had moved aside, if there is one.

    Args:
        target: the name that the folder had.
    """
    for aside in sorted(target.parent.glob(f".{target.name}.{OLD}-*")):
        if not target.exists():
            logger.warning(f"{target} was being replaced when a save was interrupted: the older one is back.")
            os.rename(aside, target)
        elif not _is_in_use(aside):
            _bring_over(aside, target)


def sweep(parent: Path) -> None:
    """Remove what interrupted saves have left in a folder."""
    for kind in (SAVING, DOOMED):
        for left in parent.glob(f".*.{kind}-*"):
            if not _is_in_use(left):
                shutil.rmtree(left, ignore_errors=True)


def _hidden(name: str, kind: str) -> str:
    return f".{name}.{kind}-{socket.gethostname()}-{os.getpid()}-{next(_count)}"


def _is_in_use(hidden: Path) -> bool:
    """Whether the process that made a hidden folder may still need it."""
    host, pid, _ = hidden.name.rpartition(".")[2].partition("-")[2].rsplit("-", 2)
    if host == socket.gethostname():
        return int(pid) == os.getpid() or psutil.pid_exists(int(pid))
    with suppress(OSError):
        return time.time() - hidden.stat().st_mtime < DAYS_TO_KEEP_STRANGERS * 24 * 3600
    return True


def _replace(folder: Path, target: Path) -> None:
    aside = target.parent / _hidden(target.name, OLD)
    os.rename(target, aside)
    try:
        os.rename(folder, target)
    except OSError:
        os.rename(aside, target)
        raise
    sync_folder(target.parent)
    _bring_over(aside, target)


def _bring_over(aside: Path, target: Path) -> None:
    """Move what the user kept in a replaced checkpoint to the new one, and remove the rest."""
    ours = _own_files(aside)
    for name in list(files_under(aside)):
        if name not in ours and not (target / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(aside / name, target / name)
    shutil.rmtree(aside)


def _own_files(folder: Path) -> set[str]:
    try:
        return {*manifest.read(folder).files, manifest.NAME}
    except CheckpointError:
        names = {path.name for pattern in _OWN_PATTERNS for path in folder.glob(pattern)}
        return {*names, manifest.NAME}


def _publish_inside(folder: Path, target: Path) -> None:
    old = _own_files(target)
    (target / manifest.NAME).unlink(missing_ok=True)
    names = [name for name in files_under(folder) if name != manifest.NAME]
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(folder / name, target / name)
    for name in old - set(names) - {manifest.NAME}:
        (target / name).unlink(missing_ok=True)
    sync_folder(target)
    os.replace(folder / manifest.NAME, target / manifest.NAME)
    sync_folder(target)
    shutil.rmtree(folder)
