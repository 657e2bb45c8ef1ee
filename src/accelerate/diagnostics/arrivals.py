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
from uuid import uuid4

from accelerate.diagnostics import processes
from accelerate.diagnostics.hang_report import Doing, Limits, Outlet, RankState, Report, compose
from accelerate.diagnostics.peers import PATIENCE, own_identity, silent_state
from accelerate.state import StoreChannel, Topology, as_dataclass, process_group

SECONDS_TO_ANSWER = 3.0
SECONDS_TO_END = 10.0
_PAUSES = 3
"""Pauses within which every rank that waits has posted so anew."""
_UNSEEN = "did not come, and no rank that waits can see what it does"
_WITHOUT_RANK_0 = "Rank 0 keeps the store of the run, so no other rank can be asked before it comes."


@dataclass(frozen=True)
class Note(RankState):
    """What a rank posts as long as it waits."""

    token: str = ""  # of its process
    beat: int = 0  # how often it has posted
    space: str = ""  # differs between machines, and between containers on them


@dataclass(frozen=True)
class Question:
    """A request to the ranks `asked` to post what they see of the missing ones."""

    number: str
    asked: list[int]
    missing: list[int]


@dataclass(frozen=True)
class SentReport:
    """A message that the process `token` of a rank has reported missing ranks."""

    rank: int
    token: str
    missing: list[int]


@dataclass(frozen=True)
class End:
    """A message that the process `token` is to end because of a report."""

    token: str
    text: str


class ArrivalWatch:
    """Watches this rank while it waits for the others to open the process group; a context.

    `opened` is how many groups this process has opened before.
    """

    def __init__(self, topology: Topology, opened: int, limits: Limits, environ: Mapping[str, str]) -> None:
        self._topology, self._opened, self._limits = topology, opened, limits
        self._rank, self._size = topology.rank, topology.size
        self._outlet = Outlet(topology.rank, topology.size, environ)
        self._waiting_thread = threading.get_ident()
        self._token = uuid4().hex  # another one than that of the same rank before a restart
        self._own = own_identity()
        self._began = time.monotonic()
        self._next = limits.seconds
        self._beats = 0
        self._channel: StoreChannel | None = None
        self._answered: set[str] = set()
        self._reported: set[int] | None = None
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
        if self._is_open and self._reported is not None:
            self._outlet.withdraw(f"accelerate: the hang is over: rank {self._rank} goes on.")

    def _look(self) -> None:
        self._channel = channel = self._channel or self._connect()
        if channel is not None:
            self._take_part(channel)
        if self._waited() < self._next:
            return
        self._next += self._limits.seconds
        if channel is not None:
            self._inquire(channel)
        elif self._reported is None:
            self._reported = {0}
            address = f"{self._topology.address}:{self._topology.port}"
            state = next(iter(self._describe([0])), RankState(0, Doing.SILENT, ending=_UNSEEN))
            state = replace(state, ending=f"{state.ending}; it does not answer at {address}")
            self._publish([self._note(), state], _WITHOUT_RANK_0, {})

    def _connect(self) -> StoreChannel | None:
        # Restarts share this part of the store: their processes have other tokens.
        return process_group.connect_before(self._topology, f"arrivals/{self._opened}", PATIENCE)

    def _take_part(self, channel: StoreChannel) -> None:
        """Post that this rank waits, and do what another one asks for."""
        self._beats += 1
        channel.post(f"here/{self._rank}", asdict(self._note()))
        end = as_dataclass(End, channel.read(f"end/{self._rank}"))
        if end is not None and end.token == self._token and self._may_end(channel):
            self._end(end.text)
        question = as_dataclass(Question, channel.read("question"))
        if question is None or question.number in self._answered or self._rank not in question.asked:
            return
        self._answered.add(question.number)
        for state in self._describe(question.missing):
            channel.post(f"seen/{question.number}/{state.rank}", asdict(state))

    def _may_end(self, channel: StoreChannel) -> bool:
        """Whether another rank may end this one: anybody may have written what is not signed."""
        return channel.is_signed or (self._limits.ends and self._waited() >= self._limits.seconds)

    def _wait_for_notes(self, channel: StoreChannel) -> bool:
        """Wait until every rank that waits has posted so anew; whether the group is open meanwhile."""
        for _ in range(_PAUSES):
            if self._done.wait(self._limits.pause):
                return True
            self._take_part(channel)
        return False

    def _find_waiting(self, channel: StoreChannel, ranks: list[int]) -> dict[int, Note]:
        """The ranks that post at this time that they wait; others may have posted before a restart."""
        before = self._read_notes(channel, ranks)
        if not ranks or self._wait_for_notes(channel):
            return {}
        after = self._read_notes(channel, ranks)
        return {rank: note for rank, note in after.items() if note != before.get(rank)}

    def _read_notes(self, channel: StoreChannel, ranks: list[int]) -> dict[int, Note]:
        posted = channel.gather("here", ranks, 0.0)
        notes = {rank: as_dataclass(Note, value) for rank, value in posted.items()}
        return {rank: note for rank, note in notes.items() if note is not None}

    def _inquire(self, channel: StoreChannel) -> None:
        others = self._find_waiting(channel, [rank for rank in range(self._size) if rank != self._rank])
        if min(others, default=self._size) < self._rank:
            return  # the lowest one reports
        missing = [rank for rank in range(self._size) if rank != self._rank and rank not in others]
        if self._done.is_set() or self._was_reported(channel, others, missing):
            return
        seen = self._ask(channel, others, missing) if missing else {}
        late = self._find_waiting(channel, missing)
        if self._done.is_set() or (missing and len(late) == len(missing)):
            return
        missing = [rank for rank in missing if rank not in late]
        notes = {**others, **late}
        states: dict[int, RankState] = {
            self._rank: self._note(),
            **{rank: replace(note, rank=rank) for rank, note in notes.items()},
            **{rank: seen.get(rank) or RankState(rank, Doing.SILENT, ending=_UNSEEN) for rank in missing},
        }
        self._reported = set(missing)
        channel.post("reported", asdict(SentReport(self._rank, self._token, missing)))
        advice = _advice([states[rank] for rank in missing])
        self._publish([states[rank] for rank in sorted(states)], advice, notes)

    def _was_reported(self, channel: StoreChannel, others: Mapping[int, Note], missing: list[int]) -> bool:
        """Whether this rank, or one that waits too, has reported all of these already."""
        if self._reported is not None and self._reported >= set(missing):
            return True
        sent = as_dataclass(SentReport, channel.read("reported"))
        if sent is None or sent.rank not in others or others[sent.rank].token != sent.token:
            return False
        return set(sent.missing) >= set(missing)

    def _ask(
        self, channel: StoreChannel, others: Mapping[int, Note], missing: list[int]
    ) -> dict[int, RankState]:
        """What the lowest rank of each machine sees of the missing ones."""
        number, asked = uuid4().hex, {(self._own.host, self._own.space): self._rank}
        for rank, note in sorted(others.items()):
            asked.setdefault((note.host, note.space), rank)
        self._answered.add(number)
        channel.post("question", asdict(Question(number, sorted(asked.values()), missing)))
        seen = {state.rank: state for state in self._describe(missing)}
        deadline = time.monotonic() + max(SECONDS_TO_ANSWER, _PAUSES * self._limits.pause)
        while len(asked) > 1 and len(seen) < len(missing) and time.monotonic() < deadline:
            if self._done.wait(self._limits.pause / 4):
                return {}
            self._take_part(channel)
            for rank in missing:
                state = as_dataclass(RankState, channel.read(f"seen/{number}/{rank}"))
                seen |= {} if state is None else {rank: replace(state, rank=rank)}
        return seen

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
            token=self._token,
            beat=self._beats,
            space=self._own.space,
        )

    def _waited(self) -> float:
        return time.monotonic() - self._began

    def _publish(self, states: list[RankState], advice: str, notes: Mapping[int, Note]) -> None:
        text = f"{compose(states, os.getcwd())}\n{advice}"
        self._outlet.publish(self._report(text))
        if not self._limits.ends:
            return
        if self._channel is not None:
            for rank, note in notes.items():
                self._channel.post(f"end/{rank}", asdict(End(note.token, text)))
            if self._wait_for_notes(self._channel):
                return
        self._end(text)

    def _end(self, text: str) -> None:
        self._outlet.prepare_end(self._report(text))
        self._outlet.end()

    def _report(self, text: str) -> Report:
        return Report(text, self._rank, self._limits.ends, [self._rank], [])


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
