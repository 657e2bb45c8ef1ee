"""Which modules of a model FSDP makes units of: names -> classes, policies -> modules."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from accelerate import torch_private
from accelerate.base import FSDP_AUTO_WRAP_POLICY, ConfigurationError, wrong_value

if TYPE_CHECKING:
    from torch import nn

Policy = Any
"""A callable as torch takes it, or one of torch's policy objects."""


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the class of this name among a module and the modules inside it; None when there is none.

    Args:
        module: where to look.
        name: of the class, without its module.
    """
    return next((type(inner) for inner in module.modules() if type(inner).__name__ == name), None)


def read_policy(value: Any) -> Policy | None:
    """Return torch's policy for a name in any case; a policy is returned as it is, None for no units."""
    if value is None or callable(value):
        return value
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    policies = (transformer_auto_wrap_policy, size_based_auto_wrap_policy, None)
    table = dict(zip(FSDP_AUTO_WRAP_POLICY, policies, strict=True))
    name = str(value).upper()
    if name not in table:
        fix = f"Choose one of {', '.join(table)}, or give a callable"
        raise wrong_value("auto_wrap_policy", value, "it is neither a policy nor the name of one", fix)
    return table[name]


def bind_policy(
    policy: Policy | None, model: nn.Module, layers: Iterable[str] | None, min_params: int | None
) -> Policy | None:
    """Return a policy that knows its model; one that is bound already, or the user's own, as it is.

    Args:
        policy: as `read_policy` returns it.
        model: the model that is cut into units.
        layers: class names of the layers that become units; None for the model's `_no_split_modules`.
        min_params: modules with at least this many parameters become units; without, there are none.
    """
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    if policy is transformer_auto_wrap_policy:
        names = layers or getattr(model, "_no_split_modules", None) or ()
        argument = "transformer_cls_names_to_wrap" if layers else ""
        return partial(policy, transformer_layer_cls=set(find_classes(model, names, argument)))
    if policy is size_based_auto_wrap_policy:
        return partial(policy, min_num_params=min_params) if min_params else None
    return policy


def find_classes(model: nn.Module, names: Iterable[str], argument: str = "") -> list[type[nn.Module]]:
    """Return the classes of these names among the modules of a model; where `argument` gives the names, the
    model must have all of them."""
    classes = {name: get_module_class_from_name(model, name) for name in names}
    missing = [name for name, kind in classes.items() if kind is None]
    if argument and missing:
        known = sorted({type(inner).__name__ for inner in model.modules() if any(inner.children())})
        raise ConfigurationError(
            f"{argument} names {', '.join(missing)}, and {type(model).__name__} has no module of that class. "
            f"Name some of {', '.join(known)}."
        )
    return [kind for kind in classes.values() if kind is not None]


def find_units(model: nn.Module, policy: Policy | None) -> list[nn.Module]:
    """Return the modules inside a model that become units by a policy bound to it, inner ones first.

    The model itself is none of them. The policy is called as torch does: with `module`, `recurse` and
    `nonwrapped_numel`.
    """
    if policy is None:
        return []
    if isinstance(policy, torch_private.Policy):
        chosen = torch_private.run_policy(policy, model)
        return [
            module for module in reversed(list(model.modules())) if module in chosen and module is not model
        ]
    units: list[nn.Module] = []
    _collect_units(model, policy, units, root=True)
    return units


def _collect_units(module: nn.Module, policy: Policy, units: list[nn.Module], root: bool = False) -> int:
    """Add the units inside a module, and then itself; return how many parameters are in units."""
    if module in units:
        return 0
    size = sum(p.numel() for p in module.parameters())
    inside = 0
    if policy(module=module, recurse=True, nonwrapped_numel=size):
        inside = sum(_collect_units(child, policy, units) for child in module.children())
    if root or not policy(module=module, recurse=False, nonwrapped_numel=size - inside):
        return inside
    units.append(module)
    return size
