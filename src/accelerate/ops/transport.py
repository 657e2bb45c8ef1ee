"""The transport of this process, chosen once: `torch.distributed`, also on Neuron devices, or `torch_xla`.

`reduce_async` reduces a few numbers of all ranks while compute goes on. They are float64 on the CPU, in a
gloo group of their own: no device waits for them, and their order among the collectives of the default group
is free. Where there can be no such group (one process, MPI, XLA) they are reduced at once over the transport.
Below are the ways in which ranks that run the same calls agree over it.
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
    finished_reduction,
    one_for_each,
    reducible_dtype,
    reduction_name,
)
from accelerate.ops.flight_record import flight_recorder
from accelerate.state import (
    Consensus,
    Judge,
    PartialState,
    StoreChannel,
    StoreConsensus,
    pack_verdict,
    process_group,
    services,
    unpack,
)

Result = TypeVar("Result")

# Older versions of torch know the call by its other name only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


IN_TURN = 256 * 1024
"""Bytes from which gloo's all-gather, which copies the whole result once more, costs more than broadcasts."""

IN_TURN_PROCESSES = 8

_ADDED_IN_TURN = (torch.float32, torch.float64, torch.int64)
_NO_SECOND_GROUP = ("mpi", "ucc")


class TorchTransport(Transport):
    """The default group of `torch.distributed`.

    Tensors on a device that the group does not support (CPU tensors under NCCL) are moved to one that it
    supports, and the result is moved back.
    """

    _object_group: dist.ProcessGroup | None = None

    def __init__(self, state: PartialState) -> None:
        self.size = state.num_processes
        self.rank = state.process_index
        self.device = state.device
        self._supported = _supported_devices(dist.get_backend_config())
        self._fallback = self.device if self.device.type in self._supported else torch.device("cpu")
        self.verifies = of_device(self._fallback).is_host
        self._copies_results = self.size <= IN_TURN_PROCESSES and "cpu:gloo" in dist.get_backend_config()
        self.header = Header(self.size, _all_gather) if "cpu" in self._supported else None

    def gather(self, tensor: Tensor) -> Tensor:
        local = at_least_1d(self._to_group_device(tensor))
        joined = local.new_empty((self.size * local.shape[0], *local.shape[1:]))
        if self._copies_results and local.is_cpu and local.nbytes >= IN_TURN:
            parts = joined.chunk(self.size)
            parts[self.rank].copy_(local)
            self._broadcast_in_turn(parts)
        else:
            _all_gather(as_supported(joined), as_supported(local))
        return joined.to(tensor.device)

    def gather_object(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self._object_group)
        return gathered

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
        large = self.size == 2 and self._copies_results and tensor.nbytes >= IN_TURN
        if large and operation == dist.ReduceOp.SUM and tensor.is_cpu and tensor.dtype in _ADDED_IN_TURN:
            # Two processes broadcast their tensors to each other; gloo's own sum works on a copy.
            local = self._to_group_device(tensor)
            received = torch.empty_like(local)
            self._broadcast_in_turn([local, received] if self.rank == 0 else [received, local])
            return finished_reduction(received.add_(local), how, self.size, tensor)
        total = tensor.detach().to(
            device=self._group_device(tensor.device),
            dtype=reducible_dtype(tensor.dtype),
            copy=True,
            memory_format=torch.contiguous_format,
        )
        dist.all_reduce(total, op=operation)
        return finished_reduction(total, how, self.size, tensor)

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, source: int = 0) -> Tensor:
        local = self._to_group_device(out)
        given = None
        if self.rank == source:
            given = [as_supported(self._to_group_device(part)) for part in one_for_each(parts, self.size)]
        dist.scatter(as_supported(local), given, src=source)
        return out if _share_memory(local, out) else out.copy_(local)

    def barrier(self) -> None:
        process_group.wait(self.device)

    @staticmethod
    def _broadcast_in_turn(parts: Sequence[Tensor]) -> None:
        """Let each process broadcast its part into the parts of the others."""
        works = [dist.broadcast(as_supported(part), src, async_op=True) for src, part in enumerate(parts)]
        for work in works:
            work.wait()

    def _group_device(self, device: torch.device) -> torch.device:
        return device if device.type in self._supported and of_device(device).is_host else self._fallback

    def _to_group_device(self, tensor: Tensor) -> Tensor:
        local = tensor.detach().to(self._group_device(tensor.device)).contiguous()
        return local.resolve_conj().resolve_neg()


class NeuronTransport(TorchTransport):
    """`torch.distributed` on Neuron devices, where objects go over a second group on the CPU.

    Pickled objects are byte tensors of any length; compiling a program for each new length would cost
    seconds.
    """

    scatter = Transport.scatter

    def __init__(self, state: PartialState) -> None:
        super().__init__(state)
        self._object_group = dist.new_group(backend="gloo")


class XlaTransport(Transport):
    """Replicas of a `torch_xla` run: tensors over XLA collectives, objects over its rendezvous."""

    def __init__(self, state: PartialState) -> None:
        self.size = state.num_processes
        self.rank = state.process_index
        self.device = state.device
        self._xm: ModuleType = importlib.import_module("torch_xla.core.xla_model")

    def gather(self, tensor: Tensor) -> Tensor:
        joined: Tensor = self._xm.all_gather(at_least_1d(self._to_group_device(tensor)), dim=0)
        return self._from_group_device(joined, tensor.device)

    def gather_object(self, obj: Any) -> list[Any]:
        gathered: list[Any] = self._xm.mesh_reduce("accelerate.gather_object", obj, list)
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        local = self._to_group_device(tensor)
        self._xm.collective_broadcast([local], root_ordinal=source)
        arrived = self._from_group_device(local, tensor.device)
        if self.rank != source and arrived is not tensor:
            tensor.detach().copy_(arrived)
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
        return finished_reduction(total, how, self.size, tensor)

    def barrier(self) -> None:
        self._xm.rendezvous("accelerate.barrier")

    def _to_group_device(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device).contiguous()

    def _from_group_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        mark_step()
        return tensor.to(device)


# Kinds of hardware that do not use plain torch.distributed.
_TRANSPORTS: dict[str, type[TorchTransport | XlaTransport]] = {"xla": XlaTransport, "neuron": NeuronTransport}


def _supported_devices(backends: str) -> frozenset[str]:
    """Device types that the default group supports, from torch's description ("cpu:gloo,cuda:nccl").

    gloo takes accelerator tensors only by way of the CPU and not for all calls, so it counts for the CPU
    alone.
    """
    pairs = (entry.split(":", 1) for entry in backends.split(","))
    return frozenset(device for device, comm in pairs if device == "cpu" or comm != "gloo")


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.data_ptr() == b.data_ptr()


def current_transport() -> Transport:
    """Return the transport of this process, chosen at the first call after `PartialState` was set up.

    It is a service of the run: a reset of `PartialState` forgets it. Without a state one is made.
    """
    transport: Transport | None = services.of_run.get(Transport)  # without a call: each collective asks
    if transport is not None:
        return transport
    state = PartialState()
    kind = _TRANSPORTS.get(state.device_backend.name, TorchTransport)
    return services.put(Transport, Transport() if state.num_processes == 1 else kind(state), uses_group=True)


def _unpickle() -> Transport:
    """The transport of this process; a local one where no state is set up, as in a loader's worker."""
    return current_transport() if PartialState._shared_state else Transport()


# A copied or unpickled transport is the one of the process that copies or reads it.
for _kind in (Transport, TorchTransport, NeuronTransport, XlaTransport):
    copyreg.pickle(_kind, lambda transport: (_unpickle, ()))


class Answer:
    """Numbers of all ranks; `work` reduces them, None where they are known. `wait` is to be called once."""

    def __init__(self, numbers: Tensor, work: Any = None, purpose: str = "") -> None:
        self._numbers, self._work, self._purpose = numbers, work, purpose

    def wait(self) -> list[float]:
        """Return the numbers, when all ranks have given theirs."""
        if self._work is not None:
            with flight_recorder().entry(self._purpose):
                self._work.wait()
        numbers: list[float] = self._numbers.tolist()
        return numbers


class AsyncGroup:
    """The gloo group for these numbers, a service of the run; None where there can be no such group.

    To open it is in the flight record under the purpose of the first numbers: a rank may wait here for one
    that never asks.
    """

    def __init__(self, purpose: str) -> None:
        has_gloo = dist.is_initialized() and dist.is_gloo_available()
        self.group: dist.ProcessGroup | None = None
        own_runtime = PartialState().device_backend.own_runtime
        if has_gloo and dist.get_backend() not in _NO_SECOND_GROUP and not own_runtime:
            with flight_recorder().entry(purpose):
                self.group = dist.new_group(backend="gloo")


def reduce_async(numbers: Sequence[float], how: str, purpose: str) -> Answer:
    """Start to reduce numbers, exact up to 2**53, element by element: "sum" or "max"; called on all ranks.

    The flight record and the reports of hangs name the `purpose`.
    """
    tensor = torch.tensor(numbers, dtype=torch.float64)
    transport = current_transport()
    if transport.size == 1:
        return Answer(tensor)
    group = services.get(AsyncGroup, partial(AsyncGroup, purpose), uses_group=True).group
    if group is None:
        return Answer(transport.reduce(tensor, how))
    work = dist.all_reduce(tensor, getattr(dist.ReduceOp, reduction_name(how)), group=group, async_op=True)
    return Answer(tensor, work, purpose)


class CollectiveConsensus(Consensus):
    """Over the collectives of a run, where it has no store."""

    is_threaded = False

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size, self._transport = transport.rank, transport.size, transport

    def decide(self, what: str, value: Any, judge: Judge, patience: float) -> Any:
        values = self._transport.gather_object(value)
        verdict = pack_verdict(judge, values) if self.rank == 0 else None
        return unpack(self._transport.broadcast_object(verdict))

    def share(self, name: str, make: Callable[[], Any], patience: float) -> tuple[int, Any]:
        names = self._transport.gather_object(name)
        maker = names.index(name)
        made = pack_verdict(lambda _: make(), []) if name and maker == self.rank else None
        all_made = self._transport.gather_object(made)
        return (maker, unpack(all_made[maker])) if name else (-1, None)


def open_consensus(transport: Transport, channel: StoreChannel | None) -> Consensus:
    """Choose the way in which the ranks of a run agree; `channel` is a connection of its own to the store."""
    if transport.size == 1:
        return Consensus()
    if channel is None:
        return CollectiveConsensus(transport)
    return StoreConsensus(channel, transport.rank, transport.size)


def run_on_all_ranks(action: Callable[[], Result]) -> Result:
    """Run an action that does not communicate on each rank; if one fails, all raise a `CheckpointError`."""
    result, failure = None, ""
    try:
        result = action()
    except Exception as error:  # raised again, on all ranks
        failure = describe(error)
    failures = [text for text in current_transport().gather_object(failure) if text]
    if failures:
        raise CheckpointError("; ".join(dict.fromkeys(failures)))
    return result  # type: ignore[return-value]  # None only where the action returned it


def run_on_rank_0(action: Callable[[], Result]) -> Result | None:
    """Run an action that does not communicate on rank 0, and return what it returned; None on the others.

    All ranks raise what it raised; a `CheckpointError` for an error of another package.
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
