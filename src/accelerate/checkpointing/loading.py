"""Choice and verification of the checkpoint that a run loads.

`open_checkpoint` and `open_newest` yield the same `CheckpointSource` objects on all ranks.
`Accelerator.load_state` reads the parts of a source while threads verify its checksums, and calls `agree`,
which raises on all ranks if any rank has an error. Then it applies the changes (`changes.py`).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from accelerate.base import (
    RNG_STATE_NAME,
    SAMPLER_NAME,
    CheckpointError,
    as_builtin,
    expect,
    for_threads,
    listed,
    wrong_value,
)
from accelerate.checkpointing import folder, manifest, retention
from accelerate.checkpointing.changes import describe_failure
from accelerate.checkpointing.folder import name_of
from accelerate.checkpointing.items import GeneratorsPart
from accelerate.checkpointing.manifest import Manifest
from accelerate.checkpointing.parts import CheckpointReader
from accelerate.data_loader import resume
from accelerate.logging import get_logger
from accelerate.state import Consensus, Topology

logger = get_logger(__name__)

CALL = "accelerator.load_state"
VERIFY_TIMEOUT = 24 * 3600.0  # seconds

THREADS = 4
OBJECT_FILES = re.compile(
    r"(?:model|pytorch_model|optimizer|scheduler|sampler|scaler|averages|diloco|local_sgd_\d+)(?:_\d+)?\.\w+"
    r"|(?:pytorch_model_fsdp|optimizer|averages)_\d+/\.metadata"
)
"""Names of files that belong to one prepared object of the run each."""
CUSTOM_FILE = re.compile(r"custom_checkpoint_(\d+)\.pkl")

NO_FOLDER = "there is no such folder"
ATTEMPTS = 5  # to read a checkpoint that saves replace at the same time
REPLACED = "another save replaced it while it was read"

WorldSizePolicy = Literal["strict", "reseed", "ignore"]
WORLD_SIZE_POLICIES = {
    "strict": "",
    "reseed": "each process derives new states for its random generators",
    "ignore": "processes that find a state for their random generators take it, the others keep theirs",
}
"""Part of the warning about random states, by the policy for checkpoints of another world size."""


class CheckpointSource:
    """Checkpoint that is about to be read, whose checksums are verified in threads.

    If another run replaces it while it is read, the files may be those of two checkpoints. `agree` detects
    this on all ranks.
    """

    def __init__(
        self,
        folder: Path,
        consensus: Consensus,
        topology: Topology,
        fault: str = "",  # known reason why it cannot be loaded
        *,
        was_complete: bool = False,  # whether it was complete just before
        is_last: bool = True,  # whether it is not read again if it was replaced
        verified: Sequence[str]
        | None = None,  # files that this rank verifies; None for its share of all files
        plans: dict[str, Any] | None = None,  # of folders of shards, by name, as in `CheckpointReader`
    ) -> None:
        self.folder = folder
        self.manifest: Manifest | None = None  # None for other software, or if it is damaged
        self.was_replaced = False  # whether all ranks read it again
        self._consensus = consensus
        self._fault = fault
        self._is_last = is_last
        self._verified = verified
        self._faults: list[Future[list[str]]] = []
        # The files of the fast tier are in memory and never change: they are mapped once, verified and read.
        self._plans = plans or {}
        self._map_file = None if verified is None else cache(manifest.map_writable)
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
        """World size of the run that saved it, from the manifest or the number of random states."""
        if self.manifest is not None:
            return self.manifest.world_size
        return len(list(self.folder.glob(f"{RNG_STATE_NAME}_*.pkl"))) or None

    @property
    def resized(self) -> bool:
        return self.world_size not in (None, self._consensus.size)

    @property
    def is_fast(self) -> bool:
        """True if it is in the fast tier, with the files that the ranks of this node read."""
        return self._verified is not None

    @property
    def is_readable(self) -> bool:
        return not self._fault

    def reader(self, options: CheckpointReader) -> CheckpointReader:
        """Returns a reader of this checkpoint with the options of another one."""
        return replace(
            options,
            folder=self.folder,
            names=None if self.manifest is None else self.manifest.files,
            is_fast=self.is_fast,
            map_file=self._map_file,
            plans=self._plans,
            requested=set(),
            confirm=self.confirm,
        )

    def confirm(self) -> None:
        """Raises if another save has replaced the checkpoint since it was opened."""
        if self._is_other():
            raise CheckpointError(REPLACED)

    def agree(self, failure: str = "", *, was_read: bool = True) -> None:
        """Waits until all ranks have verified and read their files, and raises if any rank has an error.

        Called on all ranks. The message does not contain the name of the folder.

        Args:
            failure: Error of this rank, or an empty string.
            was_read: Whether files were read since the last call.
        """
        faults = [self._fault, *(line for future in self._faults for line in future.result()), failure]
        save = self.manifest.run.get(manifest.SAVE) if self.manifest else None
        own = {
            "problems": [line for line in faults if line],
            "replaced": was_read and (self._is_gone or self._is_other()),
            # Ranks with the same path must read the same save. The path is empty if the save has a name.
            "path": "" if save else f"{socket.gethostname()}:{self.folder}",
            "save": save or self._stamp,
        }
        problems, again = self._consensus.decide(CALL, own, _reduce_answers, VERIFY_TIMEOUT)
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
        names, is_part = self._verified, self._verified is not None
        self.manifest = read = manifest.read(self.folder, whole=is_part)
        if names is None:
            names = divide_files(read, topology.local_size)[topology.local_rank]
        expect(sum(read.files[name].size for name in names))
        pool = ThreadPoolExecutor(THREADS, "accelerate-verify", **for_threads())
        self._faults = [
            pool.submit(
                manifest.problems,
                self.folder,
                read,
                [name],
                deep=True,
                map_file=self._map_file or manifest.map_file,
            )
            for name in names
        ]
        pool.shutdown(wait=False)


def _reduce_answers(answers: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    """Returns the errors of all ranks, and whether the checkpoint is read again."""
    if any(answer["replaced"] for answer in answers):
        return f"{REPLACED}: load it when no other run saves to this name", True
    if problems := "; ".join(dict.fromkeys(line for answer in answers for line in answer["problems"])):
        return problems, False
    first: dict[str, tuple[int, str]] = {}
    for rank, answer in enumerate(answers):
        earlier, save = first.setdefault(answer["path"], (rank, answer["save"]))
        if save != answer["save"]:
            return (
                f"rank {rank} finds another save under this name than rank {earlier}: use a folder that all "
                "ranks can access, or copy one checkpoint to all nodes",
                True,
            )
    return "", False


def open_checkpoint(
    path: Path, consensus: Consensus, topology: Topology, timeout: float
) -> Iterator[CheckpointSource]:
    """Yields the checkpoint at a path, on all ranks, and again if it was replaced."""
    for left in reversed(range(ATTEMPTS)):
        recover = partial(folder.recover, folder.absolute_path(path))
        failure = describe_failure(recover) if consensus.rank == 0 else ""
        if failure := consensus.decide(CALL, failure, lambda failures: failures[0], timeout):
            raise CheckpointError(f"Rank 0 failed for all ranks: {failure}.")
        source = CheckpointSource(path, consensus, topology, is_last=not left)
        yield source
        if not source.was_replaced:
            return


def open_newest(
    parent: Path, consensus: Consensus, topology: Topology, timeout: float
) -> Iterator[CheckpointSource]:
    """Yields the numbered checkpoints of a folder, the newest first.

    Called on all ranks. It begins again if a checkpoint was replaced or deleted meanwhile.
    """
    for left in reversed(range(ATTEMPTS)):
        for source in _open_numbered(parent, consensus, topology, timeout, is_last=not left):
            yield source
            if source.was_replaced:
                break
        else:
            return


def _open_numbered(
    parent: Path, consensus: Consensus, topology: Topology, timeout: float, is_last: bool
) -> Iterator[CheckpointSource]:
    try:
        checkpoints = {checkpoint.number: checkpoint for checkpoint in retention.survey(parent)}
    except OSError as error:  # this rank reports no checkpoints, so that the others do not wait for it
        logger.warning(f"Checkpoints in {parent} cannot be listed: {error}.", main_process_only=False)
        checkpoints = {}
    numbers = consensus.decide(CALL, sorted(checkpoints), lambda lists: sorted({*chain(*lists)}), timeout)
    for number in reversed(numbers):
        path = parent / name_of(number)
        fault = checkpoints[number].fault if number in checkpoints else "it is not on all nodes"
        yield CheckpointSource(path, consensus, topology, fault, was_complete=not fault, is_last=is_last)


def check_policy(policy: str) -> None:
    """Raises for an unknown `world_size_policy`."""
    if policy not in WORLD_SIZE_POLICIES:
        fix = f"choose one of {', '.join(WORLD_SIZE_POLICIES)}"
        raise wrong_value("world_size_policy", policy, "there is no such policy", fix)


class WorldSizeError(CheckpointError):
    """The policy "strict" refuses a checkpoint of another world size."""


def check_source(source: CheckpointSource, size: int, policy: str) -> None:
    """Warns of a readable checkpoint without manifest or of another world size.

    Raises a `WorldSizeError` for another world size if the policy is "strict".
    """
    if source.manifest is None:
        logger.warning(
            f"{source.folder} holds no {manifest.NAME}: other software wrote it, or its save did not "
            "end. It is loaded without being verified."
        )
    if not source.resized:
        return
    old = source.world_size
    if policy == "strict":
        raise WorldSizeError(
            f"{source.folder} was saved by {old} processes, and this run has {size}. Start {old} "
            'processes, or pass world_size_policy="reseed".'
        )
    logger.warning(
        f"{source.folder} was saved by {old} processes, and this run has {size}: loaders continue "
        f"after the samples that were read, and {WORLD_SIZE_POLICIES[policy]} (world_size_policy={policy!r})."
    )


def check_registered(reader: CheckpointReader, registered: Sequence[str]) -> None:
    """Raises if a checkpoint has more registered objects than this run.

    Args:
        registered: Names of the classes of the objects that this run has registered.
    """
    names = [path.name for path in reader.folder.glob("*.pkl")] if reader.names is None else reader.names
    numbers = [int(match[1]) for name in names if (match := CUSTOM_FILE.fullmatch(name))]
    if surplus := [number for number in sorted(numbers) if number >= len(registered)]:
        raise CheckpointError(
            f"{reader.folder} holds {listed([f'custom_checkpoint_{number}.pkl' for number in surplus])}, and "
            f"this run has registered {len(registered)} objects ({listed(registered) or 'none'}): call "
            "register_for_checkpointing with the same objects in the same order as the run that saved it."
        )


def announce_surplus(reader: CheckpointReader) -> None:
    """Warns of objects in a checkpoint that this run does not have."""
    surplus = sorted(
        name
        for name in reader.names or ()
        if OBJECT_FILES.fullmatch(name) and name not in reader.requested
        if not name.startswith(SAMPLER_NAME) or resume.continues(reader.read(name))
    )
    if surplus:
        logger.warning(
            f"{reader.folder} holds {listed(surplus)}, and this run has prepared no object for "
            "it: it is not loaded. Prepare the same objects in the same order as the run that saved it."
        )


def divide_files(read: Manifest, processes: int) -> list[list[str]]:
    """Divides the files of a checkpoint among processes, with about as many bytes for each."""
    names: list[list[str]] = [[] for _ in range(processes)]
    sizes = [0] * processes
    for record in sorted(read.files.values(), key=lambda record: -record.size):
        least = sizes.index(min(sizes))
        names[least].append(record.name)
        sizes[least] += record.size
    return names


def nothing_to_load(folder: object, faults: Sequence[str]) -> Exception:
    """Returns the error for a run that finds no checkpoint.

    Args:
        folder: Folder that the user named, or None.
        faults: Reasons why checkpoints were skipped.
    """
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
class RunProgress:
    """Counters of the run that saved a checkpoint, with None for those that are not stored."""

    step: int | None = None  # `Accelerator.step`
    sync_gradients: bool | None = None  # whether the last step updated the parameters
    gradient_order: list[list[int]] = field(default_factory=list)  # of each model, from its strategy
    # Numbers of updates of each optimizer, and at the last call of each scheduler.
    counters: dict[str, list[Any]] = field(default_factory=lambda: {"updates": [], "updates_at_call": []})


def read_progress(source: CheckpointSource, reader: CheckpointReader) -> RunProgress:
    """Reads the counters of the run that saved a checkpoint."""
    if source.manifest is not None:
        run = source.manifest.run
        sync_gradients = run.get("sync_gradients", True)
        counters = {name: run.get(name, []) for name in ("updates", "updates_at_call")}
        return RunProgress(source.manifest.step, sync_gradients, run.get("gradient_order", []), counters)
    name = GeneratorsPart(0).name
    states = reader.read(name) if reader.has(name) else {}
    step = states.get("step") if isinstance(states, Mapping) else None
    return RunProgress(step if type(step) is int else None)
