"""Context parallelism: the processes of one axis share each sequence.

Source: https://docs.pytorch.org/tutorials/unstable/context_parallel.html
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from accelerate import torch_private
from accelerate.base import ConfigurationError, StateError, wrong_value
from accelerate.logging import get_logger

logger = get_logger(__name__)

CALL = "accelerator.maybe_context_parallel"
AXIS = "cp"
PARTS = 2
"""Pieces of a sequence on each process, one from either end: later positions attend to more, so that all
processes have as much to do."""


class ContextParallel:
    """Splits sequences over the processes of an axis, and lets attention reach over all of them.

    Args:
        mesh: the mesh of the run, with the axis.
        strategy: how keys and values travel: "allgather" or "alltoall".
    """

    def __init__(self, mesh: Any, strategy: str) -> None:
        self.mesh = mesh[AXIS]
        self.strategy = strategy

    def __call__(
        self,
        buffers: Sequence[Tensor] | None = None,
        buffer_seq_dims: Sequence[int] | None = None,
        no_restore_buffers: set[Tensor] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context in which each process holds its part of the sequences; called on all ranks.

        Forward and backward both belong inside it.

        Args:
            buffers: tensors with a sequence dimension, equal on all processes of the axis; split in place.
            buffer_seq_dims: the sequence dimension of each.
            no_restore_buffers: those that need not be whole again afterwards.

        Raises:
            ConfigurationError: dimensions and buffers do not go together, or a sequence cannot be split.
        """
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor.experimental import context_parallel

        given, dims = _listed("buffers", buffers), _listed("buffer_seq_dims", buffer_seq_dims)
        self._check(given, dims)
        if self.mesh.device_type == "cpu":
            from accelerate.strategies.axes.attention_on_cpu import teach_context_parallel

            teach_context_parallel()
        torch_private.set_rotate_method(self.strategy)
        split = context_parallel(
            self.mesh, buffers=given, buffer_seq_dims=dims, no_restore_buffers=set(no_restore_buffers or ())
        )
        return _together(split, _AnyAttention(DTensor))

    def _check(self, buffers: list[Tensor], dims: list[int]) -> None:
        if not buffers:
            raise ConfigurationError(
                f"{CALL} got no buffers, so no sequence would be split. Pass the tensors of the batch that "
                "have a sequence dimension, and in buffer_seq_dims the dimension of each."
            )
        if len(buffers) != len(dims):
            raise wrong_value(
                "buffer_seq_dims",
                dims,
                f"it has {len(dims)} entries for {len(buffers)} buffers",
                "Give the sequence dimension of each buffer",
            )
        whole = PARTS * self.mesh.size()
        for buffer, dim in zip(buffers, dims, strict=True):
            if not -buffer.ndim <= dim < buffer.ndim:
                raise wrong_value(
                    "buffer_seq_dims", dim, f"a buffer has shape {list(buffer.shape)}", "Name one of its dims"
                )
            if buffer.shape[dim] % whole:
                raise wrong_value(
                    "buffers",
                    list(buffer.shape),
                    f"a sequence of {buffer.shape[dim]} is not cut evenly in {whole} pieces, {PARTS} for "
                    f"each of the {self.mesh.size()} processes that share it",
                    f"Pad sequences to a multiple of {whole}",
                )


def _listed(name: str, given: Any) -> list[Any]:
    if isinstance(given, (Tensor, int)):
        kind = type(given).__name__
        raise wrong_value(name, kind, "there may be several, so it takes a list", f"Write {name}=[...]")
    return list(given or ())


class _AnyAttention(TorchFunctionMode):
    """Lets attention reach over all processes however a model has got hold of the function.

    torch replaces `torch.nn.functional.scaled_dot_product_attention` inside its context; code that has
    imported the function by its name would attend to the part of this process only, without a word.

    Args:
        shared: the class of tensors that torch's replacement passes on.
    """

    def __init__(self, shared: type[Tensor]) -> None:
        super().__init__()
        self._shared = shared
        self.calls = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch_private.scaled_dot_product_attention:
            self.calls += 1
            if not any(isinstance(arg, self._shared) for arg in args):
                func = torch.nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


@contextmanager
def _together(split: AbstractContextManager[Any], attention: _AnyAttention) -> Iterator[None]:
    with split, attention:
        yield
    if not attention.calls:
        logger.warning_once(
            f"Nothing inside {CALL} called torch's scaled_dot_product_attention: each process attends to "
            "its own part of the sequences only. Choose attention by that function; for transformers' models "
            "that is attn_implementation='sdpa'."
        )


def whole_sequences(**given: Any) -> AbstractContextManager[Any]:
    """Return a context that does nothing: no process shares sequences."""
    return nullcontext()


def not_prepared(**given: Any) -> AbstractContextManager[Any]:
    """Refuse to split sequences for a model that does not expect it.

    Raises:
        StateError: always.
    """
    raise StateError("maybe_context_parallel() comes after prepare(): prepare the model first.")


def drop_masks(model: nn.Module) -> None:
    """Let the attention of transformers' models be causal without a mask, which would be that of whole
    sequences.

    Args:
        model: its modules whose names end with `self_attn` get a hook; others are left alone.
    """
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(_without_mask, with_kwargs=True)


def _without_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if kwargs.get("attention_mask") is not None:
        logger.warning_once(
            "Context parallelism knows causal attention without a mask only: the attention_mask of the model "
            "is not looked at. Pad on the right, and leave padding out of the loss."
        )
    if "attention_mask" in kwargs:
        kwargs = {**kwargs, "attention_mask": None, "is_causal": True}
    return args, kwargs
