"""Reports about ranks that are missing while other ranks wait for them in `init_process_group`.

Each waiting rank runs a thread, which `state` starts through `watch_arrivals`. A rank that has waited longer
than the timeout asks over the store which ranks wait, then asks one rank of each node for the state of the
processes of the missing ranks there. The lowest waiting rank prints the report. Where the store does not
respond, because rank 0 is to host it and has not arrived, each rank reports alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from accelerate.diagnostics import processes
from accelerate.diagnostics.hang_report import (
    Activity,
    HangReporter,
    Limits,
    RankState,
    Report,
    format_report,
)
from accelerate.diagnostics.peers import STORE_TIMEOUT, own_identity, silent_state
from accelerate.state import StoreChannel, Topology, as_dataclass, process_group

SECONDS_TO_ANSWER = 3.0
SECONDS_TO_END = 10.0
"""Timeouts for answers of other ranks and for the end of the thread, in seconds."""
_ANSWER_INTERVALS = 3
"""Number of check intervals within which all waiting ranks have answered."""
_UNKNOWN_STATE = "did not come, and no rank that waits can see what it does"
_WITHOUT_RANK_0 = "Rank 0 keeps the store of the run, so no other rank can be asked before it comes."


@dataclass(frozen=True)
class WaitingRank(RankState):
    """Answer of a rank that waits in `init_process_group`."""

    pid_namespace: str = ""  # differs between nodes, and between containers on them


@dataclass(frozen=True)
class Message:
    """Question to the waiting ranks, or a report.

    All waiting ranks answer a question. Restarts of a run use the same keys of the store, so a report is only
    for the processes that have answered its question.
    """

    missing: list[int]
    inspectors: list[int]  # ranks that also answer with the states of missing ranks of their node
    question: int = 0  # number of the question that a report answers; 0 for a question
    printer: int = 0  # rank that prints the report
    text: str = ""
    aborts: bool = False  # all waiting ranks end after the report


class ArrivalWatch:
    """Context manager that watches this rank while it waits in `init_process_group`.

    `num_opened` is the number of process groups that this process has opened before.
    """

    def __init__(
        self, topology: Topology, num_opened: int, limits: Limits, environ: Mapping[str, str]
    ) -> None:
        self._topology, self._num_opened, self._limits = topology, num_opened, limits
        self._rank, self._size = topology.rank, topology.size
        self._reporter = HangReporter(topology.rank, topology.size, environ)
        self._waiting_thread = threading.get_ident()
        self._identity = own_identity()
        self._start_time = time.monotonic()
        self._report_after = limits.timeout  # seconds of waiting before the next report
        self._channel: StoreChannel | None = None
        self._last_message = 0  # number of the last message that this process has read or posted
        self._answered: set[int] = set()  # numbers of the answered questions
        self._reported: set[int] | None = None  # the missing ranks of the last report
        self._has_printed = False
        self._is_open = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accelerate-arrivals", daemon=True)

    def __enter__(self) -> ArrivalWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_open = kind is None
        self._done.set()
        self._thread.join(SECONDS_TO_END)

    def _run(self) -> None:
        while not self._done.wait(self._limits.interval):
            try:
                self._check()
            except RuntimeError:  # raised by torch if the store does not respond
                self._channel = None
        if self._is_open and self._has_printed:
            self._reporter.withdraw(f"accelerate: the hang is over: rank {self._rank} continues.")

    def _check(self) -> None:
        self._channel = channel = self._channel or self._connect()
        if channel is not None:
            self._respond(channel)
        if self._waited() < self._report_after:
            return
        self._report_after = self._waited() + self._limits.timeout
        if channel is not None:
            self._inquire(channel)
        elif self._reported is None:
            self._reported = {0}
            address = f"{self._topology.address}:{self._topology.port}"
            state = next(iter(self._inspect([0])), RankState(0, Activity.SILENT, ending=_UNKNOWN_STATE))
            state = replace(state, ending=f"{state.ending}; it does not answer at {address}")
            text = _format([self._waiting_rank(), state], _WITHOUT_RANK_0)
            self._publish(text)
            if self._limits.aborts:
                self._end(text)

    def _connect(self) -> StoreChannel | None:
        return process_group.connect_before(self._topology, f"arrivals/{self._num_opened}", STORE_TIMEOUT)

    def _respond(self, channel: StoreChannel) -> None:
        """Answers the last question, or handles the last report."""
        number = channel.count("messages")
        if number == self._last_message:
            return
        message = as_dataclass(Message, channel.read(f"message/{number}"))
        if message is None:  # not posted yet
            return
        self._last_message = number
        if message.question:
            self._follow(channel, message)
            return
        # Another rank is to report, so this one waits for another timeout.
        self._report_after = max(self._report_after, self._waited() + self._limits.timeout)
        self._answered.add(number)
        channel.append(f"waiting/{number}", asdict(self._waiting_rank()))
        if self._rank in message.inspectors:
            for state in self._inspect(message.missing):
                channel.append(f"inspected/{number}", asdict(state))

    def _follow(self, channel: StoreChannel, report: Message) -> None:
        if report.question not in self._answered:  # from processes before a restart
            return
        self._reported = set(report.missing)
        if report.printer == self._rank:
            self._publish(report.text)
        if (
            report.aborts
            and self._may_end(channel)
            and not self._done.wait(_ANSWER_INTERVALS * self._limits.interval)
        ):
            self._end(report.text)

    def _may_end(self, channel: StoreChannel) -> bool:
        """Returns whether a report of another rank may end this one.

        Any process with access to the store may have written a report without a signature.
        """
        return channel.is_signed or (self._limits.aborts and self._waited() >= self._limits.timeout)

    def _post(self, channel: StoreChannel, message: Message) -> int:
        self._last_message = channel.count("messages", 1)
        self._answered.add(self._last_message)
        channel.post(f"message/{self._last_message}", asdict(message))
        return self._last_message

    def _ask(
        self, channel: StoreChannel, missing: list[int], inspectors: list[int]
    ) -> dict[int, WaitingRank] | None:
        """Returns the other waiting ranks.

        None if another rank has asked meanwhile, or if the process group is open.
        """
        number = self._post(channel, Message(missing, inspectors))
        seconds = _ANSWER_INTERVALS * self._limits.interval + (
            SECONDS_TO_ANSWER if {*inspectors} - {self._rank} else 0.0
        )
        if self._done.wait(seconds) or channel.count("messages") != number:
            return None
        answers = (as_dataclass(WaitingRank, value) for value in channel.read_list(f"waiting/{number}"))
        return {answer.rank: answer for answer in answers if answer is not None}

    def _inquire(self, channel: StoreChannel) -> None:
        waiting = self._ask(channel, [], [])
        if waiting is None:
            return
        missing = self._missing(waiting)
        if self._reported is not None and self._reported >= set(missing):
            return
        inspected: dict[int, RankState] = {}
        if missing:
            inspectors = {(self._identity.host, self._identity.pid_namespace): self._rank}
            for rank, answer in sorted(waiting.items()):
                inspectors.setdefault((answer.host, answer.pid_namespace), rank)
            waiting = self._ask(channel, missing, sorted(inspectors.values()))
            if waiting is None or not self._missing(waiting):
                return
            inspected = self._read_inspected(channel) if len(inspectors) > 1 else {}
            inspected |= {state.rank: state for state in self._inspect(missing)}
            missing = self._missing(waiting)
        states: dict[int, RankState] = {
            self._rank: self._waiting_rank(),
            **waiting,
            **{
                rank: inspected.get(rank) or RankState(rank, Activity.SILENT, ending=_UNKNOWN_STATE)
                for rank in missing
            },
        }
        text = _format([states[rank] for rank in sorted(states)], _advice([states[rank] for rank in missing]))
        printer = min({self._rank, *waiting})
        report = Message(missing, [], self._last_message, printer, text, self._limits.aborts)
        self._post(channel, report)
        self._follow(channel, report)

    def _read_inspected(self, channel: StoreChannel) -> dict[int, RankState]:
        """Returns the states of missing ranks that the ranks of other nodes have posted."""
        states = (
            as_dataclass(RankState, value) for value in channel.read_list(f"inspected/{self._last_message}")
        )
        return {state.rank: state for state in states if state is not None}

    def _missing(self, waiting: Mapping[int, WaitingRank]) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank and rank not in waiting]

    def _inspect(self, missing: Iterable[int]) -> list[RankState]:
        """Returns the states of the processes of missing ranks of this node."""
        siblings = processes.find_siblings(self._rank)
        if siblings is None:
            return []
        host, pids, launcher = self._identity.host, siblings.pids, siblings.launcher
        first = self._rank - self._topology.local_rank
        started = range(first, first + self._topology.local_size) if siblings.is_complete else ()
        ended = f"ended before it came (process {launcher} on {host}, which started it, no longer has it)"
        return [
            silent_state(rank, "did not come", host, pids[rank])
            if rank in pids
            else RankState(rank, Activity.ENDED, ending=ended, host=host)
            for rank in missing
            if rank in pids or rank in started
        ]

    def _waiting_rank(self) -> WaitingRank:
        frame = processes.innermost(self._waiting_thread)
        position = None if frame is None else processes.read_position(frame)
        return WaitingRank(
            self._rank,
            Activity.STARTING,
            operation="init_process_group",
            file=position.file if position else "",
            line=position.line if position else 0,
            seconds=self._waited(),
            host=self._identity.host,
            pid=self._identity.pid,
            pid_namespace=self._identity.pid_namespace,
        )

    def _waited(self) -> float:
        return time.monotonic() - self._start_time

    def _publish(self, text: str) -> None:
        self._has_printed = True
        self._reporter.publish(self._report(text))

    def _end(self, text: str) -> None:
        self._reporter.prepare_end(self._report(text))
        self._reporter.end()

    def _report(self, text: str) -> Report:
        return Report(text, self._rank, self._limits.aborts, 1, [])


def _format(states: list[RankState], advice: str) -> str:
    return f"{format_report(states, os.getcwd())}\n{advice}"


def _advice(missing: list[RankState]) -> str:
    if not missing:
        return (
            "All ranks have come, and do not connect to each other: look at the network interfaces "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), the addresses of the machines and their firewalls."
        )
    if all(state.activity == Activity.ENDED for state in missing):
        return "Every rank has to build an Accelerator: look at why the script ended before that."
    text = "Every rank has to build an Accelerator: look at what the script does before that."
    blind = [str(state.pid) for state in missing if state.pid and not state.stack]
    return f"{text} `py-spy dump --pid {blind[0]}` shows where a process is." if blind else text
