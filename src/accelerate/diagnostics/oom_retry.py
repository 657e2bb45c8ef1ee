"""Agree with the other ranks on how an attempt ended, over the store: their collectives may hang.

A process that runs out of memory leaves the others waiting in a collective. When some do not report because
they still wait, every process aborts the process group, which wakes them, and a new group is opened on the
same store.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from accelerate import torch_private
from accelerate.base import StateError, environ
from accelerate.ops import Transport, current_transport
from accelerate.state import PartialState, StoreChannel, process_group

SECONDS_OF_GRACE = 5.0
"""How long a process that ran out of memory waits for the others before it takes them for stuck."""
SECONDS_TO_LEAVE = 30.0
_PAUSE = 0.5


class Attempts:
    """One process: how its attempt ended is how the attempt ended.

    Each attempt is one `begin`, then one of `agree` and `fail`.
    """

    def begin(self) -> None:
        """An attempt starts. Called on all ranks."""

    def was_interrupted(self) -> bool:
        """Whether an error of this process came from another one that ran out of memory meanwhile."""
        return False

    def fail(self, error: BaseException) -> None:
        """Report that this process ends with an error of its own."""

    def agree(self, ran_out: bool) -> bool:
        """Wait for all processes, and return whether any of them ran out of memory. Called on all ranks.

        Args:
            ran_out: whether this process did, or was interrupted.

        Raises:
            StateError: a process ended with an error of its own, or did not come in time.
        """
        return ran_out


class WireAttempts(Attempts):
    """Several processes without a store: they agree in a collective, so none may be stuck in another one."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def agree(self, ran_out: bool) -> bool:
        return any(self._transport.gather_object(ran_out))


class StoreAttempts(Attempts):
    """Several processes of `torch.distributed`, which agree through its store."""

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self._ranks = range(state.num_processes)
        self._store: Any = torch_private.default_store()
        self._search = self._store.add(f"accelerate/attempts/{state.process_index}", 1)
        self._attempt = 0
        self._channel = self._open_channel()
        self._watcher: _Watcher | None = None

    def begin(self) -> None:
        self._attempt += 1
        self._channel = self._open_channel()
        self._watcher = _Watcher(self._channel)

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

    def agree(self, ran_out: bool) -> bool:
        try:
            return self._agree(ran_out)
        finally:
            self._stop_watching()

    def _agree(self, ran_out: bool) -> bool:
        self._report("ran out" if ran_out else "done", _collectives_issued())
        if ran_out and (_is_closing(self._channel) or None in self._wait(SECONDS_OF_GRACE)):
            self._channel.decide("fate", "close")
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
        if self._channel.decide("fate", "keep" if in_step else "close") == "close":
            self._reopen_group()
        return True

    def _reopen_group(self) -> None:
        """Leave the old group on all ranks and meet in a new one."""
        self._watcher = self._watcher or _Watcher(self._channel)  # none where the state is new
        if not self._watcher.has_left(SECONDS_TO_LEAVE):
            raise StateError(
                "A process ran out of memory, and the process group cannot be closed: collectives that were "
                "started wait for each other. Start the run again with a smaller batch size."
            )
        device = self._state.device
        dist.init_process_group(
            self._state.backend,
            store=dist.PrefixStore(f"{self._scope()}/group", self._store),  # type: ignore[attr-defined]
            rank=self._state.process_index,
            world_size=len(self._ranks),
            timeout=self._store.timeout,
            device_id=device if self._state.device_backend.binds_group else None,
        )
        process_group.own_group()

    def _scope(self) -> str:
        return f"accelerate/attempts/{self._search}/{self._attempt}"

    def _open_channel(self) -> StoreChannel:
        return StoreChannel(self._store, self._scope(), environ.current())

    def _report(self, how: str, detail: str | int | None) -> None:
        """Report how this attempt ended on this rank: "done", "ran out" or "failed"."""
        self._channel.post(how, True)
        self._channel.post(f"ended/{self._state.process_index}", [how, detail])

    def _wait(self, seconds: float) -> list[Any]:
        """Wait for the reports of all ranks; None for those that did not come in time."""
        return list(self._channel.gather("ended", self._ranks, seconds).values())

    def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None


class _Watcher:
    """A thread that aborts the process group when a rank decides so: the main thread may be stuck in it."""

    def __init__(self, channel: StoreChannel) -> None:
        self._channel = channel
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
            while not _is_closing(self._channel):
                if self._stopped.wait(_PAUSE):
                    return
        except dist.DistError:  # the store is gone; the main thread raises the same error
            return
        if dist.is_initialized():
            torch_private.abort_process_group()
        self._left.set()


def join_attempts() -> Attempts:
    """Return how this process agrees with the others: alone when there is no state or no other process."""
    if not PartialState._shared_state or PartialState().num_processes == 1:
        return Attempts()
    return StoreAttempts(PartialState()) if process_group.is_open() else WireAttempts(current_transport())


def _is_closing(channel: StoreChannel) -> bool:
    return bool(channel.read("fate") == "close")


def _collectives_issued() -> int | None:
    """How many collectives this process has issued on the default group; None when it was closed."""
    if not dist.is_initialized():
        return None
    return torch_private.num_collectives(dist.group.WORLD)
