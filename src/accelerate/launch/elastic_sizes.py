"""Smallest and largest size of an elastic run, whose number of machines or processes may change.

The elastic agent of torch starts all processes again with the new size. The script continues from its newest
checkpoint.
"""

from __future__ import annotations

from typing import NamedTuple

from accelerate.base import environ, wrong_value
from accelerate.launch import layout
from accelerate.settings import BUILT_IN, FLAG, Settings, nodes_of
from accelerate.settings.sections import LaunchSection, RendezvousSection

MAX_RESTARTS = 10
CHOSEN = "chosen for an elastic run"
TIMEOUTS = {"last_call_timeout": 10, "keep_alive_interval": 1, "keep_alive_max_attempt": 5}
"""Settings of the rendezvous: the seconds that it waits for further machines, and the interval in seconds and
number of heartbeats, after which a machine without a response is lost."""
VARIABLES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", environ.ELASTIC: "1"}
"""Variables of the agent and its processes. With the first one, these do not keep the address of an earlier
rank 0. With the second one, they start again if another machine is asked to end."""


class Sizes(NamedTuple):
    """Smallest sizes of an elastic run, None where the size does not change."""

    machines: int | None = None  # smallest number of machines
    processes: int | None = None  # smallest number of processes on one machine


def choose_sizes(settings: Settings) -> tuple[Settings, Sizes]:
    """Returns the sizes of an elastic run, and settings with its rendezvous.

    The largest number of processes is known.
    """
    launch, rendezvous = settings[LaunchSection], settings[RendezvousSection]
    machines, total, smallest = launch.num_machines, launch.num_processes or 1, rendezvous.min_processes
    least = nodes_of(rendezvous.nnodes)[0] if rendezvous.nnodes else machines
    if smallest is not None and smallest > total:
        reason = f"the largest number of processes is {total}"
        raise layout.wrong_option(settings, "min_processes", reason, "Use a smaller number")
    if smallest is not None and machines > 1:
        needed = -(-smallest * machines // total)
        least = max(least, needed) if rendezvous.nnodes else needed
    sizes = Sizes(least if least < machines else None)
    if machines == 1 and smallest not in (None, total):
        sizes = Sizes(processes=smallest)
    if sizes == Sizes():
        return settings, sizes
    if launch.processes_per_machine:
        reason = "each machine of an elastic run starts the same number"
        listed = ",".join(launch.processes_per_machine)
        raise wrong_value("--processes_per_machine", listed, reason, "Pass --num_processes")
    if settings.source("max_restarts") == BUILT_IN:
        settings = settings.replaced(CHOSEN, max_restarts=MAX_RESTARTS)
    if sizes.machines is not None:
        settings = _choose_rendezvous(settings)
    return settings, sizes


def _choose_rendezvous(settings: Settings) -> Settings:
    rendezvous = settings[RendezvousSection]
    if rendezvous.rdzv_backend == "static":
        if settings.source("rdzv_backend") in (FLAG, "PET_RDZV_BACKEND"):
            reason = "its number of machines cannot change"
            raise layout.wrong_option(settings, "rdzv_backend", reason, "Leave it out, or use c10d")
        settings = settings.replaced(CHOSEN, rdzv_backend="c10d")
    given = [pair for pair in rendezvous.rdzv_conf.split(",") if pair]
    names = {pair.partition("=")[0] for pair in given}
    added = [f"{name}={value}" for name, value in TIMEOUTS.items() if name not in names]
    return settings.replaced(CHOSEN, rdzv_conf=",".join([*given, *added]))
