"""Data parallelism by torch's DistributedDataParallel.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html

The order of gradients in its buckets decides how sums over three and more processes are rounded. The first
backward pass of a process has other buckets than all later ones, so a resumed run is given the later order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from accelerate import torch_private
from accelerate.base import listed, wrong_value
from accelerate.logging import get_logger
from accelerate.planning import Layout
from accelerate.plugins import DistributedDataParallelKwargs
from accelerate.state import services
from accelerate.strategies.base import Strategy, refuse_sharded_model, refuse_split_model
from accelerate.strategies.bundle import Kind, kind_of
from accelerate.strategies.request import Context

logger = get_logger(__name__)

_ORDERS = ("rebuilt_per_bucket_param_indices", "prev_iteration_grad_ready_order_indices")
"""torch's names for the order of this pass, and of the next one."""


class _AdoptedOrders(WeakKeyDictionary[DistributedDataParallel, list[int]]):
    """The orders that replicas of this process have adopted."""


def order_of(replica: DistributedDataParallel) -> list[int]:
    """Return the numbers of trained parameters in the order of their buckets in the next pass; none before
    the first backward pass, and where buckets do not change."""
    if not _changes(replica):
        return []
    statistics: Any = replica.logger
    for record in (lambda: None, statistics.set_runtime_stats_and_log):
        record()  # torch records the order before a pass, and after the first one only when asked to
        values = torch_private.ddp_statistics(replica)
        if order := next(filter(None, map(values.get, _ORDERS)), None):
            return [int(index) for index in re.findall(r"\d+", order)]
    return services.of_process(_AdoptedOrders).get(replica, [])


def adopt_order(replica: DistributedDataParallel, order: Sequence[int]) -> None:
    """Let the next pass have buckets in an order that `order_of` returned for a replica of the same model; on
    all ranks. Each gradient arrives once, as zero, in that order: DistributedDataParallel learns it from
    that. Gradients stay as they are, and so does a replica that has trained already."""
    parameters = [parameter for parameter in replica.module.parameters() if parameter.requires_grad]
    fits = order and sorted(order) == list(range(len(parameters)))
    if not fits or not _changes(replica) or order_of(replica):
        return
    if any(map(torch_private.has_gradient_hooks, parameters)):  # a gradient may step an optimizer
        return
    kept = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    replica.reducer.prepare_for_backward([])
    for index in order:
        torch.autograd.backward(parameters[index], torch.zeros_like(parameters[index]))
    for parameter, gradient in zip(parameters, kept, strict=True):
        parameter.grad = gradient
    services.of_process(_AdoptedOrders)[replica] = list(order)


def _changes(replica: DistributedDataParallel) -> bool:
    """Whether buckets are made anew after the first pass, with whole gradients that nothing else uses."""
    has_sparse = any(getattr(module, "sparse", False) for module in replica.module.modules())
    fixed = replica.find_unused_parameters or replica.static_graph
    return not (fixed or has_sparse or torch_private.comm_hooks(replica))


@contextmanager
def exchanging(model: nn.Module, on: bool = True) -> Iterator[None]:
    """Let sharded units exchange gradients inside the block, or not; afterwards FSDP 2 does the opposite."""
    modules: list[Any] = list(model.modules())
    wrappers = [(unit, kept) for unit in modules if (kept := torch_private.gradient_sync(unit)) is not None]
    in_place = [unit for unit in modules if hasattr(unit, "set_requires_gradient_sync")]
    for unit, _ in wrappers:
        torch_private.set_gradient_sync(unit, on)
    for unit in in_place:
        unit.set_requires_gradient_sync(on, recurse=False)
    try:
        yield
    finally:
        for unit, kept in wrappers:
            torch_private.set_gradient_sync(unit, kept)
        for unit in in_place:
            unit.set_requires_gradient_sync(not on, recurse=False)


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
        refuse_split_model(model, "which DistributedDataParallel cannot replicate")

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the replica, compiled around DistributedDataParallel so that its buckets shape the graph."""
        if not any(p.requires_grad for p in model.parameters()):
            return self.compile(model)
        refuse_sharded_model(
            model,
            "Pass the model before it is sharded, with fsdp_plugin=FullyShardedDataParallelPlugin(...) or "
            "parallelism_config=ParallelismConfig(...) of these axes (tp_size for a tp_plan), or keep it out "
            "of `prepare` and train it as it is.",
        )
        handler = self.context.request.ddp or DistributedDataParallelKwargs()
        index = self.context.device.index
        devices = {} if index is None else {"device_ids": [index], "output_device": index}
        replica = DistributedDataParallel(model, **devices, **handler.to_kwargs())
        handler.register_comm_hook(replica)
        return self.compile(replica)

    def memory_layout(self) -> Layout:
        return Layout(shards=self.replicas)

    def gradient_order(self, model: nn.Module) -> list[int]:
        replica = _replica(model)
        return [] if replica is None else order_of(replica)

    def adopt_gradient_order(self, model: nn.Module, order: Sequence[int]) -> None:
        replica = _replica(model)
        if replica is not None:
            adopt_order(replica, order)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        replica = _replica(model)
        return nullcontext() if replica is None else replica.no_sync()

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context of the joinable objects; what exchanges nothing in its forward is left out."""
        wrong = [type(obj).__name__ for obj in joinables if kind_of(obj) not in (Kind.MODEL, Kind.OPTIMIZER)]
        if wrong:
            reason = "only models and optimizers can be joined"
            raise wrong_value("joinables", wrong, reason, "Pass the models that `prepare` returned")
        inner = [
            self._prepared_replica(obj) if isinstance(obj, nn.Module) else getattr(obj, "optimizer", obj)
            for obj in joinables
        ]
        fitting = [obj for obj in inner if isinstance(obj, Joinable)]
        if fitting:
            return Join(list(dict.fromkeys(fitting)))
        trained = [type(obj).__name__ for obj in joinables if not _is_frozen(obj)]
        if trained:
            logger.warning_once(
                f"join_uneven_inputs joins nothing: none of {listed(trained)} is a model that `prepare` "
                "returned for several processes. Pass the models that `prepare` returned."
            )
        return nullcontext()

    def _prepared_replica(self, model: nn.Module) -> DistributedDataParallel | None:
        """Return the replica in a model, or the prepared one around it."""
        around = filter(None, map(_replica, self.session.prepared.models))
        return _replica(model) or next((replica for replica in around if replica.module is model), None)


def _is_frozen(obj: Any) -> bool:
    return isinstance(obj, nn.Module) and not any(p.requires_grad for p in obj.parameters())
