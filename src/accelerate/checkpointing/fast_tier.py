"""Fast tier of a run, which keeps the newest checkpoint in memory or on a local disk of each node.

A checkpoint of the fast tier is a generation. Each node holds the files that its ranks have written, and
copies of those of other nodes, in a numbered folder with a manifest. `GenerationSaver` writes a generation in
the background. `generations.py` finds and collects the newest complete one after nodes were lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from accelerate.base import CheckpointError, convert_bytes, environ, wrong_value
from accelerate.checkpointing import manifest, retention, temporary
from accelerate.checkpointing.exchange import Transfer, exchange, open_group
from accelerate.checkpointing.folder import StagingFolder, name_of
from accelerate.checkpointing.manifest import FileRecord
from accelerate.checkpointing.nodes import OPERATION, Nodes, find_nodes, free_bytes
from accelerate.checkpointing.parts import Payload
from accelerate.checkpointing.saving import Request, Saver, Staging, raise_failures
from accelerate.checkpointing.staging import STORE_TIMEOUT, BackgroundSave, StagingMemory
from accelerate.launch import count_of
from accelerate.logging import get_logger
from accelerate.ops import current_transport, open_consensus
from accelerate.state import Consensus, Topology, process_group, services

logger = get_logger(__name__)

NUM_KEPT = 2
"""Number of generations that a node holds while it writes one."""
TIMEOUT_AFTER_ERROR = 60.0
"""Seconds for other ranks to write a generation after an error has ended this one, which may be that another
rank has ended."""


@dataclass(eq=False)
class FastTier:
    """Fast tier of a run on this rank, a service of the run."""

    nodes: Nodes
    copies: int  # nodes that hold the files of a node, besides the node itself
    project: str  # folder of the project, to which generations belong
    consensus: Consensus  # used by the background thread, or by the main thread while it does not run
    timeout: float  # for all ranks to arrive, in seconds
    number: int = 0  # of the next generation
    background: BackgroundSave = field(default_factory=BackgroundSave)
    memory: StagingMemory = field(default_factory=StagingMemory)
    _group: Any = None

    @property
    def group(self) -> Any:
        """Process group for transfers, which all ranks open at its first use in their main threads."""
        if self._group is None:
            self._group = open_group()
        return self._group

    def begin(self, request: Request, next_durable: int) -> GenerationSaver:
        """Creates the folders of the next generation, without communication, and returns its saver.

        Called on all ranks, after the generation before is complete.

        Args:
            request: Counters of the run. The fast tier chooses the folder.
            next_durable: Number of the first durable checkpoint that is newer.
        """
        if self.copies and len(self.nodes.ranks) > 1:
            _ = self.group
        name = name_of(self.number)
        facts = {
            **request.run,
            manifest.TIER: manifest.FAST,
            manifest.PROJECT: self.project,
            manifest.NEXT_DURABLE: next_durable,
            manifest.HOLDERS: [f"node {node}" for node in range(len(self.nodes.hosts))],
        }
        request = replace(
            request,
            target=self.nodes.folder / name,
            iteration=self.number,
            keep=None,
            run=facts,
            is_generation=True,
        )
        self.number += 1
        return GenerationSaver(self, request)

    def write(
        self,
        saver: GenerationSaver,
        payloads: Sequence[Payload],
        written: Future[list[Payload]] | None = None,
    ) -> None:
        """Copies the content of files to CPU memory, and writes the generation in the background.

        Args:
            saver: Saver of the generation.
            payloads: Files of this rank.
            written: Gets the files of this rank for a durable checkpoint with the same content, as soon as
                the generation is complete.
        """
        write_and_commit = saver.stage(payloads, self.memory)

        def complete() -> None:
            try:
                write_and_commit()
                if written is not None:
                    written.set_result(saver.open_files())
                if self.nodes.is_owner:
                    retention.prune(self.nodes.folder, 1)
            except Exception as error:
                if written is not None and not written.done():
                    written.set_exception(error)
                raise

        self.background.start(complete)

    def check_space(self, size: int, is_sharded: bool) -> None:
        """Raises if the fast folder of a node is too small for the generations of this run.

        Called on all ranks.

        Args:
            size: Bytes that this rank writes for one generation.
            is_sharded: Whether other nodes do not write the same.
        """
        held = sum(
            path.stat().st_size for path in self.nodes.folder.glob("checkpoint_*/**/*") if path.is_file()
        )
        answers = self.consensus.decide(
            OPERATION, [size, free_bytes(self.nodes.folder) + held], list, self.timeout
        )
        factor = NUM_KEPT * (1 + (self.copies if is_sharded else 0))
        for ranks, host in zip(self.nodes.ranks, self.nodes.hosts, strict=True):
            needed = factor * sum(answers[rank][0] for rank in ranks)
            free = min(answers[rank][1] for rank in ranks)
            if needed > free:
                copies = f", each with {self.copies} copies," if is_sharded and self.copies else ""
                raise wrong_value(
                    "fast_dir",
                    str(self.nodes.folder),
                    f"{NUM_KEPT} recent checkpoints{copies} take {convert_bytes(needed)} on {host}, and "
                    f"{convert_bytes(free)} are free",
                    "Choose a larger disk, fewer copies, or a sharded strategy",
                )

    def close(self) -> None:
        """Ends the use of the fast folder, and keeps its generations."""
        services.remove(FastTier)
        if self.nodes.is_owner:
            shutil.rmtree(self.nodes.own_staging, ignore_errors=True)
        temporary.release(self.nodes.own_staging)
        self.consensus.close(waits=not process_group.failed())


class GenerationSaver(Saver):
    """Save of one generation, which writes on each node and copies files to other nodes."""

    def __init__(self, tier: FastTier, request: Request) -> None:
        super().__init__(tier.consensus)
        self._tier = tier
        self._copies: list[Transfer] = []
        self._summaries: Sequence[Mapping[str, Any]] = ()
        nodes, name = tier.nodes, request.target.name
        folder = StagingFolder(request.target, nodes.own_staging / name)
        folder.folder.mkdir(parents=True, exist_ok=True)
        self._created = folder if nodes.is_owner else None
        self.staging = Staging(folder, nodes.is_owner, request, f"{nodes.staging[0]}/{name}")

    @property
    def _state(self) -> str:
        updates = self.staging.request.run.get("updates", ())
        return f"{self.staging.request.target.name} of step {max(updates, default=0)}"

    def begin(self, request: Request) -> Staging:
        return self.staging

    @property
    def staging_of_hooks(self) -> Staging:
        """Staging folder of this rank alone, in which functions of the user write."""
        rank = self._tier.nodes.rank
        folder = self._tier.nodes.own_staging / f"hooks_{rank}" / self.staging.request.target.name
        folder.mkdir(parents=True, exist_ok=True)
        return replace(self.staging, staging_folder=StagingFolder(self.staging.request.target, folder))

    def files_of_hooks(self) -> list[Payload]:
        """Returns the files that functions of the user have written in `staging_of_hooks`."""
        folder = self.staging_of_hooks.folder
        return [Payload(name, folder / name, shutil.move) for name in manifest.files_under(folder)]

    def _exchange(self, summaries: Sequence[Mapping[str, Any]]) -> None:
        nodes, folder = self._tier.nodes, self.staging.folder
        self._summaries = summaries
        if len(nodes.ranks) == 1:
            return
        self._summaries = summaries = first_versions(nodes, summaries)
        kept = {record["name"] for record in summaries[nodes.rank]["records"]}
        for record in self._records:
            if record.name not in kept:
                (folder / record.name).unlink()
        self._copies = plan_copies(nodes, self._tier.copies, summaries)
        if not self._copies:
            return

        def verify(transfer: Transfer, path: Path) -> None:
            record = _record_of(summaries, transfer)
            if manifest.measure(path) != (record.size, record.checksum):
                raise CheckpointError(f"the copy of {record.name} does not fit its checksum")

        operation = self.staging.request.operation
        failures = exchange(
            self._copies, self._tier.group, folder, folder, self._consensus, operation, verify
        )
        raise_failures(enumerate(failures))

    def _files_by_folder(self, summaries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, FileRecord]]:
        summaries = self._summaries
        folders = super()._files_by_folder(summaries)
        for transfer in self._copies:
            folders[summaries[transfer.target]["folder"]][transfer.name] = _record_of(summaries, transfer)
        return folders

    def open_files(self) -> list[Payload]:
        """Opens the files of this rank, and returns them as files of a durable checkpoint.

        An open file can be read after its generation is deleted. A file that ranks of several nodes have
        written is returned by the first of them.
        """
        folder, rank = self.staging.staging_folder.target, self._tier.nodes.rank
        before = {record["name"] for summary in self._summaries[:rank] for record in summary["records"]}
        return [
            Payload(
                payload.name,
                (folder / payload.name).open("rb"),
                partial(_copy_file, self._reports.get(payload.name)),
                payload.finish,
            )
            for payload in self._payloads
            if payload.name not in before
        ]


def _record_of(summaries: Sequence[Mapping[str, Any]], transfer: Transfer) -> FileRecord:
    """Returns the record of a file that a rank has written and sends."""
    records = summaries[transfer.source]["records"]
    return next(FileRecord(**record) for record in records if record["name"] == transfer.name)


def first_versions(nodes: Nodes, summaries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the summaries of all ranks without the files that an earlier node has written differently.

    Each node writes the objects that are equal on all ranks. If they are not, such as the buffers of a
    model between two steps, a generation has those of the first rank, as a durable checkpoint has.

    Args:
        summaries: Records of the files that each rank has written.
    """
    node_of = {rank: node for node, ranks in enumerate(nodes.ranks) for rank in ranks}
    first: dict[str, tuple[int, str]] = {}

    def is_kept(rank: int, record: Mapping[str, Any]) -> bool:
        node, checksum = first.setdefault(record["name"], (node_of[rank], record["checksum"]))
        return node == node_of[rank] or checksum == record["checksum"]

    return [
        {**summary, "records": [record for record in summary["records"] if is_kept(rank, record)]}
        for rank, summary in enumerate(summaries)
    ]


def _copy_file(report: object, file: BinaryIO, path: Path) -> Any:
    with file, path.open("wb") as copy:
        shutil.copyfileobj(file, copy, 1 << 22)
    return report


def plan_copies(nodes: Nodes, copies: int, summaries: Sequence[Mapping[str, Any]]) -> list[Transfer]:
    """Returns the transfers of the files of each node to the nodes after it, except files that they have.

    Args:
        copies: Number of nodes that receive the files of a node.
    """
    names = [
        {record["name"] for rank in ranks for record in summaries[rank]["records"]} for ranks in nodes.ranks
    ]
    return [
        Transfer(record["name"], record["size"], rank, nodes.partner(rank, target))
        for node, ranks in enumerate(nodes.ranks)
        for rank in ranks
        for record in summaries[rank]["records"]
        for target in ((node + distance) % len(nodes.ranks) for distance in range(1, copies + 1))
        if record["name"] not in names[target]
    ]


def open_fast_tier(
    folder: Path, copies: int | None, project: str, topology: Topology, timeout: float
) -> FastTier:
    """Opens the fast tier of the run, which all of its `Accelerator` objects use.

    Called on all ranks.

    Args:
        folder: Folder on a disk of each node.
        copies: Number of other nodes that hold a copy of the files of a node. None is 1 if there are several
            nodes.
        timeout: Timeout for all ranks to arrive, in seconds.

    Raises:
        ConfigurationError: The folder cannot be used, or there are not more nodes than copies.
    """
    if (tier := services.find(FastTier)) is not None:
        if tier.nodes.folder != folder:
            reason = f"this process already uses {tier.nodes.folder}"
            raise wrong_value("fast_dir", str(folder), reason, "Use one folder for all runs of a process")
        return tier
    purpose = f"tiers/{services.next_number('tiers')}"
    channel = process_group.connect_channel(purpose, STORE_TIMEOUT)
    if channel is not None:
        channel.timeout_after_error = TIMEOUT_AFTER_ERROR
    consensus = open_consensus(current_transport(), channel)
    nodes = find_nodes(folder, topology.node, consensus, timeout)
    num_nodes = len(nodes.ranks)
    if copies is None:
        copies = min(1, num_nodes - 1)
    if copies >= num_nodes:
        variables = environ.current()
        lost_nodes = environ.ELASTIC in variables or count_of(variables, "TORCHELASTIC_RESTART_COUNT", 0) > 0
        reason = f"the run has {num_nodes} node{'s' * (num_nodes > 1)}, and a copy is on another node"
        if not lost_nodes:
            raise wrong_value("copies", copies, reason, f"Use at most {num_nodes - 1}, or more nodes")
        logger.warning(f"copies={copies}, and {reason}: recent checkpoints have {num_nodes - 1}.")
        copies = num_nodes - 1
    tier = FastTier(nodes, copies, project, consensus, timeout)
    return services.put(FastTier, tier, close=tier.close)
