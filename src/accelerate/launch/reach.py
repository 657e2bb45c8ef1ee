"""Before several machines start: can this one reach the machine of rank 0?"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable

from accelerate.base import LaunchError
from accelerate.launch.plan import LaunchPlan

PATIENCE = 300.0
"""Seconds that machine 0 may come later than the others."""
PAUSE = 0.5
ATTEMPT = 5.0
SAID_AFTER = 5.0
CONNECTING = ("static", "c10d")
"""Ways to meet at a port of machine 0."""

NOT_YET = (errno.ECONNREFUSED, errno.ECONNRESET)
"""The machine answers, and nothing listens there yet: machine 0 was not started, or later."""


def check_reach(
    plan: LaunchPlan, say: Callable[[str], None], *, patience: float = PATIENCE, pause: float = PAUSE
) -> None:
    """Find out in seconds what a meeting would find out in many minutes.

    Machine 0 opens the port, so there only the name of its address is looked up. The others connect; while
    machine 0 has not started yet, they wait for it, and say so.

    Args:
        plan: of several machines; with one there is nothing to check.
        say: tells the user.
        patience: seconds to wait for machine 0.
        pause: seconds between two attempts.

    Raises:
        LaunchError: the address has no meaning here, or cannot be reached.
    """
    if plan.machines == 1:
        return
    _look_up(plan)
    if plan.machine == 0 or plan.rendezvous.backend not in CONNECTING:
        return
    deadline = time.monotonic() + patience
    said_at = time.monotonic() + SAID_AFTER
    while (problem := _connect(plan)) is not None:
        now = time.monotonic()
        if problem.errno not in NOT_YET or now > deadline:
            raise _unreachable(plan, problem)
        if now > said_at:
            say(f"{_who(plan)} waits for machine 0 at {_place(plan)}: {_reason(problem)}")
            said_at = deadline + PAUSE
        time.sleep(pause)


def _look_up(plan: LaunchPlan) -> None:
    meeting = plan.rendezvous
    try:
        socket.getaddrinfo(meeting.address, meeting.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _unreachable(plan, error) from error


def _connect(plan: LaunchPlan) -> OSError | None:
    meeting = plan.rendezvous
    try:
        socket.create_connection((meeting.address, meeting.port), timeout=ATTEMPT).close()
    except OSError as error:
        return error
    return None


def _unreachable(plan: LaunchPlan, error: OSError) -> LaunchError:
    return LaunchError(
        f"{_who(plan)} cannot reach {_place(plan)}: {_reason(error)}. Check that --main_process_ip is the "
        f"address of machine 0, that `accelerate launch` runs there, and that no firewall is between."
    )


def _who(plan: LaunchPlan) -> str:
    return f"machine {plan.machine} ({plan.ranks})"


def _place(plan: LaunchPlan) -> str:
    return f"{plan.rendezvous.address}:{plan.rendezvous.port}"


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "this name has no address"
    if isinstance(error, TimeoutError):
        return f"no answer within {ATTEMPT:.0f} s"
    return (error.strerror or str(error)).lower()
