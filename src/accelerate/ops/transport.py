"""The transport of this process, chosen once: `torch.distributed`, also on Neuron devices, or `torch_xla`."""

from __future__ import annotations

import copyreg
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate.base import wrong_value
from accelerate.devices import mark_step, of_device
from accelerate.ops.base import (
    REDUCTIONS,
    Transport,
    as_supported,
    finished_reduction,
    one_for_each,
    reducible_dtype,
)
from accelerate.ops.flight_record import RecordingTransport
from accelerate.ops.header import Header
from accelerate.state import PartialState, process_group, services

# Older versions of torch know the call by its other name only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


IN_TURN = 256 * 1024
"""Bytes from which gloo's all-gather, which copies the whole result once more, costs more than broadcasts."""

IN_TURN_PROCESSES = 8

_ADDED_IN_TURN = (torch.float32, torch.float64, torch.int64)


class RankInfo(Protocol):
    """What a transport is built from: rank, world size and device, as `PartialState` has them."""

    num_processes: int
    process_index: int
    device: torch.device


class TorchTransport(Transport):
    """The default group of `torch.distributed`.

    Tensors on a device that the group does not support (CPU tensors under NCCL) are moved to one that it
    supports, and the result is moved back.
    """

    def __init__(self, info: RankInfo) -> None:
        self.size = info.num_processes
        self.rank = info.process_index
        self.device = info.device
        self._supported = _supported_devices(dist.get_backend_config())
        self._fallback = self.device if self.device.type in self._supported else torch.device("cpu")
        self.verifies = of_device(self._fallback).is_host
        self._copies_results = self.size <= IN_TURN_PROCESSES and "cpu:gloo" in dist.get_backend_config()
        self.header = Header(self.size, _all_gather) if "cpu" in self._supported else None

    def gather(self, tensor: Tensor) -> Tensor:
        local = self._to_group_device(tensor)
        if local.ndim == 0:
            local = local.reshape(1)
        joined = torch.empty(
            (self.size * local.shape[0], *local.shape[1:]), dtype=local.dtype, device=local.device
        )
        if self._copies_results and local.is_cpu and local.nbytes >= IN_TURN:
            self._gather_in_turn(joined, local)
        else:
            _all_gather(as_supported(joined), as_supported(local))
        return joined.to(tensor.device)

    def gather_object(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj)
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        local = self._to_group_device(tensor)
        dist.broadcast(as_supported(local), src=source)
        if self.rank != source and not _share_memory(local, tensor):
            tensor.detach().copy_(local)
        return tensor

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        box = [obj if self.rank == source else None]
        dist.broadcast_object_list(box, src=source)
        return obj if self.rank == source else box[0]

    def reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        operation = _REDUCE_OPERATIONS.get(how)
        if operation is None:
            raise wrong_value("how", how, "no such reduction", f"Use one of {', '.join(REDUCTIONS)}")
        if self._adds_in_turn(tensor, how):
            return finished_reduction(self._add_in_turn(tensor), how, self.size, tensor)
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

    def _gather_in_turn(self, joined: Tensor, local: Tensor) -> None:
        """Let each process broadcast its part into the results of the others, without a copy."""
        parts = joined.chunk(self.size)
        parts[self.rank].copy_(local)
        works = [dist.broadcast(as_supported(part), src, async_op=True) for src, part in enumerate(parts)]
        for work in works:
            work.wait()

    def _adds_in_turn(self, tensor: Tensor, how: str) -> bool:
        large = self.size == 2 and self._copies_results and tensor.nbytes >= IN_TURN
        return large and how in ("sum", "mean") and tensor.is_cpu and tensor.dtype in _ADDED_IN_TURN

    def _add_in_turn(self, tensor: Tensor) -> Tensor:
        """Let two processes broadcast their tensors to each other; gloo's own sum works on a copy."""
        local = self._to_group_device(tensor)
        other = torch.empty_like(local)
        works = [
            dist.broadcast(local if source == self.rank else other, source, async_op=True)
            for source in range(2)
        ]
        for work in works:
            work.wait()
        return other.add_(local)

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

    def __init__(self, info: RankInfo) -> None:
        super().__init__(info)
        self._objects = dist.new_group(backend="gloo")

    def gather_object(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self._objects)
        return gathered

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        box = [obj if self.rank == source else None]
        dist.broadcast_object_list(box, src=source, group=self._objects)
        return obj if self.rank == source else box[0]

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, source: int = 0) -> Tensor:
        return _scatter_by_broadcast(self, parts, out, source)


class XlaTransport(Transport):
    """Replicas of a `torch_xla` run: tensors over XLA collectives, objects over its rendezvous."""

    def __init__(self, info: RankInfo) -> None:
        self.size = info.num_processes
        self.rank = info.process_index
        self.device = info.device
        self._xm: ModuleType = importlib.import_module("torch_xla.core.xla_model")

    def gather(self, tensor: Tensor) -> Tensor:
        local = self._to_group_device(tensor)
        joined: Tensor = self._xm.all_gather(local.reshape(1) if local.ndim == 0 else local, dim=0)
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
        parts = self._xm.mesh_reduce(
            "accelerate.broadcast_object", obj if self.rank == source else None, list
        )
        return obj if self.rank == source else parts[source]

    def reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        if how not in REDUCTIONS:
            raise wrong_value("how", how, "no such reduction", f"Use one of {', '.join(REDUCTIONS)}")
        kind = {"max": self._xm.REDUCE_MAX, "min": self._xm.REDUCE_MIN}.get(how, self._xm.REDUCE_SUM)
        local = tensor.detach().to(device=self.device, dtype=reducible_dtype(tensor.dtype))
        total: Tensor = self._xm.all_reduce(kind, local)
        mark_step()
        return finished_reduction(total, how, self.size, tensor)

    def scatter(self, parts: Sequence[Tensor] | None, out: Tensor, source: int = 0) -> Tensor:
        return _scatter_by_broadcast(self, parts, out, source)

    def barrier(self) -> None:
        self._xm.rendezvous("accelerate.barrier")

    def _to_group_device(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device).contiguous()

    def _from_group_device(self, tensor: Tensor, device: torch.device) -> Tensor:
        mark_step()
        return tensor.to(device)


# Kinds of hardware that do not use plain torch.distributed.
_TRANSPORTS: dict[str, Callable[[RankInfo], Transport]] = {"xla": XlaTransport, "neuron": NeuronTransport}

_REDUCE_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def make_transport(hardware: str, info: RankInfo) -> Transport:
    """Build the transport between the processes on one kind of hardware.

    Args:
        hardware: Name of the row of the hardware table.
        info: Rank, world size and device of this process; its process group is initialized.
    """
    return _TRANSPORTS.get(hardware, TorchTransport)(info)


def _scatter_by_broadcast(
    transport: Transport, parts: Sequence[Tensor] | None, out: Tensor, source: int
) -> Tensor:
    """Broadcast all parts, where there is no scatter."""
    if transport.rank == source:
        everything = torch.stack(list(one_for_each(parts, transport.size)))
    else:
        everything = out.new_empty((transport.size, *out.shape))
    return out.copy_(transport.broadcast(everything, source)[transport.rank])


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
    transport = services.find(Transport)
    return _open_transport() if transport is None else transport


def _open_transport() -> Transport:
    state = PartialState()
    if state.num_processes == 1:
        transport = Transport()
    else:
        transport = RecordingTransport(make_transport(state.device_backend.name, state))
    return services.put(Transport, transport, uses_group=True)


def _transport_here() -> Transport:
    """The transport of this process; a local one where no state is set up, as in a loader's worker."""
    return current_transport() if PartialState._shared_state else Transport()


def _stand_in(transport: Transport) -> tuple[Callable[[], Transport], tuple[()]]:
    return _transport_here, ()


# A copied or unpickled transport is the one of the process that copies or reads it.
for _kind in (Transport, RecordingTransport, TorchTransport, NeuronTransport, XlaTransport):
    copyreg.pickle(_kind, _stand_in)
