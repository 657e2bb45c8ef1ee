"""Copies of live tensors in CPU memory, from which a background thread writes while training goes on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from accelerate.checkpointing.part import Payload
from accelerate.devices import of_device
from accelerate.nested import honor_type


class StagingArea:
    """Memory for one copy of everything that is saved; kept from one save to the next.

    Fresh memory costs several times as much as the copying into it, so only the first save pays for it.
    Memory for tensors of an accelerator is pinned: they are copied without a stop in between.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], Tensor] = {}

    def stage(self, payloads: Sequence[Payload]) -> list[Payload]:
        """Copy the content of files; returns when all of it is in CPU memory.

        Args:
            payloads: with references to live objects.

        Returns:
            The same with copies. They hold until the next call.
        """
        before, self._buffers = self._buffers, {}
        copied: dict[tuple[Any, ...], Tensor] = {}
        staged = [
            replace(payload, content=self._copy(payload.content, (payload.name,), before, copied))
            for payload in payloads
        ]
        for device in {key[0] for key in copied if not of_device(key[0]).is_host}:
            torch.get_device_module(device).synchronize(device)
        return staged

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()

    def _copy(self, value: Any, path: tuple[Any, ...], before: Any, copied: Any) -> Any:
        if isinstance(value, Tensor):
            return self._copy_tensor(value.detach(), path, before, copied)
        if isinstance(value, Mapping):
            items = {key: self._copy(each, (*path, key), before, copied) for key, each in value.items()}
            return items if type(value) is dict else _like(value, items)
        if isinstance(value, (list, tuple)):
            return honor_type(
                value, (self._copy(each, (*path, index), before, copied) for index, each in enumerate(value))
            )
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: Tensor, path: tuple[Any, ...], before: Any, copied: Any) -> Tensor:
        if not of_device(tensor.device).is_addressable:
            return tensor.cpu()
        if tensor.layout != torch.strided or tensor.is_quantized:
            return tensor.cpu().clone()
        identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and identity in copied:
            shared: Tensor = copied[identity]  # shared tensors stay shared
            return shared
        buffer: Tensor | None = before.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=not tensor.is_cpu)
        buffer.copy_(tensor, non_blocking=True)
        self._buffers[path] = copied[identity] = buffer
        return buffer


def _like(value: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    twin: Any = copy.copy(value)
    for key, each in items.items():  # `update` of a Counter would add
        twin[key] = each
    return twin
