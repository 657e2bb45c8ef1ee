"""Processes inside an allocation of SLURM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.settings.option import Section, option


@dataclass(frozen=True, kw_only=True)
class SlurmSection(Section):
    """SLURM: one agent on each machine of the allocation, or a job that is submitted."""

    title = "SLURM Arguments"
    file_key = "slurm_config"
    switch = "--slurm"

    slurm: bool = option(
        False,
        "Inside an allocation of SLURM: start one agent on each of its machines with srun; addresses and "
        "counts are those of the allocation. In a configuration file it has no effect outside of one.",
        negations=("--no_slurm",),
        ask="Start the processes on all machines of the allocation, when inside one of SLURM?",
        advanced=True,
    )
    submit: bool = option(
        False, "With --slurm: write a batch script for --num_machines machines and submit it.", key=None
    )
    slurm_options: str = option(
        "",
        "Further options for srun, or with --submit for sbatch, in one text: '--partition=gpu --time=60'.",
    )
    slurm_script: str | None = option(
        None, "With --submit: where the batch script is written (the script's name, with .sbatch).", key=None
    )

    @staticmethod
    def active(values: Mapping[str, Any]) -> bool:
        """Only when SLURM starts the processes."""
        return bool(values["slurm"])

    @classmethod
    def asked(cls, answers: Mapping[str, Any]) -> bool:
        """Wherever there may be several processes."""
        return bool(answers["distributed_type"] != "NO")
