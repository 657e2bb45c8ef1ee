"""Launchers for the processes of one TPU host and for the hosts of a pod."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.base import ConfigurationError, MissingPackageError, patch_environment, wrong_value
from accelerate.launch.backends.base import Command, Launcher
from accelerate.launch.machine import Machine
from accelerate.launch.plan import LaunchPlan, Target, accelerate_command, local_command
from accelerate.launch.script import PrepareForLaunch
from accelerate.settings import FLAG, Settings
from accelerate.settings.sections import LaunchSection, PrecisionSection, TpuSection

POD_MODULE = "torch_xla.distributed.xla_dist"


def precision_variables(settings: Settings) -> dict[str, str]:
    """Returns the variables for bfloat16 on XLA, which with `downcast_bf16` also replaces float64."""
    if settings[PrecisionSection].mixed_precision != "bf16":
        return {}
    return {"XLA_DOWNCAST_BF16" if settings[TpuSection].downcast_bf16 else "XLA_USE_BF16": "1"}


@dataclass(frozen=True)
class TpuDetails:
    """Function of the script for each process, number of processes (None is one per chip), and variables."""

    function: str
    processes: int | None
    variables: Mapping[str, str]


class TpuLauncher(Launcher):
    """Launcher that runs a function of the target in one process for each chip of this host."""

    counts_remotely = True

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> TpuDetails:
        """Chooses the variables, and raises an error for a target that cannot be imported."""
        if plan.target.kind == "program":
            fix = "Pass a Python script with such a function, or -m with a module"
            raise wrong_value("--no_python", True, "on TPU each process calls a function of the script", fix)
        launch = settings[LaunchSection]
        return TpuDetails(
            function=launch.main_training_function,
            processes=1 if launch.num_processes == 1 else None,
            variables=precision_variables(settings),
        )

    def command(self, plan: LaunchPlan) -> list[str]:
        return local_command(plan.target)

    def run(self, plan: LaunchPlan) -> int:
        """Imports the script, and runs its function in each process."""
        details = plan.detail(TpuDetails)
        try:
            from torch_xla.distributed import xla_multiprocessing
        except ImportError as error:
            raise MissingPackageError(
                "--tpu needs torch_xla, which cannot be imported here. Install it: "
                "pip install 'torch_xla[tpu]'."
            ) from error
        with patch_environment(**{**plan.environment, **details.variables}):
            previous, sys.argv = sys.argv, [plan.target.name, *plan.target.arguments]
            try:
                worker = PrepareForLaunch(function_of(plan.target, details.function), "XLA")
                xla_multiprocessing.spawn(worker, args=(), nprocs=details.processes)
            finally:
                sys.argv = previous
        return 0


def function_of(target: Target, name: str) -> Callable[..., Any]:
    """Imports a script or module, and returns one of its functions.

    Code under ``__main__`` does not run.
    """
    module_name = target.name
    if target.kind == "script":
        sys.path.insert(0, str(Path(target.name).parent.resolve()))
        module_name = Path(target.name).stem
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"There is no Python module {error.name!r}. Check the path.") from error
    function = getattr(module, name, None)
    if function is None:
        fix = f"Define it in {target.name}, or name another one"
        raise wrong_value("--main_training_function", name, "the script has no such function", fix)
    return function  # type: ignore[no-any-return]


class TpuPodLauncher(Launcher):
    """Launcher that starts `accelerate launch` on all hosts of a pod."""

    counts_remotely = True

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> Command:
        """Returns the command of torch_xla if it has one, or of gcloud."""
        pod = settings[TpuSection]
        if not pod.tpu_name:
            fix = "Write it into the configuration file, with tpu_zone"
            raise wrong_value("tpu_name", None, "the hosts of a pod are found by its name", fix)
        given = [pair.partition("=") for pair in pod.env or ()]
        for name, equals, _ in given:
            if not equals:
                raise wrong_value("--env", name, "it has no value", "Write NAME=value")
        variables = {**plan.environment, **{name: text for name, _, text in given}}
        remote = settings.replaced(FLAG, tpu_use_cluster=False)
        inner = accelerate_command(remote, plan.target, "tpu_use_sudo", "vm", "env")
        start = [*(("sudo", "-E") if pod.tpu_use_sudo else ()), "accelerate-launch", *inner[3:]]
        if machine.has_module(POD_MODULE):
            return Command(tuple(_by_module(pod, variables, start)))
        if pod.vm:
            fix = "Install such a torch_xla, or leave --vm out to use all hosts"
            raise wrong_value("--vm", ",".join(pod.vm), f"choosing hosts needs {POD_MODULE}", fix)
        return Command(tuple(_by_gcloud(pod, variables, start)))


def _by_module(pod: TpuSection, variables: Mapping[str, str], start: list[str]) -> list[str]:
    words = [sys.executable, "-m", POD_MODULE, "--tpu", str(pod.tpu_name)]
    for host in pod.vm or ():
        words += ["--vm", host]
    for name, text in sorted(variables.items()):
        words += ["--env", f"{name}={text}"]
    return [*words, "--", *start]


def _by_gcloud(pod: TpuSection, variables: Mapping[str, str], start: list[str]) -> list[str]:
    exports = [f"export {name}={shlex.quote(text)}" for name, text in sorted(variables.items())]
    command = " && ".join([*exports, f"cd {shlex.quote(str(Path.cwd()))}", shlex.join(start)])
    return [
        *("gcloud", "compute", "tpus", "tpu-vm", "ssh", str(pod.tpu_name)),
        *(("--zone", pod.tpu_zone) if pod.tpu_zone else ()),
        *("--worker", "all", "--command", command),
    ]
