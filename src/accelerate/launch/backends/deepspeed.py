"""DeepSpeed's own launchers for several machines: pdsh, three kinds of MPI, SLURM, and none (nossh)."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from accelerate.base import ConfigurationError, environ, wrong_value
from accelerate.launch.backends.base import Command, Launcher
from accelerate.launch.backends.mpi import hosts_of, rendezvous_environment
from accelerate.launch.children import run_child
from accelerate.launch.machine import Machine
from accelerate.launch.plan import LaunchPlan, env_var_path_add
from accelerate.settings import Settings
from accelerate.settings.sections import DeepSpeedSection

RUNNER = "deepspeed.launcher.runner"
NO_SSH = "nossh"
KNOWS_ADDRESS = ("pdsh", "slurm")
"""Launchers that ask the first host for its address, or set it in the workers themselves."""
ALL_SLOTS = ("openmpi", "mpich", "mvapich")
"""Launchers that use every slot of the host file, and take neither counts nor filters."""

SLOTS = re.compile(r"^[^#\s]\S*\s+slots=(\d{1,9})\b", re.MULTILINE)
FILE_VARIABLE = "DS_ENV_FILE"
USUAL_FILE = ".deepspeed_env"


class DeepSpeedLauncher(Launcher):
    """Runs the target under ``deepspeed``, which reaches the other machines by itself."""

    finds_address = True

    def amend(self, settings: Settings, machine: Machine) -> Settings:
        """Check what each of the launchers needs, and count the machines of the host file."""
        section = settings[DeepSpeedSection]
        values = settings.values
        _check_filters(section)
        if section.deepspeed_hostfile:
            settings = _count(settings, section, machine.read_file(section.deepspeed_hostfile))
        launcher = section.deepspeed_multinode_launcher
        if launcher not in KNOWS_ADDRESS and not values["main_process_ip"]:
            fix = "Pass the address of the machine of rank 0"
            raise wrong_value("--main_process_ip", None, f"the launcher {launcher} needs it", fix)
        if launcher != NO_SSH and values["machine_rank"]:
            fix = "Call it once, on one machine, without --machine_rank"
            reason = f"the launcher {launcher} starts all machines"
            raise wrong_value("--machine_rank", values["machine_rank"], reason, fix)
        return settings

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> Command:
        """Write the words of DeepSpeed's launcher."""
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
        """Call DeepSpeed's launcher, and return its exit code."""
        workers = rendezvous_environment(plan) if plan.rendezvous.main_process_ip else plan.environment
        variables = {**workers, "PYTHONPATH": env_var_path_add("PYTHONPATH", str(Path.cwd()))}
        with variable_file(variables) as path:
            return run_child(self.command(plan), {**variables, FILE_VARIABLE: str(path)}).code


def _check_filters(section: DeepSpeedSection) -> None:
    if section.deepspeed_inclusion_filter and section.deepspeed_exclusion_filter:
        raise ConfigurationError(
            "--deepspeed_inclusion_filter and --deepspeed_exclusion_filter exclude each other. "
            "Keep one of them."
        )
    filters = section.deepspeed_inclusion_filter or section.deepspeed_exclusion_filter
    if filters and section.deepspeed_multinode_launcher in ALL_SLOTS:
        reason = f"the launcher {section.deepspeed_multinode_launcher} uses every slot of the host file"
        raise wrong_value("filter", filters, reason, "Leave the hosts out of the host file instead")


def _count(settings: Settings, section: DeepSpeedSection, text: str) -> Settings:
    """Take the number of machines, and for some launchers of processes, from the host file."""
    path = str(section.deepspeed_hostfile)
    if not settings.given("num_machines"):
        settings = settings.replaced(path, num_machines=max(1, len(hosts_of(text))))
    launcher = section.deepspeed_multinode_launcher
    slots = sum(int(count) for count in SLOTS.findall(text))
    total = settings.values["num_processes"]
    if launcher not in ALL_SLOTS or not slots or total == slots:
        return settings
    if total not in (None, -1):
        reason = f"the launcher {launcher} uses every slot of {path}, and these are {slots}"
        raise wrong_value("--num_processes", total, reason, "Correct the host file, or leave it out")
    return settings.replaced(path, num_processes=slots)


def _devices(section: DeepSpeedSection, plan: LaunchPlan) -> list[str]:
    """A filter says which devices are used; without one it is the first ones of each machine."""
    if section.deepspeed_multinode_launcher in ALL_SLOTS:
        return []
    if section.deepspeed_inclusion_filter:
        return ["--include", section.deepspeed_inclusion_filter]
    if section.deepspeed_exclusion_filter:
        return ["--exclude", section.deepspeed_exclusion_filter]
    return ["--num_nodes", str(plan.machines), "--num_gpus", str(plan.local_processes)]


@contextmanager
def variable_file(variables: Mapping[str, str]) -> Iterator[Path]:
    """A file of variables for the other machines, with those of the user's own file, while the block runs."""
    name = environ.current().get(FILE_VARIABLE, USUAL_FILE)
    paths = dict.fromkeys(folder / name for folder in (Path.home(), Path.cwd()))  # those that DeepSpeed reads
    texts = (path.read_text(encoding="utf-8") for path in paths if path.is_file())
    own_lines = [f"{line}\n" for text in texts for line in text.splitlines() if line.strip()]
    with tempfile.TemporaryDirectory(prefix="accelerate-") as folder:
        path = Path(folder, "variables")
        lines = [*own_lines, *environ.convert_dict_to_env_variables(variables)]
        path.write_text("".join(lines), encoding="utf-8")
        yield path
