"""Whether a state that was read fits an object, which is asked before the object cannot be brought back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from accelerate import torch_private
from accelerate.base import CheckpointError, listed
from accelerate.weights import is_extra, missing_names

Strings = tuple[str, ...]

# What torch's optimizers need of a parameter that was stepped.
NEEDED: dict[str, Strings] = {
    "ASGD": ("step", "eta", "mu", "ax"),
    "Adadelta": ("step", "square_avg", "acc_delta"),
    "Adagrad": ("step", "sum"),
    "Adam": ("step", "exp_avg", "exp_avg_sq"),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "Adamax": ("step", "exp_avg", "exp_inf"),
    "Muon": ("momentum_buffer",),
    "NAdam": ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    "RAdam": ("step", "exp_avg", "exp_avg_sq"),
    "RMSprop": ("step", "square_avg"),
    "Rprop": ("step", "prev", "step_size"),
    "SGD": (),
    "SparseAdam": ("step", "exp_avg", "exp_avg_sq"),
}
NUMBERS = ("step", "eta", "mu", "mu_product")  # of these; the others are tensors of the parameter's shape
# What they need in groups with an option.
NEEDED_WITH: dict[str, dict[str, str]] = {
    "Adam": {"amsgrad": "max_exp_avg_sq"},
    "AdamW": {"amsgrad": "max_exp_avg_sq"},
    "RMSprop": {"centered": "grad_avg", "momentum": "momentum_buffer"},
}


def check_weights(
    own: Mapping[str, Any], state: Any, path: object, model: nn.Module, *, strict: bool
) -> None:
    """Compare weights with what a model has by name: anything with `shape` and `dtype`, or extra state."""
    if not isinstance(state, Mapping):
        raise CheckpointError(
            f"{path} does not fit this {type(model).__name__}: it holds a {type(state).__name__} instead of "
            "weights by name."
        )
    if strict:
        refuse_names(path, model, missing_names(own, state), [name for name in state if name not in own])
    common = [name for name in state if name in own]
    _refuse(path, model, [_misfit(name, own[name], state[name]) for name in common])
    check_dtypes(own, state, path, model)


def check_dtypes(own: Mapping[str, Any], state: Mapping[str, Any], path: object, model: nn.Module) -> None:
    """Refuse complex weights for a tensor that is not complex: torch would drop the imaginary part."""
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
    path: object, model: nn.Module, missing: Sequence[object], strange: Sequence[object]
) -> None:
    if not missing and not strange:
        return
    lacks = f" It lacks {listed([str(name) for name in missing])}." if missing else ""
    has = f" The model does not have {listed([str(name) for name in strange])}." if strange else ""
    raise CheckpointError(
        f"{path} does not fit this {type(model).__name__}.{lacks}{has} Prepare the models in the order in "
        "which they were saved; strict=False loads what fits."
    )


def _misfit(name: str, own: Any, value: Any) -> str:
    if is_extra(name) or is_lazy(own):
        return ""
    if not isinstance(value, Tensor):
        return f"{name} is a {type(value).__name__} instead of a tensor"
    shape, wanted = tuple(value.shape), tuple(own.shape)
    if shape != wanted and not (wanted == () and shape == (1,)):  # as torch takes it
        return f"{name} has the shape {shape} instead of {wanted}"
    return ""


def loads_its_own_way(model: nn.Module) -> bool:
    """Whether a model has code that may take weights of other names than those of its state dict."""

    def overrides(module: nn.Module, name: str) -> bool:
        return getattr(type(module), name) is not getattr(nn.Module, name) or name in vars(module)

    methods = ("load_state_dict", "_load_from_state_dict", "state_dict", "_save_to_state_dict")
    return any(
        any(overrides(module, name) for name in methods)
        or any(not str(getattr(hook, "__module__", "")).startswith("torch.") for hook in hooks)
        for module in model.modules()
        for hooks in [torch_private.state_dict_hooks(module)]
    )


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Compare the state of one of torch's optimizers with what it needs to step; others check their own."""
    kind = type(optimizer)
    if kind.__name__ not in NEEDED or not kind.__module__.startswith("torch.optim."):
        return
    for index, group in enumerate(optimizer.param_groups):
        _check_group(f"Group {index} of the optimizer", group, optimizer.defaults)
        further = NEEDED_WITH.get(kind.__name__, {})
        needed = (*NEEDED[kind.__name__], *(key for option, key in further.items() if group[option]))
        for number, parameter in enumerate(group["params"]):
            name = f"The state of parameter {number} in group {index}"
            _check_state(name, optimizer.state.get(parameter), parameter, needed)
    strange = [str(key) for key in optimizer.state if not isinstance(key, Tensor)]
    if strange:
        raise CheckpointError(f"There are states of parameters that it does not step: {listed(strange)}.")


def _check_group(name: str, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    missing = [key for key in defaults if key not in group]
    if missing:
        raise CheckpointError(f"{name} lacks {listed(missing)}.")
    wrong = [key for key, value in defaults.items() if not _is_like(value, group[key])]
    if wrong:
        raise CheckpointError(f"{name} has another kind of value for {listed(wrong)}.")


def _is_like(default: Any, value: Any) -> bool:
    if default is None or isinstance(default, bool):
        return value is None or isinstance(value, (bool, int, float))
    if isinstance(default, (int, float, Tensor)):
        return _is_number(value)
    if isinstance(default, (tuple, list)):
        fits = isinstance(value, (tuple, list)) and len(value) == len(default)
        return fits and all(_is_like(*pair) for pair in zip(default, value, strict=True))
    return isinstance(value, type(default))


def _check_state(name: str, state: Any, parameter: Tensor, needed: Strings) -> None:
    if state is None:
        return
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{name} is a {type(state).__name__} instead of a dictionary.")
    missing = [key for key in needed if key not in state]
    if state and missing:
        raise CheckpointError(f"{name} lacks {listed(missing)}.")
    check_shapes(name, state, tuple(parameter.shape))
    for key, value in state.items():
        is_dense = isinstance(value, Tensor) and value.layout == torch.strided
        fits = _is_number(value) if key in NUMBERS else is_dense and value.shape == parameter.shape
        if not fits and (key in NUMBERS or key in needed or value is not None):
            raise CheckpointError(f"{name} has a {type(value).__name__} as {key}, which does not fit.")


def _is_number(value: Any) -> bool:
    is_single = isinstance(value, Tensor) and value.numel() == 1
    return isinstance(value, (bool, int, float)) or (is_single and value.layout == torch.strided)


def check_shapes(name: str, state: Mapping[str, Any], wanted: tuple[int, ...]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() != 1 and tuple(value.shape) != wanted:
            raise CheckpointError(
                f"{name} has {key} with the shape {tuple(value.shape)} instead of {tuple(wanted)}."
            )


def check_form(state: Any) -> None:
    """Refuse what does not have the form that `torch.optim.Optimizer.state_dict` gives."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    has_groups = isinstance(groups, list) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups
    )
    if not has_groups or not isinstance(state.get("state"), Mapping):
        raise CheckpointError("it is no state of an optimizer: it needs 'state' and 'param_groups'")
