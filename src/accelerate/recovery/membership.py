"""Membership of replica groups in the steps of a run, which torchft agrees on.

Source: https://docs.pytorch.org/torchft/
"""

from __future__ import annotations

import logging
import socket
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from accelerate.base import RecoveryError, StateError, require
from accelerate.devices import of_device
from accelerate.ops import Transport, local_tensor

CONNECT_TIMEOUT = timedelta(seconds=2)
"""Timeout of connections to the other members, which doubles after each attempt that fails. A member may have
ended meanwhile."""
QUORUM_TIMEOUTS = 10
"""Timeouts of one collective that a replica group waits for the others to join."""
LOGGERS = (
    "torchft.manager",
    "torchft.process_group",
    "torchft.checkpointing.http_transport",
    "torchft.checkpointing._rwlock",
    "torchft.futures",
)


@dataclass(frozen=True)
class Members:
    """Replica groups that take part in a step.

    Attributes:
        index: Index of this replica group among them.
        size: Number of them.
    """

    index: int
    size: int


class Membership:
    """Replica groups of the current step, and the collectives between them.

    Created on all ranks of a replica group.

    Args:
        replica: Index of this replica group among all that were launched.
        min_replicas: Smallest number of replica groups that commit a step.
        lighthouse: Address of the lighthouse of torchft.
        timeout: Timeout of one collective, in seconds.
        group: Transport of the ranks of this replica group.
        capture: Returns the state that joining replica groups receive.
        apply: Loads this state.
    """

    def __init__(
        self,
        replica: int,
        min_replicas: int,
        lighthouse: str,
        timeout: float,
        group: Transport,
        device: torch.device,
        capture: Callable[[], Mapping[str, Any]],
        apply: Callable[[Mapping[str, Any]], None],
    ) -> None:
        require("torchft", "--replicas")
        from torchft.manager import Manager

        for name in LOGGERS:  # they log the traceback of each collective that a failure interrupts
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # received weights
        host = "localhost" if _is_loopback(lighthouse) else socket.gethostname()
        self._store, port = _open_store(group, host)
        limit = timedelta(seconds=timeout)
        uses_nccl = of_device(device).comm == "nccl"
        self._group: Any = _open_group(uses_nccl, limit)
        self._device = device if uses_nccl else torch.device("cpu")
        self._manager = Manager(
            pg=self._group,
            load_state_dict=apply,
            state_dict=capture,
            min_replica_size=min_replicas,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=QUORUM_TIMEOUTS * limit,
            connect_timeout=limit,
            rank=group.rank,
            world_size=group.size,
            store_addr=host,
            store_port=port,
            lighthouse_addr=lighthouse,
            replica_id=f"{replica:05d}",  # members are in the order of these texts
            init_sync=False,  # it would send the weights of one replica group to each rank
            hostname=host,
            checkpoint_transport=_open_transport(limit),
        )

    def begin(self) -> Members:
        """Agrees on the members of the next step, which all have the same state afterwards.

        Called on all ranks of all replica groups.

        Raises:
            RecoveryError: Too few replica groups have joined in time.
        """
        while True:
            try:
                self._manager.start_quorum()
            except RuntimeError as error:
                raise RecoveryError(
                    f"The replica groups did not agree on the next step ({' '.join(str(error).split())}). "
                    "Check that the lighthouse runs and that at least --min_replicas groups do."
                ) from error
            if self._manager.errored() is None:
                break
            self.commit()
        return Members(self._manager.participating_rank() or 0, self._manager.num_participants())

    def commit(self) -> bool:
        """Returns whether this replica group takes the step, on all its ranks."""
        error = self._manager.errored()
        if error is not None:
            self.abort()
        try:
            is_taken: bool = self._manager.should_commit()
            return is_taken
        except RuntimeError as error:
            raise RecoveryError(
                f"A rank of this replica group has ended ({' '.join(str(error).split())})."
            ) from error

    def decline(self) -> None:
        """Leaves the step, which the other members repeat."""
        self._manager.report_error(StateError("this replica group has left the step"))
        self.commit()

    def abort(self) -> None:
        """Closes the connections to the other members, which then do not wait for this one."""
        self._group.abort()

    @torch.no_grad()
    def send_from_first(self, members: Members, tensors: Iterable[Tensor]) -> bool:
        """Overwrites tensors with those of the first member, and returns whether no member has ended."""
        for tensor in tensors:
            local = local_tensor(tensor)
            sent = local.contiguous() if members.index == 0 else torch.zeros_like(local).contiguous()
            data = sent.reshape(-1).view(torch.uint8).clone()
            if not self.sum(data):
                return False
            local.copy_(data.view(local.dtype).view_as(local))
        return True

    def sum(self, tensor: Tensor) -> bool:
        """Adds up a tensor over the members in place, and returns whether none of them has ended."""
        sent = tensor.to(self._device)
        work = self._manager.allreduce(sent, reduce_op=dist.ReduceOp.SUM)
        work.wait()
        del work
        if self._manager.errored() is not None:
            self.abort()
            return False
        if sent is not tensor:
            tensor.copy_(sent)
        return True

    @property
    def has_failed(self) -> bool:
        """True if a collective of the step has failed, so that it is not committed."""
        return self._manager.errored() is not None

    @property
    def num_committed(self) -> int:
        """Number of steps that are committed."""
        return int(self._manager.current_step())

    def shut_down(self) -> None:
        """Leaves the run."""
        self._manager.shutdown(wait=False)


def _is_loopback(address: str) -> bool:
    host = urlsplit(address if "//" in address else f"//{address}").hostname
    return host in ("localhost", "127.0.0.1", "::1")


def _open_group(uses_nccl: bool, timeout: timedelta) -> Any:
    """Returns the process group of the members, which is not connected yet."""
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

    kind: Any = ProcessGroupNCCL if uses_nccl else ProcessGroupGloo

    class MemberGroup(kind):  # type: ignore[misc]
        """Process group with a shorter timeout for connections than for collectives."""

        num_failed = 0

        def configure(self, *arguments: Any, **named: Any) -> None:
            self.set_timeout(min(2**self.num_failed * CONNECT_TIMEOUT, timeout))
            self.num_failed += 1
            try:
                super().configure(*arguments, **named)
            finally:
                self.set_timeout(timeout)
            self.num_failed = 0
            self.parent.set_timeout(timeout)

    return MemberGroup(timeout=timeout)


def _open_transport(timeout: timedelta) -> Any:
    """Returns the server of the state of this rank, which prints no line for each request."""
    from torchft.checkpointing import HTTPTransport

    transport: Any = HTTPTransport(timeout=timeout, num_chunks=0)
    transport._server.RequestHandlerClass.log_message = lambda *_: None
    return transport


def _open_store(group: Transport, host: str) -> tuple[Any, int]:
    """Returns the store of this replica group, which rank 0 keeps open, and its port."""
    store = None
    if group.rank == 0:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    port: int = group.broadcast_object(None if store is None else store.port)
    return store, port
