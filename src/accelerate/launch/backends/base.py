"""The launchers by name, and what each of them does."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import ClassVar, NamedTuple

from accelerate.launch.children import run_child
from accelerate.launch.machine import Machine
from accelerate.launch.plan import LaunchPlan
from accelerate.settings import Settings


class Command(NamedTuple):
    """The details of a launcher that runs another program."""

    words: tuple[str, ...]
    files: Mapping[str, str] = {}  # path -> text of the files that are written first, and kept


class Launcher:
    """One way of starting processes: by default, a command that `details` describes.

    1. While a plan is made: `amend`, then `details`. Both are pure: they ask `machine`, and start nothing.
    2. When it is shown: `command`.
    3. When it is carried out: `run`, once, in the process of the command.
    """

    counts_remotely: ClassVar[bool] = False  # the machines that run the processes decide how many there are
    finds_address: ClassVar[bool] = False  # it needs no address of the machine of rank 0
    called_once: ClassVar[bool] = False  # it is called on one machine only, and starts the others

    def amend(self, settings: Settings, machine: Machine) -> Settings:
        """Fill in what the launcher knows by itself, such as addresses and counts, or refuse settings."""
        return settings

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> object:
        """What `command` and `run` need beyond the rest of the plan; they read it by `LaunchPlan.detail`."""
        return None

    def command(self, plan: LaunchPlan) -> list[str]:
        """The command line that does the same in a shell."""
        return list(plan.detail(Command).words)

    def files(self, plan: LaunchPlan) -> Mapping[str, str]:
        """Path -> text of the files that `run` writes first, and keeps."""
        return plan.details.files if isinstance(plan.details, Command) else {}

    def run(self, plan: LaunchPlan) -> int:
        """Start the processes, wait for them, and return the exit code of the run.

        Signals that end the launcher (SIGINT, SIGTERM, SIGHUP) end its processes too.
        """
        return run_child(self.command(plan), {}).code


LAUNCHERS = {
    "local": "LocalLauncher",
    "elastic": "ElasticLauncher",
    "mpi": "MpiLauncher",
    "slurm": "SlurmLauncher",
    "sbatch": "SbatchLauncher",
    "deepspeed": "DeepSpeedLauncher",
    "tpu": "TpuLauncher",
    "tpu_pod": "TpuPodLauncher",
    "sagemaker": "SageMakerLauncher",
}
"""Name in a plan -> its class, which this package offers and which is imported when it is used."""


def launcher_named(name: str) -> Launcher:
    launcher: Launcher = getattr(import_module(__package__), LAUNCHERS[name])()
    return launcher


def launcher_for(plan: LaunchPlan) -> Launcher:
    return launcher_named(plan.launcher)
