"""State of models and optimizers with DTensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from accelerate.checkpointing import (
    LAYOUTS,
    check_optimizer,
    layouts_of,
    live_state,
    place_state,
    refuse_inner_dtensors,
    refuse_own_form,
)
from accelerate.ops import to_full_tensor
from accelerate.strategies.dtensors import distribute_like, whole_tensor
from accelerate.strategies.state import (
    Fill,
    GatheredOptimizer,
    StrategyState,
    WholeWeights,
    gather_owned_states,
    local_states,
    owned_states,
)


class GatheredState(StrategyState):
    """State whose weights are gathered one by one, for the first rank of each node."""

    takes_dtensors = True

    def gatherable_weights(self, model: nn.Module) -> tuple[dict[str, Any], Callable[[Any], Any]]:
        weights, whole = self.whole_weights(model)
        return weights, partial(self._gather, whole)

    @torch.no_grad()
    def _gather(self, whole: Callable[[Any], Tensor], weight: torch.Tensor) -> Any:
        """Returns a whole tensor on the CPU of the first rank of each node, and an empty one on others.

        Other values, such as extra states of modules, are returned unchanged.
        """
        return self.keep(whole(weight)) if hasattr(weight, "dtype") else weight

    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        """Returns the whole state dict on the CPU of the first rank of each node."""
        return self._gather_all(*self.whole_weights(model))

    def _gather_all(self, weights: Mapping[str, Any], whole: Callable[[Any], Tensor]) -> dict[str, Any]:
        unique = {id(weight): weight for weight in weights.values()}  # tied tensors stay tied
        gathered = {key: self._gather(whole, weight) for key, weight in unique.items()}
        return {name: gathered[id(w)] for name, w in weights.items()} if self.keeps_whole_states else {}


class DistributedTensorState(GatheredState):
    """State of models and optimizers with DTensors."""

    def optimizer_owners(self, optimizers: Sequence[Any], *, gather: bool) -> list[Any]:
        return [
            WholeOptimizer(optimizer, gather_state(optimizer, self.keeps_whole_states) if gather else None)
            for optimizer in optimizers
        ]

    def whole_weights(self, model: nn.Module) -> WholeWeights:
        return self._inner(model).state_dict(keep_vars=True), whole_tensor

    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        source = self._inner(model) if unwrap else model
        return self._gather_all(source.state_dict(keep_vars=True), whole_tensor)

    def load_weights(self, model: nn.Module, state: Mapping[str, Any], fill: Fill) -> None:
        inner = self._inner(model)
        targets = inner.state_dict(keep_vars=True)
        fill(inner, {name: distribute_like(value, targets.get(name, value)) for name, value in state.items()})


class WholeOptimizer(GatheredOptimizer):
    """Optimizer of DTensors in a checkpoint, with full tensors in the format of a single process."""

    takes_layouts = True

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Verifies that a full state can be loaded, and that the layouts of its tensors are known."""
        check_optimizer(self.optimizer, {key: value for key, value in state.items() if key != LAYOUTS})
        self._placements(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the shards of this rank from a full state, without communication."""
        parameters, placements = self._parameters(), self._placements(state)
        owned = owned_states(self.optimizer)
        local = {
            key: local_states(values, parameters[key], owned[key] if owned else None, placements.get(key))
            if isinstance(key, int)
            else values
            for key, values in state["state"].items()
        }
        shards = {key: values for key, values in local.items() if values is not None}
        self.optimizer.load_state_dict({"state": shards, "param_groups": state["param_groups"]})

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _placements(self, state: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """Returns the placements of each state of the parameters whose states are not whole."""
        parameters, owned = self._parameters(), owned_states(self.optimizer)
        layouts = state.get(LAYOUTS, {})
        return {
            number: {
                key: place_state(
                    f"{key!r} of parameter {number}",
                    value,
                    parameters[number],
                    layouts.get(number, {}).get(key),
                    live_state(self.optimizer, number, key),
                )
                for key, value in values.items()
            }
            for number, values in state["state"].items()
            if isinstance(number, int) and not (owned and owned[number] is not None)
        }


@torch.no_grad()
def gather_state(optimizer: torch.optim.Optimizer, keep: bool) -> dict[str, Any]:
    """Returns the full state dict of an optimizer on the CPU, without states if `keep` is False.

    Called on all ranks.
    """
    state: dict[str, Any] = optimizer.state_dict()
    refuse_own_form(optimizer, state)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    owned = owned_states(optimizer)
    numbered = {key: values for key, values in state["state"].items() if isinstance(key, int)}
    shared = {number: parameters[number] for number in numbered if not (owned and owned[number] is not None)}
    layouts = layouts_of(numbered, shared)
    for key in state["state"].keys() - numbered.keys():
        refuse_inner_dtensors(repr(key), {key: state["state"][key]})

    def gather(value: object) -> Any:
        if not isinstance(value, DTensor):
            return value
        whole = to_full_tensor(value)
        return whole.cpu() if keep else None

    whole = {
        key: {name: gather(value) for name, value in values.items()} if key in numbered else values
        for key, values in state["state"].items()
    }
    gathered = {**state, "state": whole, **({LAYOUTS: layouts} if layouts else {})}
    if owned:
        return gather_owned_states(optimizer, gathered, keep)
    return gathered if keep else {**state, "state": {}}
