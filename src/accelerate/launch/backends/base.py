"""The launchers by name, and what each of them does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import ClassVar

from accelerate.launch.machine import Machine
from accelerate.launch.plan import LaunchPlan
from accelerate.settings import Settings


class Launcher(ABC):
    """One way of starting processes.

    1. While a plan is made: `amend`, then `details`. Both are pure: they ask `machine`, and start nothing.
    2. When it is shown: `command`.
    3. When it is carried out: `run`, once, in the process of the command.

    Attributes:
        counts_elsewhere: how many processes there are is decided on other machines.
        finds_address: nobody has to say where the machine of rank 0 is.
        called_once: it is called on one machine only, and starts the others.
    """

    counts_elsewhere: ClassVar[bool] = False
    finds_address: ClassVar[bool] = False
    called_once: ClassVar[bool] = False

    def amend(self, settings: Settings, machine: Machine) -> Settings:
        """Fill in what this way of starting knows by itself, such as addresses and counts.

        Raises:
            ConfigurationError: what it knows contradicts the settings.
        """
        return settings

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> object:
        """What `command` and `run` need beyond the rest of the plan; they read it by `LaunchPlan.detail`."""
        return None

    @abstractmethod
    def command(self, plan: LaunchPlan) -> list[str]:
        """The words that a shell would be told to do the same."""

    def files(self, plan: LaunchPlan) -> Mapping[str, str]:
        """Path -> text of the files that `run` writes first, and keeps."""
        return {}

    @abstractmethod
    def run(self, plan: LaunchPlan) -> int:
        """Start the processes, wait for them, and return the exit code of the run.

        Signals that end the launcher (SIGINT, SIGTERM, SIGHUP) end its processes too.
        """


_BACKENDS = "accelerate.launch.backends"
LAUNCHERS = {
    "local": f"{_BACKENDS}.local:LocalLauncher",
    "elastic": f"{_BACKENDS}.elastic:ElasticLauncher",
    "mpi": f"{_BACKENDS}.mpi:MpiLauncher",
    "slurm": f"{_BACKENDS}.slurm:SlurmLauncher",
    "sbatch": f"{_BACKENDS}.slurm:SbatchLauncher",
    "deepspeed": f"{_BACKENDS}.deepspeed:DeepSpeedLauncher",
    "tpu": f"{_BACKENDS}.tpu:TpuLauncher",
    "tpu_pod": f"{_BACKENDS}.tpu:TpuPodLauncher",
    "sagemaker": f"{_BACKENDS}.sagemaker:SageMakerLauncher",
}
"""Name in a plan -> where its class is; imported when it is used."""


def launcher_named(name: str) -> Launcher:
    """The launcher of a name.

    Args:
        name: key of `LAUNCHERS`.
    """
    module, _, class_name = LAUNCHERS[name].partition(":")
    launcher: Launcher = getattr(import_module(module), class_name)()
    return launcher


def launcher_for(plan: LaunchPlan) -> Launcher:
    """The launcher that a plan names."""
    return launcher_named(plan.launcher)
