"""Workspaces of the CPU kernels of convolutions and recurrent layers, which are measured.

They depend on the processor and its library, so they are no part of a plan for other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.nested import iterate_tensors
from accelerate.planning.tracing import Loss

KERNELS = {torch.ops.aten.convolution.default, torch.ops.aten.mkldnn_rnn_layer.default}
"""Operators whose kernels reorder their arguments and results on the CPU."""


class KernelMode(torch_private.TorchDispatchMode):  # type: ignore[misc]
    """Dispatch mode that collects the calls of kernels with workspaces in the trace of a forward.

    Attributes:
        calls: Operator and arguments of each call, once for equal shapes and options.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple[Any, Sequence[Any]]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in KERNELS:
            described = [_describe(arg) for arg in args]
            self.calls[f"{func} {described}"] = func, described
        return func(*args, **(kwargs or {}))

    def watched(self, loss: Loss) -> Loss:
        """Returns a loss function whose forward is watched."""

        def watched_loss(model: nn.Module, batch: object) -> Tensor:
            with self:
                return loss(model, batch)

        return watched_loss

    def measure(self) -> int:
        """Returns the bytes of the largest workspace, which is measured in one call of each kernel."""
        return max((_workspace_of(func, described) for func, described in self.calls.values()), default=0)


def _describe(argument: object) -> Any:
    """Returns the shape and the dtype of a tensor, or the argument itself."""
    return (argument.shape, argument.dtype) if isinstance(argument, Tensor) else argument


def _workspace_of(func: Callable[..., Any], described: Sequence[Any]) -> int:
    """Returns the most bytes that a kernel allocates in forward or backward, beside its results."""

    def allocate(argument: object) -> Any:
        if not (isinstance(argument, tuple) and isinstance(argument[0], torch.Size)):
            return argument
        return torch.zeros(argument[0], dtype=argument[1], requires_grad=argument[1].is_floating_point)

    arguments = [allocate(argument) for argument in described]
    inputs = [each for each in arguments if isinstance(each, Tensor) and each.requires_grad]
    outputs, forward = _beside_results(partial(func, *arguments))
    output = next(iterate_tensors((outputs,)))
    _, backward = _beside_results(partial(torch.autograd.grad, output, inputs, torch.ones_like(output)))
    return max(forward, backward)


def _beside_results(work: Any) -> tuple[Any, int]:
    """Returns the results of a function, and the most bytes that it allocates beside them."""
    measured = torch_private.peak_on_cpu(work)
    if measured is None:  # this thread is profiled
        return work(), 0
    results, peak = measured
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in iterate_tensors((results,))}
    return results, peak - sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
