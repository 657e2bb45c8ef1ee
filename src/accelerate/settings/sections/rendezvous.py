"""How processes find each other, what happens when one fails or waits too long, and when a run stops."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from accelerate.settings.option import Section, option, optional

_machines_option = partial(option, when=lambda answers: answers["num_machines"] > 1)


@dataclass(frozen=True, kw_only=True)
class RendezvousSection(Section):
    """Addresses, ports, restarts and logs."""

    title = "Distributed GPUs"

    same_network: bool = _machines_option(
        False,
        "The machines are on one local network. Kept for configuration files: addresses are used as given.",
        advanced=True,
        ask="Are the machines on one local network?",
    )
    machine_rank: int = _machines_option(
        0,
        "Rank of this machine, from 0.",
        limits=(0, 10**6),
        flag_default=None,
        ask="What is the rank of this machine?",
    )
    main_process_ip: str | None = _machines_option(
        None, "Address of the machine of rank 0.", ask="What is the address of the machine of rank 0?"
    )
    main_process_port: int | None = _machines_option(
        None,
        "Port of the machine of rank 0 where processes meet (29500). On one machine a busy port is replaced, "
        "and 0 takes any free one; on several machines a busy port is an error.",
        limits=(0, 65535),
        ask="Which port do the processes meet on?",
    )
    tee: str = option(
        "0",
        "Standard streams that go to the log folder and to the terminal: 0 none, 1 out, 2 err, 3 both; "
        "or for single ranks, as in 0:3,1:2.",
        flags=("-t", "--tee"),
        key=None,
    )
    log_dir: str | None = optional("Folder for the logs of the processes.", key=None)
    role: str = option("default", "Name of these workers in logs.", key=None)
    rdzv_backend: str = _machines_option(
        "static",
        "How the processes meet: static (fixed machines) or c10d (elastic).",
        advanced=True,
        ask="How do the processes meet (static: fixed machines, c10d: elastic)?",
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
class DiagnosticsSection(Section):
    """Hangs: after what time they are reported, and whether the run goes on."""

    title = "Diagnostics Arguments"
    env_prefix = "ACCELERATE_"

    hang_timeout: int | None = optional(
        "Seconds that a process may wait for the others before a report says where each of them is (60); "
        "0 for no reports.",
        limits=(0, 10**6),
    )
    hang_action: str | None = optional(
        "What follows a report: report (the default) lets the run go on, abort ends all processes with an "
        "error.",
        choices=("report", "abort"),
    )


@dataclass(frozen=True, kw_only=True)
class StoppingSection(Section):
    """What `accelerator.should_stop` and `accelerator.should_save` watch beside signals."""

    title = "Stopping Arguments"
    env_prefix = "ACCELERATE_"

    max_time: str | None = optional(
        "Time after its start when a process is asked to save and stop: seconds, HH:MM:SS or D-HH:MM:SS."
    )
    stop_margin: int | None = optional(
        "Seconds before the end of an allocation of SLURM when processes are asked to save and stop (120); "
        "0 leaves that to signals.",
        limits=(0, 10**6),
    )
    stop_file: str | None = optional("A file that asks all processes to save and stop as soon as it exists.")
    save_file: str | None = optional(
        "A file that asks all processes to save and go on, each time that it is touched."
    )
