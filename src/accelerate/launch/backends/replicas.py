"""Launcher of replica groups, which are started again while the others continue."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from accelerate.base import LaunchError, environ, require, wrong_value
from accelerate.launch import children, layout
from accelerate.launch.backends.base import Launcher
from accelerate.launch.children import say
from accelerate.launch.machine import Machine, new_run_id
from accelerate.launch.plan import (
    FIRST_STEP,
    LIFE,
    LaunchPlan,
    accelerate_command,
    arrived_key,
    begun_key,
    committed_key,
    has_steps,
    read_life,
)
from accelerate.settings import Settings
from accelerate.settings.sections import LaunchSection, RecoverySection

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

POLL = 0.05
DEFAULT_TIMEOUT = 60
OWN_OPTIONS = (
    *("replicas", "min_replicas", "replica_batch", "replica_timeout", "lighthouse"),
    *(
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "multi_gpu",
        "gpu_ids",
    ),
)
"""Options that the launchers of replica groups do not get."""
HEARTBEAT_MILLISECONDS = 1500
"""Time without a heartbeat after which the lighthouse counts a replica group as ended."""
TICK_MILLISECONDS = 20
LOG_LEVELS = {"RUST_LOG": "error", "TORCH_CPP_LOG_LEVEL": "FATAL"}
"""Variables without which torchft and c10d log a trace of each connection to an ended replica group.

In groups of several processes, c10d also logs errors of collectives within the group.
"""
STORE_TIMEOUT = timedelta(seconds=300)
MAX_FUTILE = 3
"""Number of times that a replica group ends in succession after the same step, or without one, which end the
run."""
LIGHTHOUSE = "lighthouse"
"""Key in the store of the run of the address of the lighthouse."""


class Groups(NamedTuple):
    """Replica groups of a launch."""

    words: tuple[str, ...]  # command that starts one of them, before the script
    target: tuple[str, ...]  # script and its arguments
    replicas: int  # number of replica groups on all nodes
    size: int  # number of processes of each
    min_replicas: int  # smallest number of replica groups that takes a step
    batch: str  # whether the global batch is constant or shrinks with the number of replica groups
    timeout: int  # timeout of one collective between replica groups, in seconds
    lighthouse: str | None  # address of a running lighthouse, or None
    # Ids of the devices of this node, of which each of its replica groups has its own, or none for the CPU.
    devices: tuple[str, ...]

    def command(self, index: int) -> list[str]:
        """Returns the command that starts a replica group, by its index on this node."""
        ids = ",".join(self.devices[index * self.size : (index + 1) * self.size])
        return [*self.words, *(["--gpu_ids", ids] if ids else []), *self.target]


@dataclass
class Group:
    """Processes of one replica group on this node."""

    number: int  # index of the replica group
    child: subprocess.Popen[Any]  # launcher of its processes
    futile: int = 0  # how often it has ended in succession after the same step, or without one
    num_steps: int = 0  # number of steps that were committed when it ended last
    is_done: bool = False  # whether its script has ended without an error


@dataclass
class Ending:
    """Signal that ends the run, which is passed on to all replica groups."""

    groups: list[Group] = field(default_factory=list)
    received: int = 0

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        if number not in children.REQUESTS:
            self.received = number
        self.send(number)

    def send(self, number: int) -> None:
        for group in self.groups:
            if group.child.poll() is None:
                children.send_signal(group.child, number)


class ReplicaLauncher(Launcher):
    """Launcher that starts the replica groups of this node, and those that end again.

    Node 0 also runs the store of the run and, unless one is given, the lighthouse of torchft. They do not
    survive their node.
    """

    def amend(self, settings: Settings, machine: Machine) -> Settings:
        require("torchft", "--replicas")
        launch, recovery = settings[LaunchSection], settings[RecoverySection]
        replicas = recovery.replicas or 1
        if launch.num_processes is None:
            devices = replicas if launch.cpu else max(machine.devices * launch.num_machines, replicas)
            settings = settings.replaced("--replicas", num_processes=devices)
        processes = settings[LaunchSection].num_processes or 1
        if processes % replicas:
            reason = f"--num_processes {processes} do not divide into replica groups of one size"
            raise wrong_value("--replicas", replicas, reason, "Use a divisor of the number of processes")
        if replicas % launch.num_machines:
            reason = f"{launch.num_machines} machines cannot have equally many of them"
            raise wrong_value("--replicas", replicas, reason, "Use a multiple of --num_machines")
        if (recovery.min_replicas or 1) > replicas:
            reason = f"there are {replicas} replica groups"
            raise wrong_value("--min_replicas", recovery.min_replicas, reason, "Use a smaller number")
        return settings

    def details(self, settings: Settings, machine: Machine, plan: LaunchPlan) -> Groups:
        recovery = settings[RecoverySection]
        words = accelerate_command(settings, plan.target, *OWN_OPTIONS)
        replicas = recovery.replicas or 1
        size = plan.processes // replicas
        at = len(words) - len(plan.target.words)
        sizes = ["--num_processes", str(size), "--num_machines", "1", "--main_process_port", "0"]
        return Groups(
            (*words[:at], *sizes),
            tuple(words[at:]),
            replicas,
            size,
            recovery.min_replicas or 1,
            recovery.replica_batch or "constant",
            recovery.replica_timeout or DEFAULT_TIMEOUT,
            recovery.lighthouse,
            layout.used_devices(settings, machine, replicas * size // plan.machines),
        )

    def command(self, plan: LaunchPlan) -> list[str]:
        return plan.detail(Groups).command(0)

    def run(self, plan: LaunchPlan) -> int:
        """Starts the replica groups of this node, and returns 0 when all of them have ended."""
        groups, ending = plan.detail(Groups), Ending()
        levels = LOG_LEVELS if groups.size == 1 else {"RUST_LOG": LOG_LEVELS["RUST_LOG"]}
        levels = {name: environ.current().get(name, level) for name, level in levels.items()}
        with environ.patch_environment(**levels):
            store, lighthouse, added = _open_run(plan, groups)
            try:
                with children.caught_signals(ending.on_signal):
                    return _run_groups(plan, groups, store, added, ending)
            finally:
                children.kill_trees(group.child.pid for group in ending.groups if group.child.poll() is None)
                if lighthouse is not None:
                    lighthouse.shutdown()


def _open_run(plan: LaunchPlan, groups: Groups) -> tuple[Any, Any, dict[str, str]]:
    """Returns the store of the run, the lighthouse of this node or None, and variables of its processes."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    is_first, is_alone = plan.machine == 0, plan.machines == 1
    host = "localhost" if is_alone else plan.address
    store = TCPStore(
        host, 0 if is_alone else plan.port, is_master=is_first, wait_for_workers=False, timeout=STORE_TIMEOUT
    )
    lighthouse = None
    if is_first:
        address = groups.lighthouse
        if address is None:
            lighthouse = _open_lighthouse(groups)
            address = f"http://{host}:{lighthouse.address().rpartition(':')[2]}"
        store.set(LIGHTHOUSE, address)
        store.set(environ.RUN_ID, new_run_id())
    variables = {
        "ACCELERATE_REPLICAS": str(groups.replicas),
        "ACCELERATE_MIN_REPLICAS": str(groups.min_replicas),
        "ACCELERATE_REPLICA_BATCH": groups.batch,
        "ACCELERATE_LIGHTHOUSE": store.get(LIGHTHOUSE).decode(),
        "ACCELERATE_RUN_STORE": f"{host}:{store.port}",
        "ACCELERATE_REPLICA_TIMEOUT": str(groups.timeout),
        environ.RUN_ID: store.get(environ.RUN_ID).decode(),
    }
    return store, lighthouse, variables


def _open_lighthouse(groups: Groups) -> Any:
    from torchft.coordination import LighthouseServer

    try:
        return LighthouseServer(
            bind="[::]:0",
            min_replicas=groups.min_replicas,
            # Replica groups that run and have not asked for the next step may save or evaluate.
            join_timeout_ms=1000 * groups.timeout,
            quorum_tick_ms=TICK_MILLISECONDS,
            heartbeat_timeout_ms=HEARTBEAT_MILLISECONDS,
        )
    except RuntimeError as error:
        raise LaunchError(f"The lighthouse of torchft did not start: {error}.") from error


def _run_groups(
    plan: LaunchPlan, groups: Groups, store: Store, added: Mapping[str, str], ending: Ending
) -> int:
    count = groups.replicas // plan.machines
    numbers = range(plan.machine * count, (plan.machine + 1) * count)

    def start(number: int) -> subprocess.Popen[Any]:
        command = groups.command(number - numbers[0])
        store.delete_key(committed_key(number))
        begin_life(store, groups.replicas)
        store.delete_key(arrived_key(read_life(store), FIRST_STEP, number))
        own = {environ.REPLICA: str(number), environ.PARENT: str(os.getpid())}
        variables = {**environ.current(), **plan.environment, **added, **own}
        return subprocess.Popen(command, env=variables)

    ending.groups = [Group(number, start(number)) for number in numbers]
    deadline, failed = float("inf"), 0
    while running := [group for group in ending.groups if not group.is_done]:
        if ending.received and deadline == float("inf"):
            deadline = time.monotonic() + children.grace() + children.DESCENDANT_TIMEOUT
        if time.monotonic() > deadline:
            return 128 + ending.received
        for group in running:
            code = group.child.poll()
            if code is None:
                continue
            if code == 0 or ending.received or any(other.is_done for other in ending.groups):
                group.is_done = True
                if code and not ending.received:
                    after = _lateness(store, ending.groups, group, children.exit_code(code), groups.replicas)
                    say(f"replica group {group.number} {_ended(code)} after another group was done{after}")
                    failed = failed or (0 if after else children.exit_code(code))
                continue
            num_steps = _num_steps(store, group)
            is_futile = not num_steps or num_steps == group.num_steps
            group.futile, group.num_steps = group.futile + 1 if is_futile else 1, num_steps
            if group.futile == MAX_FUTILE:
                where = f"after step {num_steps}" if num_steps else "without a committed step"
                say(
                    f"replica group {group.number} ended {MAX_FUTILE} times {where} ({_ended(code)}). The "
                    "run ends"
                )
                ending.send(signal.SIGTERM)
                _wait(ending.groups)
                return children.exit_code(code)
            others = sum(other.child.poll() is None for other in ending.groups)
            say(
                f"replica group {group.number} {_ended(code)} and is started again; of {len(numbers)} groups "
                f"on this machine {others} continue"
            )
            group.child = start(group.number)
        time.sleep(POLL)
    return 128 + ending.received if ending.received else failed


def _lateness(store: Store, groups: list[Group], group: Group, code: int, replicas: int) -> str:
    """Returns why the end of a group after that of another one is no failure of the run, or ""."""
    own = _num_steps(store, group)
    if not has_steps(store, replicas):
        return ""
    if not own:  # it started again after the last step, so it has no batch, and its script may need one
        return ", and had no step of its own"
    was_killed = code > 128  # by a signal, and not ended by an error of the script
    is_behind = own < max(_num_steps(store, other) for other in groups)
    return ", which took its last steps" if was_killed and is_behind else ""


def _num_steps(store: Store, group: Group) -> int:
    """Returns the number of committed steps of a replica group, or 0 if it has not taken part in one."""
    key = committed_key(group.number)
    return int(store.get(key)) if store.check([key]) else 0


def begin_life(store: Store, replicas: int) -> None:
    """Begins the next life of a run if steps were committed, and no replica group holds their state any more.

    The groups then begin where the script or its checkpoint does, and not where keys of the store say.
    """
    if has_steps(store, replicas):
        return
    life = read_life(store)
    if store.check([begun_key(life)]):
        store.compare_set(LIFE, str(life) if life else "", str(life + 1))


def _ended(code: int) -> str:
    code = children.exit_code(code)
    names = {128 + number: number.name for number in signal.Signals}
    return f"ended by {names[code]}" if code in names else f"ended with exit code {code}"


def _wait(groups: list[Group]) -> None:
    deadline = time.monotonic() + children.grace()
    while any(group.child.poll() is None for group in groups) and time.monotonic() < deadline:
        time.sleep(POLL)
