"""A plan's command line: what a shell would be told."""

from __future__ import annotations

import sys

from accelerate.base import environ
from accelerate.launch.plan import LaunchPlan, Target
from accelerate.settings import ENVIRONMENT, FLAG, Settings, flags

AGENT = (sys.executable, "-m", "accelerate.commands.launch", "--quiet")


def local_command(target: Target) -> list[str]:
    """The words that run a target as one process of this Python."""
    before = {"script": [sys.executable], "module": [sys.executable, "-m"], "program": []}[target.kind]
    return [*before, target.name, *target.arguments]


def torchrun_arguments(plan: LaunchPlan) -> list[str]:
    """The arguments of ``torchrun`` that run a plan."""
    meeting = plan.rendezvous
    endpoint = f"{meeting.address}:{meeting.port}"
    words = [
        *("--nnodes", str(plan.machines)),
        *("--nproc_per_node", str(plan.local_processes)),
        *("--node_rank", str(plan.machine)),
        *("--rdzv_endpoint", endpoint),  # absent, torch would take it from PET_RDZV_ENDPOINT
        *("--rdzv_backend", meeting.backend),
        *("--max_restarts", str(meeting.restarts)),
        *("--monitor_interval", str(meeting.interval)),
        *("--role", meeting.role),
        *("--tee", meeting.tee),
    ]
    if meeting.configuration:
        words += ["--rdzv_conf", meeting.configuration]
    if meeting.log_dir:
        words += ["--log_dir", meeting.log_dir]
    words += {"script": [], "module": ["--module"], "program": ["--no_python"]}[plan.target.kind]
    return [*words, plan.target.name, *plan.target.arguments]


def accelerate_command(settings: Settings, target: Target, *left_out: str) -> list[str]:
    """The words of an `accelerate launch` on another machine, or later, that decides the same.

    Args:
        settings: written as flags.
        target: what it runs.
        left_out: names of options that it finds out by itself.
    """
    if settings.source("num_cpu_threads_per_process") not in (FLAG, ENVIRONMENT):
        left_out = (*left_out, "num_cpu_threads_per_process")
    kind = {"script": [], "module": ["--module"], "program": ["--no_python"]}[target.kind]
    words = flags.words(settings, *left_out)
    return [*AGENT, *words, *kind, target.name, *target.arguments]


def env_var_path_add(env_var_name: str, path_to_add: str) -> str:
    """A search path with one folder more.

    Args:
        env_var_name: variable that holds the search path.
        path_to_add: folder that is put at its end.

    Returns:
        The new value; the variable is not changed.
    """
    present = [path for path in environ.current().get(env_var_name, "").split(":") if path]
    return ":".join([*present, str(path_to_add)])
