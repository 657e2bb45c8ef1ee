"""Data parallelism between XLA devices: one process, or thread, for each.

Source: https://docs.pytorch.org/xla/master/learn/api-guide.html
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import nn

from accelerate.base import DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.strategies.base import Strategy, refuse_split_model
from accelerate.strategies.request import Context
from accelerate.strategies.xla.exchange import Exchange, XlaOptimizer
from accelerate.weights import addressable, find_tied_parameters, retie_parameters


class XlaReplicas(Strategy):
    """Each process trains a replica on its share of the data; gradients are averaged before a step.

    Modules get new parameters when they are moved to an XLA device: optimizers that were built before step
    those, and tied ones are tied again.
    """

    distributed_type: ClassVar[DistributedType | None] = DistributedType.XLA

    averages_itself: ClassVar[bool] = False
    """Whether the backward pass gives averaged gradients already."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.replicas = context.topology.size
        self.exchange = Exchange(1 if self.averages_itself else self.replicas, context.gradients)

    def check_model(self, model: nn.Module) -> None:
        """Refuse models that a device map has split, and what the number format refuses."""
        super().check_model(model)
        refuse_split_model(model, "and XLA devices take whole models")

    def prepare_model(self, model: nn.Module, *, place: bool, evaluation: bool) -> nn.Module:
        """Return `model` on the device, converted to the number format and compiled.

        Args:
            model: a user's module.
            place: whether to move it to the device.
            evaluation: leaves out what only training needs.
        """
        if place:
            self.place(model)
        return super().prepare_model(model, place=False, evaluation=evaluation)

    def place(self, model: nn.Module) -> None:
        """Bring a module to the device in place, and let optimizers follow."""
        tied = find_tied_parameters(model)
        before = dict(model.named_parameters())
        model.to(self.context.device)
        retie_parameters(model, tied)
        self.follow((old, model.get_parameter(name)) for name, old in before.items())

    def follow(self, parameters: Iterable[tuple[nn.Parameter, nn.Parameter]]) -> None:
        """Let optimizers step the parameters that have taken the places of others.

        Args:
            parameters: pairs of an old one and its new one.
        """
        self.session.replace(parameters)
        self.session.remap([*self.session.waiting, *self.session.prepared.optimizers])

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *, place: bool) -> AcceleratedOptimizer:
        """Return `optimizer` in a wrapper that averages gradients before it steps."""
        self.session.remap([optimizer])
        return XlaOptimizer(optimizer, self.exchange, place, self.precision.scaler)

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Scale gradients, averaged before, so that their joint norm is at most `max_norm`."""
        return super().clip_grad_norm(self._averaged(parameters), max_norm, norm_type)

    def clip_grad_value(self, parameters: Iterable[torch.Tensor], clip_value: float) -> None:
        """Cut each element of gradients, averaged before, to the range from `-clip_value` to `clip_value`."""
        super().clip_grad_value(self._averaged(parameters), clip_value)

    def _averaged(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.context.gradients.sync_gradients:
            self.exchange.average(listed)
        return listed

    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        """Return the whole state of `model`, on the CPU: XLA's tensors have no memory to write from."""
        return dict(addressable(super().state_dict(model, unwrap=unwrap)))
