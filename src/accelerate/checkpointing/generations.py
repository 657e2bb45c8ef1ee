"""Search for the newest complete generation of the fast tier, and transfer of its files to the nodes.

After nodes were lost, or with another number of ranks, a node lacks files that its ranks read. They are sent
by nodes that hold them. A file that does not fit its checksum is removed, and sent by another node.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from accelerate.base import CheckpointError, ConfigurationError, describe, wrong_value
from accelerate.checkpointing import manifest
from accelerate.checkpointing.exchange import Transfer, exchange
from accelerate.checkpointing.fast_tier import FastTier
from accelerate.checkpointing.folder import name_of, number_of
from accelerate.checkpointing.loading import CALL, VERIFY_TIMEOUT, CheckpointSource
from accelerate.checkpointing.nodes import Nodes
from accelerate.logging import get_logger
from accelerate.state import Topology

logger = get_logger(__name__)

SHARDS = ".distcp"
"""Suffix of files of shards, of which each rank reads some."""
RANK_FILE = re.compile(r"(?:random_states|stream_\d+|local_sgd_\d+)_(\d+)\.\w+")
"""Names of files that one rank reads, with its number."""
SOURCE_OF_SEEDS = 0
"""Rank whose random states all ranks read if their number has changed."""


Origins: TypeAlias = dict[tuple[int, str], int]
"""Node that has sent a file, by the node that has received it and the name of the file."""
ShardsReadFrom: TypeAlias = Callable[[Path, dict[str, Any]], Collection[str]]
"""Function of a checkpoint and a dictionary, to which it adds the plans for the folders of shards."""


@dataclass(frozen=True)
class Generation:
    """Generation that nodes hold, with the size in bytes of each file on each node."""

    number: int
    save: str  # name of the save, equal on all nodes
    created: str
    step: int  # number of optimizer steps
    next_durable: int  # number of the durable checkpoint that is saved next
    names: Collection[str]  # of all files
    held: list[dict[str, int]]  # of each node

    @property
    def state(self) -> str:
        """Name of the state, which replica groups save at the same step."""
        return f"{self.next_durable}/{self.step}"

    @property
    def missing(self) -> list[str]:
        """Returns the names of the files that no node holds."""
        return sorted(name for name in self.names if not self.holders(name))

    def holders(self, name: str) -> list[int]:
        return [node for node, sizes in enumerate(self.held) if name in sizes]


def find_generations(tier: FastTier) -> list[Generation]:
    """Returns the generations of the project on all nodes, the newest first.

    Called on all ranks.

    Raises:
        CheckpointError: The folder holds generations of another project.
    """
    own, failure = [], ""
    if tier.nodes.is_owner:
        try:
            own = list(_survey(tier.nodes.folder, tier.project))
        except (CheckpointError, ConfigurationError, OSError) as error:
            failure = describe(error) if isinstance(error, OSError) else str(error)

    def merge(answers: Sequence[Any]) -> list[Any]:
        if failed := next((failure for failure, _ in answers if failure), ""):
            raise CheckpointError(failed)
        return _merge([answers[ranks[0]][1] for ranks in tier.nodes.ranks])

    return [Generation(**facts) for facts in tier.consensus.decide(CALL, [failure, own], merge, tier.timeout)]


def _survey(folder: Path, project: str) -> Iterator[dict[str, Any]]:
    """Yields facts about each generation in the folder of a node."""
    for path in sorted(folder.glob("checkpoint_*")):
        number = number_of(path.name)
        if number is None or not path.is_dir():
            continue
        try:
            read = manifest.read(path, whole=True)
        except CheckpointError as error:
            logger.warning(f"{path} is not used: {error}.", main_process_only=False)
            yield {"number": number}
            continue
        if manifest.TIER not in read.run:
            raise wrong_value(
                "fast_dir",
                str(folder),
                f"{path.name} in it is a durable checkpoint, and old recent checkpoints are deleted",
                "Choose a separate folder for recent checkpoints",
            )
        owner = read.run.get(manifest.PROJECT, "")
        if owner != project:
            raise CheckpointError(
                f"fast_dir={str(folder)!r} contains a checkpoint of the project {owner!r}, and this run has "
                f"the project {project!r}. Choose another folder, or delete {path}."
            )
        held = {
            name: size for name in read.files if (size := _size_of_copy(path, read.files[name])) is not None
        }
        yield {
            "number": number,
            "save": str(read.run.get(manifest.SAVE, "")),
            "created": read.created,
            "step": read.num_updates,
            "next_durable": int(read.run.get(manifest.NEXT_DURABLE, 0)),
            "names": [*read.files, manifest.NAME],
            "held": {**held, manifest.NAME: (path / manifest.NAME).stat().st_size},
        }


def _size_of_copy(folder: Path, record: manifest.FileRecord) -> int | None:
    """Returns the size of a file, or None if it is missing, or has another size than its records."""
    path = folder / record.name
    if not path.is_file():
        return None
    size = path.stat().st_size
    if size in {version.size for version in (record, *record.others)}:
        return size
    logger.warning(
        f"{path} is not used: it has {size} bytes instead of {record.size}.", main_process_only=False
    )
    return None


def _merge(surveys: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the generations of all nodes from the facts of each, the newest first."""
    merged: dict[str, dict[str, Any]] = {}
    for node, survey in enumerate(surveys):
        for facts in survey:
            if "save" not in facts:
                continue
            empty: list[dict[str, int]] = [{} for _ in surveys]
            entry = merged.setdefault(facts["save"], {**facts, "names": [], "held": empty})
            entry["names"] = sorted({*entry["names"], *facts["names"]})
            entry["held"][node] = facts["held"]
    order = itemgetter("next_durable", "step", "number", "created")
    return sorted(merged.values(), key=order, reverse=True)


def next_number(tier: FastTier) -> int:
    """Returns a number that no generation on any node has."""
    numbers = [number_of(path.name) or 0 for path in tier.nodes.folder.glob("checkpoint_*")]
    highest = tier.consensus.decide(CALL, max(numbers, default=-1), max, tier.timeout)
    return int(highest) + 1


def open_generation(
    tier: FastTier, generation: Generation, topology: Topology, shards_read_from: ShardsReadFrom
) -> Iterator[CheckpointSource]:
    """Yields a generation when all nodes have the files that they read, and again if some were damaged.

    Called on all ranks.

    Args:
        shards_read_from: Returns the names of the files of shards that this rank reads.
    """
    folder = tier.nodes.folder / name_of(generation.number)
    held = [dict(sizes) for sizes in generation.held]
    origins: Origins = {}
    while True:
        plans: dict[str, Any] = {}
        shards_read = partial(shards_read_from, folder, plans)
        try:
            verified = _collect(tier, replace(generation, held=held), folder, shards_read, origins)
        except CheckpointError as error:
            yield CheckpointSource(folder, tier.consensus, topology, str(error))
            return
        source = CheckpointSource(folder, tier.consensus, topology, verified=verified, plans=plans)
        yield source
        damaged = _remove_damaged(tier, folder, held)
        if not damaged:
            return
        for node, name in damaged:
            held[node].pop(name, None)  # it may have been sent to a node that was seen before
            if (sender := origins.pop((node, name), None)) is not None:
                held[sender].pop(name, None)
        source.was_replaced = True


def _collect(
    tier: FastTier,
    generation: Generation,
    folder: Path,
    shards_read: Callable[[], Collection[str]],
    origins: Origins,
) -> list[str]:
    """Sends each node the files that its ranks read, and returns those of them that this rank verifies.

    Raises:
        CheckpointError: A node lacks a file that its ranks read.
    """
    if generation.missing:
        raise CheckpointError(f"no remaining node stores {', '.join(generation.missing)}")
    nodes, own = tier.nodes, tier.nodes.own
    common = [_common_names(nodes, generation, node) for node in range(len(generation.held))]
    _fetch(tier, generation, folder, common, origins)
    shards = tier.consensus.decide(CALL, sorted(shards_read()), list, tier.timeout)
    needed = [sorted({name for rank in ranks for name in shards[rank]}) for ranks in nodes.ranks]
    _fetch(tier, generation, folder, needed, origins)
    first = {name: rank for rank in reversed(nodes.ranks[own]) for name in shards[rank]}
    own_shards = [name for name, rank in first.items() if rank == nodes.rank]
    return [*_share(nodes, [name for name in common[own] if name != manifest.NAME]), *own_shards]


def _common_names(nodes: Nodes, generation: Generation, node: int) -> list[str]:
    """Returns the files other than shards that ranks of a node read."""
    ranks = {SOURCE_OF_SEEDS, *nodes.ranks[node]}
    matches = {name: RANK_FILE.fullmatch(name) for name in generation.names if not name.endswith(SHARDS)}
    return sorted(name for name, match in matches.items() if match is None or int(match[1]) in ranks)


def _fetch(
    tier: FastTier, generation: Generation, folder: Path, needed: Sequence[Sequence[str]], origins: Origins
) -> None:
    """Sends each node the files that it needs and does not hold."""
    nodes, transfers = tier.nodes, []
    for node, names in enumerate(needed):
        lacking = [name for name in names if name not in generation.held[node]]
        for index, name in enumerate(lacking):
            holders = generation.holders(name)
            holder = holders[(node + index) % len(holders)]
            target = nodes.ranks[node][index % len(nodes.ranks[node])]
            source = nodes.partner(target, holder)
            transfers.append((node, Transfer(name, generation.held[holder][name], source, target)))
            origins[node, name] = holder
    if not transfers:
        return
    files = [transfer for _, transfer in transfers]
    failures = exchange(files, tier.group, folder, folder, tier.consensus, CALL)
    if any(failures):
        raise CheckpointError("; ".join(dict.fromkeys(filter(None, failures))))
    for node, transfer in transfers:
        generation.held[node][transfer.name] = transfer.size


def _share(nodes: Nodes, names: Sequence[str]) -> list[str]:
    """Returns the part of the files of a node that this rank verifies."""
    ranks = nodes.ranks[nodes.own]
    return list(names[ranks.index(nodes.rank) :: len(ranks)])


def _remove_damaged(tier: FastTier, folder: Path, held: Sequence[Mapping[str, int]]) -> list[tuple[int, str]]:
    """Removes the files on this node that do not fit their checksums, and returns those of all nodes."""
    nodes, damaged = tier.nodes, []
    try:
        read = manifest.read(folder, whole=True)
    except CheckpointError:
        damaged.append(manifest.NAME)
    else:
        for name in _share(nodes, sorted(held[nodes.own].keys() & read.files.keys())):
            if problem := manifest.problems(folder, read, [name], deep=True):
                logger.warning(
                    f"{nodes.hosts[nodes.own]}:{folder}: {problem[0]}. It is removed.",
                    main_process_only=False,
                )
                (folder / name).unlink(missing_ok=True)
                damaged.append(name)
    answers = tier.consensus.decide(CALL, damaged, list, VERIFY_TIMEOUT)
    return sorted(
        {(node, name) for node, ranks in enumerate(nodes.ranks) for rank in ranks for name in answers[rank]}
    )
