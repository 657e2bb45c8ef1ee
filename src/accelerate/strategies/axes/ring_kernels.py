"""CPU kernels of the ring attention of torch, which has kernels of accelerators only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from accelerate import torch_private
from accelerate.base import ConfigurationError

_SEQUENCE_DIM = 2


def register_cpu_kernels() -> None:
    """Adds the CPU kernels to torch's table of kernels that context parallelism supports."""
    table = torch_private.attention_handlers
    if table is None:
        raise ConfigurationError(
            f"Context parallelism on the CPU was built for torch 2.13, and torch {torch.__version__} has no "
            "place for it. Install torch 2.13, use accelerators, or leave cp_size at 1."
        )
    table.setdefault(torch_private.cpu_attention.default, _attend)
    table.setdefault(torch_private.cpu_attention_backward.default, _attend_backward)


def _attend(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Computes ring attention, with the arguments of the CPU kernel."""
    query, key, value, *rest = args
    options = {**dict(zip(("dropout_p", "is_causal"), rest, strict=False)), **kwargs}
    if options.pop("attn_mask", None) is not None:
        raise ConfigurationError("Context parallelism computes attention without a mask only: leave it out.")
    options = {"is_causal": False, **options, **_local(query=query, key=key, value=value)}
    mesh = query.device_mesh
    results = torch_private.ring_attention(
        mesh.get_group(), _SEQUENCE_DIM, torch_private.cpu_attention, **options
    )
    return _sharded(results[:2], mesh)


def _attend_backward(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Computes the backward pass of ring attention, with the arguments of the CPU kernel."""
    gradient, query, key, value, output, sums, dropout, is_causal = args[:8]
    mesh = query.device_mesh
    results = torch_private.ring_attention_backward(
        mesh.get_group(),
        _SEQUENCE_DIM,
        torch_private.cpu_attention_backward.default,
        grad_out_name="grad_out",
        is_causal=is_causal,
        dropout_p=dropout,
        scale=kwargs.get("scale"),
        **_local(grad_out=gradient, query=query, key=key, value=value, out=output, logsumexp=sums),
    )
    return _sharded(results[:3], mesh)


def _local(**tensors: Tensor) -> dict[str, Tensor]:
    return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def _sharded(tensors: Any, mesh: Any) -> tuple[DTensor, ...]:
    sharding = [Shard(_SEQUENCE_DIM)]
    return tuple(DTensor.from_local(tensor, mesh, sharding, run_check=False) for tensor in tensors)
