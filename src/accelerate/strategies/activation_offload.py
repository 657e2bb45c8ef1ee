"""Offload of the inputs of recomputed blocks to host memory, with copies on a side stream.

`recomputed_blocks.py` runs a block under the hooks of an `ActivationOffload`, which keep the tensors that
`torch.utils.checkpoint` saves. A block's inputs are copied while the block computes, and their memory is
reused from the next block on. In the backward pass the inputs of a block are copied back while the block
after it is recomputed.

Source: https://docs.pytorch.org/docs/stable/autograd.html#saved-tensors-hooks-doc
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from accelerate import torch_private
from accelerate.base import wrong_value
from accelerate.devices import of_device
from accelerate.weights import stream_module
from accelerate.wrappers import has_compiled_regions

MIN_BYTES = 2**16
"""Bytes of the smallest tensor that is offloaded. Smaller ones take longer to launch than to copy."""


Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Options = Callable[[list[Tensor]], dict[str, Any]]


class Copy:
    """Tensor on a device and the copy that reads or writes it, which is complete in this class."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> None:
        """Lets the current stream wait for the copy."""


class StreamCopy(Copy):
    """Running copy on a side stream.

    The memory of the tensor belongs to the stream that was current when the copy began. Once that stream
    waits for the copy, the memory can be reused without a call of `record_stream`, which would delay this
    until the host detects the end of the copy.

    Args:
        stream: The side stream, after the copy was launched.
        owner: Stream that was current before.
    """

    def __init__(self, tensor: Tensor, stream: torch.Stream, owner: torch.Stream) -> None:
        super().__init__(tensor)
        self._stream, self._owner = stream, owner
        self._done = stream.record_event()
        self._is_awaited = False

    def wait(self) -> None:
        current = stream_module(self.tensor.device).current_stream(self.tensor.device)
        current.wait_event(self._done)
        if current == self._owner:
            self._is_awaited = True
        else:
            self.tensor.record_stream(current)

    def __del__(self) -> None:
        # A graph may be freed before its backward pass while the copy still uses the memory.
        if not (self._is_awaited or sys.is_finalizing() or self._done.query()):
            self.tensor.record_stream(self._stream)


class Transfer(Protocol):
    """Copies between a device and the memory to which its tensors are offloaded."""

    def accepts(self, tensor: Tensor) -> bool:
        """Returns whether a tensor is on a device that offloads."""

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Copy]:
        """Returns a tensor in host memory, and the copy into it."""

    def to_device(self, tensor: Tensor, device: torch.device) -> Copy:
        """Returns the copy from a tensor in host memory."""


class StreamTransfer:
    """Transfer to pinned memory, with one side stream for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def accepts(self, tensor: Tensor) -> bool:
        return type(tensor) is Tensor and stream_module(tensor.device) is not None

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Copy]:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host, self._copy(tensor, host, tensor)

    def to_device(self, tensor: Tensor, device: torch.device) -> Copy:
        target = torch.empty_like(tensor, device=device)  # in the memory of the stream that reads it
        return self._copy(tensor, target, target)

    def _copy(self, source: Tensor, target: Tensor, on_device: Tensor) -> Copy:
        device = on_device.device
        module = stream_module(device)
        if device not in self._streams:
            self._streams[device] = module.Stream(device=device)
        stream, current = self._streams[device], module.current_stream(device)
        # Kernels before this one write the source, or still use memory that is the target now.
        stream.wait_event(current.record_event())
        with module.stream(stream):
            target.copy_(source, non_blocking=True)
            return StreamCopy(on_device, stream, current)


class TracedTransfer:
    """Transfer of traces with fake tensors, whose host memory is the meta device.

    A trace then counts offloaded tensors separately from those of the device, which may be the CPU.
    """

    def accepts(self, tensor: Tensor) -> bool:
        return not tensor.is_meta

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Copy]:
        return torch.empty_like(tensor, device="meta"), Copy(tensor)

    def to_device(self, tensor: Tensor, device: torch.device) -> Copy:
        return Copy(torch.empty_like(tensor, device=device))


class OffloadedTensor:
    """Input of one or several blocks in host memory."""

    def __init__(self, tensor: Tensor, transfer: Transfer) -> None:
        self._transfer, self._device = transfer, tensor.device
        self._storage = torch_private.weak_storage(tensor)  # so that its id is not reused
        self._host, copy = transfer.to_host(tensor.detach())
        self._leaving: Copy | None = copy
        self._arriving: Copy | None = None

    def keep(self, tensor: Tensor) -> None:
        """Keeps the tensor on the device until the next call of `release`."""
        if self._leaving is None:
            self._leaving = Copy(tensor.detach())

    def release(self) -> None:
        """Frees the memory on the device after the copy to the host."""
        if self._leaving is not None:
            self._leaving.wait()
            self._leaving = None

    def prefetch(self) -> None:
        """Begins the copy to the device, unless the tensor is there."""
        if self._leaving is None and self._arriving is None:
            self._arriving = self._transfer.to_device(self._host, self._device)

    def take(self, *, keeps: bool) -> Tensor:
        """Returns the tensor on the device for the current stream.

        Args:
            keeps: Whether another block takes it next.
        """
        self.prefetch()
        copy = self._leaving or self._arriving
        assert copy is not None
        if copy is self._arriving:
            copy.wait()
            self._arriving = copy if keeps else None
        return copy.tensor


class BlockInputs:
    """Offloaded inputs of one call of a block.

    Args:
        previous: Inputs of the call before, which a backward pass needs next.
    """

    def __init__(self, previous: BlockInputs | None) -> None:
        self._previous = _no_inputs if previous is None else ref(previous)
        self._tensors: list[OffloadedTensor] = []

    def add(self, tensor: OffloadedTensor) -> None:
        self._tensors.append(tensor)

    def release(self) -> None:
        """Frees the memory on the device after the copies to the host."""
        for tensor in self._tensors:
            tensor.release()

    def take(self, tensor: OffloadedTensor) -> Tensor:
        """Returns a tensor on the device, and prefetches the inputs of the call before."""
        tensor.prefetch()  # before others, for which this block does not wait
        previous = self._previous()
        earlier = [] if previous is None else previous._tensors
        for each in earlier:
            each.prefetch()
        return tensor.take(keeps=tensor in earlier)


class ActivationOffload:
    """Offload of the inputs of the blocks of a model.

    Offloaded are tensors that the model has computed and that have gradients. All others stay on the device:
    parameters, buffers, inputs of the model, masks, tensors on the CPU, subclasses of tensors, tensors of
    less than `MIN_BYTES`, and views of a part of a tensor, whose memory the other parts need.

    Args:
        transfer: Copies tensors. A copy of the model has one of its own.
    """

    def __init__(self, transfer: Callable[[], Transfer] = StreamTransfer) -> None:
        self._make_transfer = transfer
        self._transfer = transfer()
        self._last: Callable[[], BlockInputs | None] = _no_inputs
        self._tensors: WeakValueDictionary[tuple[object, ...], OffloadedTensor] = WeakValueDictionary()

    def __reduce__(self) -> tuple[type[ActivationOffload], tuple[Callable[[], Transfer]]]:
        return ActivationOffload, (self._make_transfer,)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def checkpoint(self, function: Function, args: Args, kwargs: Kwargs, options: Options) -> Any:
        """Calls a function that is called again in the backward pass, with tensors that are offloaded.

        The current stream waits for the copies of the call before, whose memory it then reuses.

        Args:
            function: Forward of a block.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            options: Returns the options of `torch.utils.checkpoint` for tensors with the versions of the
                inputs.

        Returns:
            The outputs of the function.
        """
        previous = self._last()
        if previous is not None:
            previous.release()
        again, leaves = torch_private.flat_call(function, args, kwargs)
        keywords = options([self._version_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        inputs = BlockInputs(previous)
        self._last = ref(inputs)
        with saved_tensors_hooks(partial(self._pack, inputs), _unpack):
            return checkpoint(again, *leaves, **keywords)

    def _version_of(self, tensor: Tensor) -> Tensor:
        """Returns a tensor with the version of an input that does not keep the memory of activations."""
        is_kept = isinstance(tensor, nn.Parameter) or not self._transfer.accepts(tensor)
        return tensor if is_kept else torch_private.version_counter(tensor)

    def _pack(self, inputs: BlockInputs, tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        """Returns what autograd saves, which is the tensor or a function that returns it."""
        if not (self._transfer.accepts(tensor) and is_offloadable(tensor)):
            return tensor
        offloaded = self._offload(tensor)
        inputs.add(offloaded)
        return partial(inputs.take, offloaded)

    def _offload(self, tensor: Tensor) -> OffloadedTensor:
        version = torch_private.in_place_version(tensor)
        shape = (tensor.dtype, tensor.shape, tensor.stride())
        key = (torch_private.storage_id(tensor), version, *shape)
        offloaded = self._tensors.get(key)
        if offloaded is None:
            offloaded = self._tensors[key] = OffloadedTensor(tensor, self._transfer)
        else:
            offloaded.keep(tensor)
        return offloaded


def is_offloadable(tensor: Tensor) -> bool:
    """Returns whether a tensor is a large activation that no other tensor is a part of."""
    if tensor.layout != torch.strided or tensor.nbytes < MIN_BYTES:
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    is_whole = tensor.untyped_storage().nbytes() == tensor.nbytes == span * tensor.element_size()
    return is_whole and torch_private.base_of(tensor).grad_fn is not None


def offload_to_host(model: nn.Module, device: torch.device) -> ActivationOffload | None:
    """Returns the offload of a model, or None on the CPU, whose activations are in host memory already."""
    if has_compiled_regions(model):
        reason = f"{type(model).__name__} is compiled, and a compiled block has no copies on a side stream"
        raise wrong_value("offload", True, reason, "Leave it out, or do not compile the model")
    if of_device(device).is_host:
        return None
    if stream_module(device) is None:
        reason = f"copies of the device {device.type} do not run in streams"
        raise wrong_value("offload", True, reason, "Leave it out")
    return ActivationOffload()


def _no_inputs() -> None:
    return None


def _unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()
