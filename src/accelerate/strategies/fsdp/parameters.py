"""Follow parameters while a model is sharded: by name through a change of identity, for every optimizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from accelerate import torch_private
from accelerate.base import ConfigurationError, PreparationError, listed, wrong_value

Value = TypeVar("Value")


def clean_name(name: str) -> str:
    """Return the name that a tensor has without wrappers."""
    return ".".join(part for part in name.split(".") if part not in torch_private.WRAPPED)


def fsdp2_canonicalize_names(named_params: Mapping[str, Value]) -> dict[str, Value]:
    """Return parameters under the names that they have without wrappers.

    Args:
        named_params: name -> parameter, or anything else.
    """
    return {clean_name(name): value for name, value in named_params.items()}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return all parameters of a model by clean name; tied ones under each of their names."""
    return fsdp2_canonicalize_names(dict(model.named_parameters(remove_duplicate=False)))


def names_by_group(optimizer: Any, models: Sequence[nn.Module]) -> list[list[list[str]]]:
    """Return for each group of an optimizer, for each parameter, all names that it has in some unwrapped
    models, the usual one first; with the number of the model where it steps several."""
    names: dict[int, list[str]] = {}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    named = [named_parameters(model) for model in models]
    several = sum(any(id(p) in stepped for p in parameters.values()) for parameters in named) > 1
    for index, parameters in enumerate(named):
        for name, parameter in parameters.items():
            names.setdefault(id(parameter), []).append(f"model_{index}.{name}" if several else name)
    if unknown := len(stepped - set(names)):
        raise ConfigurationError(
            f"{type(optimizer).__name__} steps {unknown} parameters that no prepared model has, and in "
            "shards the states of parameters are known by their names. Prepare the model, too, or save whole "
            "states: FSDP_STATE_DICT_TYPE=FULL_STATE_DICT."
        )
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def fsdp2_switch_optimizer_parameters(
    optimizer: torch.optim.Optimizer, mapping: Mapping[Tensor, Tensor]
) -> None:
    """Let an optimizer step other parameters in the places of its own.

    Args:
        optimizer: has taken no step yet.
        mapping: parameter that it holds -> the one that takes its place; others stay. Where several are
            replaced by the same one, it is stepped once.

    Raises:
        PreparationError: one parameter would be in two groups.
    """
    seen: set[int] = set()
    for group in optimizer.param_groups:
        _put(optimizer, group, [mapping.get(old, old) for old in group["params"]], seen)


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: Any
) -> set[nn.Parameter]:
    """Return the parameters of some modules of a model, moved to a device.

    Args:
        modules: the modules, or a regular expression that matches their whole names; None for none.
        model: the model they are in.
        device: of the parameters; None leaves them where they are.

    Raises:
        ConfigurationError: that is no regular expression.
    """
    if modules is None:
        return set()
    if isinstance(modules, str):
        modules = _modules_by_name(modules, model)
    parameters: set[nn.Parameter] = set()
    for module in modules:
        parameters.update((module if device is None else module.to(device)).parameters())
    return parameters


def check_ignored(modules: Iterable[nn.Module] | str | None, model: nn.Module) -> None:
    """Refuse modules to ignore that a model does not have."""
    if isinstance(modules, str):
        if not _modules_by_name(modules, model):
            reason = f"it matches the whole name of no module in {type(model).__name__}"
            fix = f"Names are such as {listed([name for name, _ in model.named_modules() if name][:3])}"
            raise wrong_value("ignored_modules", modules, reason, fix)
        return
    if modules is None:
        return
    own, given = set(model.modules()), list(modules) if isinstance(modules, Iterable) else [modules]
    unknown = [type(module).__name__ for module in given if module not in own]
    if unknown:
        fix = "Give modules of the model that is prepared, or a regular expression for their names"
        raise wrong_value("ignored_modules", listed(unknown), f"not in {type(model).__name__}", fix)


def _modules_by_name(expression: str, model: nn.Module) -> list[nn.Module]:
    try:
        pattern = re.compile(expression)
    except re.error as error:
        reason = f"no regular expression ({error})"
        raise wrong_value("ignored_modules", expression, reason, "Fix it") from error
    return [module for name, module in model.named_modules() if pattern.fullmatch(name)]


class ParameterRemapper:
    """Records where optimizers hold the parameters of a model, while sharding gives it new ones.

    Optimizers release the old parameters meanwhile: otherwise the whole model would stay in memory.

    Args:
        optimizers: prepared or not; those of other models are left alone.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Any]) -> None:
        names: dict[int, str] = {}
        self._old = WeakIdKeyDictionary()
        for name, parameter in named_parameters(model).items():
            names.setdefault(id(parameter), name)
            self._old[parameter] = names[id(parameter)]
        # Optimizer -> for each group its members: names of this model's parameters, or other parameters.
        self._members: dict[Any, list[list[Any]]] = {}
        for optimizer in (getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers):
            groups = [[names.get(id(p), p) for p in group["params"]] for group in optimizer.param_groups]
            if not any(isinstance(member, str) for group in groups for member in group):
                continue
            if optimizer.state:
                raise PreparationError(
                    f"{type(optimizer).__name__} holds the state of {len(optimizer.state)} parameters, which "
                    "cannot be sharded with them. Prepare model and optimizer before the first step, and "
                    "load an optimizer's state afterwards."
                )
            self._members[optimizer] = groups

    def release(self) -> None:
        """Take all parameters out of the optimizers."""
        for optimizer in self._members:
            for group in optimizer.param_groups:
                group["params"] = []

    def rejoin(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give the optimizers the new parameters."""
        for optimizer, groups in self._members.items():
            seen: set[int] = set()
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

    def names_by_group(self) -> dict[Any, list[list[str]]]:
        """Return for each optimizer of this model alone the names that each group had, in order."""
        return {
            optimizer: groups
            for optimizer, groups in self._members.items()
            if all(isinstance(member, str) for group in groups for member in group)
        }

    def replaced(self, parameters: Mapping[str, nn.Parameter]) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
        """Iterate over those old parameters that are still in use, with the new ones."""
        for old, name in list(self._old.items()):  # type: ignore[no-untyped-call]
            new = parameters.get(name)
            if new is not None:
                yield old, new


def _put(optimizer: Any, group: dict[str, Any], parameters: list[Any], seen: set[int]) -> None:
    """Let a group of an optimizer step some parameters, each once; `seen` are those of its other groups."""
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
