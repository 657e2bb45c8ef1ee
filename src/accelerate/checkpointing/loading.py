"""Load a list of parts: choose a complete checkpoint, verify it, read it and how far its run was."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from accelerate.base import (
    RNG_STATE_NAME,
    CheckpointError,
    as_builtin,
    expect,
    for_threads,
    listed,
    wrong_value,
)
from accelerate.checkpointing import folder, manifest, retention
from accelerate.checkpointing.manifest import Manifest
from accelerate.checkpointing.parts import GeneratorsPart, Load
from accelerate.logging import get_logger
from accelerate.state import Consensus, Topology

logger = get_logger(__name__)

CALL = "accelerator.load_state"
SECONDS_TO_VERIFY = 24 * 3600.0

THREADS = 4
OF_OBJECTS = re.compile(
    r"(?:model|pytorch_model|optimizer|scheduler|sampler|scaler|custom_checkpoint)(?:_\d+)?\.\w+"
    r"|(?:pytorch_model_fsdp|optimizer)_\d+/\.metadata"
)
"""Names of files that belong to one object of the run each."""

NO_FOLDER = "there is no such folder"
ATTEMPTS = 5  # to read a checkpoint that saves replace at the same time
REPLACED = "another save replaced it while it was read"

WorldSizePolicy = Literal["strict", "reseed", "ignore"]
WORLD_SIZE_POLICIES = {
    "strict": "",
    "reseed": "each process derives new states for its random generators",
    "ignore": "processes that find a state for their random generators take it, the others keep theirs",
}
"""Policy for a checkpoint that another number of processes saved -> what is logged of random states."""


class Candidate:
    """A checkpoint that is about to be read; its files are compared with their checksums meanwhile.

    Another run may save under the same name while it is read. Then files of two checkpoints may have been
    read, which `agree` notices on all ranks.
    """

    def __init__(
        self,
        folder: Path,
        consensus: Consensus,
        topology: Topology,
        fault: str = "",  # what is known to be wrong with it; nothing is compared then
        *,
        was_complete: bool = False,  # it was seen as complete just before
        is_last: bool = True,  # it is not read again when it was replaced
    ) -> None:
        self.folder = folder
        self.manifest: Manifest | None = None  # stays None for one of other software, or a damaged one
        self.was_replaced = False  # to be read again, as all ranks have agreed
        self._consensus = consensus
        self._fault = fault
        self._is_last = is_last
        self._faults: list[Future[list[str]]] = []
        self._stamp = manifest.stamp(folder)
        self._is_gone = False
        if fault:
            return
        try:
            self._begin(topology)
        except CheckpointError as error:
            self._fault = str(error)
            self._is_gone = was_complete

    @property
    def world_size(self) -> int | None:
        """Number of processes that saved it: without a manifest, of those whose random states are there."""
        if self.manifest is not None:
            return self.manifest.world_size
        return len(list(self.folder.glob(f"{RNG_STATE_NAME}_*.pkl"))) or None

    @property
    def resized(self) -> bool:
        return self.world_size not in (None, self._consensus.size)

    @property
    def is_readable(self) -> bool:
        return not self._fault

    def confirm(self) -> None:
        """Make sure that the checkpoint is still the one that was opened."""
        if self._is_other():
            raise CheckpointError(REPLACED)

    def agree(self, failure: str = "", *, was_read: bool = True) -> None:
        """Wait until all ranks have compared, or read, their files; called on all ranks. Raises where
        something went wrong on any rank, without the folder's name; `was_read`: files were read since
        the last call."""
        faults = [self._fault, *(line for future in self._faults for line in future.result()), failure]
        save = self.manifest.run.get(manifest.SAVE) if self.manifest else None
        own = {
            "problems": [line for line in faults if line],
            "replaced": was_read and (self._is_gone or self._is_other()),
            # The same save on all ranks with the same path, which is empty where the save has a name.
            "path": "" if save else f"{socket.gethostname()}:{self.folder}",
            "save": save or self._stamp,
        }
        problems, again = self._consensus.decide(CALL, own, _judge, SECONDS_TO_VERIFY)
        self.was_replaced = again and not self._is_last
        if problems:
            raise CheckpointError(problems)

    def _is_other(self) -> bool:
        return manifest.stamp(self.folder) != self._stamp or folder.is_changing(self.folder)

    def _begin(self, topology: Topology) -> None:
        if not self.folder.is_dir():
            folder.recover(folder.absolute_path(self.folder))
        if not self.folder.is_dir():
            raise CheckpointError(NO_FOLDER)
        if not (self.folder / manifest.NAME).is_file():
            if folder.is_changing(self.folder):
                raise CheckpointError(REPLACED)
            if numbered := retention.survey(self.folder):
                newest = numbered[0].path
                raise CheckpointError(f"it is a folder of checkpoints, and not one: pass {newest}")
            return
        self.manifest = read = manifest.read(self.folder)
        names = divide_files(read, topology.local_size)[topology.local_rank]
        expect(sum(read.files[name].size for name in names))
        pool = ThreadPoolExecutor(THREADS, "accelerate-verify", **for_threads())
        self._faults = [
            pool.submit(manifest.problems, self.folder, read, [name], deep=True) for name in names
        ]
        pool.shutdown(wait=False)


def _judge(answers: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Return what is wrong with a checkpoint, and whether it may be right when it is read again."""
    if any(answer["replaced"] for answer in answers):
        return f"{REPLACED}: load it when no other run saves to this name", True
    if problems := "; ".join(dict.fromkeys(line for answer in answers for line in answer["problems"])):
        return problems, False
    first: dict[str, tuple[int, str]] = {}
    for rank, answer in enumerate(answers):
        earlier, save = first.setdefault(answer["path"], (rank, answer["save"]))
        if save != answer["save"]:
            return (
                f"process {rank} finds another save under this name than process {earlier}: let all of them "
                "see the same folder, or copy one checkpoint to all machines",
                True,
            )
    return "", False


def open_checkpoint(
    path: Path, consensus: Consensus, topology: Topology, patience: float
) -> Iterator[Candidate]:
    """Yield a checkpoint that the user named, again when it was replaced; called on all ranks."""
    for left in reversed(range(ATTEMPTS)):
        consensus.decide(CALL, None, lambda _: folder.recover(folder.absolute_path(path)), patience)
        source = Candidate(path, consensus, topology, is_last=not left)
        yield source
        if not source.was_replaced:
            return


def open_newest(
    parent: Path, consensus: Consensus, topology: Topology, patience: float
) -> Iterator[Candidate]:
    """Yield numbered checkpoints that are on all machines and look complete, the newest first, and begin
    again when one was replaced, or deleted, meanwhile."""
    for left in reversed(range(ATTEMPTS)):
        for source in _open_numbered(parent, consensus, topology, patience, is_last=not left):
            yield source
            if source.was_replaced:
                break
        else:
            return


def _open_numbered(
    parent: Path, consensus: Consensus, topology: Topology, patience: float, is_last: bool
) -> Iterator[Candidate]:
    try:
        checkpoints = {checkpoint.number: checkpoint for checkpoint in retention.survey(parent)}
    except OSError as error:  # this rank has none, so that the others need not wait for it
        logger.warning(f"Checkpoints in {parent} cannot be looked for: {error}.", main_process_only=False)
        checkpoints = {}
    numbers = consensus.decide(CALL, sorted(checkpoints), lambda lists: sorted({*chain(*lists)}), patience)
    for number in reversed(numbers):
        path = parent / retention.name_of(number)
        fault = checkpoints[number].fault if number in checkpoints else "it is not on all machines"
        yield Candidate(path, consensus, topology, fault, was_complete=not fault, is_last=is_last)


def check_policy(policy: str) -> None:
    if policy not in WORLD_SIZE_POLICIES:
        fix = f"choose one of {', '.join(WORLD_SIZE_POLICIES)}"
        raise wrong_value("world_size_policy", policy, "there is no such policy", fix)


def announce(source: Candidate, size: int, policy: str) -> None:
    """Warn of a checkpoint without manifest, or of another number of processes; "strict" refuses that."""
    if not source.is_readable:
        return
    if source.manifest is None:
        logger.warning(
            f"{source.folder} holds no {manifest.NAME}: other software wrote it, or its save did not "
            "end. It is loaded without being verified."
        )
    if not source.resized:
        return
    old = source.world_size
    if policy == "strict":
        raise CheckpointError(
            f"{source.folder} was saved by {old} processes, and this run has {size}. Start {old} "
            'processes, or pass world_size_policy="reseed".'
        )
    logger.warning(
        f"{source.folder} was saved by {old} processes, and this run has {size}: loaders go on after the "
        f"samples seen so far, and {WORLD_SIZE_POLICIES[policy]} (world_size_policy={policy!r})."
    )


def announce_surplus(load: Load) -> None:
    """Say which objects of a checkpoint this run does not have."""
    surplus = sorted(
        name for name in load.names or () if OF_OBJECTS.fullmatch(name) and name not in load.wanted
    )
    if surplus:
        logger.warning(
            f"{load.folder} holds {listed(surplus)}, and this run has prepared or registered no object for "
            "it: it is not loaded. Prepare the same objects in the same order as the run that saved it."
        )


def divide_files(read: Manifest, processes: int) -> list[list[str]]:
    """Divide the files of a checkpoint so that each process gets about the same number of bytes."""
    shares: list[list[str]] = [[] for _ in range(processes)]
    sizes = [0] * processes
    for record in sorted(read.files.values(), key=lambda record: -record.size):
        least = sizes.index(min(sizes))
        shares[least].append(record.name)
        sizes[least] += record.size
    return shares


def nothing_to_load(folder: object, faults: Sequence[str]) -> Exception:
    """Return the error for a run that finds no checkpoint in a folder that the user named, or None."""
    reasons = "; ".join(faults)
    if folder is not None and reasons.endswith(NO_FOLDER):
        return wrong_value("input_dir", str(folder), NO_FOLDER, "pass a folder that was saved to")
    if folder is not None:
        error = CheckpointError(f"A checkpoint was not loaded, and nothing was changed. {reasons}")
        is_missing = any(mark in reasons for mark in (" is missing", " holds no "))
        return as_builtin(error, FileNotFoundError) if is_missing else error
    if faults:
        return CheckpointError(
            f"There is no complete checkpoint to load, and nothing was changed. {reasons}. One that other "
            "software wrote is loaded by its name: load_state(folder)."
        )
    error = CheckpointError("There is no checkpoint to load: none was saved under automatic naming.")
    return as_builtin(error, FileNotFoundError)


@dataclass(frozen=True)
class Progress:
    """What a run takes over that goes on from a checkpoint; None for what is not stored."""

    step: int | None = None  # `Accelerator.step`
    sync_gradients: bool | None = None  # whether the last step updated the parameters
    updates: list[int] = field(default_factory=list)  # of each optimizer
    gradient_order: list[list[int]] = field(default_factory=list)  # of each model, from its strategy


def read_progress(source: Candidate, options: Load) -> Progress:
    """Read how far a run was; nothing is changed."""
    if source.manifest is not None:
        run = source.manifest.run
        sync_gradients = run.get("sync_gradients", True)
        return Progress(
            source.manifest.step, sync_gradients, run.get("updates", []), run.get("gradient_order", [])
        )
    name = GeneratorsPart(0).name
    states = options.read(name) if options.has(name) else {}
    step = states.get("step") if isinstance(states, Mapping) else None
    return Progress(step if type(step) is int else None)
