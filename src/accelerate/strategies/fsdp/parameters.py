"""Parameters of a sharded model: their names, the optimizers that step them, and values from rank 0."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from accelerate import torch_private
from accelerate.base import ConfigurationError, PreparationError, as_builtin, environ, listed, wrong_value
from accelerate.ops import current_transport
from accelerate.plugins import EFFICIENT_LOADING

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


def names_by_group(optimizer: Any, named: Sequence[Mapping[str, nn.Parameter]]) -> list[list[list[str]]]:
    """Return for each group of an optimizer, for each parameter, all names that it has in some models,
    the usual one first; with the number of the model where it steps several."""
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

    Its optimizers, prepared or not, release the old parameters until they get the new ones: otherwise the
    whole model would stay in memory. Optimizers of other models are left alone.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Any]) -> None:
        # a tied parameter goes by its first name
        names = {id(p): name for name, p in reversed(named_parameters(model).items())}
        self._old = WeakIdKeyDictionary({p: names[id(p)] for p in model.parameters()})
        # Optimizer -> for each group its members: names of this model's parameters, or other parameters.
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
            for name, state in (self._states[optimizer] or {}).items():
                optimizer.state[parameters[name]] = {
                    key: value.like(parameters[name]) if isinstance(value, _Constant) else value
                    for key, value in state.items()
                }

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


class _Constant(NamedTuple):
    """A state of the shape of its parameter, with the same value everywhere."""

    value: float
    dtype: torch.dtype

    def like(self, parameter: Tensor) -> Tensor:
        return torch.full_like(parameter.detach(), self.value, dtype=self.dtype)


def _constant_states(optimizer: Any, names: Mapping[int, str]) -> dict[str, dict[str, Any]] | None:
    """Return the states that an optimizer has made for a model's parameters when it was built, as Adagrad
    does, by name; None if they depend on elements. Called on all ranks: those of rank 0 count."""
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
    return _Constant(value.flatten()[0].item(), value.dtype)


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


# Weights that only rank 0 has read

MAIN = 0
"""The rank that has read the weights."""


def enable_fsdp_ram_efficient_loading() -> None:
    """Tell libraries that load weights that only rank 0 shall read them."""
    environ.assign({EFFICIENT_LOADING: "True", "ACCELERATE_USE_FSDP": "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Tell libraries that load weights that every rank shall read them."""
    environ.assign({EFFICIENT_LOADING: "False"})


class MainWeights:
    """The weights of rank 0, taken out of a model that goes to the meta device; other ranks drop theirs."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        is_main = current_transport().rank == MAIN
        self.state: dict[str, Tensor] = dict(model.state_dict()) if is_main else {}
        persistent = set(model.state_dict(keep_vars=True))
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name not in persistent}
        empty_model(model)

    def restore_buffers(self, device: torch.device) -> None:
        """Restore the buffers that no state dict holds from rank 0."""
        for name, buffer in self._buffers.items():
            value = buffer if buffer.device.type != "meta" else torch.empty_like(buffer, device=device)
            owner, _, attribute = name.rpartition(".")
            sent = current_transport().broadcast(value.to(device).contiguous(), MAIN)
            self._model.get_submodule(owner)._buffers[attribute] = sent


def empty_model(model: nn.Module) -> None:
    """Put all tensors of a model on the meta device; tied ones stay tied."""
    _replace_tensors(model, lambda value: _like(value, torch.empty_like(value, device="meta")))


def _replace_tensors(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer by what `change` returns for it, tied ones by the same tensor."""
    changed: dict[Tensor, Any] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, value in tensors.items():
                if value is not None and value not in changed:
                    changed[value] = change(value)
                if value is not None:
                    tensors[name] = changed[value]


def _like(value: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor as a parameter if another one is."""
    return nn.Parameter(tensor, value.requires_grad) if isinstance(value, nn.Parameter) else tensor


def fsdp2_load_full_state_dict(
    accelerator: Any, model: nn.Module, full_sd: Mapping[str, Tensor], cpu_offload: bool = False
) -> None:
    """Fill a sharded model from the whole weights of rank 0, one tensor at a time; called on all ranks.

    Args:
        accelerator: the run.
        model: sharded; its tensors may be on the meta device.
        full_sd: whole tensors by name; those of ranks other than 0 are not looked at.
        cpu_offload: whether parameters stay on the CPU.

    Raises:
        PreparationError: rank 0 lacks a tensor, or has one of another shape; on all ranks.
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


def distribute_like(value: Any, like: Tensor) -> Any:
    """Return the shard of a whole tensor, distributed like another of its shape; anything else as it is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def send_from_main(model: nn.Module, device: torch.device) -> None:
    """Give all ranks the whole weights of rank 0, tensor by tensor; those on the meta device get memory."""
    transport = current_transport()

    @torch.no_grad()
    def receive(value: Tensor) -> Tensor:
        if value.device.type == "meta":
            value = _like(value, torch.empty_like(value, device=device))
        value.data = transport.broadcast(value.detach().to(device).contiguous(), MAIN).to(value.device)
        return value

    _replace_tensors(model, receive)


def ensure_weights_retied(
    param_init_fn: Callable[[nn.Module], None], model: nn.Module, device: torch.device
) -> Callable[[nn.Module], None]:
    """Return a function that gives values to a module's parameters, and keeps tied ones tied.

    Args:
        param_init_fn: gives values to the parameters of one module on the meta device.
        model: its parameters are tied as they shall be.
        device: of the parameters; the function moves them there.

    Returns:
        What FSDP 1 takes as `param_init_fn`.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((module, name))
    ties = {owner: group for group in owners.values() if len(group) > 1 for owner in group}
    first: dict[int, nn.Parameter] = {}

    def initialise(module: nn.Module) -> None:
        param_init_fn(module)
        for name, parameter in module.named_parameters(recurse=False):
            group = ties.get((module, name))
            if group is not None:
                module._parameters[name] = first.setdefault(id(group), parameter)

    return initialise
