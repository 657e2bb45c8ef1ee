"""Launch plan with its command line, and the recording of errors of its processes."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from accelerate.base import ConfigurationError, environ
from accelerate.launch.failures import ENTRY, FOLDER_VARIABLE, VERBOSE_VARIABLE
from accelerate.launch.layout import Sizes
from accelerate.launch.machine import DEFAULT_PORT, LOOPBACK_ADDRESS, new_run_id, run_id_of
from accelerate.settings import ENVIRONMENT, FLAG, Settings, flags
from accelerate.settings.sections import RendezvousSection

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

Detail = TypeVar("Detail")
Kind: TypeAlias = Literal["script", "module", "program"]


@dataclass(frozen=True)
class Target:
    """Program of each process, which is a Python script, a module (``-m``), or any program."""

    kind: Kind
    name: str
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: argparse.Namespace) -> Target:
        """Returns the target of a parsed command line.

        It cannot be both a module and a program.
        """
        if args.module and args.no_python:
            raise ConfigurationError("--module and --no_python exclude each other. Keep one of them.")
        kind: Kind = "module" if args.module else "program" if args.no_python else "script"
        return cls(kind, args.training_script, tuple(args.training_script_args))

    @property
    def words(self) -> list[str]:
        """Arguments that name the target for torchrun, `accelerate launch` and the launcher of DeepSpeed."""
        kind = {"script": [], "module": ["--module"], "program": ["--no_python"]}[self.kind]
        return [*kind, self.name, *self.arguments]


@dataclass(frozen=True)
class LaunchPlan:
    """Processes to start, with their target, location and environment."""

    launcher: str  # key of `launch.backends.base.LAUNCHERS`
    target: Target
    processes: int = 1  # on all nodes
    machines: int = 1
    machine: int = 0  # rank of this node
    rendezvous: RendezvousSection = RendezvousSection()  # with the address and port of the user
    address: str = LOOPBACK_ADDRESS  # of the node of rank 0
    port: int = DEFAULT_PORT
    environment: Mapping[str, str] = field(default_factory=dict)  # added variables only
    notes: tuple[str, ...] = ()  # assumptions and changes to report to the user
    details: object = None  # further data of the launcher, see `detail`
    per_machine: tuple[int, ...] = ()  # number of processes on each node, if these differ
    smallest: Sizes = Sizes()  # smallest sizes of an elastic run; the largest are those above

    @property
    def local_processes(self) -> int:
        return self.per_machine[self.machine] if self.per_machine else self.processes // self.machines

    @property
    def nodes(self) -> str:
        """Number of nodes, or the smallest and the largest number, as torchrun reads them."""
        least = self.smallest.machines
        return str(self.machines) if least is None else f"{least}:{self.machines}"

    @property
    def ranks(self) -> str:
        """Ranks of this node as text."""
        first = (
            sum(self.per_machine[: self.machine]) if self.per_machine else self.local_processes * self.machine
        )
        last = first + self.local_processes - 1
        return f"rank {first}" if first == last else f"ranks {first} to {last}"

    @property
    def layout(self) -> str:
        """Distribution of the processes over several nodes as text."""
        if self.smallest.machines is not None:
            return f"{self.local_processes} on each of {self.smallest.machines} to {self.machines} machines"
        if self.per_machine:
            return f"{', '.join(map(str, self.per_machine))} on the {self.machines} machines"
        return f"{self.local_processes} on each of {self.machines} machines"

    def detail(self, kind: type[Detail]) -> Detail:
        """Returns the data of the launcher.

        Raises a `TypeError` if the plan is of another launcher.
        """
        if not isinstance(self.details, kind):
            raise TypeError(f"a plan of the {self.launcher} launcher holds no {kind.__name__}")
        return self.details


LAUNCH_COMMAND = (sys.executable, "-m", "accelerate.commands.launch", "--quiet")


def local_command(target: Target) -> list[str]:
    """Returns the command that runs a target as one process of this Python."""
    prefix = {"script": [sys.executable], "module": [sys.executable, "-m"], "program": []}[target.kind]
    return [*prefix, target.name, *target.arguments]


def torchrun_arguments(plan: LaunchPlan) -> list[str]:
    rendezvous = plan.rendezvous
    words = [
        *("--nnodes", plan.nodes),
        *("--nproc_per_node", str(plan.local_processes)),
        # Otherwise torch would read it from PET_RDZV_ENDPOINT.
        *("--rdzv_endpoint", f"{plan.address}:{plan.port}"),
        *("--rdzv_backend", rendezvous.rdzv_backend),
        *("--max_restarts", str(rendezvous.max_restarts)),
        *("--monitor_interval", str(rendezvous.monitor_interval)),
        *("--role", rendezvous.role),
        *("--tee", rendezvous.tee),
    ]
    if rendezvous.rdzv_backend == "static":
        words += ["--node_rank", str(plan.machine)]
    if rendezvous.rdzv_conf:
        words += ["--rdzv_conf", rendezvous.rdzv_conf]
    if rendezvous.log_dir:
        words += ["--log_dir", rendezvous.log_dir]
    return [*words, *plan.target.words]


def accelerate_command(settings: Settings, target: Target, *excluded: str) -> list[str]:
    """Returns an `accelerate launch` command with the same settings, except those `excluded`."""
    excluded = (*excluded, "monitor")  # the command has no terminal
    if settings.source("num_cpu_threads_per_process") not in (FLAG, ENVIRONMENT):
        excluded = (*excluded, "num_cpu_threads_per_process")
    return [*LAUNCH_COMMAND, *flags.words(settings, *excluded), *target.words]


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """Returns a search path with one folder added.

    Args:
        env_var_name: variable with the search path.
        path_to_add: folder to append.

    Returns:
        The new value. The variable is not changed.
    """
    present = [path for path in environ.current().get(env_var_name, "").split(":") if path]
    return ":".join([*present, str(path_to_add)])


LIFE = "life"
"""Key in the store of a run of the number of times that all replica groups have lost their state."""


def committed_key(replica: int) -> str:
    """Returns the key in the store of a run of the number of steps that a replica group has committed.

    It is absent before the first step of the processes that run now.
    """
    return f"committed/{replica}"


FIRST_STEP = "first step"
"""Name of the barrier before the first step, at which replica groups without state wait for each other."""


def arrived_key(life: int, barrier: str, replica: int) -> str:
    """Returns the key in the store of a run that is set when a replica group has arrived at a barrier."""
    return f"{life}/arrived/{barrier}/{replica}"


def has_steps(store: Store, replicas: int) -> bool:
    """Returns whether a replica group that has not been started again since has committed a step."""
    return any(store.check([committed_key(replica)]) for replica in range(replicas))


def read_life(store: Store) -> int:
    """Returns the number of times that all replica groups have lost their state."""
    return int(store.get(LIFE)) if store.check([LIFE]) else 0


def begun_key(life: int) -> str:
    """Returns the key in the store of a run that is set when a step of this life has been committed."""
    return f"begun/{life}"


RECORDED = ("local", "elastic")  # launchers that start the script directly


def record_failures(plan: LaunchPlan, folder: Path) -> LaunchPlan:
    """Returns a plan whose processes record their errors in a folder, or the same plan if unsupported."""
    if plan.launcher not in RECORDED or plan.target.kind == "program":
        return plan
    prefix = ("-m",) if plan.target.kind == "module" else ()
    target = Target("script", str(ENTRY), (*prefix, plan.target.name, *plan.target.arguments))
    variables = environ.current()
    # A replica group has the identifier of the launcher of all groups.
    run_id = (run_id_of(variables) if environ.REPLICA in variables else None) or new_run_id()
    added = {FOLDER_VARIABLE: str(folder), environ.RUN_ID: run_id, environ.PARENT: str(os.getpid())}
    if plan.rendezvous.log_dir or plan.rendezvous.tee != "0":
        added[VERBOSE_VARIABLE] = "1"
    return replace(plan, target=target, environment={**plan.environment, **added})


def folder_of(plan: LaunchPlan) -> Path | None:
    """Returns the folder of the recorded errors of a plan, or None."""
    folder = plan.environment.get(FOLDER_VARIABLE)
    return None if folder is None else Path(folder)
