"""Processes that try something together and agree on how it went, without the wire that may hang.

A process that runs out of memory leaves the others waiting in a collective. So the processes tell each other
through the key-value store of the process group how their attempt ended. When some do not come because they
still wait, every process gives the group up, which wakes them, and a new group is opened on the same store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from accelerate import torch_private
from accelerate.base import StateError, environ
from accelerate.ops import Transport, current_transport
from accelerate.state import PartialState, StoreChannel, process_group

# How long a process that ran out of memory waits for the others before it takes them for stuck.
SECONDS_OF_GRACE = 5.0
SECONDS_TO_LEAVE = 30.0
_WATCH = 0.5


class Attempts:
    """One process: how its attempt ended is how the attempt ended.

    Each attempt is one `begin`, then one of `settle` and `fail`.
    """

    def begin(self) -> None:
        """An attempt starts. Called on all ranks."""

    def was_interrupted(self) -> bool:
        """Whether an error of this process came from another one that ran out of memory meanwhile."""
        return False

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process ends with an error of its own."""

    def settle(self, ran_out: bool) -> bool:
        """Wait for all processes, and return whether any of them ran out of memory. Called on all ranks.

        Args:
            ran_out: Whether this process did, or was interrupted.

        Raises:
            StateError: A process ended with an error of its own, or did not come in time.
        """
        return ran_out


class WireAttempts(Attempts):
    """Several processes without a store: they agree in a collective, so none may be stuck in another one."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def settle(self, ran_out: bool) -> bool:
        return any(self._transport.gather_object(ran_out))


class StoreAttempts(Attempts):
    """Several processes of `torch.distributed`, which agree through its store.

    Args:
        state: The facts of this process.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._rank, self._size = state.process_index, state.num_processes
        self._store: Any = torch_private.default_store()
        self._search = self._store.add(f"accelerate/attempts/{self._rank}", 1)
        self._attempt = 0
        self._channel = self._open_channel()
        self._watcher: _Watcher | None = None

    def begin(self) -> None:
        self._attempt += 1
        self._channel = channel = self._open_channel()
        self._watcher = _Watcher(lambda: channel.read("fate") == "close")

    def was_interrupted(self) -> bool:
        try:
            return self._channel.read("ran out") is not None
        except dist.DistError:  # the store went with the process that kept it, so nobody waits for an answer
            return False

    def fail(self, error: BaseException) -> None:
        try:
            self._report("failed", f"{type(error).__name__}: {error}")
        except dist.DistError:  # as above: the caller raises the error itself
            return
        finally:
            self._stop_watching()

    def settle(self, ran_out: bool) -> bool:
        try:
            return self._settle(ran_out)
        finally:
            self._stop_watching()

    def _settle(self, ran_out: bool) -> bool:
        self._report("ran out" if ran_out else "done", _collectives_issued())
        if ran_out and (self._channel.read("fate") == "close" or None in self._wait(SECONDS_OF_GRACE)):
            self._decide("close")
            torch_private.drop_group_references()
        limit = self._store.timeout.total_seconds()
        reports = self._wait(limit)
        if None in reports:
            missing = [rank for rank, report in enumerate(reports) if report is None]
            raise StateError(
                f"Processes {missing} did not end their attempt within {limit:.0f} s, so no size "
                "can be agreed on. Give InitProcessGroupKwargs a longer timeout, and make what holds "
                "the process group (device meshes, subgroups) inside the function."
            )
        failed = [f"Process {rank}: {why}" for rank, (how, why) in enumerate(reports) if how == "failed"]
        if failed:
            raise StateError("The attempt failed on another process. " + "\n".join(failed))
        if all(how == "done" for how, _ in reports):
            return False
        # Where all ranks have issued the same number of collectives, the next ones meet.
        in_step = len({_collectives_issued(), *(issued for _, issued in reports)}) == 1
        if self._decide("keep" if in_step else "close") == "close":
            self._reopen_group()
        return True

    def _reopen_group(self) -> None:
        """Leave the old group on all ranks and meet in a new one."""
        watcher = self._watcher or _Watcher(lambda: True)
        if not watcher.has_left(SECONDS_TO_LEAVE):
            raise StateError(
                "A process ran out of memory, and the process group cannot be closed: collectives that were "
                "started wait for each other. Start the run again with a smaller batch size."
            )
        device = self._state.device
        dist.init_process_group(
            self._state.backend,
            store=dist.PrefixStore(  # type: ignore[attr-defined]
                f"accelerate/attempts/{self._search}/{self._attempt}/group", self._store
            ),
            rank=self._rank,
            world_size=self._size,
            timeout=self._store.timeout,
            device_id=device if device.type == "cuda" else None,
        )
        process_group.own_group()
        PartialState._shared_state.pop("_transport", None)

    def _open_channel(self) -> StoreChannel:
        scope = f"accelerate/attempts/{self._search}/{self._attempt}"
        return StoreChannel(self._store, scope, environ.current())

    def _report(self, how: str, detail: str | int | None) -> None:
        """Tell the others how this attempt ended here: "done", "ran out" or "failed"."""
        self._channel.post(how, True)
        self._channel.post(str(self._rank), [how, detail])

    def _wait(self, seconds: float) -> list[Any]:
        """Wait for the reports of all ranks; None for those that did not come in time."""
        return list(self._channel.wait([str(rank) for rank in range(self._size)], seconds).values())

    def _decide(self, fate: str) -> str:
        """Settle for all ranks whether the group is kept; the first answer stands."""
        self._channel.post_first("fate", fate)
        return str(self._channel.read("fate"))

    def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None


class _Watcher:
    """A thread that gives the process group up when it is told to: the main thread may be stuck in it."""

    def __init__(self, told_to: Callable[[], bool]) -> None:
        self._told_to = told_to
        self._stopped = threading.Event()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="accelerate-attempt", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(SECONDS_TO_LEAVE)

    def has_left(self, seconds: float) -> bool:
        return self._left.wait(seconds)

    def _watch(self) -> None:
        try:
            while not self._told_to():
                if self._stopped.wait(_WATCH):
                    return
        except (
            dist.DistError
        ):  # the store is gone; the main thread meets the same error where it can be raised
            return
        if dist.is_initialized():
            torch_private.abort_process_group()
        self._left.set()


def join_attempts() -> Attempts:
    """Return how this process agrees with the others: alone when there is no state or no other process."""
    if not PartialState._shared_state or PartialState().num_processes == 1:
        return Attempts()
    return StoreAttempts(PartialState()) if process_group.is_open() else WireAttempts(current_transport())


def _collectives_issued() -> int | None:
    """How many collectives this process has issued on the default group; None when it was closed."""
    if not dist.is_initialized():
        return None
    return torch_private.num_collectives(dist.group.WORLD)
