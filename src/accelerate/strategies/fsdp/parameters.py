"""Parameters that FSDP ignores, and weights that only rank 0 has loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import PreparationError, as_builtin, environ, listed, wrong_value
from accelerate.ops import current_transport
from accelerate.plugins import EFFICIENT_LOADING
from accelerate.strategies.dtensors import MAIN, distribute_like, empty_model, parameter_like


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: torch.device | None
) -> set[nn.Parameter]:
    """Returns the parameters of some modules of a model, moved to a device.

    Args:
        modules: Modules, or a regular expression that matches their full names, or None for no modules.
        model: Model with the modules.
        device: Device of the parameters. None does not move them.

    Raises:
        ConfigurationError: The regular expression is invalid.
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
    """Raises for ignored modules that a model does not have."""
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
        reason = f"it is not a regular expression ({error})"
        raise wrong_value("ignored_modules", expression, reason, "Fix it") from error
    return [module for name, module in model.named_modules() if pattern.fullmatch(name)]


# Weights that only rank 0 has loaded


def enable_fsdp_ram_efficient_loading() -> None:
    """Sets the variables with which libraries load weights on rank 0 only."""
    environ.assign({EFFICIENT_LOADING: "True", "ACCELERATE_USE_FSDP": "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Sets the variable with which libraries load weights on all ranks."""
    environ.assign({EFFICIENT_LOADING: "False"})


class MainWeights:
    """Weights of rank 0 of a model that is moved to the meta device.

    The weights of other ranks are dropped.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        is_main = current_transport().rank == MAIN
        self.state: dict[str, Tensor] = dict(model.state_dict()) if is_main else {}
        persistent = set(model.state_dict(keep_vars=True))
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name not in persistent}
        empty_model(model)

    def restore_buffers(self, device: torch.device) -> None:
        """Restores the buffers that are not in the state dict from rank 0."""
        for name, buffer in self._buffers.items():
            value = buffer if buffer.device.type != "meta" else torch.empty_like(buffer, device=device)
            owner, _, attribute = name.rpartition(".")
            sent = current_transport().broadcast(value.to(device).contiguous(), MAIN)
            self._model.get_submodule(owner)._buffers[attribute] = sent


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Mapping[str, Tensor], cpu_offload: bool = False
) -> None:
    """Loads the full weights of rank 0 into a sharded model, one tensor at a time.

    Called on all ranks.

    Args:
        accelerator: Accelerator of the run.
        model: Sharded model, whose tensors may be on the meta device.
        full_sd: Full tensors by name. Those of ranks other than 0 are not used.
        cpu_offload: Whether parameters stay on the CPU.

    Raises:
        PreparationError: A tensor is missing on rank 0, or has another shape. Raised on all ranks.
    """
    transport = current_transport()
    is_main = transport.rank == MAIN
    specs = {name: (tuple(value.shape), value.dtype) for name, value in full_sd.items()} if is_main else None
    specs = transport.broadcast_object(specs, MAIN)
    targets = model.state_dict(keep_vars=True)
    _check_whole(targets, specs)
    filled: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, target in targets.items():
        if id(target) not in filled:
            shape, dtype = specs[name]
            whole = (
                full_sd[name].detach().to(accelerator.device).contiguous()
                if is_main
                else torch.empty(shape, dtype=dtype, device=accelerator.device)
            )
            shard = distribute_like(transport.broadcast(whole, MAIN), target)
            filled[id(target)] = parameter_like(target, shard.to("cpu") if cpu_offload else shard)
        state[name] = filled[id(target)]
    model.load_state_dict(state, assign=True)


def _check_whole(targets: Mapping[str, Tensor], specs: Mapping[str, Any]) -> None:
    missing = [name for name in targets if name not in specs]
    differing = [name for name in targets if name in specs and specs[name][0] != tuple(targets[name].shape)]
    if missing or differing:
        wrong = f"lacks {listed(missing)}" if missing else f"has other shapes of {listed(differing)}"
        error = PreparationError(
            f"The weights of rank 0 do not fill the model: it {wrong}. Build the same model on all ranks and "
            "load its weights on rank 0 before `prepare`, or set cpu_ram_efficient_loading=False."
        )
        raise as_builtin(error, KeyError) if missing else error


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], None], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], None]:
    """Returns a function that initializes the parameters of a module and keeps tied ones tied.

    Args:
        param_init_fn: Function that initializes the parameters of one module on the meta device.
        model: Model with tied parameters.
        device: Device of the parameters after initialization.

    Returns:
        Function for the argument `param_init_fn` of FSDP 1.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    ties = {owner: group for group in owners.values() if len(group) > 1 for owner in group}
    first: dict[int, nn.Parameter] = {}

    def initialize(module: nn.Module) -> None:
        param_init_fn(module)
        for name, parameter in module.named_parameters(recurse=False):
            group = ties.get((module, name))
            if group is not None:
                module._parameters[name] = first.setdefault(id(group), parameter)

    return initialize
