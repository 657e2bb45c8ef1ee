"""Weights that only rank 0 has read: sent to the others one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import PreparationError, as_builtin, environ, listed
from accelerate.ops import current_transport
from accelerate.plugins import EFFICIENT_LOADING

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
            filled[id(target)] = _distribute(transport.broadcast(whole, MAIN), target, cpu_offload)
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


def _distribute(whole: Tensor, target: Tensor, cpu_offload: bool) -> Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    part = whole
    if isinstance(target, DTensor):
        part = distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    return _like(target, part.to("cpu") if cpu_offload else part)


def send_from_main(model: nn.Module, device: torch.device) -> None:
    """Give all ranks the weights of rank 0, whole and one tensor at a time, also for tensors on the meta
    device."""
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
