"""Whole tensors of shards, shards of whole tensors, and weights that rank 0 sends to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate.ops import current_transport, is_dtensor, to_full_tensor

MAIN = 0
"""Rank that has loaded the weights."""


def empty_model(model: nn.Module) -> None:
    """Moves all tensors of a model to the meta device, where tied ones stay tied."""
    _replace_tensors(model, lambda value: parameter_like(value, torch.empty_like(value, device="meta")))


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


def parameter_like(value: Tensor, tensor: Tensor) -> Tensor:
    """Returns a tensor as a parameter if another one is a parameter."""
    return nn.Parameter(tensor, value.requires_grad) if isinstance(value, nn.Parameter) else tensor


@torch.no_grad()
def whole_tensor(value: torch.Tensor) -> Tensor:
    """Returns the whole tensor of a DTensor, and other tensors unchanged.

    Called on all ranks of the mesh.
    """
    whole: Tensor = to_full_tensor(value) if is_dtensor(value) else value
    return whole.detach()


def distribute_like(value: object, like: Tensor) -> Any:
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
            value = parameter_like(value, torch.empty_like(value, device=device))
        value.data = transport.broadcast(value.detach().to(device).contiguous(), MAIN).to(value.device)
        return value

    _replace_tensors(model, receive)


PLAIN_KINDS: frozenset[type] = frozenset((Tensor, nn.Parameter, type(None)))
"""Classes of tensors that are not distributed, and that of a missing gradient."""


def has_dtensors(values: Iterable[Tensor | None]) -> bool:
    """Returns whether some of many tensors are DTensors, from the few classes that they have."""
    return any(hasattr(kind, "full_tensor") for kind in set(map(type, values)) - PLAIN_KINDS)


def is_sharded(model: nn.Module) -> bool:
    """Returns whether a model has units of FSDP 2, or parameters that are DTensors."""
    is_unit = any(hasattr(module, "set_requires_gradient_sync") for module in model.modules())
    return is_unit or has_dtensors(model.parameters())


def place_unsharded(model: nn.Module, device: torch.device) -> None:
    """Moves parameters and buffers that are not sharded to a device, such as those of an adapter."""
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.device != device for tensor in tensors) and not any(
            is_dtensor(tensor) for tensor in tensors
        ):
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]


def send_unsharded(parameters: Iterable[nn.Parameter], group: Any = None) -> None:
    """Sends trained parameters that are not sharded from the first rank of a process group.

    Called on all ranks of the group. None is the group of all ranks.
    """
    group = dist.group.WORLD if group is None else group
    for parameter in parameters:
        if parameter.requires_grad and not is_dtensor(parameter) and not parameter.is_meta:
            values = parameter.data.contiguous()
            dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
            parameter.data.copy_(values)
