"""Launchers that read a host file, for the implementations of mpirun and for DeepSpeed on several nodes."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from accelerate.base import ConfigurationError, environ, wrong_value
from accelerate.launch.backends.base import Command, Launcher
from accelerate.launch.children import run_child
from accelerate.launch.machine import Machine
from accelerate.launch.plan import LaunchPlan, env_var_path_add, local_command
from accelerate.settings import Settings
from accelerate.settings.sections import DeepSpeedSection, LaunchSection, MpirunSection, RendezvousSection

LOOPBACK = ("localhost", "127.0.0.1", "::1")
INHERITED = ("PYTHONPATH",)
"""Variables of this process that all processes need, because Open MPI exports only the listed ones."""


@dataclass(frozen=True)
class Dialect:
    """Options of one implementation of mpirun."""

    name: str
    marks: tuple[str, ...]  # lowercase texts of `mpirun --version`, any of which identifies it
    hostfile: str = "-f"
    per_machine: tuple[str, ...] = ("-ppn", "{}")  # number of processes on each node
    variable: tuple[str, ...] = ("-genv", "{name}", "{text}")  # exports a variable
    as_root: tuple[str, ...] = ()
    binding: tuple[str, ...] = ()  # lets each process use several cores, if that is not the default


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
"""In the order they are tried, because Intel MPI and MVAPICH may print the name of MPICH as well."""


def dialect_of(version: str) -> Dialect:
    """Returns the implementation of mpirun from the output of `mpirun --version`.

    Raises an error if it is unknown.
    """
    text = version.lower()
    dialect = next((dialect for dialect in DIALECTS if any(mark in text for mark in dialect.marks)), None)
    if dialect is None:
        known = ", ".join(dialect.name for dialect in DIALECTS)
        first_line = version.strip().split("\n")[0]
        raise ConfigurationError(f"mpirun --version says {first_line!r}. Use an mpirun of {known}.")
    return dialect


def hosts_of(text: str) -> list[str]:
    """Returns the unique hosts of a host file.

    Lines are ``name``, ``name slots=4`` or ``name:4``, and ``#`` starts a comment. IPv6 addresses have more
    than one colon.
    """
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return list(dict.fromkeys(re.sub(r"^([^:]+):\d+$", r"\1", line[0]) for line in lines if line))


class MpiLauncher(Launcher):
    """Launcher that runs the target under mpirun, whose workers read their ranks from variables of MPI."""

    called_once = True

    def amend(self, settings: Settings, machine: Machine) -> Settings:
        """Sets the number of nodes and the address of the first one from the host file."""
        path = str(settings[MpirunSection].mpirun_hostfile)
        hosts = hosts_of(machine.read_file(path))
        if not hosts:
            raise wrong_value("--mpirun_hostfile", path, "it names no host", "Write one host in each line")
        if not settings.given("num_machines"):
            settings = settings.replaced(path, num_machines=len(hosts))
        several = settings[LaunchSection].num_machines > 1
        if settings[RendezvousSection].main_process_ip or not several:
            return settings
        if hosts[0] in LOOPBACK:
            fix = "Pass the address by which the others reach this machine"
            raise wrong_value("--main_process_ip", None, f"the first host of {path} is {hosts[0]}", fix)
        return settings.replaced(path, main_process_ip=hosts[0])

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> Command:
        dialect = dialect_of(machine.mpi_version())
        present = machine.environ or {}
        inherited = {name: present[name] for name in INHERITED if name in present}
        variables = {**inherited, **rendezvous_environment(plan)}
        words = [
            "mpirun",
            *(dialect.as_root if machine.is_root else ()),
            *(dialect.hostfile, str(settings[MpirunSection].mpirun_hostfile)),
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
    """Returns the variables of a plan with the address and the port of the rendezvous."""
    return {**plan.environment, "MASTER_ADDR": plan.address, "MASTER_PORT": str(plan.port)}


RUNNER = "deepspeed.launcher.runner"
NO_SSH = "nossh"
KNOWS_ADDRESS = ("pdsh", "slurm")
"""Launchers that query the address of the first host, or set it in the workers."""
ALL_SLOTS = ("openmpi", "mpich", "mvapich")
"""Launchers that use every slot of the host file, without counts and filters."""

SLOTS = re.compile(r"^[^#\s]\S*\s+slots=(\d{1,9})\b", re.MULTILINE)
FILE_VARIABLE = "DS_ENV_FILE"
USUAL_FILE = ".deepspeed_env"


class DeepSpeedLauncher(Launcher):
    """Launcher that runs the target under `deepspeed` with pdsh, MPI, SLURM, or none (nossh)."""

    finds_address = True

    def amend(self, settings: Settings, machine: Machine) -> Settings:
        """Checks the requirements of each launcher, and counts the hosts of the host file."""
        section, rendezvous = settings[DeepSpeedSection], settings[RendezvousSection]
        launcher = section.deepspeed_multinode_launcher
        if section.deepspeed_inclusion_filter and section.deepspeed_exclusion_filter:
            raise ConfigurationError(
                "--deepspeed_inclusion_filter and --deepspeed_exclusion_filter exclude each other. "
                "Keep one of them."
            )
        filters = section.deepspeed_inclusion_filter or section.deepspeed_exclusion_filter
        if filters and launcher in ALL_SLOTS:
            reason = f"the launcher {launcher} uses every slot of the host file"
            raise wrong_value("filter", filters, reason, "Leave the hosts out of the host file instead")
        if section.deepspeed_hostfile:
            settings = _count(settings, section, machine.read_file(section.deepspeed_hostfile))
        if launcher not in KNOWS_ADDRESS and not rendezvous.main_process_ip:
            fix = "Pass the address of the machine of rank 0"
            raise wrong_value("--main_process_ip", None, f"the launcher {launcher} needs it", fix)
        if launcher != NO_SSH and rendezvous.machine_rank:
            fix = "Call it once, on one machine, without --machine_rank"
            reason = f"the launcher {launcher} starts all machines"
            raise wrong_value("--machine_rank", rendezvous.machine_rank, reason, fix)
        return settings

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> Command:
        section = settings[DeepSpeedSection]
        launcher, address = str(section.deepspeed_multinode_launcher), plan.rendezvous.main_process_ip
        no_ssh = ("--no_ssh", "--node_rank", str(plan.machine))
        words = [
            *(sys.executable, "-m", RUNNER),
            *(("--hostfile", section.deepspeed_hostfile) if section.deepspeed_hostfile else ()),
            *(no_ssh if launcher == NO_SSH else ("--launcher", launcher)),
            *_devices(section, plan),
            *(("--master_addr", address) if address else ()),
            *("--master_port", str(plan.port)),
            "--no_local_rank",
            *plan.target.words,
        ]
        return Command(tuple(words))

    def run(self, plan: LaunchPlan) -> int:
        workers = rendezvous_environment(plan) if plan.rendezvous.main_process_ip else plan.environment
        variables = {**workers, "PYTHONPATH": env_var_path_add("PYTHONPATH", str(Path.cwd()))}
        with variable_file(variables) as path:
            return run_child(self.command(plan), {**variables, FILE_VARIABLE: str(path)}).code


def _count(settings: Settings, section: DeepSpeedSection, text: str) -> Settings:
    """Sets the number of nodes, and for some launchers that of processes, from the host file."""
    path = str(section.deepspeed_hostfile)
    if not settings.given("num_machines"):
        settings = settings.replaced(path, num_machines=max(1, len(hosts_of(text))))
    launcher = section.deepspeed_multinode_launcher
    slots = sum(int(count) for count in SLOTS.findall(text))
    total = settings[LaunchSection].num_processes
    if launcher not in ALL_SLOTS or not slots or total == slots:
        return settings
    if total not in (None, -1):
        reason = f"the launcher {launcher} uses every slot of {path}, and these are {slots}"
        raise wrong_value("--num_processes", total, reason, "Correct the host file, or leave it out")
    return settings.replaced(path, num_processes=slots)


def _devices(section: DeepSpeedSection, plan: LaunchPlan) -> list[str]:
    """Returns the arguments that select devices by a filter, or the first ones of each node."""
    if section.deepspeed_multinode_launcher in ALL_SLOTS:
        return []
    if section.deepspeed_inclusion_filter:
        return ["--include", section.deepspeed_inclusion_filter]
    if section.deepspeed_exclusion_filter:
        return ["--exclude", section.deepspeed_exclusion_filter]
    return ["--num_nodes", str(plan.machines), "--num_gpus", str(plan.local_processes)]


@contextmanager
def variable_file(variables: Mapping[str, str]) -> Iterator[Path]:
    """Writes a file with the variables of the user and those for other nodes during the block."""
    name = environ.current().get(FILE_VARIABLE, USUAL_FILE)
    # the files that DeepSpeed reads
    paths = dict.fromkeys(folder / name for folder in (Path.home(), Path.cwd()))
    texts = (path.read_text(encoding="utf-8") for path in paths if path.is_file())
    user_lines = [f"{line}\n" for text in texts for line in text.splitlines() if line.strip()]
    with tempfile.TemporaryDirectory(prefix="accelerate-") as folder:
        path = Path(folder, "variables")
        lines = [*user_lines, *environ.convert_dict_to_env_variables(variables)]
        path.write_text("".join(lines), encoding="utf-8")
        yield path
