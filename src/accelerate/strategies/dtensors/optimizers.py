"""Optimizers that step new parameters after a model was sharded or moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from accelerate.base import PreparationError, listed
from accelerate.ops import current_transport
from accelerate.strategies.dtensors.names import named_parameters
from accelerate.strategies.dtensors.shards import MAIN


def fsdp2_switch_optimizer_parameters(
    optimizer: torch.optim.Optimizer, mapping: Mapping[Tensor, Tensor]
) -> None:
    """Replaces parameters of an optimizer, in its groups and in other attributes, such as `_params` of LBFGS.

    Args:
        optimizer: Optimizer that has not taken a step.
        mapping: New parameter by old parameter. Other parameters are unchanged. A new parameter for several
            old ones is stepped once.

    Raises:
        PreparationError: One parameter would be in two groups.
    """
    seen: set[int] = set()
    for group in optimizer.param_groups:
        _put(optimizer, group, [mapping.get(old, old) for old in group["params"]], seen)
    visited = {id(optimizer.param_groups), id(optimizer.state)}
    _switch_held(optimizer, mapping, visited)


def _switch_held(held: object, mapping: Mapping[Tensor, Tensor], visited: set[int]) -> Any:
    """Returns an object of an optimizer with its parameters replaced, which is changed in place if possible.

    Args:
        held: Parameter, container or inner optimizer. Other objects are unchanged.
        mapping: New parameter by old parameter.
        visited: Identities of the containers that are replaced already.
    """
    if isinstance(held, Tensor):
        return mapping.get(held, held)
    if not isinstance(held, list | tuple | set | dict | torch.optim.Optimizer) or id(held) in visited:
        return held
    visited.add(id(held))
    if isinstance(held, torch.optim.Optimizer):
        vars(held).update({name: _switch_held(value, mapping, visited) for name, value in vars(held).items()})
        return held
    members = [part for item in held.items() for part in item] if isinstance(held, dict) else list(held)
    switched = [_switch_held(member, mapping, visited) for member in members]
    if all(new is old for new, old in zip(switched, members, strict=True)):
        return held
    if isinstance(held, tuple):
        return held._make(switched) if hasattr(held, "_make") else type(held)(switched)
    held.clear()
    if isinstance(held, dict):
        held.update(zip(switched[::2], switched[1::2], strict=True))
    elif isinstance(held, set):
        held.update(switched)
    else:
        held.extend(switched)
    return held


class ParameterRemapper:
    """Positions of the parameters of a model in its optimizers, while sharding replaces them.

    The optimizers, prepared or not, release the old parameters until they get the new ones. Otherwise the
    whole model would stay in memory. Optimizers of other models are unchanged.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Any]) -> None:
        # the first name of a tied parameter
        names = {id(p): name for name, p in reversed(named_parameters(model).items())}
        self._old = WeakIdKeyDictionary({p: names[id(p)] for p in model.parameters()})
        # Members of each group by optimizer: names of parameters of this model, or other parameters.
        self._members: dict[Any, list[list[Any]]] = {}
        self._states: dict[Any, dict[str, dict[str, Any]] | None] = {}
        for optimizer in (getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers):
            groups = [[names.get(id(p), p) for p in group["params"]] for group in optimizer.param_groups]
            if not any(isinstance(member, str) for group in groups for member in group):
                continue
            is_stage = hasattr(model, "model_of_stage")  # of a pipeline, which rank 0 does not have
            self._states[optimizer] = states = _constant_states(optimizer, names, is_stage)
            if states is None:
                raise PreparationError(
                    f"{type(optimizer).__name__} holds the state of {len(optimizer.state)} parameters, which "
                    "cannot be sharded with them. Prepare model and optimizer before the first step, and "
                    "load an optimizer's state afterwards."
                )
            self._members[optimizer] = groups
            for parameter in [p for p in optimizer.state if id(p) in names]:
                del optimizer.state[parameter]
        for group in (group for optimizer in self._members for group in optimizer.param_groups):
            group["params"] = []

    def rejoin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Adds the new parameters to the optimizers."""
        joined: dict[int, set[str]] = {}
        for name in self._old.values():  # type: ignore[no-untyped-call]
            joined.setdefault(id(parameters.get(name)), set()).add(name)
        for optimizer, groups in self._members.items():
            seen: set[int] = set()
            stepped = {member for members in groups for member in members if isinstance(member, str)}
            partly = [names for names in joined.values() if names & stepped and names - stepped]
            if partly:
                raise PreparationError(
                    f"{type(optimizer).__name__} steps {listed(sorted(partly[0] & stepped))} without "
                    f"{listed(sorted(partly[0] - stepped))}, which FSDP 1 joins into one parameter. Set "
                    "use_orig_params=True, or fsdp_version=2."
                )
            for group, members in zip(optimizer.param_groups, groups, strict=True):
                lost = [member for member in members if isinstance(member, str) and member not in parameters]
                if lost:
                    raise PreparationError(
                        f"{len(lost)} parameters that {type(optimizer).__name__} steps are gone after "
                        f"sharding: {listed(lost)}. Build the optimizer after `prepare` has returned the "
                        "model."
                    )
                new = [parameters[member] if isinstance(member, str) else member for member in members]
                _put(optimizer, group, new, seen)
            for name, state in (self._states[optimizer] or {}).items():
                optimizer.state[parameters[name]] = {
                    key: value.like(parameters[name]) if isinstance(value, _ConstantTensor) else value
                    for key, value in state.items()
                }

    def names_by_group(self) -> dict[Any, list[list[str]]]:
        """Returns the names in each group, by optimizer, of the optimizers that step only this model."""
        return {
            optimizer: groups
            for optimizer, groups in self._members.items()
            if all(isinstance(member, str) for group in groups for member in group)
        }

    def replaced(self, parameters: Mapping[str, nn.Parameter]) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
        """Iterates over the old parameters that are still in use, with the new ones."""
        for old, name in list(self._old.items()):  # type: ignore[no-untyped-call]
            new = parameters.get(name)
            if new is not None:
                yield old, new


class _ConstantTensor(NamedTuple):
    """State of the shape of its parameter with one value for all elements."""

    value: float
    dtype: torch.dtype

    def like(self, parameter: Tensor) -> Tensor:
        return torch.full_like(parameter.detach(), self.value, dtype=self.dtype)


def _constant_states(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], is_own: bool
) -> dict[str, dict[str, Any]] | None:
    """Returns the states that an optimizer has created in its constructor, such as Adagrad.

    Called on all ranks. It is None if the states differ between elements.

    Args:
        is_own: Whether the states are those of this rank, and not those of rank 0.
    """
    states = {names[id(p)]: (p.shape, state) for p, state in optimizer.state.items() if id(p) in names}
    if not states:
        return {}
    read: dict[str, dict[str, Any]] | None = None
    if all(_is_constant(value, shape) for shape, state in states.values() for value in state.values()):
        read = {
            name: {key: _read_constant(value, shape) for key, value in state.items()}
            for name, (shape, state) in states.items()
        }
    if is_own:
        return read
    return current_transport().broadcast_object(read, MAIN)  # type: ignore[no-any-return]


def _is_constant(value: object, shape: torch.Size) -> bool:
    if not isinstance(value, Tensor) or value.numel() < 2:
        return True
    return value.shape == shape and not value.is_meta and bool((value == value.flatten()[0]).all())


def _read_constant(value: object, shape: torch.Size) -> Any:
    if not isinstance(value, Tensor) or value.shape != shape or not value.numel():
        return value
    return _ConstantTensor(value.flatten()[0].item(), value.dtype)


def _put(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameters: list[Any], seen: set[int]
) -> None:
    """Sets the parameters of a group of an optimizer, each once.

    Args:
        seen: Identities of the parameters of the other groups, to which those of this group are added.
    """
    unique = {id(parameter): parameter for parameter in parameters}
    if seen & set(unique):
        raise PreparationError(
            f"The groups of {type(optimizer).__name__} share parameters that FSDP 1 has joined into one, so "
            "they cannot have settings of their own. Set use_orig_params=True, or fsdp_version=2."
        )
    seen.update(unique)
    if len(unique) != len(group.get("param_names", unique)):
        del group["param_names"]
    group["params"] = list(unique.values())
