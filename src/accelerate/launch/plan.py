"""LaunchPlan: everything decided, nothing done."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

from accelerate.base import ConfigurationError
from accelerate.settings.sections import RendezvousSection

Detail = TypeVar("Detail")
Kind: TypeAlias = Literal["script", "module", "program"]


@dataclass(frozen=True)
class Target:
    """What runs in each process.

    Attributes:
        kind: a Python script, a Python module (``-m``), or a program of any kind.
        name: its path or name.
        arguments: its own arguments, untouched.
    """

    kind: Kind
    name: str
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, args: argparse.Namespace) -> Target:
        """What a parsed command line names.

        Args:
            args: has ``module``, ``no_python``, ``training_script`` and ``training_script_args``.

        Raises:
            ConfigurationError: it is named as a module and as a program.
        """
        if args.module and args.no_python:
            raise ConfigurationError("--module and --no_python exclude each other. Keep one of them.")
        kind: Kind = "module" if args.module else "program" if args.no_python else "script"
        return cls(kind, args.training_script, tuple(args.training_script_args))


@dataclass(frozen=True)
class Rendezvous:
    """How the processes meet.

    Attributes:
        backend: "static", "c10d", or another one that torch knows.
        address: the machine of rank 0.
        port: its port.
        configuration: further settings, ``key=value,...``.
        restarts: how often a failed group is started again.
        interval: seconds between two looks at the processes.
        role: their name in logs.
        tee: which streams go to files and to the terminal.
        log_dir: folder of those files.
    """

    backend: str = "static"
    address: str = "127.0.0.1"
    port: int = 29500
    configuration: str = ""
    restarts: int = 0
    interval: float = 0.1
    role: str = "default"
    tee: str = "0"
    log_dir: str | None = None

    @classmethod
    def of(cls, wanted: RendezvousSection, port: int) -> Rendezvous:
        """The meeting that the settings describe, at a port that was chosen."""
        return cls(
            backend=wanted.rdzv_backend,
            address=wanted.main_process_ip or "127.0.0.1",
            port=port,
            configuration=wanted.rdzv_conf,
            restarts=wanted.max_restarts,
            interval=wanted.monitor_interval,
            role=wanted.role,
            tee=wanted.tee,
            log_dir=wanted.log_dir,
        )


@dataclass(frozen=True)
class LaunchPlan:
    """What to start, where and with which environment.

    Attributes:
        launcher: key of `launch.backends.base.LAUNCHERS`.
        target: what runs in each process.
        processes: over all machines.
        shares: processes on each machine, where these differ; empty where they do not.
        machines: how many.
        machine: which one this is, from 0.
        rendezvous: how the processes meet.
        environment: only the variables that are added.
        notes: what was assumed or changed, to be said once.
        details: what the launcher needs beyond this; see `detail`.
    """

    launcher: str
    target: Target
    processes: int = 1
    machines: int = 1
    machine: int = 0
    rendezvous: Rendezvous = field(default_factory=Rendezvous)
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    details: object = None
    shares: tuple[int, ...] = ()

    @property
    def local_processes(self) -> int:
        """Processes on this machine."""
        return self.shares[self.machine] if self.shares else self.processes // self.machines

    @property
    def ranks(self) -> str:
        """The ranks of this machine, in words."""
        first = sum(self.shares[: self.machine]) if self.shares else self.local_processes * self.machine
        last = first + self.local_processes - 1
        return f"rank {first}" if first == last else f"ranks {first} to {last}"

    @property
    def layout(self) -> str:
        """How the processes are shared out over several machines, in words."""
        if self.shares:
            each = ", ".join(map(str, self.shares))
            return f"{each} on the {self.machines} machines"
        return f"{self.local_processes} on each of {self.machines} machines"

    def detail(self, kind: type[Detail]) -> Detail:
        """The launcher's own part of the plan.

        Args:
            kind: its class.

        Raises:
            TypeError: another launcher made this plan.
        """
        if not isinstance(self.details, kind):
            raise TypeError(f"a plan of the {self.launcher} launcher holds no {kind.__name__}")
        return self.details
