"""Save a list of parts: agree on a folder, write, agree that all is written, rename the folder, log."""

from __future__ import annotations

import datetime
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from accelerate.base import CheckpointError, describe, expect, for_threads, is_shown, sync_folder
from accelerate.checkpointing import retention
from accelerate.checkpointing.folder import StagingFolder, place_of, plan_staging_folder
from accelerate.checkpointing.manifest import SAVE, FileRecord, Manifest, files_under, seal
from accelerate.checkpointing.part import Payload
from accelerate.checkpointing.sharded import FOLDERS, MODEL, OPTIMIZER
from accelerate.logging import get_logger
from accelerate.nested import iterate_tensors
from accelerate.state import Consensus

logger = get_logger(__name__)

CALL = "accelerator.save_state"
SECONDS_TO_WRITE = 24 * 3600.0
THREADS = 4

SAVED = {
    r"(?:pytorch_)?model(?:_\d+)?\.(?:bin|safetensors)": "Model weights saved in {path}",
    rf"{FOLDERS[MODEL]}_\d+": "Model weights saved in {path}",
    r"optimizer(?:_\d+)?\.bin": "Optimizer state saved in {path}",
    rf"{FOLDERS[OPTIMIZER]}_\d+": "Optimizer state saved in {path}",
    r"scheduler(?:_\d+)?\.bin": "Scheduler state saved in {path}",
    r"sampler(?:_(\d+))?\.bin": "Sampler state for dataloader {number} saved in {path}",
    r"scaler\.pt": "Gradient scaler state saved in {path}",
    r"random_states_\d+\.pkl": "Random states saved in {path}",
    r"custom_checkpoint_(\d+)\.pkl": "Saving the state of {kind} to {path}",
}
"""Names of files, or of folders of shards -> the line about one of them, in the order of the lines."""

LOADED = ("model weights", "optimizer states", "scheduler states", "dataloader sampler states")


@dataclass(frozen=True)
class Request:
    """What is saved where.

    Attributes:
        patience: seconds that the ranks have to come together.
        iteration: number under automatic naming; None for a folder that the user named.
        keep: how many numbered checkpoints stay; None for all.
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
        commits: whether this rank gives it its name.
        is_common: whether all ranks write in one folder.
        save: what tells this save from all others, the same on all ranks.
    """

    staging: StagingFolder
    commits: bool
    consensus: Consensus
    request: Request
    is_common: bool = True
    save: str = ""

    @property
    def folder(self) -> Path:
        """The folder in which the files are written."""
        return self.staging.folder


def open_site(request: Request, consensus: Consensus) -> Site:
    """Make the folder that the checkpoint is written in; called on all ranks.

    Ranks that do not see the folder of rank 0, on machines without a common disk, get a folder on their own
    machine; the first of them gives it its name.
    """
    target = place_of(request.target)
    opened: list[StagingFolder] = []

    def begin() -> StagingFolder:
        opened.append(plan_staging_folder(target))
        opened[-1].open()
        return opened[-1]

    try:
        return _agree_on_site(request, consensus, target, begin)
    except BaseException:
        for staging in opened:
            staging.discard()
        raise


def _agree_on_site(
    request: Request, consensus: Consensus, target: Path, begin: Callable[[], StagingFolder]
) -> Site:
    answer = consensus.decide(CALL, None, lambda _: _spell(begin()), request.patience)
    first = _staging_folder(target, answer)
    sees = answer["target"] == str(target) and first.folder.is_dir()
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
    offers = consensus.decide(CALL, {"failure": failure, "staging": _spell(own)}, list, request.patience)
    _refuse_failures([offer["failure"] for offer in offers])
    staging = _staging_folder(target, offers[leader]["staging"])
    return Site(staging, commits, consensus, request, is_common=False, save=first.folder.name)


def _spell(staging: StagingFolder) -> dict[str, Any]:
    """Write a staging for the other ranks, which find it beside or in the target that they know."""
    return {
        "target": str(staging.target),
        "name": staging.folder.name,
        "inside": staging.inside,
    }


def _staging_folder(target: Path, answer: Mapping[str, Any]) -> StagingFolder:
    """Find the staging that another rank has made for the same target."""
    name, inside = str(answer["name"]), bool(answer["inside"])
    if Path(name).name != name or not name.startswith("."):
        raise CheckpointError(
            f"Another process wants to write in {name!r}, which is no hidden folder beside {target}."
        )
    return StagingFolder(target, (target if inside else target.parent) / name, inside)


def write(site: Site, payloads: Sequence[Payload], threads: int = THREADS) -> Path:
    """Write the files of this rank, and commit the checkpoint when all ranks have; called on all ranks.

    Raises:
        CheckpointError: a file could not be written; on all ranks. The folder that was there is unchanged.
    """
    consensus = site.consensus
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
            tensors = iterate_tensors([payload.content for payload in payloads])
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            expect(2 * size)  # each byte is written, and read for its checksum
        if threads == 1:  # no pool starts threads once the interpreter has begun to end
            records.extend(map(write_file, payloads))
            return
        with ThreadPoolExecutor(threads, "accelerate-write", **for_threads()) as pool:
            records.extend(pool.map(write_file, payloads))

    def keep_reports(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Keep the reports to rank 0, which commits where there are any: they can be large."""
        all_reports.extend(summary["reports"] for summary in summaries)
        return [{**summary, "reports": {}} for summary in summaries]

    def commit(summaries: Sequence[Mapping[str, Any]]) -> None:
        for payload in payloads:
            if payload.finish is not None:
                shards = str(Path(payload.name).parent)
                payload.finish(site.folder / shards, [reports[shards] for reports in all_reports])
        own = [summary for summary in summaries if summary["folder"] == str(site.folder)]
        _commit(site, [FileRecord(**record) for summary in own for record in summary["records"]])

    try:
        failure = _attempt(write_files)
        summary = _summary(site, failure, [asdict(record) for record in records], reports)
        summaries = consensus.decide(CALL, summary, keep_reports, SECONDS_TO_WRITE)
        _refuse_failures([summary["failure"] for summary in summaries])
        failure = _attempt(lambda: commit(summaries)) if site.commits else ""
        _refuse_failures(consensus.decide(CALL, failure, list, SECONDS_TO_WRITE))
    finally:
        discard(site)
    for line in saved_lines(site.request.target, [payload.name for payload in payloads], site.request.custom):
        logger.info(line)
    return site.staging.target


def _summary(site: Site, failure: str, records: Sequence[Any] = (), reports: Any = None) -> dict[str, Any]:
    """Return what a rank tells the others when it has written its files, or why it could not."""
    return {"failure": failure, "folder": str(site.folder), "records": records, "reports": reports or {}}


def abandon(site: Site, error: Exception) -> None:
    """Tell the other ranks, which are about to write or wait for it, that this one cannot save."""
    try:
        site.consensus.decide(CALL, _summary(site, describe(error)), list, SECONDS_TO_WRITE)
    finally:
        discard(site)


def discard(site: Site) -> None:
    """Remove what was written so far, where this rank is the one to commit it."""
    if site.commits:
        site.staging.discard()


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
    site.staging.publish()
    if request.keep is not None:
        _prune(site.staging.target, request.keep)


def _prune(saved: Path, keep: int) -> None:
    """Delete older checkpoints; that one cannot be deleted does not make the new one worse."""
    try:
        retention.prune(saved.parent, keep)
    except OSError as error:
        logger.warning(f"{saved} is saved, and older checkpoints could not be deleted: {error}.")


def _attempt(action: Callable[[], Any]) -> str:
    """Do something and return why it failed, for all ranks; empty when it did not."""
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


def saved_lines(target: Path, names: Sequence[str], custom: Sequence[str]) -> list[str]:
    """Return the lines about what one rank has saved."""
    tops = list(dict.fromkeys(name.partition("/")[0] for name in names))
    return [
        _line(text, match, target / top, custom)
        for pattern, text in SAVED.items()
        for top in tops
        if (match := re.fullmatch(pattern, top))
    ]


def _line(text: str, match: re.Match[str], path: Path, custom: Sequence[str]) -> str:
    number = int(match[1] or 0) if match.re.groups else 0
    kind = custom[number] if number < len(custom) else "an object"
    return text.format(path=path, number=number, kind=kind)


def loaded_lines(folder: Path, has_scaler: bool, custom: Sequence[str]) -> list[str]:
    """Return the lines about what was loaded."""
    return [
        *(f"All {what} loaded successfully" for what in LOADED),
        *(["GradScaler state loaded successfully"] if has_scaler else []),
        "All random states loaded successfully",
        f"Loading in {len(custom)} custom states",
        *(
            f"Loading the state of {kind} from {folder / f'custom_checkpoint_{index}.pkl'}"
            for index, kind in enumerate(custom)
        ),
    ]
