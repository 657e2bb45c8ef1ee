"""How processes find each other, what happens when one fails, and programs that start them: mpirun, SLURM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from accelerate.settings.option import Section, option


def _several_machines(answers: Mapping[str, Any]) -> bool:
    return bool(answers["num_machines"] > 1)


@dataclass(frozen=True, kw_only=True)
class RendezvousSection(Section):
    """Addresses, ports, restarts and logs."""

    title = "Distributed GPUs"

    same_network: bool = option(
        False,
        "The machines are on one local network. Kept for configuration files: addresses are used as given.",
        advanced=True,
        ask="Are the machines on one local network?",
        when=_several_machines,
    )
    machine_rank: int = option(
        0,
        "Rank of this machine, from 0.",
        limits=(0, 10**6),
        flag_default=None,
        ask="What is the rank of this machine?",
        when=_several_machines,
    )
    main_process_ip: str | None = option(
        None,
        "Address of the machine of rank 0.",
        ask="What is the address of the machine of rank 0?",
        when=_several_machines,
    )
    main_process_port: int | None = option(
        None,
        "Port of the machine of rank 0 where processes meet (29500). On one machine a busy port is replaced, "
        "and 0 takes any free one; on several machines a busy port is an error.",
        limits=(0, 65535),
        ask="Which port do the processes meet on?",
        when=_several_machines,
    )
    tee: str = option(
        "0",
        "Standard streams that go to the log folder and to the terminal: 0 none, 1 out, 2 err, 3 both; "
        "or for single ranks, as in 0:3,1:2.",
        flags=("-t", "--tee"),
        key=None,
    )
    log_dir: str | None = option(None, "Folder for the logs of the processes.", key=None)
    role: str = option("default", "Name of these workers in logs.", key=None)
    rdzv_backend: str = option(
        "static",
        "How the processes meet: static (fixed machines) or c10d (elastic).",
        advanced=True,
        ask="How do the processes meet (static: fixed machines, c10d: elastic)?",
        when=_several_machines,
        offers=("static", "c10d"),
    )
    rdzv_conf: str = option("", "Further settings of the meeting: key1=value1,key2=value2.", key=None)
    max_restarts: int = option(
        0, "How often failed processes are started again.", limits=(0, 10**6), key=None
    )
    monitor_interval: float = option(
        0.1, "Seconds between two looks at the processes.", limits=(0.001, 86400), key=None
    )


@dataclass(frozen=True, kw_only=True)
class MpirunSection(Section):
    """Processes started by mpirun."""

    title = "MPI Arguments"
    file_key = "mpirun_config"
    switch = "--mpirun_hostfile"

    mpirun_hostfile: str | None = option(
        None,
        "Host file for mpirun; processes are then started by it.",
        ask="Host file for mpirun (empty: processes are not started by mpirun)?",
    )
    mpirun_ccl: int | None = option(
        None,
        "Threads of oneCCL in each process (CCL_WORKER_COUNT).",
        flags=(),
        env="CCL_WORKER_COUNT",
        foreign=True,
        advanced=True,
    )

    @classmethod
    def asked(cls, answers: Mapping[str, Any]) -> bool:
        """Only for CPU processes on several machines, where mpirun may be the one that starts them."""
        return answers["distributed_type"] == "MULTI_CPU" and _several_machines(answers)


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
        "", "Further options for srun, or with --submit for sbatch, in one text: '--partition=gpu --time=60'."
    )
    slurm_script: str | None = option(
        None, "With --submit: where the batch script is written (the script's name, with .sbatch).", key=None
    )

    @classmethod
    def asked(cls, answers: Mapping[str, Any]) -> bool:
        """Wherever there may be several processes."""
        return bool(answers["distributed_type"] != "NO")
