"""Interface of launchers, and their table by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import ClassVar, NamedTuple

from accelerate.launch.children import run_child
from accelerate.launch.machine import Machine
from accelerate.launch.plan import LaunchPlan
from accelerate.settings import Settings


class Command(NamedTuple):
    """Command line of a launcher that runs another program."""

    words: tuple[str, ...]
    files: Mapping[str, str] = {}  # path -> text of files to write before the start


class Launcher:
    """Base class of launchers, which by default runs the command of `details`.

    1. To create a plan, `amend` and `details` are called. Both are pure functions of the settings and
    `machine`.

    2. To show a plan, `command` is called.

    3. To run a plan, `run` is called once, in the process of the command.
    """

    counts_remotely: ClassVar[bool] = False  # the nodes that run the processes decide their number
    finds_address: ClassVar[bool] = False  # it does not need the address of the node of rank 0
    called_once: ClassVar[bool] = False  # it is called on one node, and starts the others

    def amend(self, settings: Settings, machine: Machine) -> Settings:
        """Returns settings with values that the launcher determines, such as addresses and counts.

        Raises an error for unsupported settings.
        """
        return settings

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> object:
        """Returns further data for `command` and `run`, which read it by `LaunchPlan.detail`."""
        return None

    def command(self, plan: LaunchPlan) -> list[str]:
        """Returns the equivalent shell command."""
        return list(plan.detail(Command).words)

    def files(self, plan: LaunchPlan) -> Mapping[str, str]:
        """Returns the text by path of the files that `run` writes and keeps."""
        return plan.details.files if isinstance(plan.details, Command) else {}

    def run(self, plan: LaunchPlan) -> int:
        """Starts the processes, waits for them, and returns the exit code of the run.

        Signals that end the launcher (SIGINT, SIGTERM, SIGHUP) also end its processes.
        """
        return run_child(self.command(plan), {}).code


LAUNCHERS = {
    "local": "elastic.LocalLauncher",
    "elastic": "elastic.ElasticLauncher",
    "replicas": "replicas.ReplicaLauncher",
    "mpi": "hostfile.MpiLauncher",
    "slurm": "slurm.SlurmLauncher",
    "sbatch": "slurm.SbatchLauncher",
    "deepspeed": "hostfile.DeepSpeedLauncher",
    "tpu": "tpu.TpuLauncher",
    "tpu_pod": "tpu.TpuPodLauncher",
    "sagemaker": "sagemaker.SageMakerLauncher",
}
"""Name in a plan -> file of this package and name of its class, which is imported on first use."""


def launcher_named(name: str) -> Launcher:
    file, _, class_name = LAUNCHERS[name].partition(".")
    launcher: Launcher = getattr(import_module(f"{__package__}.{file}"), class_name)()
    return launcher


def launcher_for(plan: LaunchPlan) -> Launcher:
    return launcher_named(plan.launcher)
