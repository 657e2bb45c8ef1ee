"""The processes of the other ranks of this machine: children of the process that started this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from accelerate.base import stack_dumps

RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
_AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"


@dataclass(frozen=True)
class Siblings:
    """The ranks that one process has started on this machine.

    Attributes:
        starter: number of that process.
        pids: rank -> number of its process, for all that live, this one included.
        is_complete: whether a rank of this machine that is not among them has ended.
    """

    starter: int
    pids: Mapping[int, int]
    is_complete: bool


def find(rank: int) -> Siblings | None:
    """Find the ranks that were started by the process that started this one.

    Args:
        rank: of this process.

    Returns:
        None where the starter wrote no rank into the environment of this process.
    """
    own = _variables(psutil.Process())
    name = next((name for name in RANK_VARIABLES if own.get(name) == str(rank)), None)
    if name is None:
        return None
    starter = _find_starter(name, str(rank))
    if starter is None:
        return None
    found: dict[int, list[psutil.Process]] = {}
    for process in starter.children(recursive=True):
        value = _variables(process).get(name, "")
        if value.isdigit() and _lives(process):
            found.setdefault(int(value), []).append(process)
    pids = {number: _choose(several) for number, several in found.items()}
    return Siblings(starter.pid, pids, is_complete=_AGENT_VARIABLE in own)


def _choose(processes: list[psutil.Process]) -> int:
    """The process of a rank that runs the script; others of it start that one, or were started by it."""
    program = _program(psutil.Process())
    alike = [process for process in processes if _program(process) == program] or processes
    return next((each.pid for each in alike if stack_dumps.offers(each.pid)), alike[0].pid)


def _program(process: psutil.Process) -> str:
    try:
        return process.exe()
    except psutil.Error:  # of another user, or ended
        return ""


def _find_starter(name: str, value: str) -> psutil.Process | None:
    """The nearest ancestor that has no rank: a script may run inside of another program, such as a shell."""
    for process in psutil.Process().parents():
        if _variables(process).get(name) != value:
            return process
    return None


def _variables(process: psutil.Process) -> dict[str, str]:
    """The environment that a process was started with; empty where it cannot be read."""
    try:
        return process.environ()
    except psutil.Error:  # of another user, or ended
        return {}


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
