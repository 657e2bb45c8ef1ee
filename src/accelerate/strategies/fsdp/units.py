"""Which modules become units of sharding, after looking at what units cannot hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelerate.base import PreparationError, listed
from accelerate.logging import get_logger
from accelerate.plugins import bind_policy, find_units, read_policy

logger = get_logger(__name__)

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Modules that are never called, so nothing would fetch their parameters."""


@dataclass(frozen=True)
class Holding:
    """One place of a parameter that a unit holds."""

    module: nn.Module
    name: str
    parameter: nn.Parameter


def choose_units(plugin: Any, model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that become units besides the model itself, inner ones first.

    Modules that share a tied parameter with the rest of the model stay in one unit with it.
    """
    policy = bind_policy(
        read_policy(plugin.auto_wrap_policy),
        model,
        plugin.transformer_cls_names_to_wrap,
        plugin.min_num_params,
    )
    found = [unit for unit in find_units(model, policy) if not isinstance(unit, _CONTAINERS)]
    torn = {id(unit) for unit in found if _tears(unit, _tied_places(model))}
    if torn:
        logger.info(
            f"{len(torn)} modules of {type(model).__name__} share parameters with the rest of it and are no "
            "units of their own."
        )
    if policy is not None and not found:
        logger.warning(
            f"auto_wrap_policy finds no module in {type(model).__name__}: it is sharded as one unit, which "
            "takes the most memory. Name its layers in transformer_cls_names_to_wrap, or set min_num_params."
        )
    return [unit for unit in found if id(unit) not in torn]


def kept_in_float32(model: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules of a model that compute in float32 whatever the number format of the run.

    Args:
        model: names them, or parts of their names, in `_keep_in_fp32_modules` or
            `_keep_in_fp32_modules_strict`, as transformers' models do.
    """
    wanted = {
        name
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for name in getattr(model, attribute, None) or ()
    }
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if wanted & set(name.split(".")) and not inside and next(module.parameters(), None) is not None:
            found[name] = module
    tied, borders = _tied_places(model), set(units)
    torn = [name for name, module in found.items() if _tears(module, tied) or borders & set(module.modules())]
    if torn:
        raise PreparationError(
            f"{type(model).__name__} keeps {listed(torn)} in float32, which hold units or share parameters "
            "with the rest of the model. Name single layers, such as norms."
        )
    return list(found.values())


def holdings(
    model: nn.Module, units: Iterable[nn.Module], ignored: Iterable[nn.Parameter] = ()
) -> Iterator[list[Holding]]:
    """Iterate over what each unit holds itself, the model being the last one."""
    names = {id(module): name for name, module in model.named_modules()}
    borders = {id(unit) for unit in units} | {id(model)}
    left_out = {id(parameter) for parameter in ignored}
    for unit in [*units, model]:
        yield [
            Holding(module, f"{names[id(module)]}.{name}".lstrip("."), parameter)
            for module in _inside(unit, borders)
            for name, parameter in module.named_parameters(recurse=False)
            if id(parameter) not in left_out
        ]


def split_by_dtype(
    model: nn.Module, units: list[nn.Module], ignored: Iterable[nn.Parameter] = ()
) -> list[nn.Module]:
    """Return units of which none trains parameters of two dtypes: odd modules become units of their own."""
    odd: list[nn.Module] = []
    for held in holdings(model, units, ignored):
        trained = [holding for holding in held if holding.parameter.requires_grad]
        sizes: Counter[torch.dtype] = Counter()
        for holding in trained:
            sizes[holding.parameter.dtype] += holding.parameter.numel()
        if len(sizes) > 1:
            usual = sizes.most_common(1)[0][0]
            odd += _odd_modules(model, trained, usual)
    if odd:
        logger.info(f"{len(odd)} modules are units of their own, for they have another dtype than the rest.")
    return [*odd, *units]


def _odd_modules(model: nn.Module, trained: list[Holding], usual: torch.dtype) -> list[nn.Module]:
    wanted = {id(h.module): h.module for h in trained if h.parameter.dtype != usual}
    mixed = [h.name for h in trained if id(h.module) in wanted and h.parameter.dtype == usual]
    tied = _tied_places(model)
    torn = [h.name for h in trained if id(h.module) in wanted and id(h.parameter) in tied]
    if mixed or torn or id(model) in wanted:
        dtypes = sorted({str(h.parameter.dtype).removeprefix("torch.") for h in trained})
        at_fault = mixed or torn or [h.name for h in trained if h.module is model]
        raise PreparationError(
            f"{type(model).__name__} trains parameters of several dtypes ({', '.join(dtypes)}) in one "
            f"module, near {listed(at_fault)}, and a unit of FSDP has one. Cast them to one dtype, freeze "
            "those of the other, or train with mixed_precision, which keeps all in float32."
        )
    return list(wanted.values())


def _inside(unit: nn.Module, borders: set[int]) -> Iterator[nn.Module]:
    """Iterate over a unit's modules, without those of units inside it; each once."""
    seen: set[int] = set()
    waiting = [unit]
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        waiting += [child for child in module.children() if id(child) not in borders]


def _tied_places(model: nn.Module) -> dict[int, set[int]]:
    """Return for each tied parameter the modules that have it, all by identity."""
    places: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            places.setdefault(id(parameter), set()).add(id(module))
    return {parameter: modules for parameter, modules in places.items() if len(modules) > 1}


def _tears(unit: nn.Module, tied: dict[int, set[int]]) -> bool:
    inside = {id(module) for module in unit.modules()}
    return any(modules & inside and modules - inside for modules in tied.values())
