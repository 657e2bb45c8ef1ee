"""Names of the parameters of a sharded model, the optimizers that step them, and weights from rank 0.

The strategies in this package call these functions while they shard a model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from accelerate import torch_private
from accelerate.base import ConfigurationError, PreparationError, as_builtin, environ, listed, wrong_value
from accelerate.ops import current_transport, is_dtensor, to_full_tensor
from accelerate.plugins import EFFICIENT_LOADING

Value = TypeVar("Value")


def clean_name(name: str) -> str:
    """Returns the name of a tensor without wrappers."""
    return ".".join(part for part in name.split(".") if part not in torch_private.WRAPPED)


def fsdp2_canonicalize_names(named_params: Mapping[str, Value]) -> dict[str, Value]:
    """Returns parameters by their names without wrappers.

    Args:
        named_params: Parameters, or any other values, by name.
    """
    return {clean_name(name): value for name, value in named_params.items()}


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns all parameters of a model by name without wrappers, tied ones by each of their names."""
    return fsdp2_canonicalize_names(dict(model.named_parameters(remove_duplicate=False)))


def names_by_group(optimizer: Any, named: Sequence[Mapping[str, nn.Parameter]]) -> list[list[list[str]]]:
    """Returns the names of each parameter of each group of an optimizer, the usual one first.

    They begin with the number of the model if the optimizer steps several models.

    Args:
        optimizer: Optimizer.
        named: Parameters by name of each model.
    """
    names: dict[int, list[str]] = {}
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
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


def _switch_held(held: Any, mapping: Mapping[Tensor, Tensor], visited: set[int]) -> Any:
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


def get_parameters_from_modules(
    modules: Iterable[nn.Module] | str | None, model: nn.Module, device: Any
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
        reason = f"no regular expression ({error})"
        raise wrong_value("ignored_modules", expression, reason, "Fix it") from error
    return [module for name, module in model.named_modules() if pattern.fullmatch(name)]


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
            self._states[optimizer] = states = _constant_states(optimizer, names)
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


def _constant_states(optimizer: Any, names: Mapping[int, str]) -> dict[str, dict[str, Any]] | None:
    """Returns the states that an optimizer has created in its constructor, such as Adagrad, on rank 0.

    Called on all ranks. It is None if the states differ between elements.
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
    return current_transport().broadcast_object(read, MAIN)  # type: ignore[no-any-return]


def _is_constant(value: Any, shape: torch.Size) -> bool:
    if not isinstance(value, Tensor) or value.numel() < 2:
        return True
    return value.shape == shape and not value.is_meta and bool((value == value.flatten()[0]).all())


def _read_constant(value: Any, shape: torch.Size) -> Any:
    if not isinstance(value, Tensor) or value.shape != shape or not value.numel():
        return value
    return _ConstantTensor(value.flatten()[0].item(), value.dtype)


def _put(optimizer: Any, group: dict[str, Any], parameters: list[Any], seen: set[int]) -> None:
    """Sets the parameters of a group of an optimizer, each once.

    Args:
        optimizer: Optimizer.
        group: One of its groups.
        parameters: New parameters.
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


# Weights that only rank 0 has loaded

MAIN = 0
"""Rank that has loaded the weights."""


def enable_fsdp_ram_efficient_loading() -> None:
    """Sets the variables that tell libraries to load weights on rank 0 only."""
    environ.assign({EFFICIENT_LOADING: "True", "ACCELERATE_USE_FSDP": "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Sets the variable that tells libraries to load weights on all ranks."""
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


def empty_model(model: nn.Module) -> None:
    """Moves all tensors of a model to the meta device, where tied ones stay tied."""
    _replace_tensors(model, lambda value: _like(value, torch.empty_like(value, device="meta")))


def _replace_tensors(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replaces each parameter and buffer by the result of `change`, tied ones by the same tensor."""
    changed: dict[Tensor, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is not None and value not in changed:
                    changed[value] = change(value)
                if value is not None:
                    tensors[name] = changed[value]


def _like(value: Tensor, tensor: Tensor) -> Tensor:
    """Returns a tensor as a parameter if another one is a parameter."""
    return nn.Parameter(tensor, value.requires_grad) if isinstance(value, nn.Parameter) else tensor


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
            filled[id(target)] = _like(target, shard.to("cpu") if cpu_offload else shard)
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


@torch.no_grad()
def whole_tensor(value: Any) -> Tensor:
    """Returns the whole tensor of a DTensor, and other tensors unchanged.

    Called on all ranks of the mesh.
    """
    whole: Tensor = to_full_tensor(value) if is_dtensor(value) else value
    return whole.detach()


def distribute_like(value: Any, like: Tensor) -> Any:
    """Returns the shard of a full tensor, distributed like another tensor of its shape.

    Other values are returned unchanged.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    shard = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    local = shard.to_local()
    if local.untyped_storage().nbytes() == local.nbytes:
        return shard
    # torch 2.9 returns a view, which keeps the memory of all values.
    mesh, placements, shape = like.device_mesh, like.placements, value.shape
    return DTensor.from_local(local.clone(), mesh, placements, shape=shape, stride=value.stride())


def send_from_main(model: nn.Module, device: torch.device) -> None:
    """Broadcasts the full weights of rank 0, and allocates memory for tensors on the meta device.

    Tensors that are sharded already stay as they are.
    """
    transport = current_transport()

    @torch.no_grad()
    def receive(value: Tensor) -> Tensor:
        if is_dtensor(value):
            return value
        if value.device.type == "meta":
            value = _like(value, torch.empty_like(value, device=device))
        value.data = transport.broadcast(value.detach().to(device).contiguous(), MAIN).to(value.device)
        return value

    _replace_tensors(model, receive)


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
