"""Launchers for the processes of this node, as one child or under the elastic agent of torch."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate.base import ConfigurationError, LaunchError, environ, spell_ranks, wrong_value
from accelerate.launch import children, layout
from accelerate.launch.attempts import Attempts
from accelerate.launch.backends.base import Launcher
from accelerate.launch.children import REQUESTS, run_child, say
from accelerate.launch.failures import Exits, Kind, collect, find_first
from accelerate.launch.layout import VARIABLES, Sizes
from accelerate.launch.machine import Machine, get_free_port, hold_loopback_store, run_key
from accelerate.launch.plan import LaunchPlan, folder_of, local_command, torchrun_arguments
from accelerate.settings import Settings

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.api import SubprocessContext

ATTEMPTS = 3
PORT_TAKEN = "EADDRINUSE"
OF_OTHER_VALUES = (json.JSONDecodeError, UnicodeDecodeError)
"""Errors of the agent of torch for a store that another program at its port has written to."""
POLL = 0.05
SECONDS_FOR_CAUSE = 2.0
"""Seconds that ranks may run after one has lost another, which may still record its error."""

NODE_0_TIMEOUT = 300.0  # seconds that the other nodes wait for node 0
PAUSE = 0.5
CONNECT_TIMEOUT = 5.0
REPORT_AFTER = 5.0
CONNECTING_BACKENDS = ("static", "c10d")  # rendezvous backends with a port on node 0
NOT_YET = (errno.ECONNREFUSED, errno.ECONNRESET)
"""Errors of a node that is reachable, but on which nothing listens yet."""
AGENT_LOGGER = "torch.distributed.elastic.multiprocessing.api"
POD_VARIABLE = "KUBERNETES_SERVICE_HOST"
"""Variable of each Kubernetes pod. Until another pod runs, its name has no address or an old one."""


class LocalLauncher(Launcher):
    """Launcher that runs the target as one child process.

    It does not replace this process, because other programs call `launch_command` as a function that returns,
    and because the launcher reports how the script ended.
    """

    def command(self, plan: LaunchPlan) -> list[str]:
        return local_command(plan.target)

    def run(self, plan: LaunchPlan) -> int:
        """Starts the target, forwards signals to it, and returns its exit code."""
        folder = folder_of(plan)  # only `entry.py` unblocks these signals
        end = run_child(self.command(plan), plan.environment, blocked_at_start=REQUESTS if folder else ())
        if folder and end.killed_after:
            Exits({0: -children.SIGKILL}, asked=(0,), asked_by=end.killed_after, killed=(0,)).write(folder)
        return end.code


class Devices(NamedTuple):
    """Devices of the processes of this node."""

    variable: str | None = None  # variable that selects devices, or None for the CPU
    ids: tuple[str, ...] = ()  # device of each process, or none for the CPU

    def without(self, index: int) -> Devices:
        """Returns the devices without that of one process."""
        return self._replace(ids=self.ids[:index] + self.ids[index + 1 :])

    @property
    def variables(self) -> dict[str, str]:
        """Variables of the processes that use these devices."""
        return {} if self.variable is None else {self.variable: ",".join(self.ids)}


class Ranks:
    """Processes that the elastic agent of torch starts on this node, which a restart replaces.

    The agent asks its processes to end and waits. That includes a stopped process, which cannot react, and
    one that saves a checkpoint. So this class ends them, and leaves to the agent those that only SIGKILL
    ends.
    """

    def __init__(
        self, folder: Path | None, smallest: Sizes | None = None, devices: Devices | None = None
    ) -> None:
        self._folder = folder  # where they record their errors, or None if they do not run `entry.py`
        self._smallest = smallest or Sizes()
        self._devices = devices or Devices()
        is_elastic = self._smallest.machines is not None
        self._attempts = None if folder is None else Attempts(folder, is_elastic)
        self._failed: int | None = None  # rank that failed first in the attempt before
        self._context: Any = None
        self._seen = Exits({})
        self._early: list[int] = []
        self._ignored = children.ignored_for_good()

    @property
    def have_started(self) -> bool:
        """True if the agent has started processes."""
        return self._context is not None

    def on_request(self, number: int, frame: FrameType | None) -> None:
        """Forwards a request to all ranks, or keeps it until they are started."""
        name = signal.Signals(number).name
        running = self._running()
        if self._seen.asked or not running:
            self._early.append(number)
            say(f"{name} received: no process runs now, so it is passed on to the next ones that start")
            return
        for handle in running.values():
            handle.proc.send_signal(number)
        say(f"{name} received and passed on to {len(running)} process{'' if len(running) == 1 else 'es'}")

    def start(self, context: SubprocessContext, start: Callable[[], None]) -> None:
        """Starts the processes of the `SubprocessContext` of torch by its own method."""
        for number in self._ignored:
            if signal.getsignal(number) != signal.SIG_IGN:  # the agent has just set its own handler
                signal.signal(number, signal.SIG_IGN)
        if self._attempts is not None:
            self._attempts.begin()
        with children.blocked(REQUESTS if self._folder is not None else ()):
            start()
            self._context = context
            self._seen = Exits({}, attempt=int(context.envs[0]["TORCHELASTIC_RESTART_COUNT"]))
        while self._early:
            self.on_request(self._early.pop(0), None)

    def next_size(self, size: int) -> int:
        """Returns the number of processes that are started next.

        In an elastic run on one node, a process that fails first twice in succession is left out, with its
        device.
        """
        if self._context is None:
            return size
        most_restarts = int(self._context.envs[0]["TORCHELASTIC_MAX_RESTARTS"])
        first = None if self._attempts is None else self._attempts.end(self.exits(), most_restarts)
        if self._smallest.machines is not None:
            say(f"the processes start again once {self._smallest.machines} or more machines have joined")
        if self._smallest.processes is None:
            return size
        rank, self._failed = self._failed, None if first is None else first.rank
        if rank is None or rank != self._failed or size <= self._smallest.processes:
            return size
        self._failed, self._devices = None, self._devices.without(rank)
        environ.assign(self._devices.variables)
        left = f"the run continues with {size - 1} of its processes"
        say(f"rank {rank} has failed twice and is left out: {left}")
        return size - 1

    def finish(self, code: int) -> None:
        """Records the end of the run with an exit code."""
        if self._attempts is not None:
            self._attempts.finish(self.exits(), code)

    def end(self, number: int) -> None:
        """Sends a signal to all running processes, waits, and records those that do not end in time."""
        self._wait_for_cause()
        running = self._running()
        if not running:
            return
        if not self._seen.asked:
            self._seen = replace(self._seen, asked=tuple(running), asked_by=number, asked_at=time.time())
        for handle in running.values() if number not in children.CONSOLE_EVENTS else ():
            handle.close(death_sig=signal.Signals(number))  # on Windows this ends it at once
        seconds = children.grace()
        deadline = time.monotonic() + seconds
        while (running := self._running()) and time.monotonic() < deadline:
            children.continue_stopped([handle.proc.pid for handle in running.values()], groups=True)
            time.sleep(POLL)
        self._seen = replace(self._seen, killed=tuple(running))
        if running:
            late = f"{spell_ranks(list(running))} did not end within {seconds} s after"
            say(f"{late} {signal.Signals(number).name} and {'is' if len(running) == 1 else 'are'} killed")

    def exits(self) -> Exits:
        codes = {rank: handle.proc.poll() for rank, handle in self._handles().items()}
        return replace(self._seen, codes={rank: code for rank, code in codes.items() if code is not None})

    def _wait_for_cause(self) -> None:
        """Waits while all failures are those of ranks that lost another rank, or the first one still ends."""
        deadline = time.monotonic() + SECONDS_FOR_CAUSE
        while self._folder is not None and self._running() and time.monotonic() < deadline:
            first = find_first(collect(self._folder, 1, self.exits()))
            if first is None or (first.kind <= Kind.SILENT and first.rank not in self._running()):
                return
            time.sleep(POLL)

    def _handles(self) -> dict[int, Any]:
        """Returns the torch handle of each process by rank."""
        if self._context is None:
            return {}
        handlers, envs = self._context.subprocess_handlers, self._context.envs
        return {int(envs[local_rank]["RANK"]): handler for local_rank, handler in handlers.items()}

    def _running(self) -> dict[int, Any]:
        return {rank: handle for rank, handle in self._handles().items() if handle.proc.poll() is None}


class ElasticLauncher(Launcher):
    """Launcher that runs the processes of this node under the elastic agent, which restarts them."""

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> Devices:
        ids = layout.used_devices(settings, machine, plan.local_processes)
        return Devices(machine.hardware.visible_env, ids) if ids else Devices()

    def command(self, plan: LaunchPlan) -> list[str]:
        return ["torchrun", *torchrun_arguments(plan)]

    def run(self, plan: LaunchPlan) -> int:
        """Starts the agent, waits for it, and returns the exit code of the first failed process.

        With one node, a port that another program takes between the plan and the start is replaced.
        """
        if folder := plan.rendezvous.log_dir:
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                reason = f"this folder cannot be created ({error.strerror})"
                raise wrong_value("--log_dir", folder, reason, "Choose another folder") from error
        devices = plan.details if isinstance(plan.details, Devices) else None
        ranks = Ranks(folder_of(plan), plan.smallest, devices)
        # SIGINT also ends this process before the agent runs, even if a shell ignores it.
        is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        interrupt = children.caught_signals(signal.default_int_handler, [signal.SIGINT] if is_ignored else [])
        with children.caught_signals(ranks.on_request, REQUESTS), interrupt:
            check_reach(plan, say)
            code = _run_where_port_is_free(plan, ranks)
            ranks.finish(code)
            return code


def _run_where_port_is_free(plan: LaunchPlan, ranks: Ranks) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousTimeoutError

    from accelerate import torch_private

    # several nodes must set the key themselves
    key = run_key(environ.current()) if plan.machines == 1 else {}
    variables = {**plan.environment, children.GRACE_VARIABLE: str(children.grace()), **key}
    if plan.smallest.machines is not None:
        variables |= VARIABLES
    if sys.platform == "win32":  # the agent warns about each missing signal
        variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _names(children.FORWARDED)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with (
                environ.patch_environment(**variables),
                torch_private.agent_hooks(ranks.start, ranks.end, ranks.next_size),
            ):
                return _run_agent(plan, ranks)
        except RendezvousTimeoutError as error:
            raise LaunchError(
                f"Not enough machines have joined the run at {plan.address}:{plan.port} in time: it needs "
                f"{plan.smallest.machines or plan.machines}. Start the others, or pass another --nnodes; "
                "--rdzv_conf join_timeout=SECONDS sets the time (600)."
            ) from error
        except (DistError, RendezvousError, *OF_OTHER_VALUES) as error:
            has_other_values = isinstance(error, OF_OTHER_VALUES)
            is_taken = PORT_TAKEN in str(error) or (has_other_values and not ranks.have_started)
            if not is_taken or plan.machines > 1 or attempt == ATTEMPTS:
                reason = " ".join(str(error).split())
                if has_other_values:
                    reason = f"its store has values that are not those of this launch ({reason})."
                raise LaunchError(
                    f"The rendezvous at {plan.address}:{plan.port} failed: {reason} "
                    f"Check that this address is that of machine 0, that the port is free there and open "
                    f"between the machines, and that every machine was started."
                ) from error
        plan = replace(plan, port=get_free_port())
    raise AssertionError("the last attempt returns or raises")


def _run_agent(plan: LaunchPlan, ranks: Ranks) -> int:
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    is_alone = plan.machines == 1 and plan.rendezvous.rdzv_backend == "static"
    store = hold_loopback_store(plan.address, plan.port) if is_alone else None
    parser = torchrun.get_args_parser()
    parser.allow_abbrev = False  # or it takes arguments of the script, such as --r, for abbreviations
    arguments = parser.parse_args(torchrun_arguments(plan))
    if arguments.log_dir is None:  # or torch leaves an empty folder in that of temporary files
        arguments.log_dir = folder_of(plan)
    if sys.platform == "win32":
        arguments.signals_to_handle = _names(children.FORWARDED)  # newer torch does not read the variable
    logger = logging.getLogger(AGENT_LOGGER)
    level = logger.level
    if folder_of(plan) is not None:  # it logs the exit code of a process, which this launcher also reports
        logger.setLevel(logging.CRITICAL)
    try:
        torchrun.run(arguments)  # type: ignore[no-untyped-call]
    except OF_OTHER_VALUES:  # not about settings
        raise
    except ValueError as error:  # raised before a process is started
        reason = " ".join(str(error).split()).rstrip(".?")
        raise ConfigurationError(
            f"torch cannot use these settings of the rendezvous: {reason}. Correct --main_process_ip, "
            f"--rdzv_backend or --rdzv_conf."
        ) from error
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        return children.exit_code(_code_of_first(plan, ranks) or first.exitcode) or 1
    except SignalException as error:
        say(f"{error.sigval.name} ended all processes of this machine")
        return _code_after(error.sigval)
    finally:
        logger.setLevel(level)
        del store
    return 0


def _names(numbers: Sequence[int]) -> str:
    return ",".join(signal.Signals(number).name for number in numbers)


def _code_of_first(plan: LaunchPlan, ranks: Ranks) -> int:
    """Records the exits of the processes, and returns the code of the rank that failed first, or 0."""
    folder = folder_of(plan)
    if folder is None:
        return 0
    seen = ranks.exits()
    seen.write(folder)
    first = find_first(collect(folder, 1))
    return 0 if first is None or first.rank in seen.asked else seen.codes.get(first.rank, 0)


def _code_after(number: signal.Signals) -> int:
    """Returns the exit code of a run that a signal ended.

    `srun` ends all its tasks when one has failed, and returns the highest code, which must be that of the
    failed task.
    """
    ended_by_srun = number == signal.SIGTERM and "SLURM_STEP_ID" in environ.current()
    return 1 if ended_by_srun else 128 + int(number)


def check_reach(
    plan: LaunchPlan, say: Callable[[str], None], *, timeout: float = NODE_0_TIMEOUT, pause: float = PAUSE
) -> None:
    """Checks that node 0 is reachable, because a rendezvous reports an unreachable node only after minutes.

    Node 0 opens the port, so it only looks up the name of its address. The others connect. Until node 0 has
    started they wait `timeout` seconds for it, and report that. In a pod every problem may mean that node 0
    has not started yet.
    """
    if plan.machines == 1:
        return
    endpoint, node = (plan.address, plan.port), f"machine {plan.machine} ({plan.ranks})"
    connects = plan.machine > 0 and plan.rendezvous.rdzv_backend in CONNECTING_BACKENDS
    deadline, report_at = (time.monotonic() + seconds for seconds in (timeout, REPORT_AFTER))
    is_pod = POD_VARIABLE in environ.current()
    while (problem := _connect(endpoint, connects)) is not None:
        now = time.monotonic()
        if not (is_pod or problem.errno in NOT_YET) or now > deadline:
            raise LaunchError(
                f"{node} cannot reach {plan.address}:{plan.port}: {_reason(problem)}. Check that "
                "--main_process_ip is the address of machine 0, that `accelerate launch` runs there, and "
                "that no firewall is in between."
            )
        if now > report_at:
            say(f"{node} waits for machine 0 at {plan.address}:{plan.port}: {_reason(problem)}")
            report_at = deadline + PAUSE
        time.sleep(pause)


def _connect(endpoint: tuple[str, int], connects: bool) -> OSError | None:
    """Looks up the address, connects if this node must, and returns the error or None."""
    try:
        socket.getaddrinfo(*endpoint, type=socket.SOCK_STREAM)
        if connects:
            socket.create_connection(endpoint, timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        return error
    return None


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "this name has no address"
    if isinstance(error, TimeoutError):
        return f"no answer within {CONNECT_TIMEOUT:.0f} s"
    return (error.strerror or str(error)).lower()
