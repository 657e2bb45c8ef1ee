"""Ring attention on the CPU: torch has it for the kernels of accelerators, and knows none of the CPU.

torch 2.13 keeps a table from attention kernels to what they become when sequences are shared. The CPU's
kernels are entered in it, by torch's own functions; nothing is changed where torch has them already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from accelerate import torch_private
from accelerate.base import ConfigurationError

_SEQUENCE_DIM = 2


def teach_context_parallel() -> None:
    """Enter the CPU's kernels in torch's table.

    Raises:
        ConfigurationError: this torch keeps no such table.
    """
    table = torch_private.attention_handlers
    if table is None:
        raise ConfigurationError(
            f"Context parallelism on the CPU was built for torch 2.13, and torch {torch.__version__} has no "
            "place for it. Install torch 2.13, use accelerators, or leave cp_size at 1."
        )
    table.setdefault(torch_private.cpu_attention.default, _attend)
    table.setdefault(torch_private.cpu_attention_backward.default, _attend_backward)


def _attend(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """`(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None)`."""
    query, key, value, *rest = args
    options = {**dict(zip(("dropout_p", "is_causal"), rest, strict=False)), **kwargs}
    options.pop("attn_mask", None)
    mesh = query.device_mesh
    results = torch_private.ring_attention(
        mesh.get_group(),
        _SEQUENCE_DIM,
        torch_private.cpu_attention,
        query=_local(query),
        key=_local(key),
        value=_local(value),
        is_causal=options.pop("is_causal", False),
        **options,
    )
    return _shared(results[:2], mesh)


def _attend_backward(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """`(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask, scale)`."""
    gradient, query, key, value, output, sums, dropout, is_causal = args[:8]
    mesh = query.device_mesh
    results = torch_private.ring_attention_backward(
        mesh.get_group(),
        _SEQUENCE_DIM,
        torch_private.cpu_attention_backward.default,
        grad_out=_local(gradient),
        grad_out_name="grad_out",
        query=_local(query),
        key=_local(key),
        value=_local(value),
        out=_local(output),
        logsumexp=_local(sums),
        is_causal=is_causal,
        dropout_p=dropout,
        scale=kwargs.get("scale"),
    )
    return _shared(results[:3], mesh)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shared(tensors: Any, mesh: Any) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(each, mesh, [Shard(_SEQUENCE_DIM)], run_check=False) for each in tensors)
