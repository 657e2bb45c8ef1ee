"""Attention functions that exchange heads for sequences, in place of those of torch and transformers.

The attention of the model is called with whole sequences and a part of the heads. So masks, sliding windows,
chunks, prefixes, packed documents and biases are those of one rank. Functions of transformers that create
masks get the length and the positions of whole sequences.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from accelerate import torch_private
from accelerate.base import ConfigurationError
from accelerate.plugins import one_of
from accelerate.strategies.axes.counted_positions import count
from accelerate.strategies.axes.head_exchange import (
    HEADS,
    SEQUENCE,
    exchanged,
    join,
    repeats_of,
)
from accelerate.strategies.axes.ring_attention import attend_by_layer, attend_over_blocks
from accelerate.strategies.axes.sequence_shards import SequenceShards
from accelerate.strategies.axes.sharded_forwards import (
    Binding,
    SequenceState,
    ShardedForward,
    rebound,
    sequence_state,
)
from accelerate.strategies.axes.whole_losses import LOSSES, cross_entropy

INTERFACE = "transformers.modeling_utils"
MASKS = "transformers.masking_utils"
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def replace_all(stack: ExitStack, bindings: list[Binding]) -> None:
    """Replaces the functions until a stack is closed."""
    state, attention = sequence_state(), torch.nn.functional.scaled_dot_product_attention
    if state.ring is not None:
        state.ring_attention = stack.enter_context(state.ring())
    stack.enter_context(
        torch_private.attention_replaced(lambda function, args, kwargs: attend(attention, args, kwargs))
    )
    for loss in LOSSES:
        stack.enter_context(torch_private.function_replaced(loss.__name__, cross_entropy))
    stack.enter_context(torch_private.function_replaced("arange", count, torch))
    stack.enter_context(rebound(bindings))
    stack.enter_context(_interface_replaced())
    if torch.backends.mha.get_fastpath_enabled():  # its kernels do not call scaled_dot_product_attention
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, True)


def replacement_of(value: Any) -> Callable[..., Any] | None:
    """Returns what replaces a function, and takes it and its arguments, or None."""
    if value is torch_private.scaled_dot_product_attention:
        return lambda function, *args, **kwargs: attend(function, args, kwargs)
    if value in LOSSES:
        return lambda function, *args, **kwargs: cross_entropy(function, args, kwargs)
    if value is torch_private.arange:
        return lambda function, *args, **kwargs: count(function, args, kwargs)
    name = getattr(value, "__name__", "")
    if getattr(value, "__module__", None) == MASKS and name.startswith("create_") and "mask" in name:
        return create_whole_mask
    return None


def _shards_for(query: Tensor, key: Tensor, forward: ShardedForward | None) -> SequenceShards | None:
    """Returns the shards over which an attention has to be computed, or None for another attention."""
    if forward is None or query.shape[-2] != forward.shards.own or key.shape[-2] != forward.shards.own:
        return None
    return forward.shards


# torch


def attend(attention: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Computes `scaled_dot_product_attention` over whole sequences.

    Raises:
        ConfigurationError: Heads cannot be divided, or a mask is that of a shard.
    """
    state = sequence_state()
    arguments = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    query, key, value = heads = tuple(arguments.pop(name) for name in _NAMES[:3])
    if (blocks_of := state.blocks_of) is not None:  # the function of transformers, after the exchange
        state.blocks_of = None
        return attend_over_blocks(attention, heads, arguments, blocks_of)
    shards = _shards_for(query, key, state.current)
    if shards is None:
        return attention(*args, **kwargs)
    _count(state)
    shapes = [list(each.shape) for each in heads]
    if any(each.ndim != 4 for each in heads):
        raise ConfigurationError(
            f"scaled_dot_product_attention gets tensors of shapes {shapes}, and sp_size exchanges the heads "
            "of tensors of shape [batch, heads, sequence, size]. Reshape query, key and value."
        )
    if (mask := arguments.get("attn_mask")) is not None:
        arguments["attn_mask"] = heads_of_mask(mask, query.shape[HEADS], shards)

    def compute(*tensors: Tensor) -> Tensor:
        if shards.ranks.ring is not None:
            return attend_over_blocks(attention, tensors, arguments, shards)
        return attention(*tensors, **arguments)

    with state.whole():
        return exchanged(compute, query, key, value, shards)


def _count(state: SequenceState) -> None:
    assert state.forward is not None
    state.forward.num_attentions += 1


def heads_of_mask(mask: Tensor, heads: int, shards: SequenceShards) -> Tensor:
    """Returns the part of a mask or bias of whole sequences that the heads of this rank need.

    Raises:
        ConfigurationError: It is that of a shard.
    """
    length = shards.length
    if mask.shape[-1] not in (1, length) or (mask.ndim > 1 and mask.shape[-2] not in (1, length)):
        raise ConfigurationError(
            f"An attention layer gets a mask of shape {list(mask.shape)} for sequences of {length} "
            "positions, of which each rank has a part (sp_size). Masks are those of whole sequences: pass "
            "the mask to the model as an argument with `mask` in its name, or use is_causal=True."
        )
    if mask.ndim < 3 or heads == 1 or mask.shape[-3] != heads:
        return mask
    return shards.heads(mask, mask.ndim - 3)


# transformers


@contextmanager
def _interface_replaced() -> Iterator[None]:
    """Replaces how models of transformers look up their attention functions, by whatever name."""
    module = sys.modules.get(INTERFACE)
    kind: Any = getattr(module, "AttentionInterface", None)
    if kind is None:
        yield
        return
    kept = {name: vars(kind).get(name) for name in ("get_interface", "__getitem__")}
    for name in kept:
        if hasattr(kind, name):
            setattr(kind, name, _looked_up(getattr(kind, name)))
    try:
        yield
    finally:
        for name, method in kept.items():
            if method is not None:
                setattr(kind, name, method)
            elif name in vars(kind):
                delattr(kind, name)


def _looked_up(look_up: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that returns attention functions of transformers which exchange heads."""

    @wraps(look_up)
    def exchanging(self: Any, *args: Any, **kwargs: Any) -> Any:
        return partial(attend_in_layer, look_up(self, *args, **kwargs))

    return exchanging


def attend_in_layer(
    attention: Callable[..., Any],
    layer: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Computes an attention function of transformers over whole sequences.

    Args:
        attention: A function that returns outputs of shape [batch, length, heads, size], and attention
            weights.
        query: Queries of shape [batch, heads, positions of this rank, size].
        key: Keys, which may have fewer heads.
        args: Further arguments, of which the first is the mask.

    Returns:
        Outputs for the positions of this rank, and None for the attention weights.
    """
    state = sequence_state()
    forward = state.current
    shards = _shards_for(query, key, forward)
    if shards is None:
        return attention(layer, query, key, value, *args, **kwargs)
    assert forward is not None
    _count(state)
    heads = query.shape[HEADS]
    if args:
        kwargs, args = {"attention_mask": args[0], **kwargs}, args[1:]
    kwargs = {name: _whole_argument(name, value, heads, forward) for name, value in kwargs.items()}
    mask = kwargs.pop("attention_mask", None)

    def attend_whole(*tensors: Any, **kwargs: Any) -> Tensor:
        outputs: Tensor = attention(part, *tensors, *args, **kwargs)[0]
        return outputs.transpose(HEADS, SEQUENCE)

    def compute(*tensors: Tensor) -> Tensor:
        if shards.ranks.ring is not None:
            return attend_by_layer(attend_whole, tensors, mask, kwargs, shards)
        return attend_whole(*tensors, mask, **kwargs)

    repeats = repeats_of(heads, key.shape[HEADS], shards.ranks.exchange.size())
    part = _LayerOfHeads(layer, heads, repeats, shards)
    with state.whole():
        outputs = exchanged(compute, query, key, value, shards)
    return outputs.transpose(HEADS, SEQUENCE).contiguous(), None


def _whole_argument(name: str, value: Any, heads: int, forward: ShardedForward) -> Any:
    """Returns an argument of an attention function for whole sequences and the heads of this rank."""
    shards = forward.shards
    if not isinstance(value, Tensor):
        return value
    if name in ("attention_mask", "position_bias") and value.ndim > 2:
        return heads_of_mask(value, heads, shards)
    if name == "s_aux":  # a learned sink for each head
        return shards.heads(value, 0)
    if name == "position_ids" and value.shape[-1] == shards.own:
        return whole_positions(value, forward)
    return value


class _LayerOfHeads:
    """Attention layer with the attributes for the heads of this rank."""

    def __init__(self, layer: Any, heads: int, repeats: int, shards: SequenceShards) -> None:
        self._layer = layer
        if isinstance(groups := getattr(layer, "num_key_value_groups", None), int):
            self.num_key_value_groups = groups // repeats
        sinks = getattr(layer, "sinks", None)
        if isinstance(sinks, Tensor) and sinks.shape[0] == heads:
            self.sinks = shards.heads(sinks, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def whole_positions(positions: Tensor, forward: ShardedForward) -> Tensor:
    """Returns the positions of whole sequences, from those of this rank.

    Called on all ranks of the group.
    """
    known = forward.positions
    if known is not None and known.shape[:-1] == positions.shape[:-1]:
        return known
    return join(positions, positions.ndim - 1, forward.shards)


def create_whole_mask(create: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Creates a mask of transformers for whole sequences."""
    forward = sequence_state().current
    if forward is None:
        return create(*args, **kwargs)
    shards = forward.shards
    arguments = inspect.signature(create).bind(*args, **kwargs).arguments
    if arguments.get("encoder_hidden_states") is not None:
        raise ConfigurationError(
            "A layer attends to the outputs of an encoder, whose sequences have another length than those "
            "that sp_size divides. Set sp_size=1 for models with cross-attention."
        )
    name = "inputs_embeds" if "inputs_embeds" in arguments else "input_embeds"
    embedded = arguments[name]
    if embedded.shape[1] == shards.own:
        arguments[name] = embedded.new_empty(()).expand(embedded.shape[0], shards.length, 1)
    positions, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    if isinstance(positions, Tensor) and positions.shape[-1] == shards.own:
        arguments["position_ids"] = whole_positions(positions, forward)
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape[-1] == shards.own != shards.length:
        arguments["attention_mask"] = join(mask, 1, shards)
    return create(**arguments)


# Functions of the user

Function = TypeVar("Function", bound=Callable[..., Tensor])


def sequence_parallel_attention(function: Function, head_dim: int = 1) -> Function:
    """Returns an attention function that computes whole sequences where `sp_size` divides them.

    It is for functions other than torch's `scaled_dot_product_attention` and those of transformers. With
    `ParallelismConfig(sp_size=..., sp_backend="torch")` the function gets whole sequences of some heads.
    Otherwise, and outside of the forward of a prepared model, it gets what it is called with.

    Called by each rank in the forward of a model.

    Args:
        function: Function of queries, keys and values, and of further arguments that are those of whole
            sequences. It returns outputs in the shape of the queries.
        head_dim: Dimension of the heads in queries, keys, values and outputs. 1 is [batch, heads, sequence,
            size], and 2 is [batch, sequence, heads, size].

    Raises:
        ConfigurationError: `head_dim` is neither 1 nor 2, or the function is called with `cp_size` above 1.
    """
    one_of("head_dim", head_dim, (HEADS, SEQUENCE))

    @wraps(function)
    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        state = sequence_state()
        tensors = [each.transpose(HEADS, head_dim) for each in (query, key, value)]
        shards = _shards_for(tensors[0], tensors[1], state.current)
        if shards is None:
            return function(query, key, value, *args, **kwargs)
        if shards.ranks.ring is not None:
            raise ConfigurationError(
                "A function of sequence_parallel_attention gets whole sequences, and with cp_size a rank has "
                "a part of them. Set cp_size=1 for this model, or call scaled_dot_product_attention."
            )
        _count(state)

        def compute(*heads: Tensor) -> Tensor:
            output = function(*(each.transpose(HEADS, head_dim) for each in heads), *args, **kwargs)
            return output.transpose(HEADS, head_dim)

        with state.whole():
            outputs = exchanged(compute, tensors[0], tensors[1], tensors[2], shards)
        return outputs.transpose(HEADS, head_dim)

    return attention  # type: ignore[return-value]  # it has the signature of the function


SequenceState.replace_all = staticmethod(replace_all)
