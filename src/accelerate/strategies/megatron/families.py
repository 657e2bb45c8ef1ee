"""The models and datasets of `megatron.core`, built from Megatron-LM's arguments for each model family."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

from torch import nn

from accelerate.base import wrong_value
from accelerate.strategies.megatron import library


def build_model(
    args: Any, pre_process: bool, post_process: bool, add_encoder: bool, add_decoder: bool, **options: Any
) -> nn.Module:
    """Build the part of a model that this process holds.

    Args:
        **options: `config`, `vp_stage` and `pg_collection`, where the version of Megatron-LM passes them.
    """
    builder = _BUILDERS.get(args.model_type_name)
    if builder is None:
        reason = f"there are models for {', '.join(_BUILDERS)}"
        fix = "Pass custom_model_provider_function to MegatronLMPlugin"
        raise wrong_value("model_type_name", args.model_type_name, reason, fix)
    config = options.pop("config", None)
    if config is None:
        config = library.training("arguments").core_transformer_config_from_args(args)
    common = {
        "config": config,
        "vocab_size": args.padded_vocab_size,
        "max_sequence_length": args.max_position_embeddings,
        "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
        "parallel_output": True,
        "rotary_percent": args.rotary_percent,
        "pre_process": pre_process,
        "post_process": post_process,
    }
    if builder is _build_t5:
        common.update(add_encoder=add_encoder, add_decoder=add_decoder)
    else:
        known = ("vp_stage", "pg_collection")
        common.update({name: options[name] for name in known if options.get(name) is not None})
    model: nn.Module = builder(args, config, args.transformer_impl == "transformer_engine", common)
    return model


def _build_gpt(args: Any, config: Any, uses_engine: bool, common: dict[str, Any]) -> Any:
    stage = {"vp_stage": common["vp_stage"]} if "vp_stage" in common else {}
    layers = library.core("models.gpt.gpt_layer_specs").get_gpt_decoder_block_spec(
        config, use_transformer_engine=uses_engine, normalization=args.normalization, **stage
    )
    return library.core("models.gpt").GPTModel(
        transformer_layer_spec=layers,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        **common,
    )


def _build_bert(args: Any, config: Any, uses_engine: bool, common: dict[str, Any]) -> Any:
    specs = library.core("models.bert.bert_layer_specs")
    layer = (
        specs.get_bert_layer_with_transformer_engine_spec() if uses_engine else specs.bert_layer_local_spec
    )
    return library.core("models.bert.bert_model").BertModel(
        transformer_layer_spec=layer,
        num_tokentypes=2 if args.bert_binary_head else 0,
        add_binary_head=args.bert_binary_head,
        **common,
    )


def _build_t5(args: Any, config: Any, uses_engine: bool, common: dict[str, Any]) -> Any:
    specs = library.core("models.T5.t5_spec")
    kind = "transformer_engine" if uses_engine else "local"
    encoder_config = deepcopy(config)
    encoder_config.num_layers = args.encoder_num_layers or args.num_layers
    config.num_layers = args.decoder_num_layers or args.num_layers
    encoder_layers = getattr(specs, f"get_t5_encoder_with_{kind}_block_spec")(encoder_config.num_layers)
    decoder_layers = getattr(specs, f"get_t5_decoder_with_{kind}_block_spec")(config.num_layers)
    return library.core("models.T5").T5Model(
        encoder_config=encoder_config,
        transformer_encoder_layer_spec=encoder_layers,
        transformer_decoder_layer_spec=decoder_layers,
        position_embedding_type=args.position_embedding_type,
        relative_attention_num_buckets=args.relative_attention_num_buckets,
        relative_attention_max_distance=args.relative_attention_max_distance,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        **common,
    )


_BUILDERS = {"gpt": _build_gpt, "bert": _build_bert, "t5": _build_t5}


def build_datasets(train_val_test_num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Build the datasets for training, validation and test; called on all ranks."""
    args = library.get_args()
    describe = _DATASETS.get(args.model_type_name)
    if describe is None:
        reason = f"there are datasets for {', '.join(_DATASETS)}"
        fix = "Pass custom_megatron_datasets_provider_function to MegatronLMPlugin"
        raise wrong_value("model_type_name", args.model_type_name, reason, fix)
    kind, config = describe(args)
    builder = library.core("datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    return builder(kind, train_val_test_num_samples, partial(_reads, vp_stage), config).build()


def _reads(vp_stage: int | None) -> bool:
    """Whether this process reads data: one of those that share layers, on the ends of the pipeline."""
    groups = library.core("parallel_state")
    is_end = groups.is_pipeline_first_stage() or groups.is_pipeline_last_stage()
    return bool(is_end and groups.get_tensor_model_parallel_rank() == 0)


def _common(args: Any) -> dict[str, Any]:
    blend = library.core("datasets.utils").get_blend_from_list
    paths = (args.train_data_path, args.valid_data_path, args.test_data_path)
    return {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend(args.data_path),
        "blend_per_split": [blend(path) for path in paths] if any(paths) else None,
        "split": args.split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": library.training("global_vars").get_tokenizer(),
    }


def _describe_gpt(args: Any) -> tuple[type, Any]:
    datasets = library.core("datasets.gpt_dataset")
    config = datasets.GPTDatasetConfig(
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,  # the train step makes it
        **_common(args),
    )
    return datasets.MockGPTDataset if getattr(args, "mock_data", False) else datasets.GPTDataset, config


def _masked(args: Any, max_ngram: int, geometric: bool) -> dict[str, Any]:
    return {
        **_common(args),
        "masking_max_ngram": max_ngram,
        "masking_use_geometric_distribution": geometric,
        "masking_probability": args.mask_prob,
        "short_sequence_probability": args.short_seq_prob,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
    }


def _describe_bert(args: Any) -> tuple[type, Any]:
    datasets = library.core("datasets.bert_dataset")
    config = datasets.BERTMaskedWordPieceDatasetConfig(
        classification_head=args.bert_binary_head, **_masked(args, max_ngram=3, geometric=False)
    )
    return datasets.BERTMaskedWordPieceDataset, config


def _describe_t5(args: Any) -> tuple[type, Any]:
    datasets = library.core("datasets.t5_dataset")
    masked = {**_masked(args, max_ngram=10, geometric=True), "sequence_length": args.encoder_seq_length}
    config = datasets.T5MaskedWordPieceDatasetConfig(
        sequence_length_decoder=args.decoder_seq_length, **masked
    )
    return datasets.T5MaskedWordPieceDataset, config


_DATASETS: dict[str, Callable[[Any], tuple[type, Any]]] = {
    "gpt": _describe_gpt,
    "bert": _describe_bert,
    "t5": _describe_t5,
}
