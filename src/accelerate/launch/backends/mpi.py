"""Processes that mpirun starts, in its dialects; the workers find their ranks in the variables of MPI."""

from __future__ import annotations

import re
from dataclasses import dataclass

from accelerate.base import ConfigurationError, wrong_value
from accelerate.launch.backends.base import Command, Launcher
from accelerate.launch.machine import Machine
from accelerate.launch.plan import LaunchPlan, local_command
from accelerate.settings import Settings

LOOPBACK = ("localhost", "127.0.0.1", "::1")
INHERITED = ("PYTHONPATH",)
"""Variables of this process that the others need too; Open MPI exports only those that it is given."""


@dataclass(frozen=True)
class Dialect:
    """The spelling of options in one implementation of mpirun.

    Attributes:
        marks: texts of ``mpirun --version``, in small letters, any of which names it.
        per_machine: the words for processes on each machine, with ``{}`` for the count.
        variable: the words that export a variable, with ``{name}`` and ``{text}``.
        binding: words that let each process use several cores, where that is not the default.
    """

    name: str
    marks: tuple[str, ...]
    hostfile: str = "-f"
    per_machine: tuple[str, ...] = ("-ppn", "{}")
    variable: tuple[str, ...] = ("-genv", "{name}", "{text}")
    as_root: tuple[str, ...] = ()
    binding: tuple[str, ...] = ()


DIALECTS = (
    Dialect("Intel MPI", ("intel(r) mpi",)),
    Dialect(
        "Open MPI",
        ("open mpi", "openrte", "open-rte", "prrte"),
        hostfile="--hostfile",
        per_machine=("--map-by", "ppr:{}:node"),
        variable=("-x", "{name}={text}"),
        as_root=("--allow-run-as-root",),
        binding=("--bind-to", "none"),
    ),
    Dialect("MVAPICH", ("mvapich",), binding=("-genv", "MV2_ENABLE_AFFINITY", "0")),
    Dialect("MPICH", ("hydra", "mpich"), binding=("-bind-to", "none")),
)
"""In the order they are tried: Intel's and MVAPICH's mpirun come from MPICH and may name it as well."""


def dialect_of(version: str) -> Dialect:
    """Recognize a kind of mpirun by what ``mpirun --version`` prints; an error where it is unknown."""
    text = version.lower()
    dialect = next((dialect for dialect in DIALECTS if any(mark in text for mark in dialect.marks)), None)
    if dialect is None:
        known = ", ".join(dialect.name for dialect in DIALECTS)
        first = version.strip().split("\n")[0]
        raise ConfigurationError(f"mpirun --version says {first!r}. Use an mpirun of {known}.")
    return dialect


def hosts_of(text: str) -> list[str]:
    """The hosts of a host file, each once: ``name``, ``name slots=4``, ``name:4``; ``#`` starts a comment."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return list(dict.fromkeys(re.sub(r":\d+$", "", line[0]) for line in lines if line))


class MpiLauncher(Launcher):
    """Runs the target under mpirun, on the machines of a host file."""

    called_once = True

    def amend(self, settings: Settings, machine: Machine) -> Settings:
        """Take machines, and the address of the first one, from the host file."""
        path = settings.values["mpirun_hostfile"]
        hosts = hosts_of(machine.read_file(path))
        if not hosts:
            raise wrong_value("--mpirun_hostfile", path, "it names no host", "Write one host in each line")
        if not settings.given("num_machines"):
            settings = settings.replaced(path, num_machines=len(hosts))
        several = settings.values["num_machines"] > 1
        if settings.values["main_process_ip"] or not several:
            return settings
        if hosts[0] in LOOPBACK:
            fix = "Pass the address by which the others reach this machine"
            raise wrong_value("--main_process_ip", None, f"the first host of {path} is {hosts[0]}", fix)
        return settings.replaced(path, main_process_ip=hosts[0])

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> Command:
        """Write the words of this machine's mpirun, in its dialect."""
        dialect = dialect_of(machine.mpi_version())
        present = machine.environ or {}
        inherited = {name: present[name] for name in INHERITED if name in present}
        variables = {**inherited, **rendezvous_environment(plan)}
        words = [
            "mpirun",
            *(dialect.as_root if machine.is_root else ()),
            *(dialect.hostfile, settings.values["mpirun_hostfile"]),
            *("-n", str(plan.processes)),
            *(word.format(plan.local_processes) for word in dialect.per_machine),
            *dialect.binding,
            *(
                word.format(name=name, text=text)
                for name, text in sorted(variables.items())
                for word in dialect.variable
            ),
            *local_command(plan.target),
        ]
        return Command(tuple(words))


def rendezvous_environment(plan: LaunchPlan) -> dict[str, str]:
    """The plan's variables, with the address and the port of the rendezvous."""
    return {**plan.environment, "MASTER_ADDR": plan.address, "MASTER_PORT": str(plan.port)}
