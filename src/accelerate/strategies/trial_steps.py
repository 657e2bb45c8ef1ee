"""Trial steps that find optimizers whose updates are not element-wise, which flat parameters change.

The class of an optimizer does not say it. A copy of the optimizer steps a small matrix, and copies of it step
the flat halves of that matrix. An element-wise optimizer computes the same values.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import rng
from accelerate.nested import iterate_tensors

NUM_STEPS = 30
MAX_GROUPS = 8  # whose options differ
TOLERANCE = 1e-5  # relative to the largest change of a value
KNOWN = frozenset(
    {
        *("AdamMini", "Adam_mini", "Kron", "OrthoGrad", "Prodigy", "ScalableShampoo", "TRAC"),
        *("DAdaptAdaGrad", "DAdaptAdam", "DAdaptAdan", "DAdaptLion"),
    }
)
"""Classes of which a few steps do not show it."""
OF_DEVICES = {"fused": None, "capturable": False, "foreach": None}
"""Options that depend on the device, with values for the CPU."""


def needs_whole_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer changes a value depending on the shape or the other values of a parameter.

    False for an unknown optimizer that cannot be tried, or that draws random numbers.
    """
    if type(optimizer).__name__ in KNOWN:
        return True
    parts = list(vars(optimizer).values())
    if any(isinstance(part, (torch.optim.Optimizer, nn.Module)) for part in parts):
        inner = [part for part in parts if isinstance(part, torch.optim.Optimizer)]
        return any(map(needs_whole_parameters, inner))
    states = rng.capture()
    try:
        return any(_depends_on_shape(optimizer, group) for group in _different_groups(optimizer))
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
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 1.0, 30.0, 30.0], dtype=torch.float64)[:, None]  # other norms of the halves
    numbers = torch.randn(1 + NUM_STEPS, 4, 6, generator=generator, dtype=torch.float64) * scale
    try:
        whole, again = (_change(optimizer, options, numbers, seed) for seed in (0, 1))
    except Exception:  # it needs another model, or the hardware of the run
        return False
    largest = whole.abs().max()
    if not whole.isfinite().all() or not largest or not torch.equal(whole, again):
        return False
    try:
        halves = [_change(optimizer, options, half, 0) for half in numbers.flatten(1).chunk(2, dim=1)]
    except Exception:  # it steps matrices only
        return True
    return not bool((torch.cat(halves) - whole).abs().max() <= TOLERANCE * largest)


def _change(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], numbers: Tensor, seed: int
) -> Tensor:
    """Returns the change of a parameter, whose values and gradients are given, in a few steps."""
    rng.set_seed(seed)
    parameter = nn.Parameter(numbers[0].clone())
    trial: Any = _copy_for(parameter, optimizer, options)

    def closure() -> Tensor:
        return numbers[0].sum()

    for gradient in numbers[1:]:
        parameter.grad = gradient.clone()
        try:
            type(optimizer).step(trial)
        except TypeError:
            type(optimizer).step(trial, closure)  # type: ignore[arg-type]  # as torch's own closures
    return (parameter.detach() - numbers[0]).flatten()


def _copy_for(parameter: Tensor, optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> Any:
    """Returns a copy of an optimizer, without its hooks and states, that steps another parameter."""
    trial: Any = object.__new__(type(optimizer))
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, value in vars(optimizer).items():
        if name in ("state", "param_groups", "step"):  # schedulers replace the method
            continue
        vars(trial)[name] = _copy_value(value, parameter, own)
    options = {**options, **{key: OF_DEVICES[key] for key in OF_DEVICES.keys() & options.keys()}}
    if not options.get("lr", 1):  # a scheduler begins with zero
        options["lr"] = 1e-3
    trial.state = defaultdict(dict)
    trial.param_groups = [{**options, "params": [parameter]}]
    return trial


def _copy_value(value: Any, parameter: Tensor, own: set[int]) -> Any:
    tensors = list(iterate_tensors(value))
    if any(id(tensor) in own for tensor in tensors):
        if isinstance(value, list) and all(id(item) in own for item in value):
            return [parameter]
        raise ValueError("It keeps its parameters in another place, which a copy would change.")
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, OrderedDict) and any(map(callable, value.values())):
        return OrderedDict()  # hooks
    return type(value)(value) if type(value) in (list, dict, set, OrderedDict) else value
