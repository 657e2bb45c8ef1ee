"""The order of gradients in the buckets of DistributedDataParallel, which decides how sums are rounded.

It adds gradients of three and more processes in an order that depends on their place in a bucket. The first
backward pass of a process has other buckets than all later ones, so that a run that goes on would round its
first sums otherwise than the run that was not interrupted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelerate import torch_private

_NOW, _NEXT = "rebuilt_per_bucket_param_indices", "prev_iteration_grad_ready_order_indices"
_replayed: WeakKeyDictionary[DistributedDataParallel, list[int]] = WeakKeyDictionary()


def order_of(replica: DistributedDataParallel) -> list[int]:
    """Return the places of parameters in the buckets, as they are or will be in the next pass.

    Args:
        replica: maybe trained.

    Returns:
        Indices of parameters that are trained; empty before the first backward pass, and where buckets do not
        change.
    """
    if not _changes(replica):
        return []
    return _noted_order(replica) or _replayed.get(replica, [])


def adopt_order(replica: DistributedDataParallel, order: Sequence[int]) -> None:
    """Let the next pass have buckets in an order that `order_of` returned; called on all ranks.

    Each gradient arrives once, as zero, in that order: this is what DistributedDataParallel learns it from.
    Gradients that are there stay.

    Args:
        replica: one that has trained already keeps its own.
        order: of a replica of the same model; any other is left alone.
    """
    parameters = [each for each in replica.module.parameters() if each.requires_grad]
    fits = sorted(order) == list(range(len(parameters)))
    if not order or not fits or not _changes(replica) or order_of(replica) or _has_hooks(parameters):
        return
    kept = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    replica.reducer.prepare_for_backward([])
    for index in order:
        torch.autograd.backward(parameters[index], torch.zeros_like(parameters[index]))
    for each, gradient in zip(parameters, kept, strict=True):
        each.grad = gradient
    _replayed[replica] = list(order)


def _changes(replica: DistributedDataParallel) -> bool:
    """Whether buckets are made anew after the first pass, with whole gradients that nothing else uses."""
    has_sparse = any(getattr(each, "sparse", False) for each in replica.module.modules())
    fixed = replica.find_unused_parameters or replica.static_graph
    return not (fixed or has_sparse or torch_private.has_comm_hooks(replica))


def _noted_order(replica: DistributedDataParallel) -> list[int]:
    """The order that torch records: before a pass, and after the first one when asked to."""
    notes: Any = replica.logger
    for take_down in (lambda: None, notes.set_runtime_stats_and_log):
        take_down()
        facts = torch_private.ddp_statistics(replica)
        if noted := facts.get(_NOW) or facts.get(_NEXT):
            return [int(index) for index in re.findall(r"\d+", noted)]
    return []


def _has_hooks(parameters: Sequence[nn.Parameter]) -> bool:
    """Whether a gradient that arrives does something, such as a step of an optimizer."""
    return any(map(torch_private.has_gradient_hooks, parameters))
