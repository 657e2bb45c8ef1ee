"""One round of the hang detector: detect a deadlock, answer other ranks, write the report.

The watcher looks about once a second, from a thread of its own. That costs the training thread nothing, and
works while it is blocked outside Python.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass

from accelerate.diagnostics.hang_channel import HangChannel, Report
from accelerate.diagnostics.hang_outlet import Outlet
from accelerate.diagnostics.hang_report import DATA, RankState, awaits_data, compose, is_hang
from accelerate.diagnostics.observation import Observation
from accelerate.diagnostics.peers import Peers

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_TO_NOTICE_A_DEATH = 2.0
SECONDS_TO_ANSWER = 3.0
GROWTH = 2.0


@dataclass(frozen=True)
class Limits:
    """When something is said, and what follows.

    Attributes:
        seconds: how long a rank may wait.
        ends: whether all ranks end after a report.
    """

    seconds: float
    ends: bool

    @property
    def pause(self) -> float:
        """Seconds between two looks."""
        return min(SECONDS_BETWEEN_LOOKS, self.seconds / 10)

    @property
    def death(self) -> float:
        """Seconds of waiting after which a rank looks whether the others live."""
        return min(SECONDS_TO_NOTICE_A_DEATH, self.seconds)


class Watchdog:
    """The watcher of one rank.

    Args:
        rank: of this process.
        limits: when something is said.
        hang_channel: the common board.
        peers: the other ranks.
        observation: of the thread that trains.
        outlet: where reports go.
    """

    def __init__(
        self,
        rank: int,
        limits: Limits,
        hang_channel: HangChannel,
        peers: Peers,
        observation: Observation,
        outlet: Outlet,
    ) -> None:
        self._rank = rank
        self._limits = limits
        self._hang_channel = hang_channel
        self._peers = peers
        self._observation = observation
        self._outlet = outlet
        self._answered = 0  # last inquiry that this rank has answered
        self._read = 0  # last inquiry whose report it has read
        self._answered_at = 0.0
        self._token: object = None
        self._next = limits.seconds  # how long the present wait may last until it is reported (again)
        self._named: set[int] = set()  # ranks that were reported to have ended
        self._reported: object = None  # the wait that this rank had reported last
        self._over = False
        self._patience_for_data = limits.seconds  # grows: a loader that is slow at each batch is no fault

    def look(self) -> None:
        """Look once: answer others, read reports, and ask when this rank waits too long."""
        token, seconds = self._observation.waited()
        if token != self._token:
            is_data = isinstance(token, tuple) and token[0] == DATA
            self._token, self._next = token, self._patience_for_data if is_data else self._limits.seconds
        self._attend(seconds)
        self._tell_end_of_hang()
        if token is None or seconds < self._limits.death or self._is_inquiring():
            return
        if seconds >= self._next or self._peers.ended().keys() - self._named:
            self._inquire(seconds)

    def last_words(self, ending: str, failed: bool, lost: RankState | None) -> None:
        """Say how this process ends, and name those whose end before made it fail.

        Args:
            ending: what follows "has".
            failed: whether an error ends it.
            lost: where this rank was when an operation with other ranks failed; None when that is not why
                it ends.
        """
        self._hang_channel.leave(ending)
        if self._reported is not None and not failed:
            self._say_over()
        ended = {} if lost is None else self._peers.ended()
        if lost is not None and ended and not self._named and self._hang_channel.is_first_to_tell():
            states = [self._peers.silent_state(rank) for rank in ended]
            text = compose(sorted([lost, *states], key=lambda state: state.rank), os.getcwd())
            self._outlet.publish(self._report(text, [self._rank], list(ended), ends=False))

    def _attend(self, seconds: float) -> None:
        """Answer the last inquiry, and read its report when it is there."""
        number = self._hang_channel.inquiry()
        if number > self._answered:
            self._hang_channel.answer(number, self._observation.state())
            self._enter(number, seconds)
        if self._read < self._answered and (report := self._hang_channel.report(self._answered)) is not None:
            self._obey(self._answered, report)

    def _enter(self, number: int, seconds: float) -> None:
        self._answered, self._answered_at = number, time.monotonic()
        self._next = max(self._next, seconds * GROWTH)

    def _is_inquiring(self) -> bool:
        """Whether the last inquiry has no report yet; one whose asker has died meanwhile does not count."""
        return self._read < self._answered and time.monotonic() - self._answered_at < 3 * SECONDS_TO_ANSWER

    def _inquire(self, seconds: float) -> None:
        if not self._hang_channel.ask(self._answered):
            return
        own = self._observation.state()
        self._enter(self._answered + 1, seconds)
        self._hang_channel.answer(self._answered, own)
        answers = self._collect(own)
        ended = list(self._peers.ended())
        states = [answers.get(rank) or self._peers.silent_state(rank) for rank in self._all_ranks()]
        hang = is_hang(states) and self._observation.waited()[0] == self._token
        slow = not hang and awaits_data(states, self._limits.seconds)
        if slow:
            self._patience_for_data = seconds * GROWTH
        text = compose(states, os.getcwd()) if hang or slow else ""
        report = self._report(text, list(answers), ended, ends=hang and self._limits.ends)
        self._hang_channel.announce(self._answered, report)
        self._reported = self._token if hang or slow else None
        self._obey(self._answered, report)

    def _all_ranks(self) -> list[int]:
        return sorted((self._rank, *self._peers.ranks))

    def _collect(self, own: RankState) -> dict[int, RankState]:
        """The states of the ranks that answer in time."""
        found = {self._rank: own}
        deadline = time.monotonic() + SECONDS_TO_ANSWER
        while time.monotonic() < deadline:
            found |= self._hang_channel.answers(
                self._answered, [r for r in self._peers.ranks if r not in found]
            )
            if len(found) + len(self._peers.ended().keys() - found.keys()) == len(self._peers.ranks) + 1:
                break
            time.sleep(self._limits.pause / 4)
        return found

    def _report(self, text: str, answered: list[int], ended: list[int], *, ends: bool) -> Report:
        living = [rank for rank in answered if rank not in ended]
        return Report(text, min(living, default=self._rank), ends, time.time(), answered, ended)

    def _obey(self, number: int, report: Report) -> None:
        self._read = number
        self._named |= set(report.ended)
        if report.text and report.printer == self._rank:
            self._outlet.publish(report)
        if report.ends and self._may_end():
            self._outlet.prepare_end(report)
            with suppress(RuntimeError):  # the process that keeps the store has ended before this one
                self._wait_for_confirmations(number, len(report.answered))
            self._outlet.end()

    def _may_end(self) -> bool:
        """Whether a report may end this process: anybody may have written one that is not signed.

        Then this rank ends by what it sees itself, and one that does not wait is left to its launcher.
        """
        _, seconds = self._observation.waited()
        return self._hang_channel.is_signed or (self._limits.ends and seconds >= self._limits.seconds)

    def _wait_for_confirmations(self, number: int, wanted: int) -> None:
        """Let all that answered come here, so that the end of the first does not keep others from it."""
        deadline = time.monotonic() + SECONDS_TO_ANSWER
        confirmed = self._hang_channel.confirm(number)
        while confirmed < wanted and time.monotonic() < deadline:
            time.sleep(self._limits.pause / 4)
            confirmed = self._hang_channel.confirmed(number)

    def _tell_end_of_hang(self) -> None:
        """Say that the wait which this rank reported is over; a look later: it may have ended in an error."""
        if self._reported is None or self._reported == self._token:
            return
        if self._over:
            self._say_over()
        self._over = not self._over

    def _say_over(self) -> None:
        self._outlet.withdraw(f"accelerate: the hang is over: rank {self._rank} goes on.")
        self._reported = None
