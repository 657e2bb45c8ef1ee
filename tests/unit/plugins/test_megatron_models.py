"""Each family of models has a function that turns its configuration into arguments of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.base import ConfigurationError
from accelerate.plugins import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    MegatronLMPlugin,
    add_model_config_to_megatron_parser,
    megatron_models,
)

ROPE = {"rope_theta": 10000.0, "rope_type": "default"}

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 1024,
        "n_inner": None,
        "vocab_size": 50257,
        "layer_norm_epsilon": 1e-5,
        "eos_token_id": 50256,
        "tie_word_embeddings": True,
    },
    "llama": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "rope_parameters": ROPE,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "bert": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "layer_norm_eps": 1e-12,
        "id2label": {0: "a", 1: "b", 2: "c"},
        "tie_word_embeddings": True,
    },
    "t5": {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 96,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "vocab_size": 32128,
        "layer_norm_epsilon": 1e-6,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
    },
    "glm4_moe": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 151552,
        "max_position_embeddings": 4096,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "use_qk_norm": True,
        "attention_bias": True,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
    },
    "opt": {"num_hidden_layers": 5},
}
"""Configurations as transformers writes them: the values that are read."""


class Config:
    """A configuration of transformers, without transformers, whose import takes seconds."""

    def __init__(self, model_type: str, **values: Any) -> None:
        self.model_type = model_type
        self.__dict__.update({**CONFIGS[model_type], **values})

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


BATCH = {"input_ids": torch.zeros(2, 16, dtype=torch.long), "labels": torch.zeros(2, 8, dtype=torch.long)}


def parse(
    config: Any, name: str, batch: Any = BATCH, **fields: Any
) -> tuple[MegatronLMPlugin, dict[str, Any]]:
    model = type(name, (nn.Module,), {})()
    model.config = config
    plugin = MegatronLMPlugin(**fields)
    plugin.set_network_size_args(model, batch)
    return plugin, plugin.megatron_lm_default_args


def subset(arguments: dict[str, Any], names: Any) -> dict[str, Any]:
    return {name: arguments[name] for name in names}


def test_gpt2_is_converted() -> None:
    config = Config("gpt2")
    plugin, arguments = parse(config, "GPT2LMHeadModel")
    expected = {
        "model_type_name": "gpt",
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
        "orig_vocab_size": 50257,
        "seq_length": 16,
        "ffn_hidden_size": 256,
        "pretraining_flag": True,
        "model_return_dict": True,
        "return_logits": False,
        "tokenizer_type": "GPT2BPETokenizer",
        "position_embedding_type": "learned_absolute",
        "untie_embeddings_and_output_weights": False,
        "eos_token_id": 50256,
    }
    assert subset(arguments, expected) == expected
    assert plugin.seq_length == 16


def test_the_sequence_length_is_that_of_the_plugin_the_batch_or_the_model() -> None:
    config = Config("gpt2", n_positions=128)
    assert parse(config, "M", seq_length=12)[1]["seq_length"] == 12
    assert parse(config, "M", decoder_seq_length=20)[1]["seq_length"] == 20
    assert parse(config, "M", batch=None)[1]["seq_length"] == 128


def test_positions_are_those_of_the_user() -> None:
    config = Config("gpt2")
    assert parse(config, "M", use_rotary_position_embeddings=True)[1]["position_embedding_type"] == "rope"


def test_llama_is_converted() -> None:
    config = Config("llama", num_key_value_heads=2)
    _, arguments = parse(config, "LlamaForCausalLM", return_logits=True)
    expected = {
        "model_type_name": "gpt",
        "num_query_groups": 2,
        "group_query_attention": True,
        "kv_channels": 16,
        "ffn_hidden_size": 96,
        "swiglu": True,
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-6,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "position_embedding_type": "rope",
        "rotary_base": 10000,
        "untie_embeddings_and_output_weights": True,
        "return_logits": True,
    }
    assert subset(arguments, expected) == expected


def test_llama_without_groups() -> None:
    config = Config("llama")
    _, arguments = parse(config, "LlamaForCausalLM")
    assert arguments["group_query_attention"] is False
    assert "num_query_groups" not in arguments


def test_llama_with_scaled_positions() -> None:
    config = Config(
        "llama",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    )
    _, arguments = parse(config, "LlamaForCausalLM")
    found = subset(arguments, ("use_rope_scaling", "rope_scaling_factor", "rotary_base"))
    assert found == {"use_rope_scaling": True, "rope_scaling_factor": 32.0, "rotary_base": 500000}


@pytest.mark.parametrize("model_type", ["bert", "megatron-bert"])
@pytest.mark.parametrize(
    ("name", "pretraining", "binary"),
    [
        ("BertForPreTraining", True, True),
        ("BertForMaskedLM", True, False),
        ("BertForSequenceClassification", False, False),
    ],
)
def test_bert_is_converted(model_type: str, name: str, pretraining: bool, binary: bool) -> None:
    config = Config("bert")
    config.model_type = model_type
    _, arguments = parse(config, name)
    expected = {
        "model_type_name": "bert",
        "ffn_hidden_size": 96,
        "num_labels": 3,
        "pretraining_flag": pretraining,
        "bert_binary_head": binary,
        "seq_length": 16,
    }
    assert subset(arguments, expected) == expected


def test_t5_is_converted() -> None:
    config = Config("t5")
    plugin, arguments = parse(config, "T5ForConditionalGeneration")
    expected = {
        "model_type_name": "t5",
        "num_layers": 3,
        "decoder_num_layers": 2,
        "kv_channels": 16,
        "ffn_hidden_size": 96,
        "encoder_seq_length": 16,
        "decoder_seq_length": 8,
        "max_position_embeddings": 1024,
    }
    assert subset(arguments, expected) == expected
    assert (plugin.encoder_seq_length, plugin.decoder_seq_length) == (16, 8)


@pytest.mark.parametrize(("has_engine", "positions"), [(True, "relative"), (False, "learned_absolute")])
def test_positions_of_t5_need_transformer_engine_to_be_relative(
    monkeypatch: pytest.MonkeyPatch, has_engine: bool, positions: str
) -> None:
    monkeypatch.setattr(megatron_models, "is_transformer_engine_available", lambda: has_engine)
    assert parse(Config("t5"), "T5Model")[1]["position_embedding_type"] == positions


def test_glm4_moe_is_converted() -> None:
    config = Config("glm4_moe")
    _, arguments = parse(config, "Glm4MoeForCausalLM")
    expected = {
        "model_type_name": "gpt",
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "qk_layernorm": True,
        "add_qkv_bias": True,
        "rotary_percent": 0.5,
        "num_query_groups": 2,
    }
    assert subset(arguments, expected) == expected


def test_further_arguments_take_precedence() -> None:
    config = Config("gpt2")
    _, arguments = parse(config, "GPT2LMHeadModel", other_megatron_args={"ffn_hidden_size": 100})
    assert arguments["ffn_hidden_size"] == 100


def test_unknown_types_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"model_type='opt'.*gpt2.*llama.*add_model_config"):
        parse(Config("opt"), "OPTForCausalLM")


def test_models_without_a_configuration_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="a Linear cannot be converted to Megatron-LM"):
        MegatronLMPlugin().set_network_size_args(nn.Linear(2, 2))


def test_an_incomplete_configuration_is_named() -> None:
    config = Config("gpt2")
    del config.n_layer
    with pytest.raises(ConfigurationError, match=r"config\.n_layer"):
        parse(config, "GPT2LMHeadModel")


@pytest.fixture
def table() -> Iterator[dict[str, Any]]:
    before = dict(MODEL_CONFIGS_TO_MEGATRON_PARSERS)
    yield MODEL_CONFIGS_TO_MEGATRON_PARSERS
    MODEL_CONFIGS_TO_MEGATRON_PARSERS.clear()
    MODEL_CONFIGS_TO_MEGATRON_PARSERS.update(before)


def test_users_add_their_own(table: dict[str, Any]) -> None:
    @add_model_config_to_megatron_parser("opt")
    def parse_opt(plugin: MegatronLMPlugin, model: nn.Module, batch: Any) -> None:
        plugin.megatron_lm_default_args["num_layers"] = model.config.num_hidden_layers  # type: ignore[union-attr]

    assert table["opt"] is parse_opt
    assert parse(Config("opt"), "OPTForCausalLM")[1]["num_layers"] == 5
