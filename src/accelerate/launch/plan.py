"""LaunchPlan: everything that was decided, its command line, and how its processes record their errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

from accelerate.base import ConfigurationError, environ
from accelerate.launch.failures import ENTRY, FOLDER_VARIABLE, VERBOSE_VARIABLE
from accelerate.launch.machine import DEFAULT_PORT, LOOPBACK_ADDRESS
from accelerate.settings import ENVIRONMENT, FLAG, Settings, flags
from accelerate.settings.sections import RendezvousSection

Detail = TypeVar("Detail")
Kind: TypeAlias = Literal["script", "module", "program"]


@dataclass(frozen=True)
class Target:
    """What runs in each process: a Python script, a module (``-m``), or a program of any kind."""

    kind: Kind
    name: str
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: argparse.Namespace) -> Target:
        """What a parsed command line names; it cannot be both a module and a program."""
        if args.module and args.no_python:
            raise ConfigurationError("--module and --no_python exclude each other. Keep one of them.")
        kind: Kind = "module" if args.module else "program" if args.no_python else "script"
        return cls(kind, args.training_script, tuple(args.training_script_args))

    @property
    def words(self) -> list[str]:
        """The words that name it to torchrun, to `accelerate launch` and to DeepSpeed's launcher."""
        kind = {"script": [], "module": ["--module"], "program": ["--no_python"]}[self.kind]
        return [*kind, self.name, *self.arguments]


@dataclass(frozen=True)
class LaunchPlan:
    """What to start, where and with which environment."""

    launcher: str  # key of `launch.backends.base.LAUNCHERS`
    target: Target
    processes: int = 1  # over all machines
    machines: int = 1
    machine: int = 0  # rank of this machine
    rendezvous: RendezvousSection = RendezvousSection()  # with the address and port that were given
    address: str = LOOPBACK_ADDRESS  # of the machine of rank 0, as it was chosen; the port likewise
    port: int = DEFAULT_PORT
    environment: Mapping[str, str] = field(default_factory=dict)  # only the variables that are added
    notes: tuple[str, ...] = ()  # what was assumed or changed, for the user
    details: object = None  # what the launcher needs beyond this; see `detail`
    shares: tuple[int, ...] = ()  # processes on each machine, where these differ

    @property
    def local_processes(self) -> int:
        return self.shares[self.machine] if self.shares else self.processes // self.machines

    @property
    def ranks(self) -> str:
        """The ranks of this machine, in words."""
        first = sum(self.shares[: self.machine]) if self.shares else self.local_processes * self.machine
        last = first + self.local_processes - 1
        return f"rank {first}" if first == last else f"ranks {first} to {last}"

    @property
    def layout(self) -> str:
        """How the processes are distributed over several machines, in words."""
        if self.shares:
            return f"{', '.join(map(str, self.shares))} on the {self.machines} machines"
        return f"{self.local_processes} on each of {self.machines} machines"

    def detail(self, kind: type[Detail]) -> Detail:
        """The launcher's own part of the plan, of this class; a `TypeError` in a plan of another launcher."""
        if not isinstance(self.details, kind):
            raise TypeError(f"a plan of the {self.launcher} launcher holds no {kind.__name__}")
        return self.details


AGENT = (sys.executable, "-m", "accelerate.commands.launch", "--quiet")


def local_command(target: Target) -> list[str]:
    """The words that run a target as one process of this Python."""
    before = {"script": [sys.executable], "module": [sys.executable, "-m"], "program": []}[target.kind]
    return [*before, target.name, *target.arguments]


def torchrun_arguments(plan: LaunchPlan) -> list[str]:
    rendezvous = plan.rendezvous
    words = [
        *("--nnodes", str(plan.machines)),
        *("--nproc_per_node", str(plan.local_processes)),
        *("--node_rank", str(plan.machine)),
        # Absent, torch would take it from PET_RDZV_ENDPOINT.
        *("--rdzv_endpoint", f"{plan.address}:{plan.port}"),
        *("--rdzv_backend", rendezvous.rdzv_backend),
        *("--max_restarts", str(rendezvous.max_restarts)),
        *("--monitor_interval", str(rendezvous.monitor_interval)),
        *("--role", rendezvous.role),
        *("--tee", rendezvous.tee),
    ]
    if rendezvous.rdzv_conf:
        words += ["--rdzv_conf", rendezvous.rdzv_conf]
    if rendezvous.log_dir:
        words += ["--log_dir", rendezvous.log_dir]
    return [*words, *plan.target.words]


def accelerate_command(settings: Settings, target: Target, *left_out: str) -> list[str]:
    """The words of an `accelerate launch` that decides the same, and finds `left_out` by itself."""
    left_out = (*left_out, "monitor")  # it has no terminal
    if settings.source("num_cpu_threads_per_process") not in (FLAG, ENVIRONMENT):
        left_out = (*left_out, "num_cpu_threads_per_process")
    return [*AGENT, *flags.words(settings, *left_out), *target.words]


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """A search path with one folder more.

    Args:
        env_var_name: variable that holds the search path.
        path_to_add: folder that is put at its end.

    Returns:
        The new value; the variable is not changed.
    """
    present = [path for path in environ.current().get(env_var_name, "").split(":") if path]
    return ":".join([*present, str(path_to_add)])


RECORDED = ("local", "elastic")  # launchers that start the script themselves


def record_failures(plan: LaunchPlan, folder: Path) -> LaunchPlan:
    """A plan whose processes write what ends them into a folder; the same plan where that is not possible."""
    if plan.launcher not in RECORDED or plan.target.kind == "program":
        return plan
    before = ("-m",) if plan.target.kind == "module" else ()
    target = Target("script", str(ENTRY), (*before, plan.target.name, *plan.target.arguments))
    added = {FOLDER_VARIABLE: str(folder)}
    if plan.rendezvous.log_dir or plan.rendezvous.tee != "0":
        added[VERBOSE_VARIABLE] = "1"
    return replace(plan, target=target, environment={**plan.environment, **added})


def folder_of(plan: LaunchPlan) -> Path | None:
    """Where the processes of a plan write down what ends them; `None` where they do not."""
    folder = plan.environment.get(FOLDER_VARIABLE)
    return None if folder is None else Path(folder)
