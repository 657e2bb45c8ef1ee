"""Saving of a checkpoint in three calls, `Saver.begin`, `Saver.write` and `Saver.commit`, on all ranks.

`begin` creates a hidden staging folder. `write` writes the files of this rank in it. `commit` waits until all
ranks have written, and then one rank writes the manifest and renames the folder. The ranks agree with a
`Consensus`, which decides from the values of all ranks and never accesses the disk.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from accelerate.base import CheckpointError, describe, expect, for_threads, is_shown, sync_folder
from accelerate.checkpointing import retention
from accelerate.checkpointing.changes import describe_failure
from accelerate.checkpointing.folder import (
    StagingFolder,
    absolute_path,
    name_of,
    plan_staging_folder,
    saved_lines,
)
from accelerate.checkpointing.manifest import (
    FOLDERS_OF_SAVE,
    SAVE,
    FileRecord,
    Manifest,
    checksum_of,
    encode_records,
    files_under,
    seal,
)
from accelerate.checkpointing.parts import Payload
from accelerate.logging import get_logger
from accelerate.monitoring import Checkpoint
from accelerate.nested import iterate_tensors
from accelerate.state import Consensus, run_observers, run_records

if TYPE_CHECKING:
    from accelerate.checkpointing.staging import StagingMemory

logger = get_logger(__name__)

WRITE_TIMEOUT = 24 * 3600.0
"""Timeout for all ranks to write their files, in seconds."""
THREADS = 4


@dataclass(frozen=True)
class Request:
    """Folder, counters and settings of one checkpoint."""

    target: Path
    timeout: float  # in seconds, for all ranks to call the operation
    operation: str = "accelerator.save_state"  # in error messages
    step: int = 0
    epoch: int = 0
    iteration: int | None = None  # number under automatic naming; None for a folder that the user named
    keep: int | None = None  # number of numbered checkpoints that are kept; None for all
    run: Mapping[str, Any] = field(default_factory=dict)  # further facts for the manifest
    custom: Sequence[str] = ()  # classes of the objects of the user
    has_manifest: bool = True  # False for the shards of one object, which are not a checkpoint of a run
    is_generation: bool = False  # whether it is written to the fast tier


@dataclass(frozen=True)
class Staging:
    """Staging folder of one save on this rank."""

    staging_folder: StagingFolder
    is_owner: bool  # this rank creates the folder, and commits or removes it
    request: Request
    name: str  # the same on all ranks, and different for each save
    is_common: bool = True  # the files of all ranks are read together
    began: float = field(default_factory=time.perf_counter)

    @property
    def folder(self) -> Path:
        return self.staging_folder.folder


class Saver:
    """Save of one checkpoint, for which all ranks call `begin`, `write` and `commit` in this order."""

    def __init__(self, consensus: Consensus) -> None:
        self._consensus = consensus
        self._created: StagingFolder | None = None
        self._payloads: Sequence[Payload] = ()
        self._records: list[FileRecord] = []
        self._reports: dict[str, Any] = {}
        self._failure = ""
        self.staging: Staging

    @property
    def _state(self) -> str:
        """Name of the state that is saved, which must be equal on all ranks."""
        return ""

    def begin(self, request: Request) -> Staging:
        """Creates the folder in which the checkpoint is written.

        Rank 0 chooses the number of a numbered checkpoint. Ranks that cannot access the folder of rank 0, on
        nodes without a common disk, get a folder on their own node.
        """
        try:
            self.staging = self._begin(request)
        except BaseException:
            self.discard()
            raise
        return self.staging

    def _begin(self, request: Request) -> Staging:
        offer = self._create(_with_free_number, request) if self._consensus.rank == 0 else {}
        offer = self._consensus.decide(request.operation, offer, _first_offer, request.timeout)
        if offer["iteration"] != request.iteration:
            logger.warning(
                f"{request.target.parent} already contains checkpoint {request.iteration}, so this run "
                f"continues with number {offer['iteration']}. Use a separate project folder for each run."
            )
        request = _with_number(request, offer["iteration"])
        target = absolute_path(request.target)
        common = _staging_folder(target, offer)
        name = common.folder.name  # which has that of the host
        sees_it = offer["target"] == str(target) and common.folder.is_dir()
        place = "" if sees_it else f"{socket.gethostname()}:{target}"
        owners = self._consensus.decide(request.operation, place, _owners, request.timeout)
        if not owners:
            return Staging(common, self._consensus.rank == 0, request, name)
        # Some ranks cannot access the folder of rank 0: one rank for each of their folders creates it.
        is_owner = owners.get(place) == self._consensus.rank
        own = self._create(lambda given: given, request) if is_owner else {}
        offers = self._consensus.decide(request.operation, own, _all_offers, request.timeout)
        if sees_it:
            return Staging(common, self._consensus.rank == 0, request, name)
        staging = _staging_folder(target, offers[owners[place]])
        return Staging(staging, is_owner, request, name, is_common=False)

    def _create(self, choose: Callable[[Request], Request], request: Request) -> dict[str, Any]:
        """Creates a staging folder and returns its description for the other ranks, or the error."""
        try:
            chosen = choose(request)
            self._created = plan_staging_folder(absolute_path(chosen.target))
            self._created.open()
        except CheckpointError as error:
            return {"failure": str(error)}
        except Exception as error:  # raised again, on all ranks
            return {"failure": f"Rank {self._consensus.rank} failed for all ranks: {describe(error)}."}
        return {
            "iteration": chosen.iteration,
            "target": str(self._created.target),
            "name": self._created.folder.name,
            "inside": self._created.inside,
        }

    def write(self, payloads: Sequence[Payload], threads: int = THREADS) -> None:
        """Writes the files of this rank, and keeps an error until `commit` raises it on all ranks."""
        self._payloads = payloads
        try:
            self._failure = describe_failure(partial(self._write, payloads, threads), self._describe)
        except BaseException:  # such as KeyboardInterrupt
            self.discard()
            raise

    def stage(self, payloads: Sequence[Payload], memory: StagingMemory) -> Callable[[], None]:
        """Copies the content of files to CPU memory, and returns the function that writes and commits them.

        The function runs in a background thread.
        """
        try:
            staged = memory.stage(payloads)
        except Exception as error:
            self.abort(error)
            raise
        blocked = time.perf_counter() - self.staging.began

        def write_and_commit() -> None:
            self.write(staged, threads=1)
            self.commit(blocked)

        return write_and_commit

    def _write(self, payloads: Sequence[Payload], threads: int) -> None:
        if is_shown():
            tensors = iterate_tensors([payload.content for payload in payloads])
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            expect(2 * size)  # each byte is written, and read for its checksum
        if threads == 1:  # a pool cannot start threads while the interpreter ends
            self._records = list(map(self._write_file, payloads))
            return
        with ThreadPoolExecutor(threads, "accelerate-write", **for_threads()) as pool:
            self._records = list(pool.map(self._write_file, payloads))

    def _write_file(self, payload: Payload) -> FileRecord:
        path = self.staging.folder / payload.name
        path.parent.mkdir(parents=True, exist_ok=True)
        report = payload.write(payload.content, path)
        if payload.finish is not None:
            self._reports[payload.name] = report
        return seal(self.staging.folder, payload.name, self._consensus.rank)

    def commit(self, blocked: float | None = None) -> Path:
        """Waits until all ranks have written, and renames the folder to the target.

        An error of any rank is raised on all. The checkpoint that had this name is unchanged then.

        Args:
            blocked: Seconds for which training has waited for this save. None for the time since `begin`.

        Returns:
            The folder of the checkpoint.
        """
        staging = self.staging
        try:
            summaries, decision = self._gather_summaries()
            raise_failures(decision["failures"])
            if decision["summaries"]:  # decoded again on each rank, so that all write the same metadata
                summaries = json.loads(json.dumps(decision["summaries"]))
            self._exchange(summaries)
            commit = partial(self._commit_folder, summaries, decision["created"])
            failure = describe_failure(commit, self._describe) if staging.is_owner else ""
            failures = self._consensus.decide(staging.request.operation, failure, list, WRITE_TIMEOUT)
            raise_failures(enumerate(failures))
        except Exception as error:
            self._record("failed", blocked, text=describe(error))
            raise
        finally:
            self.discard()
        self._record("committed", blocked, size=sum(record.size for record in self._records))
        level = logging.DEBUG if staging.request.is_generation else logging.INFO
        for line in saved_lines(
            staging.request.target, [payload.name for payload in self._payloads], staging.request.custom
        ):
            logger.log(level, line)
        return staging.staging_folder.target

    def _gather_summaries(self) -> tuple[list[dict[str, Any]], Any]:
        """Waits until all ranks have written, and decides whether the checkpoint is committed.

        Returns:
            The summaries of all ranks on rank 0, an empty list on the others, and the decision. The decision
            contains the summaries, too, if ranks have written to several folders.
        """
        summaries: list[dict[str, Any]] = []

        def decide(values: Sequence[dict[str, Any]]) -> dict[str, Any]:
            summaries.extend(values)
            failures = [(rank, value["failure"]) for rank, value in enumerate(values) if value["failure"]]
            first, *others = (value["state"] for value in values)
            mixed = [(rank, state) for rank, state in enumerate(others, 1) if state != first]
            failures += [(rank, f"it saves {state}, and rank 0 saves {first}") for rank, state in mixed[:1]]
            has_several = not failures and len({value["folder"] for value in values}) > 1
            created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            return {"failures": failures, "summaries": values if has_several else [], "created": created}

        summary = {
            "failure": self._failure,
            "state": self._state,
            "folder": str(self.staging.folder),
            "records": [asdict(record) for record in self._records],
            "reports": self._reports,
        }
        return summaries, self._consensus.decide(
            self.staging.request.operation, summary, decide, WRITE_TIMEOUT
        )

    def _describe(self, error: Exception) -> str:
        """Returns the message of an error, with the folder if it names no file, as of a full disk."""
        names_none = isinstance(error, OSError) and error.errno is not None and error.filename is None
        return f"{self.staging.folder}: {describe(error)}" if names_none else describe(error)

    def abort(self, error: Exception) -> None:
        """Ends the save on a rank that cannot write, which all ranks raise as an error in `commit`."""
        self._failure = describe(error)
        try:
            self._gather_summaries()
        finally:
            self.discard()

    def discard(self) -> None:
        """Removes the staging folder if this rank has created it and it is not committed."""
        if self._created is not None:
            self._created.discard()

    def _exchange(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        """Copies files between the folders of several nodes, on all ranks."""

    def _files_by_folder(self, summaries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, FileRecord]]:
        """Returns the records of the files in each folder in which ranks have written."""
        folders: dict[str, dict[str, FileRecord]] = {}
        for summary in summaries:
            records = {record["name"]: FileRecord(**record) for record in summary["records"]}
            folders.setdefault(summary["folder"], {}).update(records)
        return folders

    def _commit_folder(self, summaries: Sequence[Mapping[str, Any]], created: str) -> None:
        """Completes the folder of this rank, renames it to the target, and deletes old checkpoints.

        Folders on several nodes get the same manifest: copied into one folder, they are one checkpoint.
        """
        folder, request = self.staging.folder, self.staging.request
        finishes = {Path(own.name).parent: own.finish for own in self._payloads if own.finish is not None}
        reports = [report for summary in summaries for report in summary["reports"].items()]
        for shards, finish in finishes.items():
            finish(folder / shards, [report for name, report in reports if Path(name).parent == shards])
        if request.has_manifest:
            self._write_manifest(summaries, created)
        self.staging.staging_folder.publish()
        if request.keep is not None:
            target = self.staging.staging_folder.target
            try:
                retention.prune(target.parent, request.keep)
            except OSError as error:  # the new checkpoint is complete
                logger.warning(f"{target} is saved, and older checkpoints could not be deleted: {error}.")

    def _write_manifest(self, summaries: Sequence[Mapping[str, Any]], created: str) -> None:
        folder, request = self.staging.folder, self.staging.request
        folders = self._files_by_folder(summaries)
        own = folders[str(folder)]
        for name in files_under(folder):
            if name not in own:  # written by hooks of the user, or metadata of shards
                own[name] = seal(folder, name, self._consensus.rank)
        for parent in {(folder / name).parent for name in own}:
            sync_folder(parent)
        files = {name: record for each in reversed(folders.values()) for name, record in each.items()}
        several = {FOLDERS_OF_SAVE: list(map(encode_records, folders.values()))} if len(folders) > 1 else {}
        Manifest(
            files=files,
            world_size=self._consensus.size,
            step=request.step,
            epoch=request.epoch,
            iteration=request.iteration,
            created=created,
            software=f"accelerate {version('accelerate')}",
            torch=torch.__version__,
            run={**request.run, SAVE: checksum_of(os.fsencode(self.staging.name)), **several},
        ).write(folder)

    def _record(self, event: str, blocked: float | None, size: int = 0, text: str = "") -> None:
        """Adds the save to the records of the run."""
        request, seconds = self.staging.request, time.perf_counter() - self.staging.began
        record = Checkpoint(
            time=time.time(),
            event=event,
            path=str(request.target),
            step=max(request.run.get("updates", ()), default=request.step),
            seconds=seconds,
            blocked=seconds if blocked is None else blocked,
            size=size,
            text=text,
        )
        if request.has_manifest:
            run_records.append(record)
        if event == "committed":
            run_observers().checkpointed(record.path, record.step)


# Decisions


def _first_offer(offers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return _all_offers(offers[:1])[0]


def _all_offers(offers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    if failure := next((offer["failure"] for offer in offers if "failure" in offer), ""):
        raise CheckpointError(failure)
    return list(offers)


def _owners(places: Sequence[str]) -> dict[str, int]:
    """Returns the first rank of each folder that cannot access the folder of rank 0."""
    return {place: places.index(place) for place in places if place}


def _with_free_number(request: Request) -> Request:
    """Returns a request with the number after all others if its own number is taken."""
    if request.iteration is None:
        return request
    taken = retention.taken_numbers(request.target.parent)
    return _with_number(request, max(taken) + 1) if request.iteration in taken else request


def _with_number(request: Request, number: int | None) -> Request:
    if number is None or number == request.iteration:
        return request
    return replace(request, iteration=number, target=request.target.parent / name_of(number))


def _staging_folder(target: Path, offer: Mapping[str, Any]) -> StagingFolder:
    """Returns the staging folder that another rank has created for the same target."""
    name, inside = str(offer["name"]), bool(offer["inside"])
    if Path(name).name != name or not name.startswith("."):
        raise CheckpointError(
            f"Another process wants to write in {name!r}, which is not a hidden folder beside {target}."
        )
    return StagingFolder(target, (target if inside else target.parent) / name, inside)


def raise_failures(texts: Iterable[tuple[int, str]]) -> None:
    """Raises one error for the ranks with a text."""
    if lines := "; ".join(f"process {rank}: {text}" for rank, text in texts if text):
        raise CheckpointError(
            f"The checkpoint was not saved, and the ones before it are unchanged ({lines}). Fix the cause, "
            "such as a full disk, and save again."
        )
