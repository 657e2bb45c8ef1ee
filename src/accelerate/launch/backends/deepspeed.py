"""DeepSpeed's own launchers for several machines: pdsh, three kinds of MPI, SLURM, and none (nossh)."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from accelerate.base import ConfigurationError, environ, wrong_value
from accelerate.launch.backends.base import Launcher
from accelerate.launch.backends.mpi import hosts_of, meeting_environment
from accelerate.launch.children import run_child
from accelerate.launch.machine import Machine
from accelerate.launch.plan import LaunchPlan
from accelerate.settings import Settings
from accelerate.settings.sections import DeepSpeedSection

RUNNER = "deepspeed.launcher.runner"
NO_SSH = "nossh"
KNOWS_ADDRESS = ("pdsh", "slurm")
"""Launchers that ask the first host for its address, or tell the workers themselves."""
ALL_SLOTS = ("openmpi", "mpich", "mvapich")
"""Launchers that use every slot of the host file, and take neither counts nor filters."""

SLOTS = re.compile(r"^[^#\s]\S*\s+slots=(\d{1,9})\b", re.MULTILINE)
FILE_VARIABLE = "DS_ENV_FILE"
USUAL_FILE = ".deepspeed_env"


@dataclass(frozen=True)
class DeepSpeedDetails:
    """What DeepSpeed's launcher is told beyond the plan.

    Attributes:
        launcher: its name for the way of starting.
        hostfile: path; ``None`` leaves it at DeepSpeed's usual place.
        include: hosts and devices to use.
        exclude: hosts and devices to leave out.
        address: of machine 0; ``None`` lets DeepSpeed ask.
    """

    launcher: str
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    address: str | None = None


class DeepSpeedLauncher(Launcher):
    """Runs the target under ``deepspeed``, which reaches the other machines by itself."""

    finds_address = True

    def amend(self, settings: Settings, machine: Machine) -> Settings:
        """Check what each of the launchers needs, and count the machines of the host file."""
        wanted = settings[DeepSpeedSection]
        values = settings.values
        _check_filters(wanted)
        if wanted.deepspeed_hostfile:
            text = machine.read_file(wanted.deepspeed_hostfile)
            settings = _count(settings, wanted, wanted.deepspeed_hostfile, text)
        launcher = wanted.deepspeed_multinode_launcher
        if launcher not in KNOWS_ADDRESS and not values["main_process_ip"]:
            fix = "Pass the address of the machine of rank 0"
            raise wrong_value("--main_process_ip", None, f"the launcher {launcher} needs it", fix)
        if launcher != NO_SSH and values["machine_rank"]:
            fix = "Call it once, on one machine, without --machine_rank"
            reason = f"the launcher {launcher} starts all machines"
            raise wrong_value("--machine_rank", values["machine_rank"], reason, fix)
        return settings

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> DeepSpeedDetails:
        """Read DeepSpeed's part of the settings."""
        wanted = settings[DeepSpeedSection]
        return DeepSpeedDetails(
            launcher=str(wanted.deepspeed_multinode_launcher),
            hostfile=wanted.deepspeed_hostfile,
            include=wanted.deepspeed_inclusion_filter,
            exclude=wanted.deepspeed_exclusion_filter,
            address=settings.values["main_process_ip"],
        )

    def command(self, plan: LaunchPlan) -> list[str]:
        """The words of DeepSpeed's launcher."""
        told = plan.detail(DeepSpeedDetails)
        kind = {"script": [], "module": ["--module"], "program": ["--no_python"]}[plan.target.kind]
        return [
            *(sys.executable, "-m", RUNNER),
            *(("--hostfile", told.hostfile) if told.hostfile else ()),
            *_starter(told, plan),
            *_share(told, plan),
            *(("--master_addr", told.address) if told.address else ()),
            *("--master_port", str(plan.rendezvous.port)),
            "--no_local_rank",
            *kind,
            plan.target.name,
            *plan.target.arguments,
        ]

    def run(self, plan: LaunchPlan) -> int:
        """Call DeepSpeed's launcher, and return its exit code."""
        told = plan.detail(DeepSpeedDetails)
        variables = meeting_environment(plan) if told.address else dict(plan.environment)
        variables["PYTHONPATH"] = python_path()
        with variable_file(variables) as path:
            return run_child(self.command(plan), {**variables, FILE_VARIABLE: str(path)})


def python_path() -> str:
    """The search path of the workers: the one of this process, and the folder of now."""
    present = environ.current().get("PYTHONPATH")
    return f"{present}:{Path.cwd()}" if present else str(Path.cwd())


def _check_filters(wanted: DeepSpeedSection) -> None:
    if wanted.deepspeed_inclusion_filter and wanted.deepspeed_exclusion_filter:
        raise ConfigurationError(
            "--deepspeed_inclusion_filter and --deepspeed_exclusion_filter exclude each other. "
            "Keep one of them."
        )

    filters = wanted.deepspeed_inclusion_filter or wanted.deepspeed_exclusion_filter
    if filters and wanted.deepspeed_multinode_launcher in ALL_SLOTS:
        reason = f"the launcher {wanted.deepspeed_multinode_launcher} uses every slot of the host file"
        raise wrong_value("filter", filters, reason, "Leave the hosts out of the host file instead")


def _count(settings: Settings, wanted: DeepSpeedSection, path: str, text: str) -> Settings:
    """Take the number of machines, and for some launchers of processes, from the host file."""
    if not settings.given("num_machines"):
        settings = settings.replaced(path, num_machines=max(1, len(hosts_of(text))))
    launcher = wanted.deepspeed_multinode_launcher
    slots = sum(int(count) for count in SLOTS.findall(text))
    total = settings.values["num_processes"]
    if launcher not in ALL_SLOTS or not slots or total == slots:
        return settings
    if total not in (None, -1):
        reason = f"the launcher {launcher} uses every slot of {path}, and these are {slots}"
        raise wrong_value("--num_processes", total, reason, "Correct the host file, or leave it out")
    return settings.replaced(path, num_processes=slots)


def _starter(told: DeepSpeedDetails, plan: LaunchPlan) -> list[str]:
    if told.launcher == NO_SSH:
        return ["--no_ssh", "--node_rank", str(plan.machine)]
    return ["--launcher", told.launcher]


def _share(told: DeepSpeedDetails, plan: LaunchPlan) -> list[str]:
    """A filter says which devices are used; otherwise it is the first ones of each machine."""
    if told.launcher in ALL_SLOTS:
        return []
    if told.include:
        return ["--include", told.include]
    if told.exclude:
        return ["--exclude", told.exclude]
    return ["--num_nodes", str(plan.machines), "--num_gpus", str(plan.local_processes)]


@contextmanager
def variable_file(variables: Mapping[str, str]) -> Iterator[Path]:
    """A file of variables for the other machines, with those of the user's own file, while the block runs."""
    lines = [*_own_lines(), *environ.convert_dict_to_env_variables(variables)]
    with tempfile.TemporaryDirectory(prefix="accelerate-") as folder:
        path = Path(folder, "variables")
        path.write_text("".join(lines), encoding="utf-8")
        yield path


def _own_lines() -> list[str]:
    """Lines of the files that DeepSpeed would have read."""
    name = environ.current().get(FILE_VARIABLE, USUAL_FILE)
    places = dict.fromkeys(folder / name for folder in (Path.home(), Path.cwd()))
    texts = (place.read_text(encoding="utf-8") for place in places if place.is_file())
    return [f"{line}\n" for text in texts for line in text.splitlines() if line.strip()]
