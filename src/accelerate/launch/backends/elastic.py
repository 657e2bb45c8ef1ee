"""Several processes: torch's elastic agent, in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from accelerate.base import ConfigurationError, LaunchError, current, patch_environment, wrong_value
from accelerate.launch.backends.base import Launcher
from accelerate.launch.backends.ranks import Ranks
from accelerate.launch.children import GRACE_VARIABLE, exit_code, grace, say, taken_signals
from accelerate.launch.command import torchrun_arguments
from accelerate.launch.failures import collect
from accelerate.launch.first_failure import find_first
from accelerate.launch.local_store import hold_loopback_store, run_key
from accelerate.launch.pending_signals import REQUESTS
from accelerate.launch.plan import LaunchPlan
from accelerate.launch.ports import get_free_port
from accelerate.launch.reach import check_reach
from accelerate.launch.recording import folder_of

ATTEMPTS = 3
PORT_TAKEN = "EADDRINUSE"


class ElasticLauncher(Launcher):
    """Runs the target in each of the plan's processes on this machine, and restarts them as asked."""

    def command(self, plan: LaunchPlan) -> list[str]:
        """The words of ``torchrun``."""
        return ["torchrun", *torchrun_arguments(plan)]

    def run(self, plan: LaunchPlan) -> int:
        """Start the agent, wait for it, and return the exit code of the process that failed first.

        A port that another program takes between the plan and the start is replaced on one machine.

        Raises:
            LaunchError: the processes did not meet.
        """
        _make_log_folder(plan)
        ranks = Ranks(folder_of(plan))
        with taken_signals(ranks.on_request, REQUESTS), _interruptible():
            check_reach(plan, say)
            return _run_where_port_is_free(plan, ranks)


def _run_where_port_is_free(plan: LaunchPlan, ranks: Ranks) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    from accelerate import torch_private

    for attempt in range(1, ATTEMPTS + 1):
        try:
            variables = {**plan.environment, GRACE_VARIABLE: str(grace()), **_key(plan)}
            with patch_environment(**variables), torch_private.agent_hooks(ranks.start, ranks.end):
                return _run_agent(plan, ranks)
        except (DistError, RendezvousError) as error:
            if PORT_TAKEN not in str(error) or plan.machines > 1 or attempt == ATTEMPTS:
                raise _did_not_meet(plan, error) from error
        plan = replace(plan, rendezvous=replace(plan.rendezvous, port=get_free_port()))
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGINT end this process before the agent runs, too, where a shell had it ignored."""
    is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    with taken_signals(signal.default_int_handler, [signal.SIGINT] if is_ignored else []):
        yield


def _run_agent(plan: LaunchPlan, ranks: Ranks) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    held = hold_loopback_store(plan.rendezvous.address, plan.rendezvous.port) if _is_alone(plan) else None
    try:
        torchrun.run(torchrun.parse_args(torchrun_arguments(plan)))  # type: ignore[no-untyped-call]
    except ValueError as error:  # before a process is started
        reason = " ".join(str(error).split()).rstrip(".?")
        raise ConfigurationError(
            f"torch cannot use these settings of the rendezvous: {reason}. Correct --main_process_ip, "
            f"--rdzv_backend or --rdzv_conf."
        ) from error
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return exit_code(_code_of_first(plan, ranks) or first.exitcode) or 1
    except SignalException as error:
        say(f"{error.sigval.name} ended all processes of this machine")
        return _code_after(error.sigval)
    finally:
        del held
    return 0


def _is_alone(plan: LaunchPlan) -> bool:
    """Whether the agent of this machine opens the store itself, and no other machine needs to reach it."""
    return plan.machines == 1 and plan.rendezvous.backend == "static"


def _key(plan: LaunchPlan) -> dict[str, str]:
    """The key of the run; several machines have one where it was handed to each of them."""
    return run_key(current()) if plan.machines == 1 else {}


def _code_of_first(plan: LaunchPlan, ranks: Ranks) -> int:
    """Keep what was seen of the processes; return the exit code of the rank that failed first, or 0."""
    folder = folder_of(plan)
    if folder is None:
        return 0
    seen = ranks.exits()
    seen.write(folder)
    first = find_first(collect(folder, 1))
    return 0 if first is None or first.rank in seen.asked else seen.codes.get(first.rank, 0)


def _make_log_folder(plan: LaunchPlan) -> None:
    folder = plan.rendezvous.log_dir
    try:
        if folder:
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        reason = f"this folder cannot be made ({error.strerror})"
        raise wrong_value("--log_dir", folder, reason, "Choose another place") from error


def _code_after(number: signal.Signals) -> int:
    """The exit code of a run that a signal ended.

    `srun` ends all its tasks when one has failed, and returns their highest code: that of the failed one.
    """
    ended_by_srun = number == signal.SIGTERM and "SLURM_STEP_ID" in current()
    return 1 if ended_by_srun else 128 + int(number)


def _did_not_meet(plan: LaunchPlan, error: Exception) -> LaunchError:
    meeting = plan.rendezvous
    reason = " ".join(str(error).split())
    return LaunchError(
        f"The processes did not meet at {meeting.address}:{meeting.port}: {reason} "
        f"Check that this address is that of machine 0, that the port is free there and open between the "
        f"machines, and that every machine was started."
    )
