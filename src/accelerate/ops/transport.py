"""The wire between the processes of a run: one class per kind, chosen once per process.

Everything that talks to other processes through this package goes through `current_transport`. A `Transport`
knows single tensors and single objects only; nested data is taken apart by its callers. The base class is the
case without a wire: one process. A transport may wrap another one (a check, a record of calls): it gives the
same six calls and hands them on.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from accelerate.base.errors import wrong_value
from accelerate.state import PartialState, process_group

REDUCTIONS = ("sum", "mean", "max", "min")

# Older versions of torch know the call by its other name only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# What both gloo and NCCL carry as it is. Other dtypes travel as bytes when they are only moved.
_CARRIED_DTYPES = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
    }
)


class Wire(Protocol):
    """What a transport is built from: the facts of one process's place, as `PartialState` has them."""

    num_processes: int
    process_index: int
    device: torch.device


class Transport:
    """One process: nothing travels, every call answers with what it was given.

    Attributes:
        size: Number of processes on the wire.
        rank: The place of this process among them.
        verifies: Whether comparing shapes before a collective is cheap on this wire (no device to wait for),
            so that it is always done and not only in debug mode.
    """

    size: int = 1
    rank: int = 0
    verifies: bool = False

    def gather(self, tensor: Tensor) -> Tensor:
        """Join the tensors of all processes along the first dimension, in rank order, on every process.

        Args:
            tensor: Of the same shape and dtype on all ranks; a 0-d tensor counts as one of shape `[1]`.

        Returns:
            A tensor of shape `[size * n, ...]` on the device of the argument.
        """
        return tensor

    def gather_object(self, obj: Any) -> list[Any]:
        """Collect one picklable object of each process, in rank order, on every process."""
        return [obj]

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite `tensor` with that of rank `source` and return it; shapes are equal on all ranks."""
        return tensor

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        """Return rank `source`'s object on every process; on the source it is the very object given."""
        return obj

    def reduce(self, tensor: Tensor, how: str = "sum") -> Tensor:
        """Combine the tensors of all processes element by element, on every process.

        Args:
            tensor: Of the same shape and dtype on all ranks; it is not changed.
            how: "sum", "mean", "max" or "min". Sums of half-precision numbers are formed in float32. Integers
                and booleans are summed in int64, as `torch.sum` does; their mean has the default floating
                dtype.

        Returns:
            A tensor of the same shape on the device of the argument; on one process the argument itself.
        """
        return tensor

    def barrier(self) -> None:
        """Wait until all processes have come here."""

    def __reduce__(self) -> tuple[Callable[[], Transport], tuple[()]]:
        """Copies and pickles stand for the transport of the process that reads them."""
        return _transport_here, ()


class TorchTransport(Transport):
    """The default group of `torch.distributed`.

    Tensors on a device that the group does not carry (CPU tensors under NCCL) are moved to one that it does,
    and the result is moved back.
    """

    def __init__(self, wire: Wire) -> None:
        self.size = wire.num_processes
        self.rank = wire.process_index
        self.device = wire.device
        self._carried = _carried_devices(dist.get_backend_config())
        self._fallback = self.device if self.device.type in self._carried else torch.device("cpu")
        self.verifies = self._fallback.type == "cpu"

    def gather(self, tensor: Tensor) -> Tensor:
        local = self._onto_wire(tensor)
        if local.ndim == 0:
            local = local.reshape(1)
        joined = torch.empty(
            (self.size * local.shape[0], *local.shape[1:]), dtype=local.dtype, device=local.device
        )
        _all_gather(_as_carried(joined), _as_carried(local))
        return joined.to(tensor.device)

    def gather_object(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj)
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        local = self._onto_wire(tensor)
        dist.broadcast(_as_carried(local), src=source)
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
        total = tensor.detach().to(
            device=self._wire_device(tensor.device),
            dtype=_reducible_dtype(tensor.dtype),
            copy=True,
            memory_format=torch.contiguous_format,
        )
        dist.all_reduce(total, op=operation)
        return _finished_reduction(total, how, self.size, tensor)

    def barrier(self) -> None:
        process_group.wait(self.device)

    def _wire_device(self, device: torch.device) -> torch.device:
        return device if device.type in self._carried and device.type == "cpu" else self._fallback

    def _onto_wire(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._wire_device(tensor.device)).contiguous()


class NeuronTransport(TorchTransport):
    """`torch.distributed` on Neuron devices, where objects go over a second group on the CPU.

    Pickled objects are byte tensors of any length; compiling a program for each new length would cost
    seconds.
    """

    def __init__(self, wire: Wire) -> None:
        super().__init__(wire)
        self._objects = dist.new_group(backend="gloo")

    def gather_object(self, obj: Any) -> list[Any]:
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, obj, group=self._objects)
        return gathered

    def broadcast_object(self, obj: Any, source: int = 0) -> Any:
        box = [obj if self.rank == source else None]
        dist.broadcast_object_list(box, src=source, group=self._objects)
        return obj if self.rank == source else box[0]


class XlaTransport(Transport):
    """Replicas of a `torch_xla` run: tensors over XLA collectives, objects over its rendezvous."""

    def __init__(self, wire: Wire) -> None:
        self.size = wire.num_processes
        self.rank = wire.process_index
        self.device = wire.device
        self._xm: ModuleType = importlib.import_module("torch_xla.core.xla_model")

    def gather(self, tensor: Tensor) -> Tensor:
        local = self._onto_wire(tensor)
        joined: Tensor = self._xm.all_gather(local.reshape(1) if local.ndim == 0 else local, dim=0)
        return self._off_wire(joined, tensor.device)

    def gather_object(self, obj: Any) -> list[Any]:
        gathered: list[Any] = self._xm.mesh_reduce("accelerate.gather_object", obj, list)
        return gathered

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        local = self._onto_wire(tensor)
        self._xm.collective_broadcast([local], root_ordinal=source)
        arrived = self._off_wire(local, tensor.device)
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
        local = tensor.detach().to(device=self.device, dtype=_reducible_dtype(tensor.dtype))
        total: Tensor = self._xm.all_reduce(kind, local)
        self._xm.mark_step()
        return _finished_reduction(total, how, self.size, tensor)

    def barrier(self) -> None:
        self._xm.rendezvous("accelerate.barrier")

    def _onto_wire(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device).contiguous()

    def _off_wire(self, tensor: Tensor, device: torch.device) -> Tensor:
        self._xm.mark_step()
        return tensor.to(device)


# Device rows whose wire is not plain torch.distributed.
_TRANSPORTS: dict[str, Callable[[Wire], Transport]] = {"xla": XlaTransport, "neuron": NeuronTransport}

_REDUCE_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def current_transport() -> Transport:
    """Return the wire of this process, decided at the first call after `PartialState` was set up.

    It lies in the shared dictionary of `PartialState` and goes with it at a reset. Without a state one is
    made.
    """
    transport: Transport | None = PartialState._shared_state.get("_transport")
    return _open_transport() if transport is None else transport


def _open_transport() -> Transport:
    state = PartialState()
    if state.num_processes == 1:
        transport = Transport()
    else:
        transport = _TRANSPORTS.get(state.device_backend.name, TorchTransport)(state)
    PartialState._shared_state["_transport"] = transport
    return transport


def _transport_here() -> Transport:
    """The transport of this process; without a wire where no state was set up, as in a loader's worker."""
    return current_transport() if PartialState._shared_state else Transport()


def _carried_devices(backends: str) -> frozenset[str]:
    """Device types that the default group carries, from torch's description ("cpu:gloo,cuda:nccl").

    gloo takes accelerator tensors only by way of the CPU and not for all calls, so it counts for the CPU
    alone.
    """
    pairs = (entry.split(":", 1) for entry in backends.split(","))
    return frozenset(device for device, comm in pairs if device == "cpu" or comm != "gloo")


def _as_carried(tensor: Tensor) -> Tensor:
    """The same memory under a dtype that every wire carries."""
    return tensor if tensor.dtype in _CARRIED_DTYPES else tensor.reshape(-1).view(torch.uint8)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.data_ptr() == b.data_ptr()


def _reducible_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of `dtype` are combined: wide enough for a sum, and known to every wire."""
    if dtype.is_complex:
        return dtype
    if dtype.is_floating_point:
        return dtype if dtype.itemsize >= 4 else torch.float32
    return torch.int64


def _finished_reduction(total: Tensor, how: str, size: int, given: Tensor) -> Tensor:
    """Divide the combined numbers for a mean, and bring them back to the dtype and device of `given`."""
    exact = not (given.dtype.is_floating_point or given.dtype.is_complex)
    if how == "mean":
        total = total / size
    if exact and how in ("sum", "mean"):
        return total.to(given.device)
    return total.to(device=given.device, dtype=given.dtype)
