"""Save a list of parts: agree on a folder, write, agree that all is written, give the folder its name."""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from accelerate.base import CheckpointError, describe, expect, for_threads, is_shown
from accelerate.checkpointing import retention
from accelerate.checkpointing.files import FileRecord, files_under, seal, sync_folder
from accelerate.checkpointing.folder import Workplace, place_of, plan_workplace
from accelerate.checkpointing.manifest import SAVE, Manifest
from accelerate.checkpointing.part import Payload
from accelerate.checkpointing.report import saved_lines
from accelerate.logging import get_logger
from accelerate.nested import iterate_tensors
from accelerate.state import Consensus

logger = get_logger(__name__)

CALL = "accelerator.save_state"
SECONDS_TO_WRITE = 24 * 3600.0
THREADS = 4


@dataclass(frozen=True)
class Request:
    """What is saved where.

    Attributes:
        target: the folder of the checkpoint.
        patience: seconds that the ranks have to come together.
        step: `Accelerator.step`.
        epoch: of the first loader.
        iteration: number under automatic naming; None for a folder that the user named.
        keep: how many numbered checkpoints stay; None for all.
        run: further facts of the run.
        custom: types of the user's own objects, for the log.
    """

    target: Path
    patience: float
    step: int = 0
    epoch: int = 0
    iteration: int | None = None
    keep: int | None = None
    run: Mapping[str, Any] = field(default_factory=dict)
    custom: Sequence[str] = ()


@dataclass(frozen=True)
class Site:
    """Where this rank writes.

    Attributes:
        workplace: the folder.
        commits: whether this rank gives it its name.
        consensus: between the ranks.
        request: what is saved.
        is_common: whether all ranks write in one folder.
        save: what tells this save from all others, the same on all ranks.
    """

    workplace: Workplace
    commits: bool
    consensus: Consensus
    request: Request
    is_common: bool = True
    save: str = ""

    @property
    def folder(self) -> Path:
        """The folder in which the files are written."""
        return self.workplace.folder


def open_site(request: Request, consensus: Consensus) -> Site:
    """Make the folder that the checkpoint is written in; called on all ranks.

    Ranks that do not see the folder of rank 0, on machines without a common disk, get a folder on their own
    machine; the first of them gives it its name.

    Args:
        request: what is saved where.
        consensus: between the ranks.

    Raises:
        StateError: a rank did not come in time.
        CheckpointError: a folder cannot be made.
    """
    target = place_of(request.target)
    opened: list[Workplace] = []

    def begin() -> Workplace:
        opened.append(plan_workplace(target))
        opened[-1].open()
        return opened[-1]

    try:
        return _agree_on_site(request, consensus, target, begin)
    except BaseException:
        for workplace in opened:
            workplace.discard()
        raise


def _agree_on_site(
    request: Request, consensus: Consensus, target: Path, begin: Callable[[], Workplace]
) -> Site:
    said = consensus.decide(CALL, None, lambda _: _spell(begin()), request.patience)
    first = _workplace(target, said)
    sees = said["target"] == str(target) and first.folder.is_dir()
    place = "" if sees else f"{socket.gethostname()}:{target}"
    places = consensus.decide(CALL, place, list, request.patience)
    leader = places.index(place)
    if not any(places):
        return Site(first, consensus.rank == 0, consensus, request, save=first.folder.name)
    commits = leader == consensus.rank
    own, failure = first, ""
    if commits and not sees:
        try:
            own = begin()
        except CheckpointError as error:
            failure = str(error)
    offers = consensus.decide(CALL, {"failure": failure, "workplace": _spell(own)}, list, request.patience)
    _refuse_failures([offer["failure"] for offer in offers])
    workplace = _workplace(target, offers[leader]["workplace"])
    return Site(workplace, commits, consensus, request, is_common=False, save=first.folder.name)


def _spell(workplace: Workplace) -> dict[str, Any]:
    """Write a workplace for the other ranks, which find it beside or in the target that they know."""
    return {
        "target": str(workplace.target),
        "name": workplace.folder.name,
        "inside": workplace.inside,
    }


def _workplace(target: Path, said: Mapping[str, Any]) -> Workplace:
    """Find the workplace that another rank has made for the same target.

    Raises:
        CheckpointError: what it says names no folder in that place.
    """
    name, inside = str(said["name"]), bool(said["inside"])
    if Path(name).name != name or not name.startswith("."):
        raise CheckpointError(
            f"Another process wants to write in {name!r}, which is no hidden folder beside {target}."
        )
    return Workplace(target, (target if inside else target.parent) / name, inside)


@dataclass(frozen=True)
class Written:
    """What one rank says when it has written its files.

    Attributes:
        failure: why it could not; empty when it could.
        folder: where it wrote.
        records: its files.
        reports: folder of shards in the checkpoint -> what the rank that finishes it needs to know.
    """

    failure: str
    folder: str
    records: Sequence[FileRecord] = ()
    reports: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Written:
        """Read what `asdict` has made of one on another rank."""
        return cls(**{**said, "records": [FileRecord(**record) for record in said["records"]]})


def write(site: Site, payloads: Sequence[Payload], threads: int = THREADS) -> Path:
    """Write the files of this rank, and commit the checkpoint when all ranks have; called on all ranks.

    Args:
        site: where.
        payloads: the files of this rank.
        threads: files that are written at a time.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: a file could not be written; on all ranks. The folder that was there is unchanged.
    """
    consensus, folder = site.consensus, str(site.folder)
    records: list[FileRecord] = []
    reports: dict[str, Any] = {}
    all_reports: list[Mapping[str, Any]] = []

    def write_file(payload: Payload) -> FileRecord:
        path = site.folder / payload.name
        path.parent.mkdir(parents=True, exist_ok=True)
        report = payload.write(payload.content, path)
        if payload.finish is not None:
            reports[str(Path(payload.name).parent)] = report
        return seal(site.folder, payload.name, consensus.rank)

    def write_files() -> None:
        if is_shown():
            size = sum(tensor.nbytes for each in payloads for tensor in iterate_tensors(each.content))
            expect(2 * size)  # each byte is written, and read for its checksum
        with ThreadPoolExecutor(threads, "accelerate-write", **for_threads()) as pool:
            records.extend(pool.map(write_file, payloads))

    def keep_reports(said: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Keep the reports to the first rank, which commits where there are any: they can be large."""
        all_reports.extend(each["reports"] for each in said)
        return [{**each, "reports": {}} for each in said]

    def commit(said: Sequence[Written]) -> None:
        _finish(site, payloads, all_reports)
        _commit(site, [record for each in said if each.folder == folder for record in each.records])

    try:
        failure = _attempt(write_files)
        own = asdict(Written(failure, folder, records, reports))
        said = [Written.read(each) for each in consensus.decide(CALL, own, keep_reports, SECONDS_TO_WRITE)]
        _refuse_failures([each.failure for each in said])
        failure = _attempt(lambda: commit(said)) if site.commits else ""
        _refuse_failures(consensus.decide(CALL, failure, list, SECONDS_TO_WRITE))
    finally:
        if site.commits:
            site.workplace.discard()
    for line in saved_lines(site.request.target, [payload.name for payload in payloads], site.request.custom):
        logger.info(line)
    return site.workplace.target


def _finish(site: Site, payloads: Sequence[Payload], reports: Sequence[Mapping[str, Any]]) -> None:
    """Add to each folder that several ranks have written to what they have in common."""
    for payload in payloads:
        if payload.finish is not None:
            group = str(Path(payload.name).parent)
            payload.finish(site.folder / group, [each[group] for each in reports])


def abandon(site: Site, error: Exception) -> None:
    """Tell the other ranks, which are about to write or wait for it, that this one cannot save.

    Args:
        site: where.
        error: why; the caller raises it.
    """
    try:
        site.consensus.decide(
            CALL, asdict(Written(describe(error), str(site.folder))), list, SECONDS_TO_WRITE
        )
    finally:
        if site.commits:
            site.workplace.discard()


def discard(site: Site) -> None:
    """Remove what was written so far, where this rank is the one to commit it."""
    if site.commits:
        site.workplace.discard()


def _commit(site: Site, records: Sequence[FileRecord]) -> None:
    """Describe the folder, give it its name, and only then delete what it makes superfluous."""
    request = site.request
    files = {record.name: record for record in records}
    for name in files_under(site.folder):
        if name not in files:  # written by the user's hooks
            files[name] = seal(site.folder, name, site.consensus.rank)
    for folder in {(site.folder / name).parent for name in files}:
        sync_folder(folder)
    Manifest(
        files=files,
        world_size=site.consensus.size,
        step=request.step,
        epoch=request.epoch,
        iteration=request.iteration,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        software=f"accelerate {version('accelerate')}",
        torch=torch.__version__,
        run={**request.run, SAVE: site.save},
    ).write(site.folder)
    site.workplace.publish()
    if request.keep is not None:
        _prune(site.workplace.target, request.keep)


def _prune(saved: Path, keep: int) -> None:
    """Delete older checkpoints; that one cannot be deleted does not make the new one worse."""
    try:
        retention.prune(saved.parent, keep)
    except OSError as error:
        logger.warning(f"{saved} is saved, and older checkpoints could not be deleted: {error}.")


def _attempt(action: Callable[[], Any]) -> str:
    """Do something and return why it failed, so that all ranks can be told; empty when it did not."""
    try:
        action()
    except Exception as error:  # raised again, on all ranks, by _refuse_failures
        return describe(error)
    return ""


def _refuse_failures(failures: Sequence[str]) -> None:
    failed = {rank: text for rank, text in enumerate(failures) if text}
    if failed:
        lines = "; ".join(f"process {rank}: {text}" for rank, text in failed.items())
        raise CheckpointError(
            f"The checkpoint was not saved, and the ones before it are unchanged ({lines}). Fix the cause, "
            "such as a full disk, and save again."
        )
