"""Comparison of states that were read with the objects that will load them.

Parts call these functions before any object is changed. They raise a `CheckpointError` for a state that does
not fit.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accelerate import torch_private
from accelerate.base import CheckpointError, listed
from accelerate.checkpointing.state_layouts import LAYOUTS
from accelerate.weights import is_extra, missing_names

STATE, GROUPS, PARAMETERS = "state", "param_groups", "params"  # keys of a state dict of an optimizer

Names = Sequence[Sequence[Sequence[str]]]
"""Names of each parameter of each group of an optimizer. The first name is saved."""


def check_weights(
    own: Mapping[str, Any], state: object, path: object, model: nn.Module, *, strict: bool
) -> None:
    """Compares names, shapes and dtypes of weights with those of a model.

    Args:
        own: Tensors of the model by name, or objects with their `shape` and `dtype`.
        state: Weights that were read.
        path: File, for messages.
        model: Model, for messages.
        strict: Whether all names must be the same.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{path} does not fit this {type(model).__name__}: it holds a {type(state).__name__} instead of "
            "weights by name."
        )
    if strict:
        # Layers of torch add the counter to weights of old versions.
        missing = [name for name in missing_names(own, state) if not name.endswith("num_batches_tracked")]
        refuse_names(path, model, missing, [name for name in state if name not in own])
    common = [name for name in state if name in own]
    _refuse(path, model, [_mismatch(name, own[name], state[name]) for name in common])
    check_dtypes(own, state, path, model)


def check_dtypes(own: Mapping[str, Any], state: Mapping[str, Any], path: object, model: nn.Module) -> None:
    """Raises for complex weights of a real tensor, whose imaginary part torch would drop."""
    losses = [
        f"{name} has the dtype {value.dtype} instead of {own[name].dtype}"
        for name, value in state.items()
        if name in own and not is_extra(name) and isinstance(value, Tensor)
        if value.is_complex() and not own[name].dtype.is_complex
    ]
    _refuse(path, model, losses)


def _refuse(path: object, model: nn.Module, reasons: Sequence[str]) -> None:
    wrong = [reason for reason in reasons if reason]
    if wrong:
        raise CheckpointError(
            f"{path} does not fit this {type(model).__name__}: {listed(wrong)}. Prepare the models in the "
            "order in which they were saved."
        )


def refuse_names(
    path: object, model: nn.Module, missing: Sequence[object], unexpected: Sequence[object]
) -> None:
    """Raises if there are missing or unexpected names."""
    if not missing and not unexpected:
        return
    lacks = f" It lacks {listed([str(name) for name in missing])}." if missing else ""
    has = f" The model does not have {listed([str(name) for name in unexpected])}." if unexpected else ""
    raise CheckpointError(
        f"{path} does not fit this {type(model).__name__}.{lacks}{has} Prepare the models in the order in "
        "which they were saved; strict=False loads what fits."
    )


def _mismatch(name: str, own: Any, value: Any) -> str:
    if is_extra(name) or is_lazy(own):
        return ""
    if not isinstance(value, Tensor):
        return f"{name} is a {type(value).__name__} instead of a tensor"
    shape, wanted = tuple(value.shape), tuple(own.shape)
    if shape != wanted and not (wanted == () and shape == (1,)):  # which torch accepts
        return f"{name} has the shape {shape} instead of {wanted}"
    return ""


def loads_its_own_way(model: nn.Module) -> bool:
    """Returns whether a model has code that may load weights of other names than those of its state dict."""

    def overrides(module: nn.Module, name: str) -> bool:
        defined_in = str(getattr(getattr(type(module), name), "__module__", ""))
        return name in vars(module) or not defined_in.startswith("torch.nn.modules.")

    methods = ("load_state_dict", "_load_from_state_dict", "state_dict", "_save_to_state_dict")
    return any(
        any(overrides(module, name) for name in methods)
        or any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)
        for module in model.modules()
        for hooks in [torch_private.state_dict_hooks(module)]
    )


def check_optimizer(owner: object, state: Mapping[str, Any]) -> None:
    """Verifies that an optimizer can load a state dict, without changing the optimizer.

    The optimizer loads the state into a copy that has its options, and parameters without values. An
    optimizer with its own code to load a state is not verified.
    """
    check_form(state, owner)
    optimizer = find_plain_optimizer(owner)
    if optimizer is None or any(is_lazy(parameter) for parameter in _parameters(optimizer)):
        return
    trial = _copy_without_values(optimizer)
    trial.load_state_dict(dict(state))
    if _is_torchs(optimizer):
        for index, group in enumerate(trial.param_groups):
            options = optimizer.param_groups[index]  # torch adds defaults that no group has
            if missing := [key for key in optimizer.defaults if key in options and key not in group]:
                raise CheckpointError(f"Group {index} of the optimizer lacks {listed(missing)}.")
        if unknown := [str(key) for key in trial.state if not isinstance(key, Tensor)]:
            raise CheckpointError(f"There are states of parameters that it does not step: {listed(unknown)}.")
    pairs = zip(_parameters(optimizer), _parameters(trial), strict=True)
    for number, (live, copied) in enumerate(pairs):
        _check_like(
            f"The state of parameter {number}", live, optimizer.state.get(live), trial.state.get(copied)
        )


def inner_optimizer(owner: object) -> Any:
    """Returns the optimizer of the user in wrappers of this package."""
    while type(owner).__module__.startswith("accelerate.") and hasattr(owner, "optimizer"):
        owner = owner.optimizer
    return owner


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """Returns the name of the class of an optimizer, which may be in wrappers of this package."""
    return type(inner_optimizer(optimizer)).__name__


def live_state(owner: Any, number: int, key: str) -> Any:
    """Returns a state that an optimizer has for a parameter now, or None."""
    state = getattr(inner_optimizer(owner), "state", None)
    values = state.get(_parameters(owner)[number]) if isinstance(state, Mapping) else None
    return values.get(key) if isinstance(values, Mapping) else None


def find_plain_optimizer(owner: object) -> torch.optim.Optimizer | None:
    """Returns the optimizer in wrappers of this package, or None if it has its own code to load a state."""
    owner, base = inner_optimizer(owner), torch.optim.Optimizer
    if not isinstance(owner, base):
        return None
    is_plain = type(owner).load_state_dict is base.load_state_dict and (
        _is_torchs(owner) or type(owner).__setstate__ is base.__setstate__
    )
    return owner if is_plain and not torch_private.has_load_hooks(owner) else None


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _copy_without_values(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns an optimizer with the same groups, no state, and parameters on the meta device."""
    trial = object.__new__(type(optimizer))
    vars(trial).update(vars(optimizer))
    trial.state, trial.defaults = defaultdict(dict), dict(optimizer.defaults)
    trial.param_groups = [
        {**group, "params": [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in group["params"]]}
        for group in optimizer.param_groups
    ]
    return trial


def _check_like(name: str, parameter: Tensor, live: object, loaded: object) -> None:
    """Compares the state that an optimizer has for a parameter with the state to be loaded."""
    if not isinstance(live, Mapping) or loaded is None:
        return
    if not isinstance(loaded, Mapping):
        raise CheckpointError(f"{name} is a {type(loaded).__name__} instead of a dictionary.")
    for key in live.keys() & loaded.keys():
        before, after = live[key], loaded[key]
        is_elementwise = isinstance(before, Tensor) and before.shape == parameter.shape and before.numel() > 1
        if not is_elementwise or after is None:
            continue
        if not isinstance(after, Tensor):
            raise CheckpointError(f"{name} has a {type(after).__name__} as {key} instead of a tensor.")
        check_shapes(name, {key: after}, tuple(parameter.shape))


def check_shapes(name: str, state: Mapping[str, Any], wanted: tuple[int, ...]) -> None:
    """Raises if a tensor of a state has another shape than its parameter, and is not a single number."""
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() != 1 and tuple(value.shape) != wanted:
            raise CheckpointError(
                f"{name} has {key} with the shape {tuple(value.shape)} instead of {tuple(wanted)}."
            )


def has_form(state: Mapping[str, Any]) -> bool:
    """Returns whether a value is a state dict in the form of `torch.optim.Optimizer`."""
    groups = state.get(GROUPS) if isinstance(state, Mapping) else None
    has_groups = isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get(PARAMETERS), list) for group in groups
    )
    return has_groups and isinstance(state.get(STATE), Mapping)


def check_form(state: Mapping[str, Any], owner: object = None) -> None:
    """Raises for a value that is not a state dict of an optimizer, which may have a form of its own."""
    own_method = getattr(type(inner_optimizer(owner)), "state_dict", None)
    is_own = isinstance(owner, torch.optim.Optimizer) and own_method is not torch.optim.Optimizer.state_dict
    if not has_form(state) and not is_own:
        raise CheckpointError("it is not the state of an optimizer: it needs 'state' and 'param_groups'")


def in_order(state: Mapping[str, Any], names: Callable[[], Names] | None) -> Mapping[str, Any]:
    """Returns a state dict of an optimizer with numbers of parameters in place of their names."""
    keys = [parameter for group in state[GROUPS] for parameter in group[PARAMETERS]]
    if names is None or not any(isinstance(key, str) for key in keys):
        return state  # keys of other text are states that belong to no parameter
    groups = names()
    numbers, count = parameter_numbers(groups), itertools.count()
    if unknown := sorted(str(name) for name in state[STATE] if name not in numbers):
        raise CheckpointError(f"The state is that of parameters it does not step: {listed(unknown)}.")
    if len(state[GROUPS]) != len(groups):
        raise CheckpointError(f"The state has {len(state[GROUPS])} groups, and there are {len(groups)}.")
    return {
        **{
            kind: {numbers[name]: values for name, values in state[kind].items()}
            for kind in (STATE, LAYOUTS)
            if kind in state
        },
        GROUPS: [
            {**saved, PARAMETERS: [next(count) for _ in group]}
            for saved, group in zip(state[GROUPS], groups, strict=True)
        ],
    }


def parameter_numbers(names: Names) -> dict[str, int]:
    """Returns the number of each parameter in a state dict, by each of its names."""
    parameters = [own for group in names for own in group]
    return {name: number for number, own in enumerate(parameters) for name in own}


def check_keys(state: object, needed: Iterable[str]) -> None:
    """Verifies that a state is a dictionary with some keys."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"it is a {type(state).__name__} instead of a dictionary")
    if missing := [key for key in needed if key not in state]:
        raise CheckpointError(f"it lacks {listed(missing)}")
