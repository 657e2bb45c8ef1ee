"""Parsers that convert model configurations to arguments of Megatron-LM, and checks of their sizes.

`MegatronLMPlugin.set_network_size_args` calls the function `parse_MODEL_config` of a model type, which writes
the arguments to the plugin. A batch, if given, determines the sequence lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from accelerate.base import wrong_value
from accelerate.devices import is_transformer_engine_available

if TYPE_CHECKING:
    from torch import nn

    from accelerate.plugins.megatron import MegatronLMPlugin

Parser = Callable[..., None]

MODEL_CONFIGS_TO_MEGATRON_PARSERS: dict[str, Parser] = {}
"""Model type -> the function that parses configurations of this type."""

_MAX_T5_POSITIONS = 1024  # relative positions have no maximum, and Megatron-LM requires one


def add_model_config_to_megatron_parser(model_type: str) -> Callable[[Parser], Parser]:
    """Returns a decorator that registers a parser for models of another type.

    The parser is called with the plugin, the model and a batch (or None), and writes to
    `megatron_lm_default_args` of the plugin.

    Args:
        model_type: Value of `config.model_type` of these models.
    """

    def register(parser: Parser) -> Parser:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type] = parser
        return parser

    return register


@add_model_config_to_megatron_parser("megatron-bert")
@add_model_config_to_megatron_parser("bert")
def parse_bert_config(megatron_lm_plugin: MegatronLMPlugin, model: nn.Module, batch_data: object) -> None:
    """Sets the sizes of a BERT, of which Megatron-LM itself has only the pretraining heads."""
    config, plugin = _Config(model), megatron_lm_plugin
    name = type(model).__name__
    pretraining = not any(head in name for head in ("ForSequenceClassification", "ForTokenClassification"))
    length = plugin.seq_length or plugin.encoder_seq_length
    plugin.seq_length = _length(length, batch_data, "input_ids", config)
    plugin.megatron_lm_default_args.update(
        _common(plugin, config, "bert", pretraining),
        seq_length=plugin.seq_length,
        tokenizer_type="BertWordPieceLowerCase",
        ffn_hidden_size=config("intermediate_size", 4 * config("hidden_size")),
        norm_epsilon=config("layer_norm_eps", 1e-12),
        position_embedding_type="learned_absolute",
        num_labels=config("num_labels", len(config("id2label", ())) or 2),
        bert_binary_head="ForPreTraining" in name,
    )


@add_model_config_to_megatron_parser("gpt2")
def parse_gpt2_config(megatron_lm_plugin: MegatronLMPlugin, model: nn.Module, batch_data: object) -> None:
    """Sets the sizes of a GPT-2."""
    config = _Config(
        model,
        num_hidden_layers="n_layer",
        hidden_size="n_embd",
        num_attention_heads="n_head",
        max_position_embeddings="n_positions",
    )
    _set_decoder(megatron_lm_plugin, config, batch_data, "GPT2BPETokenizer")
    megatron_lm_plugin.megatron_lm_default_args.update(
        ffn_hidden_size=config("n_inner", None) or 4 * config("hidden_size"),
        norm_epsilon=config("layer_norm_epsilon", 1e-5),
        position_embedding_type=_position_embedding_type(megatron_lm_plugin, "learned_absolute"),
    )


@add_model_config_to_megatron_parser("t5")
def parse_t5_config(megatron_lm_plugin: MegatronLMPlugin, model: nn.Module, batch_data: object) -> None:
    """Sets the sizes of a T5."""
    config = _Config(
        model,
        num_hidden_layers="num_layers",
        hidden_size="d_model",
        num_attention_heads="num_heads",
        max_position_embeddings="n_positions",
    )
    config.values.setdefault("n_positions", _MAX_T5_POSITIONS)
    plugin = megatron_lm_plugin
    plugin.encoder_seq_length = _length(plugin.encoder_seq_length, batch_data, "input_ids", config)
    plugin.decoder_seq_length = _length(plugin.decoder_seq_length, batch_data, "labels", config)
    plugin.megatron_lm_default_args.update(
        _common(plugin, config, "t5", True),
        encoder_seq_length=plugin.encoder_seq_length,
        decoder_seq_length=plugin.decoder_seq_length,
        decoder_num_layers=config("num_decoder_layers", config("num_hidden_layers")),
        tokenizer_type="BertWordPieceCase",
        ffn_hidden_size=config("d_ff"),
        kv_channels=config("d_kv"),
        normalization="RMSNorm",
        norm_epsilon=config("layer_norm_epsilon", 1e-6),
        add_bias_linear=False,
        # Relative positions are an attention bias, which only Transformer Engine supports.
        position_embedding_type="relative" if is_transformer_engine_available() else "learned_absolute",
        relative_attention_num_buckets=config("relative_attention_num_buckets", 32),
        relative_attention_max_distance=config("relative_attention_max_distance", 128),
    )


@add_model_config_to_megatron_parser("llama")
def parse_llama_config(megatron_lm_plugin: MegatronLMPlugin, model: nn.Module, batch_data: object) -> None:
    """Sets the sizes of a Llama."""
    config = _Config(model)
    _set_decoder(megatron_lm_plugin, config, batch_data, "Llama2Tokenizer")
    megatron_lm_plugin.megatron_lm_default_args.update(_llama_arguments(megatron_lm_plugin, config))


@add_model_config_to_megatron_parser("glm4_moe")
def parse_glm4_moe_config(megatron_lm_plugin: MegatronLMPlugin, model: nn.Module, batch_data: object) -> None:
    """Sets the sizes of a GLM-4 with experts."""
    config = _Config(model)
    _set_decoder(megatron_lm_plugin, config, batch_data, "HuggingFaceTokenizer")
    num_dense = config("first_k_dense_replace", 0)
    arguments = megatron_lm_plugin.megatron_lm_default_args
    arguments.update(
        _llama_arguments(megatron_lm_plugin, config),
        original_model_type="glm4_moe",
        qk_layernorm=config("use_qk_norm", False),
        rotary_percent=config.rope("partial_rotary_factor", 0.5),
        num_experts=config("n_routed_experts"),
        moe_ffn_hidden_size=config("moe_intermediate_size"),
        moe_shared_expert_intermediate_size=config("moe_intermediate_size") * config("n_shared_experts", 1),
        moe_layer_freq=[int(layer >= num_dense) for layer in range(config("num_hidden_layers"))],
        moe_router_topk=config("num_experts_per_tok"),
        moe_router_topk_scaling_factor=config("routed_scaling_factor", 1.0),
        moe_router_pre_softmax=True,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0,
        moe_router_load_balancing_type="seq_aux_loss",
        moe_router_dtype="fp32",
        moe_grouped_gemm=is_transformer_engine_available(),
        moe_aux_loss_coeff=0,
        moe_token_dispatcher_type="alltoall",
    )
    if config("n_group", 1) > 1:
        arguments.update(moe_router_num_groups=config("n_group"), moe_router_group_topk=config("topk_group"))


class _Config:
    """Configuration of a model, read by names that are common to all families.

    Args:
        model: Model with `config`.
        **names: Common name -> the name in this family.
    """

    def __init__(self, model: nn.Module, **names: str) -> None:
        config: Any = model.config
        self.model_type = str(config.model_type)
        self.values: dict[str, Any] = dict(config.to_dict() if hasattr(config, "to_dict") else vars(config))
        self.names = names

    def __call__(self, name: str, *default: Any) -> Any:
        """Returns a value, which must exist if no default is given."""
        key = self.names.get(name, name)
        if key in self.values:
            return self.values[key]
        if default:
            return default[0]
        reason = f"a model of type {self.model_type} needs it, and its configuration has none"
        raise wrong_value(f"config.{key}", None, reason, "Give the model a complete configuration")

    def rope(self, name: str, default: object) -> Any:
        """Returns an option of rotary positions, which newer configurations have in a separate dictionary."""
        entry: Mapping[str, Any] = self.values.get("rope_parameters") or self.values.get("rope_scaling") or {}
        return entry.get(name, self.values.get(name, default))


def _common(plugin: MegatronLMPlugin, config: _Config, family: str, pretraining: bool) -> dict[str, Any]:
    return {
        "model_type_name": family,
        "num_layers": config("num_hidden_layers"),
        "hidden_size": config("hidden_size"),
        "num_attention_heads": config("num_attention_heads"),
        "max_position_embeddings": config("max_position_embeddings"),
        "orig_vocab_size": config("vocab_size"),
        "pretraining_flag": pretraining,
        "return_logits": plugin.return_logits,
        "model_return_dict": config("return_dict", True),
        "eos_token_id": config("eos_token_id", None),
        "pad_token_id": config("pad_token_id", None),
        "untie_embeddings_and_output_weights": not config("tie_word_embeddings", True),
    }


def _set_decoder(plugin: MegatronLMPlugin, config: _Config, batch_data: object, tokenizer: str) -> None:
    """Sets the sizes that all autoregressive models have."""
    length = plugin.seq_length or plugin.decoder_seq_length
    plugin.seq_length = _length(length, batch_data, "input_ids", config)
    plugin.megatron_lm_default_args.update(
        _common(plugin, config, "gpt", True), seq_length=plugin.seq_length, tokenizer_type=tokenizer
    )


def _llama_arguments(plugin: MegatronLMPlugin, config: _Config) -> dict[str, Any]:
    heads = config("num_attention_heads")
    groups = config("num_key_value_heads", heads) or heads
    arguments = {
        "ffn_hidden_size": config("intermediate_size"),
        "kv_channels": config("head_dim", None) or config("hidden_size") // heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups if groups != heads else None,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": config("rms_norm_eps", 1e-6),
        "add_bias_linear": config("mlp_bias", False),
        "add_qkv_bias": config("attention_bias", False),
        "position_embedding_type": _position_embedding_type(plugin, "rope"),
        "rotary_base": int(config.rope("rope_theta", 10000)),
    }
    if config.rope("rope_type", "default") == "llama3":
        arguments.update(use_rope_scaling=True, rope_scaling_factor=config.rope("factor", 8.0))
    return {name: value for name, value in arguments.items() if value is not None}


def _position_embedding_type(plugin: MegatronLMPlugin, default: str) -> str:
    """Returns the position embedding of the plugin, or the default of the model if it is not set."""
    is_rotary = plugin.use_rotary_position_embeddings
    if is_rotary is None:
        return default
    return "rope" if is_rotary else "learned_absolute"


def _length(configured: int | None, batch_data: object, key: str, config: _Config) -> int:
    """Returns the configured sequence length, else that of the batch, else the maximum of the model."""
    if configured is not None:
        return configured
    if isinstance(batch_data, Mapping) and key in batch_data:
        return int(batch_data[key].shape[1])
    return int(config("max_position_embeddings"))


# The checks below return one line for each problem, and raise no errors.


def find_wrong_sizes(plugin: MegatronLMPlugin, processes: int) -> list[str]:
    """Returns the problems of the degrees of parallelism with the world size."""
    tp, pp, cp = plugin.tp_degree or 1, plugin.pp_degree or 1, plugin.context_parallel_size or 1
    etp, ep = plugin.expert_tensor_parallel_size or 1, plugin.expert_model_parallel_size or 1
    replicas = [("the model", {"tp_degree": tp, "pp_degree": pp, "context_parallel_size": cp})]
    if ep > 1:
        sizes = {"expert_tensor_parallel_size": etp, "expert_model_parallel_size": ep, "pp_degree": pp}
        replicas.append(("the experts", sizes))
    problems = []
    for part, sizes in replicas:
        size = math.prod(sizes.values())
        product = " * ".join(f"{name}={value}" for name, value in sizes.items())
        if processes % size:
            problems.append(
                f"{processes} processes cannot be divided: one replica of {part} takes {product} = {size}. "
                f"Launch a multiple of {size}, or change these sizes"
            )
    return problems


def find_wrong_network(plugin: MegatronLMPlugin, network: Mapping[str, Any]) -> list[str]:
    """Returns the problems of the degrees of parallelism with the sizes of a network.

    Args:
        network: Arguments of Megatron-LM for the model.
    """
    return [*_wrong_layers(plugin, network), *_wrong_heads(plugin, network), *_wrong_lengths(plugin, network)]


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
            f"{layers} layers cannot be divided between {pp} stages in virtual stages of "
            f"num_layers_per_virtual_pipeline_stage={virtual}. Use a divisor of {max(1, layers // pp)}"
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
    heads, groups, tp = (
        network.get("num_attention_heads"),
        network.get("num_query_groups"),
        plugin.tp_degree or 1,
    )
    if heads is not None and heads % tp:
        yield f"{heads} attention heads cannot be divided between tp_degree={tp} processes. Change it"
    if groups is not None and groups % tp and tp % groups:
        yield f"{groups} groups of queries cannot be divided between tp_degree={tp} processes. Change it"
    experts, ep = network.get("num_experts"), plugin.expert_model_parallel_size or 1
    if experts and tp > 1 and not plugin.sequence_parallelism:
        yield (
            f"tp_degree={tp}: tensor parallelism with experts requires sequence parallelism. Set "
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
            yield f"{name}={length}: sequence_parallelism splits it in {tp} parts. Use a multiple of {tp}"
        if cp > 1 and length % (2 * cp):
            yield (
                f"{name}={length}: context_parallel_size={cp} splits it in {2 * cp} parts. Use a multiple "
                f"of {2 * cp}"
            )
