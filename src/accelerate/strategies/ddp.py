"""Data parallelism by DistributedDataParallel.

Source: https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html

The order of gradients in its buckets determines how sums over three and more ranks are rounded. The first
backward pass of a process has other buckets than all later ones, so a resumed run adopts the later order
before it trains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn import parallel

from accelerate import torch_private
from accelerate.base import DDPCommunicationHookType, StateError, listed, wrong_value
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.planning import Layout
from accelerate.state import services
from accelerate.strategies.base import (
    Strategy,
    mean_over_ranks,
    refuse_join,
    refuse_sharded_model,
    refuse_split_model,
)
from accelerate.strategies.dtensors import Replicas, gradient_sync, sparse_weights
from accelerate.strategies.layer import divided
from accelerate.strategies.replicas import ALL_RANKS, ReplicaCheck, watch_replicas
from accelerate.strategies.request import Context, require_plugin
from accelerate.strategies.session import Kind, kind_of
from accelerate.strategies.state import StrategyState

logger = get_logger(__name__)

_ORDERS = ("rebuilt_per_bucket_param_indices", "prev_iteration_grad_ready_order_indices")
"""Names of the statistics of torch that have the order of this pass, and of the next one."""


class _AdoptedOrders(WeakKeyDictionary[parallel.DistributedDataParallel, list[int]]):
    """Orders that replicas of this process have adopted."""


def order_of(replica: parallel.DistributedDataParallel) -> list[int]:
    """Returns the indices of trained parameters in the order of their buckets in the next backward pass.

    The list is empty before the first backward pass, and if buckets are not rebuilt.
    """
    if not _rebuilds_buckets(replica):
        return []
    statistics: Any = replica.logger
    for record in (lambda: None, statistics.set_runtime_stats_and_log):
        record()  # torch records the order before a pass, and after the first pass on request only
        values = torch_private.ddp_statistics(replica)
        if order := next(filter(None, map(values.get, _ORDERS)), None):
            return [int(index) for index in re.findall(r"\d+", order)]
    return services.of_process(_AdoptedOrders).get(replica, [])


def adopt_order(replica: parallel.DistributedDataParallel, order: Sequence[int]) -> None:
    """Makes the next backward pass use buckets in an order that `order_of` returned.

    Called on all ranks. It runs a backward pass with zeros in that order, from which DistributedDataParallel
    records the order. Gradients are not changed, nor is a replica that has trained already.

    Args:
        order: The order of a replica of the same model.
    """
    parameters = [parameter for parameter in replica.module.parameters() if parameter.requires_grad]
    fits = order and sorted(order) == list(range(len(parameters)))
    if not fits or not _rebuilds_buckets(replica) or order_of(replica):
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


def _rebuilds_buckets(replica: parallel.DistributedDataParallel) -> bool:
    """Returns whether buckets are rebuilt after the first pass, with dense gradients and without hooks."""
    has_sparse = any(getattr(module, "sparse", False) for module in replica.module.modules())
    fixed = replica.find_unused_parameters or replica.static_graph
    return not (fixed or has_sparse or torch_private.comm_hooks(replica))


def _replica(model: nn.Module) -> parallel.DistributedDataParallel | None:
    """Returns the DistributedDataParallel in a model, also in a compiled one, or None."""
    inner = torch_private.uncompiled(model)
    return inner if isinstance(inner, parallel.DistributedDataParallel) else None


@contextmanager
def _synced_backward(replica: parallel.DistributedDataParallel) -> Iterator[None]:
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
    """Returns a context manager in which the next backward pass of a model synchronizes gradients."""
    replica = _replica(model)
    return gradient_sync(model) if replica is None else _synced_backward(replica)


_REDUCED = 1
"""Value of `require_forward_param_sync` after a backward pass in which the reducer has averaged gradients.

It counts as True. The next forward for a synchronized backward pass sets it to `True`, which prepares the
reducer for one pass, and other forwards set it to False.
"""
_BUCKET_BYTES = 25 << 20  # of gradients that are averaged late in one call, as in torch's buckets
_requires_grad = attrgetter("requires_grad")
_NOT_MANAGED = (
    "They were frozen or did not exist when the model was prepared, so DistributedDataParallel does not "
    "average their gradients. Call accelerator.backward(loss), which averages those that were unfrozen, or "
    "prepare the model when all of them exist."
)
_UNUSED = (
    "The loss does not depend on {}, or they were frozen after `prepare`, so the backward pass may have "
    "ended before gradients were averaged. Pass kwargs_handlers=[DistributedDataParallelKwargs("
    "find_unused_parameters=True)], or freeze these parameters before `prepare`."
)
_IN_NO_SYNC = (
    "The last forward ran without gradients or inside of no_sync(), so the backward pass did not average "
    "gradients. Call the prepared model outside of no_sync() for the last micro-batch before a step."
)
_NO_FORWARD = (
    "No forward has called the model that prepare() returned, so the backward pass did not average "
    "gradients. Call that model instead of the module inside, or call accelerator.backward(loss) instead of "
    "loss.backward()."
)


_CHANGED = (
    "The backward pass has changed weights, such as by an optimizer that a hook on a gradient steps. "
    "DistributedDataParallel averages gradients after these hooks, so the ranks would diverge. Step the "
    "optimizer after accelerator.backward(loss), or shard the model with FSDP 2, which calls hooks of "
    "register_post_accumulate_grad_hook with averaged gradients."
)


def _version_of(gradient: Tensor | None) -> int:
    return 0 if gradient is None else torch_private.in_place_version(gradient)


Before = tuple[nn.Parameter, Tensor | None, int, int]
"""Parameter, its gradient, and the numbers of changes in place of the gradient and of the parameter."""


class LateReduction:
    """Average of gradients that the reducer of a replica does not average, after a backward pass.

    Those are all gradients of a backward pass that the reducer is not prepared for, because its forward has
    not called the replica, or because it is the second pass after one forward. And they are the gradients of
    parameters that were frozen when the model was wrapped. Gradients that are equal on all ranks stay equal
    to their average, so gradients may be sums of both kinds.
    """

    def __init__(self, replica: parallel.DistributedDataParallel) -> None:
        ignored = replica.parameters_to_ignore
        own = [p for name, p in replica.module.named_parameters() if name not in ignored]
        self.replica = replica
        self._frozen = [parameter for parameter in own if not parameter.requires_grad]
        self._managed = [parameter for parameter in own if parameter.requires_grad]
        self._has_averaged = False
        vars(replica)["require_forward_param_sync"] = _REDUCED

    def manages(self, parameter: Tensor) -> bool:
        """Returns whether the reducer averages the gradient of a parameter."""
        return any(parameter is each for each in self._managed)

    def names_without_gradients(self) -> list[str]:
        """Returns the names of parameters whose gradients the reducer waits for, and that have none."""
        if self.replica.find_unused_parameters or self.replica.static_graph:
            return []
        named = self.replica.module.named_parameters()
        return [name for name, p in named if p.grad is None and self.manages(p)]

    def is_left_out(self) -> bool:
        """Returns whether no backward pass has averaged gradients, because no forward called the replica."""
        return self.replica.require_forward_param_sync is not True and not self._has_averaged

    def begin(self) -> list[Before]:
        """Returns a few parameters with their gradients and versions before a backward pass."""
        unfrozen = list(filter(_requires_grad, self._frozen))
        ends = (several[index] for several in (self._managed, unfrozen) if several for index in (0, -1))
        return [(p, p.grad, _version_of(p.grad), _version_of(p)) for p in ends]

    def complete(self, before: Sequence[Before]) -> None:
        """Averages gradients that the backward pass has changed and the reducer has not averaged.

        Called on all ranks.

        Raises:
            StateError: The backward pass has changed weights.
        """
        is_unchanged = True
        for parameter, gradient, version, own_version in before:
            is_unchanged &= parameter.grad is gradient and _version_of(gradient) == version
            is_changed = _version_of(parameter) != own_version
            if is_changed and not torch_private.is_stepped_in_backward(parameter):
                raise StateError(_CHANGED)
        mode: Any = self.replica.require_forward_param_sync
        if is_unchanged or mode is False or torch_private.is_joining(self.replica):
            return
        late = list(filter(_requires_grad, self._frozen))
        if mode is not True:
            late += filter(_requires_grad, self._managed)
        vars(self.replica)["require_forward_param_sync"] = _REDUCED
        self._has_averaged = True
        if late:
            sparse = sparse_weights(self.replica.module)
            Replicas(late, sparse, None, has_batches=True, bucket_bytes=_BUCKET_BYTES).average()


class DistributedDataParallel(parallel.DistributedDataParallel):
    """Replica of a model, as torch's DistributedDataParallel, with errors that name the fix.

    It has the name of torch's class, which users see in printed models.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the forward of the model.

        Raises:
            StateError: Parameters had no gradient in the backward pass before.
        """
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if "Expected to have finished reduction" not in str(error):
                raise
            raise StateError(
                "Parameters had no gradient in the backward pass before, and gradients were not averaged: "
                f"parameters of {type(self.module).__name__} took no part in the loss, or were frozen after "
                "`prepare`. Pass kwargs_handlers=[DistributedDataParallelKwargs("
                "find_unused_parameters=True)] to Accelerator, or freeze parameters before `prepare`."
            ) from error

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
            if not hasattr(model, name):
                raise
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}, which the prepared "
                f"{type(model).__name__} has. Use accelerator.unwrap_model(model).{name}. To train with a "
                "method, call it in `forward`: only gradients of `forward` are averaged over the ranks.",
                name=name,
                obj=self,
            ) from None


class DataParallelCheck(ReplicaCheck):
    """Comparison of the parameters of replicas, which torch's wrapper makes equal."""

    def is_joining(self) -> bool:
        return bool(self.strategy.is_joining())

    def trains_apart(self, optimizer: AcceleratedOptimizer) -> bool:
        """Returns whether a model is inside of `no_sync` when its optimizer steps, as in `LocalSGD`."""
        stepped = set(map(id, optimizer.parameters()))
        apart = (r.replica for r in self.strategy.reductions if not r.replica.require_backward_grad_sync)
        return any(id(parameter) in stepped for replica in apart for parameter in replica.module.parameters())

    def excluded(self) -> set[int]:
        handler = self.strategy.context.request.ddp
        has_hook = handler is not None and handler.comm_hook != DDPCommunicationHookType.NO
        return {
            id(parameter)
            for replica in (reduction.replica for reduction in self.strategy.reductions)
            for name, parameter in replica.module.named_parameters()
            if name in replica.parameters_to_ignore or (not has_hook and torch_private.comm_hooks(replica))
        }

    def cause(self, parameter: Tensor) -> str | None:
        for reduction in self.strategy.reductions:
            if not any(parameter is each for each in reduction.replica.module.parameters()):
                continue
            if not reduction.manages(parameter):
                return _NOT_MANAGED
            if unused := reduction.names_without_gradients():
                return _UNUSED.format(listed(unused))
            if reduction.replica.require_forward_param_sync is False:
                return _IN_NO_SYNC
            return _NO_FORWARD if reduction.is_left_out() else None
        return None


class DataParallelState(StrategyState):
    """State of replicas, with the order of their buckets."""

    def gradient_order(self, model: nn.Module) -> list[int]:
        replica = _replica(model)
        return [] if replica is None else order_of(replica)

    def adopt_gradient_order(self, model: nn.Module, order: Sequence[int]) -> None:
        replica = _replica(model)
        if replica is not None:
            adopt_order(replica, order)


class DataParallel(Strategy):
    """Strategy in which each rank trains a replica, and the backward pass averages gradients."""

    state_class = DataParallelState

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.replicas = context.topology.size
        self.reductions: list[LateReduction] = []

    def check_model(self, model: nn.Module) -> None:
        refuse_split_model(model, "which DistributedDataParallel cannot replicate")
        if self.context.request.parallelism is not None:
            require_plugin(model, self.context.request)

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Returns the replica, compiled including DistributedDataParallel, whose buckets split the graph."""
        if not any(p.requires_grad for p in model.parameters()):
            return self.compile(model)
        refuse_sharded_model(
            model,
            "Pass the model before it is wrapped, with fsdp_plugin=FullyShardedDataParallelPlugin("
            "fsdp_version=1), or shard it with fully_shard.",
        )
        handler, index = self.context.request.ddp, self.context.device.index
        devices = {} if index is None else {"device_ids": [index], "output_device": index}
        arguments = {} if handler is None else handler.to_kwargs()
        replica = DistributedDataParallel(model, **devices, **arguments)
        if handler is not None:
            handler.register_comm_hook(replica)
        self.reductions.append(LateReduction(replica))
        return self.compile(replica)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, *, to_device: bool) -> AcceleratedOptimizer:
        wrapped = super().wrap_optimizer(optimizer, to_device=to_device)
        watch_replicas(wrapped, DataParallelCheck(self, ALL_RANKS))
        wrapped.mean_loss = partial(_mean_unless_joining, ref(self))
        return wrapped

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Computes the gradients of a loss, and averages those that the reducers have not averaged."""
        if not self.context.gradients.sync_gradients:
            super().backward(loss, **kwargs)
            return
        before = [reduction.begin() for reduction in self.reductions]
        super().backward(loss, **kwargs)
        for reduction, gradients in zip(self.reductions, before, strict=True):
            reduction.complete(gradients)

    def is_joining(self) -> bool:
        """Returns whether ranks may have different numbers of batches now."""
        return any(torch_private.is_joining(each.replica) for each in self.reductions)

    def release(self) -> None:
        super().release()
        self.reductions.clear()

    def memory_layout(self) -> Layout:
        return divided(Layout(shards=self.replicas), self.layers)

    def no_sync(self, model: nn.Module, *, early: bool = False) -> AbstractContextManager[Any]:
        replica = None if early else _replica(model)
        return super().no_sync(model, early=early) if replica is None else replica.no_sync()

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Returns torch's context of the joinable objects, without models that are not replicas."""
        wrong = [type(obj).__name__ for obj in joinables if kind_of(obj) not in (Kind.MODEL, Kind.OPTIMIZER)]
        if wrong:
            reason = "only models and optimizers can be joined"
            raise wrong_value("joinables", wrong, reason, "Pass the models that `prepare` returned")
        if not self.holds_whole_models:
            refuse_join()
        inner = [
            self._prepared_replica(obj) if isinstance(obj, nn.Module) else getattr(obj, "optimizer", obj)
            for obj in joinables
        ]
        joined = [obj for obj in inner if isinstance(obj, Joinable)]
        if joined:
            return Join(list(dict.fromkeys(joined)))
        trained = [
            type(obj).__name__
            for obj in joinables
            if not isinstance(obj, nn.Module) or any(p.requires_grad for p in obj.parameters())
        ]
        if trained:
            logger.warning_once(
                f"join_uneven_inputs joins nothing: none of {listed(trained)} is a model that `prepare` "
                "returned for several processes. Pass the models that `prepare` returned."
            )
        return nullcontext()

    def _prepared_replica(self, model: nn.Module) -> parallel.DistributedDataParallel | None:
        """Returns the replica in a model, or the prepared replica around it, or None."""
        replicas = filter(None, map(_replica, self.session.prepared.models))
        return _replica(model) or next((replica for replica in replicas if replica.module is model), None)


def _mean_unless_joining(strategy: ref[DataParallel], loss: torch.Tensor) -> Any:
    """Returns the mean loss of a closure, or the loss itself if other ranks may have no batch."""
    owner = strategy()  # it has the optimizers, which have this function
    return loss if owner is not None and owner.is_joining() else mean_over_ranks(loss)
