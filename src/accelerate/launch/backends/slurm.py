"""Launchers that start one agent on each node of a SLURM allocation, or submit a batch script."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from signal import SIGINT, SIGTERM

from accelerate.base import ConfigurationError, LaunchError, environ, slurm, whole_number, wrong_value
from accelerate.launch.backends.base import Command, Launcher
from accelerate.launch.children import run_child
from accelerate.launch.layout import where
from accelerate.launch.machine import Machine, run_key
from accelerate.launch.plan import LaunchPlan, accelerate_command
from accelerate.settings import ENVIRONMENT, FLAG, Settings
from accelerate.settings.sections import LaunchSection, RendezvousSection, SlurmSection

ALLOCATION = "SLURM allocation"
SLURM_OPTIONS = ("slurm", "submit", "slurm_options", "slurm_script")
DECIDED_BY_AGENT = ("machine_rank", "gpu_ids")
"""Options that an agent decides on its node, where SLURM has assigned the devices."""


class SlurmLauncher(Launcher):
    """Launcher that starts one agent on each node of the allocation with srun."""

    called_once = True

    def amend(self, settings: Settings, machine: Machine) -> Settings:
        """Sets nodes, address, port and number of processes from the allocation."""
        facts = machine.environ or {}
        nodes = _read_count(facts, "SLURM_JOB_NUM_NODES", "SLURM_NNODES") or 1
        values: dict[str, object] = {}
        launch, rendezvous = settings[LaunchSection], settings[RendezvousSection]
        machines = launch.num_machines
        if settings.source("num_machines") not in (FLAG, ENVIRONMENT):
            machines = values["num_machines"] = nodes
        elif machines > nodes:
            fix = "Leave it out, or ask SLURM for more"
            raise wrong_value("--num_machines", machines, f"the allocation has {nodes}", fix)
        if rendezvous.main_process_ip is None:
            values["main_process_ip"] = slurm.first_host(facts.get("SLURM_JOB_NODELIST", ""))
        if rendezvous.main_process_port is None:
            values["main_process_port"] = slurm.port_of_step(facts)
        if launch.num_processes in (None, -1):  # one for each device, otherwise one for each task
            local = _read_count(facts, "SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE") or machine.devices
            values["num_processes"] = machines * local
        return settings.replaced(ALLOCATION, **values)

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> Command:
        """Returns the srun command, in which each agent reads its node rank in a shell.

        An agent is this command for one node with all chosen values.
        """
        rank = '"$SLURM_NODEID"' if plan.machines > 1 else "0"
        words = accelerate_command(settings, plan.target, *SLURM_OPTIONS, *DECIDED_BY_AGENT)
        end = len(words) - len(plan.target.words)
        agent = f"exec {shlex.join(words[:end])} --no_slurm --machine_rank {rank} {shlex.join(words[end:])}"
        cores = slurm.per_node((machine.environ or {}).get("SLURM_JOB_CPUS_PER_NODE", ""))
        srun = [
            "srun",
            *("--nodes", str(plan.machines), "--ntasks", str(plan.machines), "--ntasks-per-node", "1"),
            *(("--cpus-per-task", str(min(cores))) if cores else ()),
            "--kill-on-bad-exit=1",
            *_options(settings),
            *("sh", "-c", agent),
        ]
        return Command(tuple(srun))

    def run(self, plan: LaunchPlan) -> int:
        """Runs srun and returns its exit code.

        srun only reports at the first Ctrl-C, so it receives the signal that ends its tasks.
        """
        variables = {**plan.environment, **run_key(environ.current())}  # srun passes on the environment
        return run_child(self.command(plan), variables, {SIGINT: SIGTERM}).code


def _options(settings: Settings) -> list[str]:
    text = settings[SlurmSection].slurm_options
    try:
        return shlex.split(text)
    except ValueError as error:
        reason = f"a shell cannot split it into words ({error})"
        raise wrong_value(where(settings, "slurm_options"), text, reason, "Close the quotes") from None


def _read_count(facts: Mapping[str, str], *names: str) -> int | None:
    """Returns the first of these variables that is a number of at least 1."""
    for name in names:
        try:
            number = whole_number(facts.get(name, "0"))
        except ValueError:
            continue
        if number > 0:
            return number
    return None


class SbatchLauncher(Launcher):
    """Launcher that writes and submits a batch script, which launches in its allocation."""

    counts_remotely = True

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> Command:
        """Returns the script, which runs this command again without the submission."""
        name = Path(plan.target.name).stem
        # Options of the user come last, because the last one takes precedence.
        defaults = [
            f"--job-name={shlex.quote(name)}",
            f"--nodes={plan.machines}",
            "--ntasks-per-node=1",
            "--output=%x-%j.out",
        ]
        words = accelerate_command(settings, plan.target, *SLURM_OPTIONS[1:], "num_machines")
        lines = [
            "#!/bin/sh",
            *(f"#SBATCH {option}" for option in [*defaults, *_join_values(_options(settings))]),
            f"exec {shlex.join(words)}",
        ]
        path = str(Path(settings[SlurmSection].slurm_script or f"{name}.sbatch"))
        return Command(("sbatch", "--parsable", path), files={path: "\n".join(lines) + "\n"})

    def run(self, plan: LaunchPlan) -> int:
        """Writes and submits the script, and prints its path and the job number."""
        ((path, text),) = self.files(plan).items()
        variables = {**environ.current(), **plan.environment}
        try:
            Path(path).write_text(text, encoding="utf-8")
            submitted = subprocess.run(
                self.command(plan), env=variables, capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise ConfigurationError(f"{error.filename} cannot be used: {error.strerror}.") from error
        if submitted.returncode:
            reason = " ".join(submitted.stderr.split())
            raise LaunchError(f"sbatch did not accept {path}: {reason}")
        job = submitted.stdout.strip().partition(";")[0]
        print(f"Submitted {Path(path).resolve()} as job {job}.", flush=True)
        sys.stderr.write(submitted.stderr)
        return 0


def _join_values(options: list[str]) -> list[str]:
    """Joins each option with its value, because a batch script has one option on each line."""
    entries: list[str] = []
    for word in options:
        if word.startswith("-") or not entries:
            name, equals, value = word.partition("=")
            entries.append(f"{name}={shlex.quote(value)}" if equals else word)
        else:
            entries[-1] += f" {shlex.quote(word)}"
    return entries
