"""Data parallelism by torch's DistributedDataParallel.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from accelerate import torch_private
from accelerate.base import wrong_value
from accelerate.plugins import DistributedDataParallelKwargs
from accelerate.strategies.base import Strategy, refuse_split_model
from accelerate.strategies.buckets import adopt_order, order_of
from accelerate.strategies.exchange import exchanging
from accelerate.strategies.request import Context


def _replica(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel in `model`, also under torch.compile's wrapper."""
    inner = torch_private.uncompiled(model)
    return inner if isinstance(inner, DistributedDataParallel) else None


@contextmanager
def _synchronising(replica: DistributedDataParallel) -> Iterator[None]:
    kept = replica.require_backward_grad_sync, replica.require_forward_param_sync
    replica.require_backward_grad_sync = True
    replica.require_forward_param_sync = True
    # The forward ran under no_sync and did not arm the reducer; an empty list marks all parameters as used.
    replica.reducer.prepare_for_backward([])
    try:
        yield
    finally:
        replica.require_backward_grad_sync, replica.require_forward_param_sync = kept


def sync_in_backward(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context that arms the replica in `model` for its next backward pass; nothing without one."""
    replica = _replica(model)
    return exchanging(model) if replica is None else _synchronising(replica)


class DataParallel(Strategy):
    """Each process trains a replica on its share of the data; the backward pass averages gradients."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.replicas = context.topology.size

    def check_model(self, model: nn.Module) -> None:
        """Refuse models that a device map has split, and what the number format refuses."""
        super().check_model(model)
        refuse_split_model(model, "which DistributedDataParallel cannot replicate")

    def wrap(self, model: nn.Module, compile: Callable[[nn.Module], nn.Module]) -> nn.Module:
        """Return the replica, compiled around DistributedDataParallel so that its buckets shape the graph."""
        if not any(p.requires_grad for p in model.parameters()):
            return compile(model)
        handler = self.context.request.ddp or DistributedDataParallelKwargs()
        replica = DistributedDataParallel(model, **self._device_arguments(), **handler.to_kwargs())
        handler.register_comm_hook(replica)
        return compile(replica)

    def _device_arguments(self) -> dict[str, Any]:
        device = self.context.device
        if device.index is None:
            return {}
        return {"device_ids": [device.index], "output_device": device.index}

    def gradient_order(self, model: nn.Module) -> list[int]:
        """Return the places of gradients in the buckets of the replica."""
        replica = _replica(model)
        return [] if replica is None else order_of(replica)

    def adopt_gradient_order(self, model: nn.Module, order: Sequence[int]) -> None:
        """Let the replica sum in that order from its next pass on."""
        replica = _replica(model)
        if replica is not None:
            adopt_order(replica, order)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return torch's `no_sync` of the replica."""
        replica = _replica(model)
        return nullcontext() if replica is None else replica.no_sync()

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return torch's `Join` over the replicas (and joinable optimizers) in `joinables`."""
        found = [
            _replica(obj) if isinstance(obj, nn.Module) else getattr(obj, "optimizer", obj)
            for obj in joinables
        ]
        fitting = [inner for inner in found if isinstance(inner, Joinable)]
        if len(fitting) < len(found):
            raise wrong_value(
                "joinables",
                [type(obj).__name__ for obj in joinables],
                "only models prepared for several processes and joinable optimizers can be joined",
                "Pass the models that `prepare` returned",
            )
        return Join(fitting)
