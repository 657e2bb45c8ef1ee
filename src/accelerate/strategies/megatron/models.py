"""The models of `megatron.core`, built from Megatron-LM's arguments: one function for each family."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from torch import nn

from accelerate.base import wrong_value
from accelerate.strategies.megatron import library


def build_model(
    args: Any, pre_process: bool, post_process: bool, add_encoder: bool, add_decoder: bool, **options: Any
) -> nn.Module:
    """Build the part of a model that lies on this process.

    Args:
        args: Megatron-LM's, with `model_type_name`.
        pre_process: whether it has the embeddings.
        post_process: whether it has the head.
        add_encoder: whether it has the encoder.
        add_decoder: whether it has the decoder.
        **options: `config`, `vp_stage` and `pg_collection`, where the version of Megatron-LM passes them.

    Raises:
        ConfigurationError: there is no such family.
    """
    builder = _BUILDERS.get(args.model_type_name)
    if builder is None:
        raise wrong_value(
            "model_type_name",
            args.model_type_name,
            f"there are models for {', '.join(_BUILDERS)}",
            "Pass custom_model_provider_function to MegatronLMPlugin",
        )
    config = options.pop("config", None) or library.training("arguments").core_transformer_config_from_args(
        args
    )
    ends = {"pre_process": pre_process, "post_process": post_process}
    model: nn.Module = builder(
        args, config, ends, {"add_encoder": add_encoder, "add_decoder": add_decoder}, options
    )
    return model


def _sizes(args: Any) -> dict[str, Any]:
    return {
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "parallel_output": True,
        "rotary_percent": args.rotary_percent,
    }


def _uses_engine(args: Any) -> bool:
    return bool(args.transformer_impl == "transformer_engine")


def _build_gpt(
    args: Any, config: Any, ends: dict[str, bool], parts: dict[str, bool], options: dict[str, Any]
) -> Any:
    stage = {"vp_stage": options["vp_stage"]} if "vp_stage" in options else {}
    layers = library.core("models.gpt.gpt_layer_specs").get_gpt_decoder_block_spec(
        config, use_transformer_engine=_uses_engine(args), normalization=args.normalization, **stage
    )
    return library.core("models.gpt").GPTModel(
        config=config,
        transformer_layer_spec=layers,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        **_sizes(args),
        **ends,
        **_given(options),
    )


def _build_bert(
    args: Any, config: Any, ends: dict[str, bool], parts: dict[str, bool], options: dict[str, Any]
) -> Any:
    specs = library.core("models.bert.bert_layer_specs")
    layer = (
        specs.get_bert_layer_with_transformer_engine_spec()
        if _uses_engine(args)
        else specs.bert_layer_local_spec
    )
    return library.core("models.bert.bert_model").BertModel(
        config=config,
        transformer_layer_spec=layer,
        num_tokentypes=2 if args.bert_binary_head else 0,
        add_binary_head=args.bert_binary_head,
        **_sizes(args),
        **ends,
        **_given(options),
    )


def _build_t5(
    args: Any, config: Any, ends: dict[str, bool], parts: dict[str, bool], options: dict[str, Any]
) -> Any:
    specs = library.core("models.T5.t5_spec")
    kind = "transformer_engine" if _uses_engine(args) else "local"
    encoder_layers = args.encoder_num_layers or args.num_layers
    decoder_layers = args.decoder_num_layers or args.num_layers
    encoder_config = deepcopy(config)
    encoder_config.num_layers = encoder_layers
    config.num_layers = decoder_layers
    return library.core("models.T5").T5Model(
        config=config,
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=getattr(specs, f"get_t5_encoder_with_{kind}_block_spec")(
            encoder_layers
        ),
        transformer_decoder_layer_spec=getattr(specs, f"get_t5_decoder_with_{kind}_block_spec")(
            decoder_layers
        ),
        position_embedding_type=args.position_embedding_type,
        relative_attention_num_buckets=args.relative_attention_num_buckets,
        relative_attention_max_distance=args.relative_attention_max_distance,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        **_sizes(args),
        **ends,
        **parts,
    )


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return those options that the version of Megatron-LM passes and its models take."""
    return {name: options[name] for name in ("vp_stage", "pg_collection") if options.get(name) is not None}


_BUILDERS = {"gpt": _build_gpt, "bert": _build_bert, "t5": _build_t5}
