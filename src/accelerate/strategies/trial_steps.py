"""Trial steps that find optimizers whose updates depend on other values, which not all ranks have.

The class of an optimizer does not say it. A copy of the optimizer steps a small matrix, and copies of it step
the flat halves of that matrix. An element-wise optimizer computes the same values. In the same way a copy
steps two matrices together, and copies of it step each of them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import rng
from accelerate.nested import iterate_tensors, recursively_apply

NUM_STEPS = 30
MAX_GROUPS = 8  # whose options differ
TOLERANCE = 1e-5  # relative to the largest change of a value
OVER_PARAMETERS = frozenset(
    {"Prodigy", "TRAC", "DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion", "DAdaptSGD"}
)
"""Classes with sums over all parameters, of which a few steps do not show it."""
KNOWN = OVER_PARAMETERS | {"AdamMini", "Adam_mini", "Kron", "OrthoGrad", "ScalableShampoo"}
"""Classes that are not element-wise, of which a few steps do not show it."""
OF_DEVICES = {"fused": None, "capturable": False, "foreach": None}
"""Options that depend on the device, with values for the CPU."""


def needs_whole_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer changes a value depending on the shape or the other values of a parameter.

    False for an unknown optimizer that cannot be tried, or that draws random numbers.
    """
    return _is_true_of_trials(optimizer, KNOWN, _depends_on_shape)


def needs_all_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer changes a parameter depending on the values of others.

    False for an unknown optimizer that cannot be tried, or that draws random numbers.
    """
    return _is_true_of_trials(optimizer, OVER_PARAMETERS, _depends_on_others)


def _is_true_of_trials(
    optimizer: torch.optim.Optimizer,
    known: frozenset[str],
    trial: Callable[[torch.optim.Optimizer, Mapping[str, Any]], bool],
) -> bool:
    """Returns whether a trial of an optimizer, or of those in it, succeeds for the options of any group."""
    if type(optimizer).__name__ in known:
        return True
    parts = list(vars(optimizer).values())
    if any(isinstance(part, (torch.optim.Optimizer, nn.Module)) for part in parts):
        inner = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        if any(_is_true_of_trials(part, known, trial) for part in inner):
            return True
        if any(isinstance(part, nn.Module) for part in parts):
            return False
    states = rng.capture()
    try:
        return any(trial(optimizer, group) for group in _different_groups(optimizer))
    finally:
        rng.restore(states)


def _different_groups(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    seen: list[str] = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if repr(options) not in seen and len(seen) < MAX_GROUPS:
            seen.append(repr(options))
            yield options


def _depends_on_shape(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> bool:
    numbers = _numbers()
    whole = _change_of_all(optimizer, options, [numbers])
    if whole is None:
        return False
    try:
        halves = [_change(optimizer, options, [half], 0) for half in numbers.flatten(1).chunk(2, dim=1)]
    except Exception:  # it steps matrices only
        return True
    return _differ(torch.cat(halves), whole)


def _depends_on_others(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> bool:
    several = [_numbers(), 10 * _numbers().flip(1)]
    together = _change_of_all(optimizer, options, several)
    if together is None:
        return False
    return _differ(torch.cat([_change(optimizer, options, [each], 0) for each in several]), together)


def _numbers() -> Tensor:
    """Returns the values of a parameter, and its gradients in all steps."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 1.0, 30.0, 30.0], dtype=torch.float64)[:, None]  # other norms of the halves
    return torch.randn(1 + NUM_STEPS, 4, 6, generator=generator, dtype=torch.float64) * scale


def _change_of_all(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], several: Sequence[Tensor]
) -> Tensor | None:
    """Returns the change of parameters that are stepped together, or None if a trial has no result."""
    try:
        whole, again = (_change(optimizer, options, several, seed) for seed in (0, 1))
    except Exception:  # it needs another model, or the hardware of the run
        return None
    is_useful = whole.isfinite().all() and whole.abs().max() and torch.equal(whole, again)
    return whole if is_useful else None


def _differ(changes: Tensor, whole: Tensor) -> bool:
    return not bool((changes - whole).abs().max() <= TOLERANCE * whole.abs().max())


def _change(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], several: Sequence[Tensor], seed: int
) -> Tensor:
    """Returns the change of parameters, whose values and gradients are given, in a few steps."""
    rng.set_seed(seed)
    parameters = [nn.Parameter(numbers[0].clone()) for numbers in several]
    trial: Any = _copy_for(parameters, optimizer, options)

    has_inner = any(isinstance(value, torch.optim.Optimizer) for value in vars(trial).values())

    def closure() -> Tensor:
        if has_inner:  # such as one that changes weights to compute other gradients there
            for parameter, numbers in zip(parameters, several, strict=True):
                parameter.grad = numbers[step] + parameter.detach()
        return sum((numbers[0].sum() for numbers in several), torch.zeros(()))

    for step in range(1, 1 + NUM_STEPS):
        for parameter, numbers in zip(parameters, several, strict=True):
            parameter.grad = numbers[step].clone()
        try:
            type(optimizer).step(trial)
        except Exception:  # it needs a closure
            type(optimizer).step(trial, closure)  # type: ignore[arg-type]  # as torch's own closures
    changes = [p.detach() - numbers[0] for p, numbers in zip(parameters, several, strict=True)]
    return torch.cat([change.flatten() for change in changes])


def _copy_for(
    parameters: Sequence[Tensor], optimizer: torch.optim.Optimizer, options: Mapping[str, Any]
) -> Any:
    """Returns a copy of an optimizer, without its hooks and states, that steps other parameters."""
    trial: Any = object.__new__(type(optimizer))
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "step"):  # schedulers replace the method
            continue
        if isinstance(value, torch.optim.Optimizer):
            vars(trial)[name] = _copy_for(parameters, value, options)
        else:
            vars(trial)[name] = _copy_value(value, parameters, own)
    options = {
        **recursively_apply(Tensor.clone, options),
        **{key: OF_DEVICES[key] for key in OF_DEVICES.keys() & options.keys()},
    }
    if not options.get("lr", 1):  # a scheduler begins with zero
        options["lr"] = 1e-3
    trial.state = defaultdict(dict)
    trial.param_groups = [{**options, "params": [*parameters]}]
    return trial


def _copy_value(value: Any, parameters: Sequence[Tensor], own: set[int]) -> Any:
    tensors = list(iterate_tensors(value))
    if any(id(tensor) in own for tensor in tensors):
        if isinstance(value, list) and all(id(item) in own for item in value):
            return [*parameters]
        raise ValueError("It keeps its parameters in another place, which a copy would change.")
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, OrderedDict) and any(map(callable, value.values())):
        return OrderedDict()  # hooks
    if type(value) in (list, dict, OrderedDict):
        return recursively_apply(Tensor.clone, value)
    return set(value) if type(value) is set else value
