"""The datasets of `megatron.core`, built from Megatron-LM's arguments: one function for each family."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from accelerate.base import wrong_value
from accelerate.strategies.megatron import library


def build_datasets(train_val_test_num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Build the datasets for training, validation and test; called on all ranks.

    Args:
        train_val_test_num_samples: how many samples each of them gives.
        vp_stage: virtual stage, where the version of Megatron-LM passes it.

    Raises:
        ConfigurationError: there are none for this family of models.
    """
    args = library.get_args()
    describe = _DATASETS.get(args.model_type_name)
    if describe is None:
        raise wrong_value(
            "model_type_name",
            args.model_type_name,
            f"there are datasets for {', '.join(_DATASETS)}",
            "Pass custom_megatron_datasets_provider_function to MegatronLMPlugin",
        )
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


def _masked(args: Any) -> dict[str, Any]:
    return {
        "masking_probability": args.mask_prob,
        "short_sequence_probability": args.short_seq_prob,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
    }


def _describe_bert(args: Any) -> tuple[type, Any]:
    datasets = library.core("datasets.bert_dataset")
    config = datasets.BERTMaskedWordPieceDatasetConfig(
        classification_head=args.bert_binary_head,
        masking_max_ngram=3,
        masking_use_geometric_distribution=False,
        **_masked(args),
        **_common(args),
    )
    return datasets.BERTMaskedWordPieceDataset, config


def _describe_t5(args: Any) -> tuple[type, Any]:
    datasets = library.core("datasets.t5_dataset")
    common = {**_common(args), "sequence_length": args.encoder_seq_length}
    config = datasets.T5MaskedWordPieceDatasetConfig(
        sequence_length_decoder=args.decoder_seq_length,
        masking_max_ngram=10,
        masking_use_geometric_distribution=True,
        **_masked(args),
        **common,
    )
    return datasets.T5MaskedWordPieceDataset, config


_DATASETS: dict[str, Callable[[Any], tuple[type, Any]]] = {
    "gpt": _describe_gpt,
    "bert": _describe_bert,
    "t5": _describe_t5,
}
