"""Checks of models whose layers combine positions by other means than attention."""

from __future__ import annotations

from torch import nn

from accelerate import torch_private
from accelerate.base import PreparationError
from accelerate.strategies.axes.masks import config_of, other_kinds

RECURRENT = (
    "Mamba",
    "DeltaNet",
    "Rwkv",
    "RWKV",
    "LinearAttention",
    "LightningAttention",
    "ShortConv",
    "Recurrent",
    "RetNet",
    "Retention",
    "LSTM",
    "xLSTM",
)
"""Parts of the names of classes whose layers carry a state over positions."""
GATHERED = ("sdpa", "eager")
"""Attention implementations of transformers that take keys of other positions than those of the queries."""


def check_model(model: nn.Module, ranks: int, shards_of_heads: int, ring: int = 1) -> None:
    """Raises an error for a model whose sequences cannot be divided.

    Args:
        ranks: Number of ranks that divide sequences.
        shards_of_heads: Number of ranks that divide heads already, by tensor parallelism.
        ring: Number of ranks that exchange keys and values, by context parallelism.

    Raises:
        PreparationError: A layer combines positions by other means than attention, or heads cannot be
            divided.
    """
    kind = type(model).__name__
    for name, part in model.named_modules():
        if reason := _reason(part, is_layer=bool(name)):
            where = f"{kind}.{name} ({type(part).__name__})" if name else kind
            raise PreparationError(
                f"{where} {reason}, and sp_size={ranks} divides sequences "
                "among ranks, which exchange heads of attention only. Set sp_size=1 for this model."
            )
    config = config_of(model)
    if config is None:
        return
    if getattr(config, "is_encoder_decoder", False):
        raise PreparationError(
            f"{kind} has an encoder and a decoder, whose sequences have different lengths, and "
            f"sp_size={ranks} divides sequences of one length. Set sp_size=1 for this model."
        )
    if others := other_kinds(config):
        raise PreparationError(
            f"{kind} has layers of other kinds by layer_types of {type(config).__name__} "
            f"({', '.join(others)}), and sp_size={ranks} divides the sequences of attention only. Set "
            "sp_size=1 for this model."
        )
    heads = getattr(config, "num_attention_heads", None)
    if isinstance(heads, int) and heads % (ranks * shards_of_heads):
        with_tensors = f" with tp_size={shards_of_heads}" if shards_of_heads > 1 else ""
        raise PreparationError(
            f"{kind} has {heads} attention heads, which sp_size={ranks}{with_tensors} does not divide. "
            "Choose a size that divides them."
        )
    attention = getattr(config, "_attn_implementation", None)
    if ring > 1 and attention not in (None, *GATHERED):
        raise PreparationError(
            f"{kind} computes attention by {attention!r}, which takes queries and keys of the same "
            f"positions, and cp_size={ring} with sp_size={ranks} gives it the keys of other ranks. Load it "
            "with attn_implementation='sdpa', or set cp_size=1."
        )


def _reason(part: nn.Module, is_layer: bool) -> str | None:
    """Returns how a layer combines positions by other means than attention, or None."""
    name = type(part).__name__
    if torch_private.uncompiled(part) is not part or torch_private.is_compiled_in_place(part):
        return "is compiled"
    if isinstance(part, (nn.RNNBase, nn.RNNCellBase)) or (
        is_layer and any(each in name for each in RECURRENT)
    ):
        return "carries a state over positions"
    if isinstance(part, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
        return "computes statistics over positions"
    if isinstance(part, nn.Conv1d) and part.kernel_size[0] > 1:
        return "is a convolution over time"
    return None
