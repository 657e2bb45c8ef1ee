"""Save a list of parts: agree on a folder, write, agree that all is written, rename the folder, log.

A `Session` has what the saves of one run share: consensus, staged copies, the thread that writes, hooks.
"""

from __future__ import annotations

import copy
import datetime
import re
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from accelerate.base import CheckpointError, describe, expect, for_threads, is_shown, sync_folder
from accelerate.checkpointing import retention
from accelerate.checkpointing.folder import StagingFolder, absolute_path, plan_staging_folder
from accelerate.checkpointing.manifest import (
    FOLDERS_OF_SAVE,
    SAVE,
    FileRecord,
    Manifest,
    files_under,
    seal,
    spell_records,
)
from accelerate.checkpointing.parts import Payload
from accelerate.checkpointing.sharded import FOLDERS, MODEL, OPTIMIZER
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.monitoring import Checkpoint
from accelerate.nested import iterate_tensors
from accelerate.ops import current_transport, open_consensus
from accelerate.state import Consensus, process_group, run_records, services

logger = get_logger(__name__)

CALL = "accelerator.save_state"
SECONDS_TO_WRITE = 24 * 3600.0
THREADS = 4
STORE_TIMEOUT = datetime.timedelta(minutes=5)  # how long one request to the store may take

# Names of files, or of folders of shards -> the line about one of them, in the order of the lines.
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
LOADED = ("model weights", "optimizer states", "scheduler states", "dataloader sampler states")


@dataclass(frozen=True)
class Request:
    target: Path
    patience: float  # seconds that the ranks have to come together
    step: int = 0
    epoch: int = 0
    iteration: int | None = None  # number under automatic naming; None for a folder that the user named
    keep: int | None = None  # how many numbered checkpoints stay; None for all
    run: Mapping[str, Any] = field(default_factory=dict)
    custom: Sequence[str] = ()


@dataclass(frozen=True)
class Site:
    """Where this rank writes."""

    staging: StagingFolder
    commits: bool  # this rank gives it its name
    consensus: Consensus
    request: Request
    is_common: bool = True  # all ranks write in one folder
    save: str = ""  # identifies this save, the same on all ranks
    began: float = field(default_factory=time.perf_counter)

    @property
    def folder(self) -> Path:
        return self.staging.folder


def open_site(request: Request, consensus: Consensus) -> Site:
    """Make the folder that the checkpoint is written in; called on all ranks.

    Rank 0 chooses the number of a numbered checkpoint. Ranks that do not see the folder of rank 0, on
    machines without a common disk, get a folder on their own machine; the rank that makes it commits it.
    """
    opened: list[StagingFolder] = []

    def begin(target: Path) -> StagingFolder:
        opened.append(plan_staging_folder(target))
        opened[-1].open()
        return opened[-1]

    try:
        return _agree_on_site(request, consensus, begin)
    except BaseException:
        for staging in opened:
            staging.discard()
        raise


def _agree_on_site(request: Request, consensus: Consensus, begin: Callable[[Path], StagingFolder]) -> Site:
    def begin_first(_: Sequence[Any]) -> dict[str, Any]:
        chosen = _choose_number(request)
        return {"iteration": chosen.iteration, **_spell(begin(absolute_path(chosen.target)))}

    answer = consensus.decide(CALL, None, begin_first, request.patience)
    if answer["iteration"] != request.iteration:
        logger.warning(
            f"{request.target.parent} holds a checkpoint {request.iteration} already: this run goes on with "
            f"number {answer['iteration']}. A project folder for each run keeps them apart."
        )
    request = _with_number(request, answer["iteration"])
    target = absolute_path(request.target)
    first = _staging_folder(target, answer)
    sees = answer["target"] == str(target) and first.folder.is_dir()
    name = "" if sees else f"{socket.gethostname()}:{target}"
    leader, offer = consensus.compute_once(name, lambda: _spell(begin(target)), request.patience)
    if sees:
        return Site(first, consensus.rank == 0, consensus, request, save=first.folder.name)
    staging, commits = _staging_folder(target, offer), leader == consensus.rank
    return Site(staging, commits, consensus, request, is_common=False, save=first.folder.name)


def _choose_number(request: Request) -> Request:
    """Take the next number above all where there is a checkpoint of this number."""
    if request.iteration is None:
        return request
    taken = retention.taken_numbers(request.target.parent)
    return _with_number(request, max(taken) + 1) if request.iteration in taken else request


def _with_number(request: Request, number: int | None) -> Request:
    if number is None or number == request.iteration:
        return request
    return replace(request, iteration=number, target=request.target.parent / retention.name_of(number))


def _spell(staging: StagingFolder) -> dict[str, Any]:
    """Describe a staging folder for the other ranks, which find it beside or in the target that they know."""
    return {"target": str(staging.target), "name": staging.folder.name, "inside": staging.inside}


def _staging_folder(target: Path, answer: Mapping[str, Any]) -> StagingFolder:
    """Return the staging folder that another rank has made for the same target."""
    name, inside = str(answer["name"]), bool(answer["inside"])
    if Path(name).name != name or not name.startswith("."):
        raise CheckpointError(
            f"Another process wants to write in {name!r}, which is no hidden folder beside {target}."
        )
    return StagingFolder(target, (target if inside else target.parent) / name, inside)


def write(
    site: Site, payloads: Sequence[Payload], threads: int = THREADS, blocked: float | None = None
) -> Path:
    """Write the files of this rank, and commit the checkpoint when all ranks have; called on all ranks.

    A file that could not be written is an error on all, and the folder that was there is unchanged.
    `blocked` are the seconds for which training has waited; None: until now.
    """
    consensus = site.consensus
    records: list[FileRecord] = []
    reports: dict[str, Any] = {}

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

    def commit(summaries: Sequence[Mapping[str, Any]], created: str) -> None:
        own = [summary for summary in summaries if summary["folder"] == str(site.folder)]
        for payload in payloads:
            if payload.finish is not None:
                shards = str(Path(payload.name).parent)
                payload.finish(site.folder / shards, [summary["reports"][shards] for summary in own])
        _commit(site, summaries, created)

    try:
        failure = _attempt(write_files)
        summary = _summary(site, failure, [asdict(record) for record in records], reports)
        _finish(site, summary, commit)
    except Exception as error:
        _note_save(site, "failed", blocked, text=describe(error))
        raise
    finally:
        discard(site)
    _note_save(site, "committed", blocked, size=sum(record.size for record in records))
    for line in saved_lines(site.request.target, [payload.name for payload in payloads], site.request.custom):
        logger.info(line)
    return site.staging.target


def _note_save(site: Site, event: str, blocked: float | None, size: int = 0, text: str = "") -> None:
    """Add the save to the records of the run."""
    seconds = time.perf_counter() - site.began
    save = Checkpoint(
        time=time.time(),
        event=event,
        path=str(site.request.target),
        step=max(site.request.run.get("updates", ()), default=site.request.step),
        seconds=seconds,
        blocked=seconds if blocked is None else blocked,
        size=size,
        text=text,
    )
    run_records.append(save)


Commit = Callable[[Sequence[Mapping[str, Any]], str], None]
"""Commits the folder of this rank, after the summaries of all ranks and the time of the save."""


def _finish(site: Site, summary: dict[str, Any], commit: Commit) -> None:
    """Commit the checkpoint when all ranks have written; raises on all ranks where one has failed."""
    verdict = _decide(site, summary, commit)
    _refuse_failures(verdict["failures"])
    if not verdict["summaries"]:
        return
    commits = site.commits and not site.is_common
    failure = _attempt(lambda: commit(verdict["summaries"], verdict["created"])) if commits else ""
    failures = site.consensus.decide(CALL, failure, list, SECONDS_TO_WRITE)
    _refuse_failures([(rank, text) for rank, text in enumerate(failures) if text])


def _decide(site: Site, summary: dict[str, Any], commit: Commit) -> Any:
    """Let rank 0 commit its folder when all ranks have written, and return what the ranks need to know.

    These are the failures, and the summaries where there are other folders; those of a folder that all have
    are many.
    """

    def judge(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        failures = [(rank, each["failure"]) for rank, each in enumerate(summaries) if each["failure"]]
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        if not failures and (failure := _attempt(lambda: commit(summaries, created))):
            failures = [(site.consensus.rank, failure)]
        is_needed = not failures and any(each["folder"] != str(site.folder) for each in summaries)
        return {"failures": failures, "summaries": summaries if is_needed else [], "created": created}

    return site.consensus.decide(CALL, summary, judge, SECONDS_TO_WRITE)


def _summary(site: Site, failure: str, records: Sequence[Any] = (), reports: Any = None) -> dict[str, Any]:
    return {"failure": failure, "folder": str(site.folder), "records": records, "reports": reports or {}}


def abandon(site: Site, error: Exception) -> None:
    """Tell the other ranks, which are about to write or wait for it, that this one cannot save."""
    try:
        _decide(site, _summary(site, describe(error)), lambda *_: None)
    finally:
        discard(site)


def discard(site: Site) -> None:
    """Remove what was written so far, where this rank is the one to commit it."""
    if site.commits:
        site.staging.discard()


def _commit(site: Site, summaries: Sequence[Mapping[str, Any]], created: str) -> None:
    """Describe the folder, give it its name, and only then delete what it makes superfluous.

    Ranks that write several folders describe them alike: copied into one, they are one checkpoint.
    """
    request = site.request
    folders: dict[str, dict[str, FileRecord]] = {}
    for summary in summaries:
        records = {record["name"]: FileRecord(**record) for record in summary["records"]}
        folders.setdefault(summary["folder"], {}).update(records)
    own = folders[str(site.folder)]
    for name in files_under(site.folder):
        if name not in own:  # written by the user's hooks
            own[name] = seal(site.folder, name, site.consensus.rank)
    for folder in {(site.folder / name).parent for name in own}:
        sync_folder(folder)
    files = {name: record for each in reversed(folders.values()) for name, record in each.items()}
    several = {FOLDERS_OF_SAVE: list(map(spell_records, folders.values()))} if len(folders) > 1 else {}
    Manifest(
        files=files,
        world_size=site.consensus.size,
        step=request.step,
        epoch=request.epoch,
        iteration=request.iteration,
        created=created,
        software=f"accelerate {version('accelerate')}",
        torch=torch.__version__,
        run={**request.run, SAVE: site.save, **several},
    ).write(site.folder)
    site.staging.publish()
    if request.keep is not None:
        try:
            retention.prune(site.staging.target.parent, request.keep)
        except OSError as error:  # the new one is whole all the same
            saved = site.staging.target
            logger.warning(f"{saved} is saved, and older checkpoints could not be deleted: {error}.")


def _attempt(action: Callable[[], Any]) -> str:
    """Do something and return why it failed, for all ranks; empty when it did not."""
    try:
        action()
    except Exception as error:  # raised again, on all ranks, by _refuse_failures
        return describe(error)
    return ""


def _refuse_failures(failures: Sequence[tuple[int, str]]) -> None:
    if failures:
        lines = "; ".join(f"process {rank}: {text}" for rank, text in failures)
        raise CheckpointError(
            f"The checkpoint was not saved, and the ones before it are unchanged ({lines}). Fix the cause, "
            "such as a full disk, and save again."
        )


def saved_lines(target: Path, names: Sequence[str], custom: Sequence[str]) -> list[str]:
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


class Session:
    """The checkpoints of one run; the ranks have `patience` seconds to come together."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        # called before a save with models, weights and folder
        self.save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        # called before a load with models and folder
        self.load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._staging = StagingArea()

    @property
    def consensus(self) -> Consensus:
        """How the ranks agree; every session of a process counts their decisions together."""
        return services.get(Consensus, _open_consensus)

    @property
    def background(self) -> Background:
        """What writes; the sessions of a process take turns in it, because they agree over one consensus."""
        return services.get(Background, Background)

    @staticmethod
    def add_hook(hooks: OrderedDict[int, Any], hook: Callable[..., Any]) -> RemovableHandle:
        """Append a hook; the handle takes it away again."""
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def prepare_write(
        self, site: Site, payloads: Sequence[Payload], *, blocking: bool
    ) -> Callable[[], object]:
        """Return what writes and commits; where it does not block, in the background. Called on all ranks."""
        if not blocking and not self.consensus.is_threaded:
            logger.warning_once("This run has no store to agree over in the background: saves block.")
            blocking = True
        if blocking:
            return partial(write, site, payloads)
        staged = self._staging.stage(payloads)
        blocked = time.perf_counter() - site.began
        return partial(self.background.start, partial(write, site, staged, threads=1, blocked=blocked))


class Background:
    """At most one job, in a thread that is no daemon: the interpreter waits for it before it ends."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, job: Callable[[], Any]) -> None:
        """Run a job in a thread, after the one before has ended, whose error is raised."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(job,), name="accelerate-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the job that runs; the error of the last job is raised once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, job: Callable[[], Any]) -> None:
        try:
            job()
        except Exception as error:  # raised again by wait()
            logger.error(f"A checkpoint was not saved: {error}", main_process_only=False)
            self._error = error


class StagingArea:
    """Memory for one copy of everything that is saved; kept from one save to the next.

    Fresh memory costs several times as much as the copying into it, so only the first save pays for it.
    Memory for tensors of an accelerator is pinned: they are copied without a stop in between.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def stage(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Copy the content of files to CPU memory; the copies hold until the next call."""
        before, self._buffers = self._buffers, {}
        staged: dict[tuple[Any, ...], Tensor] = {}
        tensors = {
            (payload.name, number): tensor
            for payload in payloads
            for number, tensor in enumerate(iterate_tensors(payload.content))
        }

        def copy_of(key: tuple[str, int], tensor: Tensor) -> Tensor:
            if not of_device(tensor.device).is_addressable:
                return tensor.cpu()
            if tensor.layout != torch.strided or tensor.is_quantized:
                return tensor.cpu().clone()
            identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel() and identity in staged:
                return staged[identity]  # shared tensors stay shared
            buffer = before.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not tensor.is_cpu)
            buffer.copy_(tensor, non_blocking=True)
            self._buffers[key] = staged[identity] = buffer
            return buffer

        # as `deepcopy` takes them: by the identities of tensors that stay alive
        copies = {id(tensor): copy_of(key, tensor.detach()) for key, tensor in tensors.items()}
        for device in {key[0] for key in staged if not of_device(key[0]).is_host}:
            torch.get_device_module(device).synchronize(device)
        return [replace(payload, content=copy.deepcopy(payload.content, copies)) for payload in payloads]


def _open_consensus() -> Consensus:
    # All ranks open theirs in the same order; the store may still hold values from before a reset.
    purpose = f"checkpoints/{services.next_number('checkpoints')}"
    consensus = open_consensus(current_transport(), process_group.connect_channel(purpose, STORE_TIMEOUT))
    return services.put(Consensus, consensus, close=_close_consensus)


def _close_consensus() -> None:
    consensus = services.remove(Consensus)
    if consensus is not None:
        consensus.close()
