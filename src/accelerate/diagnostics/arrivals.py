"""Which ranks have not come while others wait for them in `init_process_group`.

Each rank that waits posts so again and again, from a thread of its own. One that has waited too long, and is
the lowest of those that post, asks one rank of each machine what it sees of the missing ones, and reports it.
Where the store does not answer, as rank 0 is to keep it and did not come, each rank reports alone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from accelerate.diagnostics import processes
from accelerate.diagnostics.hang_report import Doing, Limits, Outlet, RankState, Report, compose
from accelerate.diagnostics.peers import PATIENCE, own_identity, silent_state
from accelerate.state import StoreChannel, Topology, as_dataclass, process_group

SECONDS_TO_ANSWER = 3.0
SECONDS_TO_END = 10.0
_PAUSES = 3
"""Pauses within which every rank that waits has answered."""
_UNSEEN = "did not come, and no rank that waits can see what it does"
_WITHOUT_RANK_0 = "Rank 0 keeps the store of the run, so no other rank can be asked before it comes."


@dataclass(frozen=True)
class Note(RankState):
    """The answer of a rank that waits."""

    space: str = ""  # differs between machines, and between containers on them


@dataclass(frozen=True)
class Message:
    """A question to the ranks that wait, or a report.

    All that wait answer a question that they are there. Restarts share this part of the store: a report is
    for the processes that have answered the question before it.
    """

    missing: list[int]
    asked: list[int]  # ranks that answer too what they see of the missing ones
    question: int = 0  # number of the question that a report answers; 0 for a question
    printer: int = 0  # rank that prints the report
    text: str = ""
    ends: bool = False


class ArrivalWatch:
    """Watches this rank while it waits for the others to open the process group; a context.

    `opened` is how many groups this process has opened before.
    """

    def __init__(self, topology: Topology, opened: int, limits: Limits, environ: Mapping[str, str]) -> None:
        self._topology, self._opened, self._limits = topology, opened, limits
        self._rank, self._size = topology.rank, topology.size
        self._outlet = Outlet(topology.rank, topology.size, environ)
        self._waiting_thread = threading.get_ident()
        self._own = own_identity()
        self._began = time.monotonic()
        self._next = limits.seconds
        self._channel: StoreChannel | None = None
        self._read = 0  # number of the last message that this process has read, or posted
        self._answered: set[int] = set()
        self._reported: set[int] | None = None
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
        while not self._done.wait(self._limits.pause):
            try:
                self._look()
            except RuntimeError:  # what torch raises when a store does not answer: this rank is alone
                self._channel = None
        if self._is_open and self._has_printed:
            self._outlet.withdraw(f"accelerate: the hang is over: rank {self._rank} goes on.")

    def _look(self) -> None:
        self._channel = channel = self._channel or self._connect()
        if channel is not None:
            self._take_part(channel)
        if self._waited() < self._next:
            return
        self._next = self._waited() + self._limits.seconds
        if channel is not None:
            self._inquire(channel)
        elif self._reported is None:
            self._reported = {0}
            address = f"{self._topology.address}:{self._topology.port}"
            state = next(iter(self._describe([0])), RankState(0, Doing.SILENT, ending=_UNSEEN))
            state = replace(state, ending=f"{state.ending}; it does not answer at {address}")
            text = _spell([self._note(), state], _WITHOUT_RANK_0)
            self._publish(text)
            if self._limits.ends:
                self._end(text)

    def _connect(self) -> StoreChannel | None:
        return process_group.connect_before(self._topology, f"arrivals/{self._opened}", PATIENCE)

    def _take_part(self, channel: StoreChannel) -> None:
        """Answer the last question, or follow the last report."""
        number = channel.count("messages")
        if number == self._read:
            return
        message = as_dataclass(Message, channel.read(f"message/{number}"))
        if message is None:  # not posted yet
            return
        self._read = number
        if message.question:
            self._follow(channel, message)
            return
        self._next = max(self._next, self._waited() + self._limits.seconds)  # another rank reports
        self._answered.add(number)
        channel.append(f"waiting/{number}", asdict(self._note()))
        if self._rank in message.asked:
            for state in self._describe(message.missing):
                channel.append(f"seen/{number}", asdict(state))

    def _follow(self, channel: StoreChannel, report: Message) -> None:
        if report.question not in self._answered:  # of processes before a restart
            return
        self._reported = set(report.missing)
        if report.printer == self._rank:
            self._publish(report.text)
        if report.ends and self._may_end(channel) and not self._done.wait(_PAUSES * self._limits.pause):
            self._end(report.text)

    def _may_end(self, channel: StoreChannel) -> bool:
        """Whether another rank may end this one: anybody may have written what is not signed."""
        return channel.is_signed or (self._limits.ends and self._waited() >= self._limits.seconds)

    def _post(self, channel: StoreChannel, message: Message) -> int:
        """Post a message, and return its number."""
        self._read = channel.count("messages", 1)
        self._answered.add(self._read)
        channel.post(f"message/{self._read}", asdict(message))
        return self._read

    def _ask(self, channel: StoreChannel, missing: list[int], asked: list[int]) -> dict[int, Note] | None:
        """The other ranks that wait; None where another rank has asked meanwhile, or the group is open."""
        number = self._post(channel, Message(missing, asked))
        seconds = _PAUSES * self._limits.pause + (SECONDS_TO_ANSWER if {*asked} - {self._rank} else 0.0)
        if self._done.wait(seconds) or channel.count("messages") != number:
            return None
        notes = (as_dataclass(Note, value) for value in channel.read_list(f"waiting/{number}"))
        return {note.rank: note for note in notes if note is not None}

    def _inquire(self, channel: StoreChannel) -> None:
        waiting = self._ask(channel, [], [])
        if waiting is None:
            return
        missing = self._missing(waiting)
        if self._reported is not None and self._reported >= set(missing):
            return
        seen: dict[int, RankState] = {}
        if missing:
            asked = {(self._own.host, self._own.space): self._rank}
            for rank, note in sorted(waiting.items()):
                asked.setdefault((note.host, note.space), rank)
            waiting = self._ask(channel, missing, sorted(asked.values()))
            if waiting is None or not self._missing(waiting):
                return
            seen = self._read_seen(channel) if len(asked) > 1 else {}
            seen |= {state.rank: state for state in self._describe(missing)}
            missing = self._missing(waiting)
        states: dict[int, RankState] = {
            self._rank: self._note(),
            **waiting,
            **{rank: seen.get(rank) or RankState(rank, Doing.SILENT, ending=_UNSEEN) for rank in missing},
        }
        text = _spell([states[rank] for rank in sorted(states)], _advice([states[rank] for rank in missing]))
        printer = min({self._rank, *waiting})
        report = Message(missing, [], self._read, printer, text, self._limits.ends)
        self._post(channel, report)
        self._follow(channel, report)

    def _read_seen(self, channel: StoreChannel) -> dict[int, RankState]:
        """What the ranks that were asked see of the missing ones."""
        states = (as_dataclass(RankState, value) for value in channel.read_list(f"seen/{self._read}"))
        return {state.rank: state for state in states if state is not None}

    def _missing(self, waiting: Mapping[int, Note]) -> list[int]:
        return [rank for rank in range(self._size) if rank != self._rank and rank not in waiting]

    def _describe(self, missing: Iterable[int]) -> list[RankState]:
        """What this process sees of the missing ranks of its machine."""
        siblings = processes.find_siblings(self._rank)
        if siblings is None:
            return []
        host, pids, starter = self._own.host, siblings.pids, siblings.starter
        first = self._rank - self._topology.local_rank
        started = range(first, first + self._topology.local_size) if siblings.is_complete else ()
        ended = f"ended before it came (process {starter} on {host}, which started it, no longer has it)"
        return [
            silent_state(rank, "did not come", host, pids[rank])
            if rank in pids
            else RankState(rank, Doing.ENDED, ending=ended, host=host)
            for rank in missing
            if rank in pids or rank in started
        ]

    def _note(self) -> Note:
        frame = processes.innermost(self._waiting_thread)
        position = None if frame is None else processes.read_position(frame)
        return Note(
            self._rank,
            Doing.STARTING,
            operation="init_process_group",
            file=position.file if position else "",
            line=position.line if position else 0,
            seconds=self._waited(),
            host=self._own.host,
            pid=self._own.pid,
            space=self._own.space,
        )

    def _waited(self) -> float:
        return time.monotonic() - self._began

    def _publish(self, text: str) -> None:
        self._has_printed = True
        self._outlet.publish(self._report(text))

    def _end(self, text: str) -> None:
        self._outlet.prepare_end(self._report(text))
        self._outlet.end()

    def _report(self, text: str) -> Report:
        return Report(text, self._rank, self._limits.ends, 1, [])


def _spell(states: list[RankState], advice: str) -> str:
    return f"{compose(states, os.getcwd())}\n{advice}"


def _advice(missing: list[RankState]) -> str:
    if not missing:
        return (
            "All ranks have come, and do not connect to each other: look at the network interfaces "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), the addresses of the machines and their firewalls."
        )
    if all(state.doing == Doing.ENDED for state in missing):
        return "Every rank has to build an Accelerator: look at why the script ended before that."
    text = "Every rank has to build an Accelerator: look at what the script does before that."
    blind = [str(state.pid) for state in missing if state.pid and not state.stack]
    return f"{text} `py-spy dump --pid {blind[0]}` shows where a process is." if blind else text
