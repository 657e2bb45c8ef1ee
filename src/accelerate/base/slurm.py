"""Hosts, tasks per node and rendezvous port of a SLURM job step, read from its variables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain, islice, repeat

from accelerate.base.errors import wrong_value

FIRST_PORT = 12000
PORTS = 20000  # ends below the ephemeral ports of Linux
MOST_NODES = 10**6
_FIRST = re.compile(r"(?:\[[^\]]*(?:\]|$)|[^,\[])*")
_RANGES = re.compile(r"\[([^\[\]\-,]+)(?:[\-,][^\[\]]*)?\]")
_NUMBER = re.compile(r"\d{1,18}")
_TASKS = re.compile(r"(?P<tasks>\d{1,9})(?:\(x(?P<nodes>\d{1,9})\))?")


def first_host(node_list: str) -> str:
    """Returns the first host of a compressed list, such as `gpu07` for `gpu[07-09,12],login1`."""
    host = _RANGES.sub(r"\1", _FIRST.findall(node_list)[0]).strip()
    if not host or "[" in host or "]" in host:
        raise wrong_value("SLURM_JOB_NODELIST", node_list, "it names no host", "set MASTER_ADDR yourself")
    return host


def tasks_on_node(tasks_per_node: str, node: int) -> int:
    """Returns the number of tasks on one node, such as 2 on nodes 0 to 2 and 1 on node 3 for `2(x3),1`."""
    counts = per_node(tasks_per_node)
    if node < len(counts):
        return counts[node]
    raise wrong_value(
        "SLURM_STEP_TASKS_PER_NODE",
        tasks_per_node,
        f"it does not give the number of tasks of node {node}",
        "start the step with srun, or set RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE yourself",
    )


def per_node(counts: str) -> list[int]:
    """Returns the tasks or cores of each node, such as 16, 16 and 8 for `16(x2),8`.

    The list is empty for text of another form.
    """
    matches = [_TASKS.fullmatch(entry.strip()) for entry in counts.split(",")]
    if None in matches:
        return []
    runs = [repeat(int(match["tasks"]), int(match["nodes"] or 1)) for match in matches if match]
    return list(islice(chain.from_iterable(runs), MOST_NODES))


def is_step_of_tasks(environ: Mapping[str, str]) -> bool:
    """Returns whether srun started this process as a task, not as a batch script or interactive shell."""
    return bool(environ.get("SLURM_STEP_ID")) and not environ.get("SLURM_PTY_PORT")


def port_of_step(environ: Mapping[str, str]) -> int:
    """Returns a port derived from the job and step, which is the same in all tasks.

    Two steps on one node get different ports.
    """
    texts = [environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    return FIRST_PORT + sum(int(text) for text in texts if _NUMBER.fullmatch(text)) % PORTS
