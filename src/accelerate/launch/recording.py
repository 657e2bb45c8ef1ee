"""Have the processes of a run write down what ends them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from accelerate.launch.failures import ENTRY, FOLDER_VARIABLE, VERBOSE_VARIABLE
from accelerate.launch.plan import LaunchPlan, Target

RECORDED = ("local", "elastic")
"""Launchers that start the script themselves; the others start programs that do, or that we cannot change."""


def record_failures(plan: LaunchPlan, folder: Path) -> LaunchPlan:
    """A plan whose processes write down what ends them; the same plan where that cannot be had.

    Args:
        plan: what is going to run.
        folder: where they write.
    """
    if plan.launcher not in RECORDED or plan.target.kind == "program":
        return plan
    before = ("-m",) if plan.target.kind == "module" else ()
    target = Target("script", str(ENTRY), (*before, plan.target.name, *plan.target.arguments))
    added = {FOLDER_VARIABLE: str(folder)}
    if plan.rendezvous.log_dir or plan.rendezvous.tee != "0":
        added[VERBOSE_VARIABLE] = "1"
    return replace(plan, target=target, environment={**plan.environment, **added})


def folder_of(plan: LaunchPlan) -> Path | None:
    """Where the processes of a plan write down what ends them; `None` where they do not.

    Args:
        plan: what is going to run.
    """
    folder = plan.environment.get(FOLDER_VARIABLE)
    return None if folder is None else Path(folder)
