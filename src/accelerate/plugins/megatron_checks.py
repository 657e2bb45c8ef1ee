"""Checks of a MegatronLMPlugin: each returns a line for every problem, and raises nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from accelerate.base import shown

if TYPE_CHECKING:
    from accelerate.plugins.megatron import MegatronLMPlugin

_NO_COUNTS = ("pipeline_model_parallel_split_rank", "lr_warmup_iters", "lr_warmup_samples")
"""Integer fields that may be 0, or are refused anyway; the others are counts of at least 1."""

_FRACTIONS = ("attention_dropout", "hidden_dropout", "lr_warmup_fraction")

_CHOICES = {
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "weight_decay_incr_style": ("constant", "linear", "cosine"),
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
}

_NEEDED = (
    ("overlap_cpu_optimizer_d2h_h2d", "optimizer_cpu_offload", "the optimizer is not on the CPU"),
    (
        "use_precision_aware_optimizer",
        "use_distributed_optimizer",
        "only the distributed optimizer has low-precision states",
    ),
    (
        "optimizer_cpu_offload",
        "use_precision_aware_optimizer",
        "only the precision-aware optimizer, which is a distributed one, works on the CPU",
    ),
)
"""Fields, other fields that each needs, and why."""

_WSD = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")

_TOGETHER: tuple[tuple[str, str], ...] = (
    ("train_iters", "train_samples"),
    ("train_iters", "lr_decay_samples"),
    ("train_iters", "lr_warmup_samples"),
    ("train_samples", "lr_decay_iters"),
    ("train_samples", "lr_warmup_iters"),
    ("lr_warmup_iters", "lr_warmup_fraction"),
    ("lr_warmup_samples", "lr_warmup_fraction"),
)
"""Pairs of fields that say the same thing in different units."""


def read_backend(value: Any) -> Any:
    """Return the name of an attention kernel; a yes leaves the choice to Megatron-LM."""
    words: dict[Any, str | None] = {True: "auto", "true": "auto", False: None, "false": None}
    key = value.lower() if isinstance(value, str) else value
    return words.get(key, key)


def find_wrong_values(plugin: MegatronLMPlugin) -> list[str]:
    """Return what is wrong with the fields themselves, one line each."""
    return [*_wrong_fields(plugin), *_wrong_companions(plugin)]


def find_wrong_sizes(plugin: MegatronLMPlugin, processes: int) -> list[str]:
    """Return how the number of processes does not fit the degrees of parallelism."""
    tp, pp, cp = plugin.tp_degree or 1, plugin.pp_degree or 1, plugin.context_parallel_size or 1
    etp, ep = plugin.expert_tensor_parallel_size or 1, plugin.expert_model_parallel_size or 1
    copies = [("the model", {"tp_degree": tp, "pp_degree": pp, "context_parallel_size": cp})]
    if ep > 1:
        sizes = {"expert_tensor_parallel_size": etp, "expert_model_parallel_size": ep, "pp_degree": pp}
        copies.append(("the experts", sizes))
    problems = []
    for part, sizes in copies:
        size = math.prod(sizes.values())
        product = " * ".join(f"{name}={value}" for name, value in sizes.items())
        if processes % size:
            problems.append(
                f"{processes} processes cannot be divided: one copy of {part} takes {product} = {size}. "
                f"Launch a multiple of {size}, or change these sizes"
            )
    return problems


def find_wrong_network(plugin: MegatronLMPlugin, network: Mapping[str, Any]) -> list[str]:
    """Return how the sizes of a network, as arguments of Megatron-LM, do not fit the degrees."""
    return [*_wrong_layers(plugin, network), *_wrong_heads(plugin, network), *_wrong_lengths(plugin, network)]


def _wrong_fields(plugin: MegatronLMPlugin) -> Iterator[str]:
    integers = (field.name for field in fields(plugin) if field.type == "int | None")
    for name in (name for name in integers if name not in _NO_COUNTS):
        value = getattr(plugin, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            yield f"{name}={shown(value)}: it is not a count. Give a whole number of at least 1"
    for name in _FRACTIONS:
        value = getattr(plugin, name)
        if value is not None and not 0 <= value <= 1:
            yield f"{name}={shown(value)}: it is not a part of a whole. Give a number from 0 to 1"
    if plugin.gradient_clipping is not None and plugin.gradient_clipping < 0:
        yield f"gradient_clipping={plugin.gradient_clipping!r}: a norm is never negative. Give 0 for no limit"
    for name, choices in _CHOICES.items():
        value = getattr(plugin, name)
        if value is not None and value not in choices:
            yield f"{name}={shown(value)}: it is not a known choice. Choose one of {', '.join(choices)}"
    if plugin.pipeline_model_parallel_split_rank is not None:
        yield (
            f"pipeline_model_parallel_split_rank={plugin.pipeline_model_parallel_split_rank!r}: Megatron-LM "
            "splits no encoder from its decoder any more. Leave it out"
        )
    for names in _TOGETHER:
        first, second = (f"{name}={getattr(plugin, name)!r}" for name in names)
        if all(getattr(plugin, name) for name in names):
            yield f"{first} and {second} count in different units. Give one of them"


def _wrong_companions(plugin: MegatronLMPlugin) -> Iterator[str]:
    if plugin.recompute_method is not None and plugin.recompute_granularity != "full":
        yield (
            f"recompute_method={plugin.recompute_method!r}: it chooses layers that are recomputed as a "
            "whole. Set recompute_granularity='full', or leave it out"
        )
    if plugin.recompute_granularity == "full" and plugin.recompute_method is None:
        yield (
            "recompute_granularity='full': nothing says which layers are recomputed. Set recompute_method to "
            "'uniform' or 'block', and recompute_num_layers"
        )
    for field, needed, reason in _NEEDED:
        if getattr(plugin, field) and not getattr(plugin, needed):
            yield f"{field}=True: {reason}. Set {needed}=True"
    if plugin.num_layers_per_virtual_pipeline_stage is not None and (plugin.pp_degree or 1) < 2:
        yield (
            f"num_layers_per_virtual_pipeline_stage={plugin.num_layers_per_virtual_pipeline_stage!r}: there "
            "is no pipeline. Set pp_degree to 2 or more, or leave it out"
        )
    weight_decays = (plugin.start_weight_decay, plugin.end_weight_decay)
    if plugin.weight_decay_incr_style != "constant" and None in weight_decays:
        yield (
            f"weight_decay_incr_style={plugin.weight_decay_incr_style!r}: nothing says from where to where. "
            "Set start_weight_decay and end_weight_decay"
        )
    further = plugin.other_megatron_args or {}
    if plugin.lr_decay_style == "WSD" and not any(name in further for name in _WSD):
        yield (
            "lr_decay_style='WSD': nothing says over how many steps the learning rate falls at the end. Set "
            "other_megatron_args={'lr_wsd_decay_iters': ...}"
        )
    if plugin.custom_train_step_class is not None and not isinstance(plugin.custom_train_step_class, type):
        yield "custom_train_step_class: it is not a class. Pass the class, and its arguments apart"


def _wrong_layers(plugin: MegatronLMPlugin, network: Mapping[str, Any]) -> Iterator[str]:
    layers, pp = network.get("num_layers"), plugin.pp_degree or 1
    if layers is None or pp == 1:
        return
    if network.get("model_type_name") == "t5":
        yield f"pp_degree={pp}: Megatron-LM has no pipelines for T5. Set pp_degree=1"
        return
    last = plugin.decoder_last_pipeline_num_layers
    stages, rest = (pp, layers) if last is None else (pp - 1, layers - last)
    if rest <= 0 or rest % stages:
        yield (
            f"{layers} layers cannot be divided between pp_degree={pp} stages"
            + ("" if last is None else f", of which the last has {last}")
            + ". Change pp_degree, or set decoder_last_pipeline_num_layers so that the rest can be divided"
        )
    virtual = plugin.num_layers_per_virtual_pipeline_stage
    if virtual is not None and layers % (pp * virtual):
        yield (
            f"{layers} layers cannot be divided between {pp} stages in parts of "
            f"num_layers_per_virtual_pipeline_stage={virtual}. Take a divisor of {max(1, layers // pp)}"
        )
    if virtual is not None and last is not None:
        yield (
            f"decoder_last_pipeline_num_layers={last}: the stages of an interleaved schedule have equally "
            "many layers. Leave it out, or num_layers_per_virtual_pipeline_stage"
        )
    micro = plugin.num_micro_batches or 1
    if virtual is not None and micro % pp:
        yield (
            f"num_micro_batches={micro}: an interleaved schedule takes a multiple of pp_degree={pp}. "
            "Change it, or leave num_layers_per_virtual_pipeline_stage out"
        )


def _wrong_heads(plugin: MegatronLMPlugin, network: Mapping[str, Any]) -> Iterator[str]:
    tp, heads, groups = (
        plugin.tp_degree or 1,
        network.get("num_attention_heads"),
        network.get("num_query_groups"),
    )
    if heads is not None and heads % tp:
        yield f"{heads} attention heads cannot be divided between tp_degree={tp} processes. Change it"
    if groups is not None and groups % tp and tp % groups:
        yield f"{groups} groups of queries cannot be divided between tp_degree={tp} processes. Change it"
    experts, ep = network.get("num_experts"), plugin.expert_model_parallel_size or 1
    if experts and tp > 1 and not plugin.sequence_parallelism:
        yield (
            f"tp_degree={tp}: experts are trained with shared layers only where sequences are split too. Set "
            "sequence_parallelism=True, or tp_degree=1"
        )
    if ep > 1 and (experts is None or experts % ep):
        yield (
            f"{experts or 'no'} experts cannot be divided between expert_model_parallel_size={ep} "
            "processes. Change it"
        )


def _wrong_lengths(plugin: MegatronLMPlugin, network: Mapping[str, Any]) -> Iterator[str]:
    longest = network.get("max_position_embeddings")
    tp, cp = plugin.tp_degree or 1, plugin.context_parallel_size or 1
    for name in ("seq_length", "encoder_seq_length", "decoder_seq_length"):
        length = network.get(name)
        if length is None:
            continue
        if longest is not None and length > longest:
            yield f"{name}={length}: the model has {longest} positions. Make sequences shorter"
        if plugin.sequence_parallelism and length % tp:
            yield f"{name}={length}: sequence_parallelism splits it in {tp} parts. Take a multiple of {tp}"
        if cp > 1 and length % (2 * cp):
            yield (
                f"{name}={length}: context_parallel_size={cp} splits it in {2 * cp} parts. Take a multiple "
                f"of {2 * cp}"
            )
