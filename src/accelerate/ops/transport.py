"""Transports over `torch.distributed` and `torch_xla`, asynchronous reductions, and consensus by collectives.

All collectives of this package run on `current_transport()`, which is chosen once in a process.

`reduce_async` reduces a few numbers of all ranks during the computation. They are float64 on the CPU, in a
separate gloo group, so no device synchronizes with them, and their order relative to the collectives of the
default group is free. Without such a group (one process, MPI, UCC, XLA) they are reduced synchronously over
the transport. `open_consensus`, `run_on_all_ranks` and `run_on_rank_0` let checkpointing decide and fail on
all ranks together.
"""

from __future__ import annotations

import copyreg
import importlib
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate.base import AccelerateError, CheckpointError, describe
from accelerate.devices import mark_step, of_device
from accelerate.ops.base import (
    Header,
    Transport,
    as_supported,
    at_least_1d,
    check_scatter_parts,
    finish_reduction,
    reducible_dtype,
    reduction_name,
)
from accelerate.ops.flight_record import flight_recorder
from accelerate.state import (
    Connections,
    Consensus,
    PartialState,
    ReduceFunction,
    StoreChannel,
    StoreConsensus,
    pack_decision,
    process_group,
    services,
    unpack_decision,
)

Result = TypeVar("Result")

# Older versions of torch have the function under its other name only.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


BROADCAST_BYTES = 256 * 1024
"""Bytes from which broadcasts are faster than the all-gather of gloo, which copies the result once more."""

BROADCAST_WORLD_SIZE = 8
"""Largest world size at which tensors are gathered by broadcasts."""

_BROADCAST_SUM_DTYPES = (torch.float32, torch.float64, torch.int64)
_NO_SECOND_GROUP = ("mpi", "ucc")


class TorchTransport(Transport):
    """Transport over the default process group of `torch.distributed`.

    Tensors on a device that the group does not support (CPU tensors under NCCL) are moved to one that it
    supports, and the result is moved back.
    """

    _object_group: dist.ProcessGroup | None = None

    def __init__(self, state: PartialState) -> None:
        self.size = state.num_processes
        self.rank = state.process_index
        self.device = state.device
        self._supported = supported_devices(dist.get_backend_config())
        self._fallback = self.device if self.device.type in self._supported else torch.device("cpu")
        self.verifies = of_device(self._fallback).is_host
        self._copies_results = self.size <= BROADCAST_WORLD_SIZE and "cpu:gloo" in dist.get_backend_config()
        self.header = Header(self.size, all_gather_flat) if "cpu" in self._supported else None

    def gather(self, tensor: Tensor) -> Tensor:
        local = at_least_1d(self._to_group_device(tensor))
        joined = local.new_empty((self.size * local.shape[0], *local.shape[1:]))
        if self._copies_results and local.is_cpu and local.nbytes >= BROADCAST_BYTES:
            parts = joined.chunk(self.size)
            parts[self.rank].copy_(local)
            self._broadcast_parts(parts)
        else:
            all_gather_flat(as_supported(joined), as_supported(local))
        return joined.to(tensor.device)

    def gather_object(self, obj: object) -> list[Any]:
        return gather_in_group(obj, self._object_group)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        local = self._to_group_device(tensor)
        dist.broadcast(as_supported(local), src=source)
        if self.rank != source and not _share_memory(local, tensor):
            tensor.detach().copy_(local)
        return tensor

    def start_broadcast(self, tensor: Tensor, source: int) -> Callable[[], object]:
        local = self._to_group_device(tensor)
        work: dist.Work = dist.broadcast(as_supported(local), src=source, async_op=True)
        return work.wait

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        objects = [obj if self.rank == source else None]
        dist.broadcast_object_list(objects, src=source, group=self._object_group)
        return obj if self.rank == source else objects[0]

    def reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        operation = getattr(dist.ReduceOp, reduction_name(how))
        large = self.size == 2 and self._copies_results and tensor.nbytes >= BROADCAST_BYTES
        is_sum = operation == dist.ReduceOp.SUM and tensor.dtype in _BROADCAST_SUM_DTYPES
        if large and is_sum and tensor.is_cpu:
            # Two ranks broadcast their tensors to each other, because the all-reduce of gloo works on a copy.
            local = self._to_group_device(tensor)
            received = torch.empty_like(local)
            self._broadcast_parts([local, received] if self.rank == 0 else [received, local])
            return finish_reduction(received.add_(local), how, self.size, tensor)
        total = tensor.detach().to(
            device=self._group_device(tensor.device),
            dtype=reducible_dtype(tensor.dtype),
            copy=True,
            memory_format=torch.contiguous_format,
        )
        dist.all_reduce(total, op=operation)
        return finish_reduction(total, how, self.size, tensor)

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, source: int = 0) -> Tensor:
        local = self._to_group_device(out)
        inputs = None
        if self.rank == source:
            parts = check_scatter_parts(parts, self.size)
            inputs = [as_supported(self._to_group_device(part)) for part in parts]
        dist.scatter(as_supported(local), inputs, src=source)
        return out if _share_memory(local, out) else out.copy_(local)

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        local = self._to_group_device(tensor)
        result = local.new_empty(sum(received))
        outgoing, incoming = as_supported(local), as_supported(result)
        scale = local.itemsize // outgoing.itemsize
        counts, own_counts = ([scale * count for count in side] for side in (received, sent))
        dist.all_to_all_single(incoming, outgoing, counts, own_counts)
        return result.to(tensor.device)

    def barrier(self) -> None:
        process_group.wait(self.device)

    @staticmethod
    def _broadcast_parts(parts: Sequence[Tensor]) -> None:
        """Broadcasts the part of each rank to the other ranks, as an all-gather without a copy."""
        works = [dist.broadcast(as_supported(part), src, async_op=True) for src, part in enumerate(parts)]
        for work in works:
            work.wait()

    def _group_device(self, device: torch.device) -> torch.device:
        return device if device.type in self._supported and of_device(device).is_host else self._fallback

    def _to_group_device(self, tensor: Tensor) -> Tensor:
        local = tensor.detach().to(self._group_device(tensor.device)).contiguous()
        return local.resolve_conj().resolve_neg()


class NeuronTransport(TorchTransport):
    """Transport over `torch.distributed` on Neuron devices, with a second group on the CPU for objects.

    Pickled objects are byte tensors of any length, and a Neuron device would compile a program for each new
    length, which takes seconds.
    """

    scatter = Transport.scatter

    def __init__(self, state: PartialState) -> None:
        super().__init__(state)
        self._object_group = dist.new_group(backend="gloo")


class XlaTransport(Transport):
    """Transport over `torch_xla`, with XLA collectives for tensors and its rendezvous for objects."""

    def __init__(self, state: PartialState) -> None:
        self.size = state.num_processes
        self.rank = state.process_index
        self.device = state.device
        self._xm: ModuleType = importlib.import_module("torch_xla.core.xla_model")

    def gather(self, tensor: Tensor) -> Tensor:
        joined: Tensor = self._xm.all_gather(at_least_1d(self._to_group_device(tensor)), dim=0)
        return self._from_group_device(joined, tensor.device)

    def gather_object(self, obj: object) -> list[Any]:
        gathered: list[Any] = self._xm.mesh_reduce("accelerate.gather_object", obj, list)
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        local = self._to_group_device(tensor)
        self._xm.collective_broadcast([local], root_ordinal=source)
        received = self._from_group_device(local, tensor.device)
        if self.rank != source and received is not tensor:
            tensor.detach().copy_(received)
        return tensor

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        sent = obj if self.rank == source else None
        objects = self._xm.mesh_reduce("accelerate.broadcast_object", sent, list)
        return obj if self.rank == source else objects[source]

    def reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        kind = getattr(self._xm, f"REDUCE_{reduction_name(how)}")
        local = tensor.detach().to(device=self.device, dtype=reducible_dtype(tensor.dtype))
        total: Tensor = self._xm.all_reduce(kind, local)
        mark_step()
        return finish_reduction(total, how, self.size, tensor)

    def barrier(self) -> None:
        self._xm.rendezvous("accelerate.barrier")

    def _to_group_device(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device).contiguous()

    def _from_group_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        mark_step()
        return tensor.to(device)


# Hardware that does not use `TorchTransport`.
_TRANSPORTS: dict[str, type[TorchTransport | XlaTransport]] = {"xla": XlaTransport, "neuron": NeuronTransport}


def supported_devices(backends: str) -> frozenset[str]:
    """Returns the device types that the default group supports, from a text as "cpu:gloo,cuda:nccl".

    gloo copies accelerator tensors to the CPU, and does not accept them in all calls, so it counts as a
    backend of the CPU only.
    """
    pairs = (entry.split(":", 1) for entry in backends.split(","))
    return frozenset(device for device, comm in pairs if device == "cpu" or comm != "gloo")


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.data_ptr() == b.data_ptr()


def current_transport() -> Transport:
    """Returns the transport of this process, which the first call chooses.

    The transport is a service of the run, which a reset of `PartialState` removes. The first call creates a
    `PartialState` if there is none.
    """
    transport: Transport | None = services.of_run.get(Transport)  # not `find`, as each collective runs this
    if transport is not None:
        return transport
    state = PartialState()
    kind = _TRANSPORTS.get(state.device_backend.name, TorchTransport)
    return services.put(Transport, Transport() if state.num_processes == 1 else kind(state), uses_group=True)


def reachable_transport(num_processes: int) -> Transport | None:
    """Returns the transport to a number of processes, or None if it does not connect them."""
    transport = current_transport()
    return transport if transport.size == num_processes else None


def _unpickle_transport() -> Transport:
    """Returns the transport of this process, or a local one without a state, as in a DataLoader worker."""
    return current_transport() if PartialState._shared_state else Transport()


# A copied or unpickled transport is the transport of the process that copies or unpickles it.
for _kind in (Transport, TorchTransport, NeuronTransport, XlaTransport):
    copyreg.pickle(_kind, lambda transport: (_unpickle_transport, ()))


class AsyncReduction:
    """Result of `reduce_async`, whose `wait` is called once.

    Args:
        numbers: Tensor with the result after `work`.
        work: Asynchronous reduction, or None if the numbers are reduced already.
        purpose: Name in the flight recorder while a rank waits.
    """

    def __init__(self, numbers: Tensor, work: Any = None, purpose: str = "") -> None:
        self._numbers, self._work, self._purpose = numbers, work, purpose

    def wait(self) -> list[float]:
        """Waits for the reduction, and returns the numbers."""
        if self._work is not None:
            with flight_recorder().entry(self._purpose):
                self._work.wait()
        numbers: list[float] = self._numbers.tolist()
        return numbers


class AsyncGroup:
    """Separate gloo group of `reduce_async`, whose `group` is None if the run cannot have one.

    The flight recorder records its creation under the purpose of the first numbers, because this rank may
    wait here for a rank that never calls `reduce_async`.
    """

    def __init__(self, purpose: str) -> None:
        has_gloo = dist.is_initialized() and dist.is_gloo_available()
        self.group: dist.ProcessGroup | None = None
        own_runtime = PartialState().device_backend.own_runtime
        if has_gloo and dist.get_backend() not in _NO_SECOND_GROUP and not own_runtime:
            with flight_recorder().entry(purpose):
                self.group = dist.new_group(backend="gloo")


def reduce_async(numbers: Sequence[float], how: str, purpose: str) -> AsyncReduction:
    """Starts an asynchronous elementwise reduction of numbers over all ranks.

    Called on all ranks.

    Args:
        numbers: As many on each rank, reduced in float64, which is exact for integers up to 2**53.
        how: "sum" or "max".
        purpose: Name in the flight recorder and in hang reports.
    """
    tensor = torch.tensor(numbers, dtype=torch.float64)
    transport = current_transport()
    if transport.size == 1:
        return AsyncReduction(tensor)
    group = services.get(AsyncGroup, partial(AsyncGroup, purpose), uses_group=True).group
    if group is None:
        return AsyncReduction(transport.reduce(tensor, how))
    work = dist.all_reduce(tensor, getattr(dist.ReduceOp, reduction_name(how)), group=group, async_op=True)
    return AsyncReduction(tensor, work, purpose)


class CollectiveConsensus(Consensus):
    """Consensus over the collectives of a run without a store."""

    is_threaded = False

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size, self._transport = transport.rank, transport.size, transport

    def decide(self, operation: str, value: object, reduce_fn: ReduceFunction, timeout: float) -> Any:
        values = self._transport.gather_object(value)
        decision = pack_decision(reduce_fn, values) if self.rank == 0 else None
        return unpack_decision(self._transport.broadcast_object(decision))


def open_consensus(transport: Transport, channel: StoreChannel | None) -> Consensus:
    """Returns the consensus for a run, over the store if there is a channel.

    Args:
        channel: Separate connection to the store of the process group, or None without a store.
    """
    if transport.size == 1:
        return Consensus()
    if channel is None:
        return CollectiveConsensus(transport)
    connections = services.find(Connections)
    find_ended = connections.ended if connections else list
    return StoreConsensus(channel, transport.rank, transport.size, find_ended=find_ended)


def gather_in_group(obj: object, group: dist.ProcessGroup | None) -> list[Any]:
    """Returns the object of each rank of a process group.

    Called on all ranks of the group.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, obj, group=group)
    return gathered


def is_on_any_rank(value: bool, device: torch.device) -> bool:
    """Returns whether a value is True on any rank.

    Called on all ranks.
    """
    return bool(current_transport().reduce(torch.tensor(float(value), device=device), "sum").item())


def run_on_all_ranks(action: Callable[[], Result], kind: type[AccelerateError] = CheckpointError) -> Result:
    """Runs an action on each rank, and raises an error of a class on all ranks if it fails on one.

    Called on all ranks. The action does not communicate.
    """
    result: Any = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:  # raised again, on all ranks
        cause = error
    failures = current_transport().gather_object("" if cause is None else describe(cause))
    if any(failures):
        raise kind("; ".join(dict.fromkeys(filter(None, failures)))) from cause
    return result  # type: ignore[no-any-return]


def run_on_rank_0(action: Callable[[], Result]) -> Result | None:
    """Runs an action on rank 0, and returns its result there and None on the others.

    Called on all ranks. The action does not communicate. If it fails, all ranks raise the same error, or a
    `CheckpointError` for an error of another package.
    """
    transport = current_transport()
    result: Result | None = None
    failure: AccelerateError | None = None
    if transport.rank == 0:
        try:
            result = action()
        except Exception as error:  # raised again, on all ranks
            failure = error if isinstance(error, AccelerateError) else CheckpointError(describe(error))
    failure = transport.broadcast_object(failure)
    if failure is not None:
        raise failure
    return result
