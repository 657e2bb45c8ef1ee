"""Arguments: defaults, what follows from them, and the configuration of a model."""

import argparse
import dataclasses
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn import functional as F

DEFAULTS: dict[str, Any] = {
    "accumulate_allreduce_grads_in_fp32": False,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "attention_backend": None,
    "attention_dropout": 0.1,
    "attention_softmax_in_fp32": False,
    "bert_binary_head": True,
    "bf16": False,
    "calculate_per_token_loss": False,
    "clip_grad": 1.0,
    "consumed_train_samples": 0,
    "consumed_valid_samples": 0,
    "context_parallel_size": 1,
    "data_cache_path": None,
    "data_parallel_random_init": False,
    "data_path": None,
    "decoder_last_pipeline_num_layers": None,
    "decoder_num_layers": None,
    "decoder_seq_length": None,
    "distributed_timeout_minutes": 10,
    "encoder_num_layers": None,
    "encoder_seq_length": None,
    "end_weight_decay": None,
    "eod_mask_loss": False,
    "eval_interval": 1000,
    "eval_iters": 100,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "ffn_hidden_size": None,
    "fp16": False,
    "fp16_lm_cross_entropy": False,
    "global_batch_size": None,
    "group_query_attention": False,
    "hidden_dropout": 0.1,
    "hidden_size": None,
    "initial_loss_scale": 2**16,
    "kv_channels": None,
    "load": None,
    "log_interval": 100,
    "lr": None,
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_decay_style": "linear",
    "lr_warmup_fraction": None,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "make_vocab_size_divisible_by": 128,
    "mask_prob": 0.15,
    "max_position_embeddings": None,
    "micro_batch_size": None,
    "min_lr": 0.0,
    "mock_data": False,
    "moe_layer_freq": 1,
    "no_load_optim": None,
    "no_save_optim": None,
    "norm_epsilon": 1e-5,
    "normalization": "LayerNorm",
    "num_attention_heads": None,
    "num_experts": None,
    "num_layers": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_query_groups": 1,
    "optimizer": "adam",
    "optimizer_cpu_offload": False,
    "overlap_cpu_optimizer_d2h_h2d": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "pipeline_model_parallel_size": 1,
    "position_embedding_type": "learned_absolute",
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "relative_attention_max_distance": 128,
    "relative_attention_num_buckets": 32,
    "reset_attention_mask": False,
    "reset_position_ids": False,
    "rope_scaling_factor": 8.0,
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "save": None,
    "seed": 1234,
    "seq_length": None,
    "sequence_parallel": False,
    "sgd_momentum": 0.9,
    "short_seq_prob": 0.1,
    "split": "100,0,0",
    "start_weight_decay": None,
    "swiglu": False,
    "tensor_model_parallel_size": 1,
    "tensorboard_log_interval": 1,
    "test_data_path": None,
    "tokenizer_type": None,
    "train_data_path": None,
    "train_iters": None,
    "train_samples": None,
    "transformer_impl": "transformer_engine",
    "untie_embeddings_and_output_weights": False,
    "use_distributed_optimizer": False,
    "use_megatron_fsdp": False,
    "use_precision_aware_optimizer": False,
    "use_rope_scaling": False,
    "use_rotary_position_embeddings": False,
    "valid_data_path": None,
    "virtual_pipeline_model_parallel_size": None,
    "weight_decay": 0.01,
    "weight_decay_incr_style": "constant",
    "qk_layernorm": False,
}


def parse_args(extra_args_provider: Any = None, ignore_unknown_args: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--seed", type=int)
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    found, unknown = parser.parse_known_args()
    assert not unknown, f"arguments of the script came to the parser: {unknown}"
    assert found.seed is None
    given = {name: value for name, value in vars(found).items() if name != "seed"}
    return argparse.Namespace(**{**DEFAULTS, **given})


def validate_args(args: Any, defaults: Any = {}) -> None:  # noqa: B006  # as it is called
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    assert args.world_size % model == 0
    args.data_parallel_size = args.world_size // model
    args.params_dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    if args.num_layers_per_virtual_pipeline_stage is not None:
        stage = args.num_layers // args.pipeline_model_parallel_size
        args.virtual_pipeline_model_parallel_size = stage // args.num_layers_per_virtual_pipeline_stage
    if args.weight_decay_incr_style == "constant":
        assert args.start_weight_decay is None
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    if args.train_iters:
        assert not args.train_samples
        assert args.lr_warmup_samples == 0
    if args.encoder_seq_length is None:
        args.encoder_seq_length = args.seq_length
    else:
        args.seq_length = args.encoder_seq_length
    args.encoder_num_layers = args.num_layers
    assert args.lr >= args.min_lr
    assert args.max_position_embeddings >= args.seq_length


def core_transformer_config_from_args(args: Any) -> TransformerConfig:
    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    values = {name: value for name, value in vars(args).items() if name in names and value is not None}
    values.update(
        layernorm_epsilon=args.norm_epsilon,
        num_moe_experts=args.num_experts,
        pipeline_dtype=args.params_dtype,
        num_layers_in_last_pipeline_stage=args.decoder_last_pipeline_num_layers,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        deallocate_pipeline_outputs=True,
        batch_p2p_comm=True,
    )
    if args.swiglu:
        values.update(activation_func=F.silu, gated_linear_unit=True)
    return TransformerConfig(**values)
