"""Context parallelism: the processes of one axis share each sequence.

Source: https://docs.pytorch.org/tutorials/unstable/context_parallel.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from accelerate import torch_private
from accelerate.base import ConfigurationError, StateError, wrong_value
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.strategies.axes.masks import attend, check_masks, sharded
from accelerate.strategies.axes.sequence import Axis

logger = get_logger(__name__)

CALL = "accelerator.maybe_context_parallel"
_SEQUENCE_DIM = 2
PARTS = 2
"""Pieces of a sequence on each rank, one from either end, for later positions attend to more others."""


class ContextAxis(Axis):
    """Splits sequences over the ranks of an axis, and lets attention reach over all of them."""

    splits_buffers = True

    def __init__(self, mesh: Any, handler: Any) -> None:
        self._mesh = mesh
        self._handler = handler
        self._is_prepared = False

    def transform(self, models: Iterable[nn.Module], micro_batch_size: int = 1) -> None:
        """Let models check their attention while sequences are sharded, and compute it without a mask."""
        self._is_prepared = True
        for model in models:
            check_masks(model)

    def batch(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return torch's context, in which attention reaches over all ranks of the axis."""
        from torch.distributed.tensor.experimental import context_parallel

        if not self._is_prepared:
            raise StateError("maybe_context_parallel() comes after prepare(): prepare the model first.")
        given, dims = _listed("buffers", buffers), _listed("buffer_seq_dims", buffer_seq_dims)
        mesh = self._mesh["cp"]
        _check_buffers(given, dims, mesh.size())
        if of_device(torch.device(mesh.device_type)).is_host:
            register_cpu_kernels()
        torch_private.set_rotate_method(self._handler.cp_comm_strategy)
        split = context_parallel(
            mesh, buffers=given, buffer_seq_dims=dims, no_restore_buffers=set(no_restore_buffers or ())
        )
        return _within(split, given, dims)


def _check_buffers(buffers: list[Tensor], dims: list[int], size: int) -> None:
    if not buffers:
        raise ConfigurationError(
            f"{CALL} got no buffers, so no sequence would be split. Pass the tensors of the batch that have "
            "a sequence dimension, and in buffer_seq_dims the dimension of each."
        )
    if len(buffers) != len(dims):
        reason = f"it has {len(dims)} entries for {len(buffers)} buffers"
        raise wrong_value("buffer_seq_dims", dims, reason, "Give the sequence dimension of each buffer")
    pieces = PARTS * size
    for buffer, dim in zip(buffers, dims, strict=True):
        if not -buffer.ndim <= dim < buffer.ndim:
            reason = f"a buffer has shape {list(buffer.shape)}"
            raise wrong_value("buffer_seq_dims", dim, reason, "Name one of its dims")
        if buffer.shape[dim] % pieces:
            reason = (
                f"a sequence of {buffer.shape[dim]} is not cut evenly in {pieces} pieces, {PARTS} for each"
            )
            reason += f" of the {size} processes that share it"
            raise wrong_value(
                "buffers", list(buffer.shape), reason, f"Pad sequences to a multiple of {pieces}"
            )


def _listed(name: str, given: Any) -> list[Any]:
    if isinstance(given, (Tensor, int)):
        kind = type(given).__name__
        raise wrong_value(name, kind, "there may be several, so it takes a list", f"Write {name}=[...]")
    return list(given or ())


class _AnyAttention(TorchFunctionMode):
    """Lets attention reach over all processes however a model has imported the function.

    torch replaces `torch.nn.functional.scaled_dot_product_attention` inside its context; code that has
    imported the function by its name would attend to the part of this process only, without a word.
    """

    calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch_private.scaled_dot_product_attention:
            self.calls += 1
            if not any(isinstance(arg, DTensor) for arg in args):
                func = torch.nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


@contextmanager
def _within(split: AbstractContextManager[Any], buffers: list[Tensor], dims: list[int]) -> Iterator[None]:
    attention = _AnyAttention()
    with sharded(buffers, dims), split, torch_private.attention_replaced(attend), attention:
        yield
    if not attention.calls:
        logger.warning_once(
            f"Nothing inside {CALL} called torch's scaled_dot_product_attention: each process attends to "
            "its own part of the sequences only. Choose attention by that function; for transformers' models "
            "that is attn_implementation='sdpa'."
        )


def register_cpu_kernels() -> None:
    """Enter the CPU's kernels in torch's table of kernels that context parallelism supports."""
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
    if options.pop("attn_mask", None) is not None:
        raise ConfigurationError("Context parallelism computes attention without a mask only: leave it out.")
    options = {"is_causal": False, **options, **_local(query=query, key=key, value=value)}
    mesh = query.device_mesh
    results = torch_private.ring_attention(
        mesh.get_group(), _SEQUENCE_DIM, torch_private.cpu_attention, **options
    )
    return _sharded(results[:2], mesh)


def _attend_backward(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """`(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask, scale)`."""
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
