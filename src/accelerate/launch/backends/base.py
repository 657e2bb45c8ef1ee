"""The launchers by name, and what each of them does."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

from accelerate.base.errors import ConfigurationError
from accelerate.launch.plan import LaunchPlan


class Launcher(Protocol):
    """Runs a plan: 1. `run` is called once, in the process of the command, with everything decided."""

    def run(self, plan: LaunchPlan) -> int:
        """Start the processes, wait for them, and return the exit code of the run.

        Signals that end the launcher (SIGINT, SIGTERM, SIGHUP) end its processes too.
        """
        ...


LAUNCHERS = {
    "local": "accelerate.launch.backends.local:LocalLauncher",
    "elastic": "accelerate.launch.backends.elastic:ElasticLauncher",
}
"""Name in a plan -> where its class is; imported when it is used."""

MISSING = {
    "tpu": "TPU hosts",
    "sagemaker": "Amazon SageMaker",
    "mpi": "mpirun",
    "deepspeed": "DeepSpeed's own launchers for several machines (the launcher named standard works)",
}


def launcher_for(plan: LaunchPlan) -> Launcher:
    """The launcher that a plan names.

    Raises:
        ConfigurationError: this version has no such launcher.
    """
    if plan.launcher not in LAUNCHERS:
        what = MISSING.get(plan.launcher, plan.launcher)
        raise ConfigurationError(
            f"This version cannot launch on {what}. Use one machine, or torchrun's kind of cluster."
        )
    module, _, name = LAUNCHERS[plan.launcher].partition(":")
    launcher: Launcher = getattr(import_module(module), name)()
    return launcher
