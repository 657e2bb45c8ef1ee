"""Megatron-LM itself: its modules and what is missing of them, its start, its models and datasets."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn

from accelerate.base import StateError, environ, wrong_value
from accelerate.logging import get_logger

logger = get_logger(__name__)

_FIXES = {
    "megatron.core": "Install it with `pip install megatron-core`",
    "megatron.training": (
        "Install megatron-core 0.17 or newer, which has it and wants Python 3.12, or clone "
        "https://github.com/NVIDIA/Megatron-LM and put the clone on PYTHONPATH"
    ),
}


QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = 10
"""The first of NVIDIA's GPUs, by compute capability, that keeps the order of kernels in several queues."""


def core(name: str) -> Any:
    """Return a module of `megatron.core`."""
    return import_module(f"megatron.core.{name}")


def training(name: str) -> Any:
    """Return a module of `megatron.training`."""
    return import_module(f"megatron.training.{name}")


def get_args() -> Any:
    """Return the arguments of the running Megatron-LM, a namespace."""
    return training("global_vars").get_args()


def find_missing(plugin: Any) -> list[str]:
    """Return what this machine lacks for Megatron-LM, one line each."""
    engine, apex = exists("transformer_engine"), exists("apex")
    shares = (plugin.context_parallel_size or 1) > 1
    problems = [f"{name} cannot be imported. {fix}" for name, fix in _FIXES.items() if not exists(name)]
    if not torch.cuda.is_available():
        problems.append(
            "Megatron-LM computes on CUDA devices, and there is none. Run it on a machine with one"
        )
    if plugin.sequence_parallelism and not (engine or apex):
        problems.append(
            "sequence_parallelism=True: the layers for it are in Transformer Engine and in Apex, and neither "
            "can be imported. Install Transformer Engine"
        )
    if shares and not engine:
        problems.append(
            f"context_parallel_size={plugin.context_parallel_size}: the layers for it are in Transformer "
            "Engine, which cannot be imported. Install it"
        )
    if plugin.use_precision_aware_optimizer and not engine:
        problems.append(
            "use_precision_aware_optimizer=True: its Adam is that of Transformer Engine, which cannot be "
            "imported. Install it"
        )
    if plugin.use_custom_fsdp and not exists("einops"):
        problems.append("use_custom_fsdp=True: Megatron's own FSDP needs einops. Run `pip install einops`")
    return problems or _wrong_queues(bool(plugin.use_custom_fsdp), shares or (plugin.tp_degree or 1) > 1)


def _wrong_queues(own_fsdp: bool, shares: bool) -> list[str]:
    """Return what is wrong with the number of queues by which kernels come to a GPU."""
    number = environ.current().get(QUEUES)
    if own_fsdp and number == "1":
        return [f"{QUEUES}=1: use_custom_fsdp wants kernels to come in several queues. Unset it"]
    if own_fsdp or not shares or number == "1" or torch.cuda.get_device_capability()[0] >= BLACKWELL:
        return []
    return [
        f"{QUEUES}={number}: Megatron-LM shares layers and sequences on this GPU only where kernels come in "
        "one queue. Set it to 1 before the program starts; `accelerate launch --use_megatron_lm` does"
    ]


def exists(name: str) -> bool:
    """Whether a module can be imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


_KERNELS: tuple[tuple[str, str, Any], ...] = (
    ("transformer_engine", "transformer_impl", "local"),
    ("transformer_engine", "apply_rope_fusion", False),
    ("apex", "no_persist_layer_norm", True),
    ("fused_weight_gradient_mlp_cuda", "gradient_accumulation_fusion", False),
    ("scaled_masked_softmax_cuda", "masked_softmax_fusion", False),
)
"""Modules that may be missing, and the values of the arguments by which Megatron-LM does without them."""

_SET_LATER = frozenset(
    {
        "data_parallel_size",
        "eos_token_id",
        "megatron_dataset_flag",
        "model_return_dict",
        "model_type_name",
        "no_wd_decay_cond",
        "num_labels",
        "num_micro_batches",
        "orig_vocab_size",
        "original_model_type",
        "pad_token_id",
        "padded_vocab_size",
        "pretraining_flag",
        "return_logits",
        "scale_lr_cond",
        "lr_mult",
        "consumed_samples",
    }
)
"""Arguments that Megatron-LM's parser does not know, and we or it read later."""

_SEEDS_BETWEEN_STAGES = 100
_SEEDS_BETWEEN_COPIES = 10  # both are Megatron-LM's, so that runs can be compared


def initialize(
    accelerator: Any,
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> None:
    """Start Megatron-LM; called on all ranks, once in a process.

    Its arguments come from the plugin alone: the command line is the script's.

    Args:
        accelerator: has `state.megatron_lm_plugin`, with the sizes of model and batches.
        extra_args_provider: adds arguments to Megatron-LM's parser.
        args_defaults: values of arguments that the plugin does not set.

    Raises:
        StateError: it runs already.
    """
    if core("parallel_state").model_parallel_is_initialized():
        raise StateError(
            "Megatron-LM runs in this process already, and keeps its state there. Prepare everything in "
            "one call of `prepare`, and start another process for another run."
        )
    plugin, arguments = accelerator.state.megatron_lm_plugin, training("arguments")
    script = sys.argv
    sys.argv = script[:1]  # the parser reads it, and the flags are the script's own
    try:
        args = arguments.parse_args(extra_args_provider, ignore_unknown_args=True)
    finally:
        sys.argv = script
    _lay_over(args, {**(args_defaults or {}), **plugin.megatron_lm_default_args})
    args.rank, args.world_size = accelerator.process_index, accelerator.num_processes
    args.local_rank = accelerator.local_process_index
    arguments.validate_args(args)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = int(-(-args.orig_vocab_size // multiple) * multiple)
    training("global_vars").set_global_variables(args, build_tokenizer=bool(plugin.megatron_dataset_flag))
    finish_mpu_init()


def finish_mpu_init() -> None:
    """Set up the process groups of Megatron-LM and seed all generators; called on all ranks."""
    args, groups = get_args(), core("parallel_state")
    if not torch.distributed.is_initialized():  # one process, which needs a group all the same
        torch.distributed.init_process_group(
            "nccl" if torch.cuda.is_available() and torch.distributed.is_nccl_available() else "gloo",
            store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )
    if not groups.model_parallel_is_initialized():
        known = signature(groups.initialize_model_parallel).parameters
        given = {name: getattr(args, name) for name in known if hasattr(args, name)}
        if getattr(args, "use_tp_pp_dp_mapping", False):
            given["order"] = "tp-cp-ep-pp-dp"
        groups.initialize_model_parallel(**given)
    seed = args.seed + _SEEDS_BETWEEN_STAGES * groups.get_pipeline_model_parallel_rank()
    if args.data_parallel_random_init:
        seed += _SEEDS_BETWEEN_COPIES * groups.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    core("tensor_parallel.random").model_parallel_cuda_manual_seed(seed)
    if getattr(args, "num_experts", None) is not None:
        scaler = core("transformer.moe.moe_utils").MoEAuxLossAutoScaler
        scaler.set_loss_scale(torch.ones(1, device=torch.cuda.current_device()))


def model_provider_func(
    pre_process: bool = True,
    post_process: bool = True,
    add_encoder: bool = True,
    add_decoder: bool = True,
    **options: Any,
) -> nn.Module:
    """Build the part of the model that this process trains, as the arguments describe it.

    Args:
        pre_process: whether the part has the embeddings.
        post_process: whether it has the head.
        add_encoder: whether it has the encoder.
        add_decoder: whether it has the decoder.
        **options: further ones that versions of Megatron-LM pass (`config`, `vp_stage`, `pg_collection`).
    """
    args = get_args()
    builder = _BUILDERS.get(args.model_type_name)
    if builder is None:
        reason = f"there are models for {', '.join(_BUILDERS)}"
        fix = "Pass custom_model_provider_function to MegatronLMPlugin"
        raise wrong_value("model_type_name", args.model_type_name, reason, fix)
    config = options.pop("config", None)
    if config is None:
        config = training("arguments").core_transformer_config_from_args(args)
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


def prepare_model_optimizer_scheduler(accelerator: Any) -> tuple[list[nn.Module], Any, Any]:
    """Let Megatron-LM build its model, optimizer and scheduler; called on all ranks.

    Returns:
        The parts of the model on this process, its optimizer and its scheduler.
    """
    plugin, package = accelerator.state.megatron_lm_plugin, training("training")
    given = {
        "model_provider_func": plugin.custom_model_provider_function or model_provider_func,
        "model_type": core("enums").ModelType.encoder_or_decoder,
    }  # by name: versions differ in their order
    if plugin.custom_prepare_model_function is not None:
        parts = plugin.custom_prepare_model_function()
        model = list(parts) if isinstance(parts, (list, tuple)) else [parts]
    elif plugin.no_wd_decay_cond is not None or plugin.scale_lr_cond is not None:
        model = package.get_model(**given)
    else:
        return package.setup_model_and_optimizer(**given)  # type: ignore[no-any-return]
    optimizer = prepare_optimizer(accelerator, model)
    return model, optimizer, prepare_scheduler(accelerator, optimizer, None)


def prepare_optimizer(accelerator: Any, model: list[nn.Module]) -> Any:
    """Return Megatron-LM's optimizer for a model that is wrapped already."""
    built = training("training").get_megatron_optimizer_config(get_args())
    # Newer versions return what differs from parameter to parameter apart.
    config, overrides = built if isinstance(built, tuple) else (built, None)
    overrides = _with_conditions(accelerator.state.megatron_lm_plugin, overrides)
    further = {} if overrides is None else {"config_overrides": overrides}
    return core("optimizer").get_megatron_optimizer(config, model, **further)


def _with_conditions(plugin: Any, overrides: dict[Any, Any] | None) -> dict[Any, Any] | None:
    """Return what differs from parameter to parameter, with what the user's own conditions say."""
    conditions: dict[Any, Any] = {}
    if plugin.no_wd_decay_cond is not None:
        overrides = {key: value for key, value in (overrides or {}).items() if "wd_mult" not in value}
        conditions[_key(plugin, "no_wd_decay_cond")] = {"wd_mult": 0.0}
    if plugin.scale_lr_cond is not None:
        args, factor = get_args(), plugin.lr_mult
        rates = {"max_lr": args.lr * factor, "min_lr": args.min_lr * factor}
        conditions[_key(plugin, "scale_lr_cond")] = rates
    return {**(overrides or {}), **conditions} if conditions else overrides


def _key(plugin: Any, name: str) -> Any:
    """Return Megatron-LM's key for the parameters that meet a condition of the plugin."""
    module, condition = core("optimizer.optimizer_config"), getattr(plugin, name)
    predicate = module.ParamWithNamePredicate(name, lambda parameter, path: condition(path, parameter))
    return module.ParamKey(with_name_predicate=predicate)


def prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> Any:
    """Return the scheduler of Megatron-LM for an optimizer of its own.

    Args:
        accelerator: has `state.megatron_lm_plugin`.
        optimizer: Megatron-LM's.
        scheduler: what the user gave; the plugin has its lengths already.
    """
    return training("training").get_optimizer_param_scheduler(optimizer)


def _lay_over(args: Any, values: Mapping[str, Any]) -> None:
    known = _SET_LATER
    if "use_custom_fsdp" in values and hasattr(args, "use_megatron_fsdp"):  # its newer name
        args.use_megatron_fsdp = values["use_custom_fsdp"]
        known = known | {"use_custom_fsdp"}
    unknown = [name for name in values if not hasattr(args, name) and name not in known]
    for name, value in values.items():
        setattr(args, name, value)
    backend = values.get("attention_backend")
    if isinstance(backend, str):
        args.attention_backend = core("transformer.enums").AttnBackend[backend]
    if backend == "local":  # Megatron-LM refuses these kernels without both
        args.spec = values.get("spec", ["local"])
        args.transformer_impl = values.get("transformer_impl", "local")
    if values.get("use_custom_fsdp") and "ckpt_format" not in values:
        args.ckpt_format = "fsdp_dtensor"  # the only one that Megatron's own FSDP has
    for module, name, value in _KERNELS:
        if name not in values and not exists(module):
            setattr(args, name, value)
    if unknown:
        logger.warning(
            f"This Megatron-LM has no arguments {', '.join(unknown)}: they are set, and maybe never read."
        )


# Models and datasets of each family


def _build_gpt(args: Any, config: Any, uses_engine: bool, common: dict[str, Any]) -> Any:
    stage = {"vp_stage": common["vp_stage"]} if "vp_stage" in common else {}
    layers = core("models.gpt.gpt_layer_specs").get_gpt_decoder_block_spec(
        config, use_transformer_engine=uses_engine, normalization=args.normalization, **stage
    )
    return core("models.gpt").GPTModel(
        transformer_layer_spec=layers,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        **common,
    )


def _build_bert(args: Any, config: Any, uses_engine: bool, common: dict[str, Any]) -> Any:
    specs = core("models.bert.bert_layer_specs")
    get_engine_spec = specs.get_bert_layer_with_transformer_engine_spec
    layer = get_engine_spec() if uses_engine else specs.bert_layer_local_spec
    return core("models.bert.bert_model").BertModel(
        transformer_layer_spec=layer,
        num_tokentypes=2 if args.bert_binary_head else 0,
        add_binary_head=args.bert_binary_head,
        **common,
    )


def _build_t5(args: Any, config: Any, uses_engine: bool, common: dict[str, Any]) -> Any:
    specs = core("models.T5.t5_spec")
    kind = "transformer_engine" if uses_engine else "local"
    encoder_config = deepcopy(config)
    encoder_config.num_layers = args.encoder_num_layers or args.num_layers
    config.num_layers = args.decoder_num_layers or args.num_layers
    encoder_layers = getattr(specs, f"get_t5_encoder_with_{kind}_block_spec")(encoder_config.num_layers)
    decoder_layers = getattr(specs, f"get_t5_decoder_with_{kind}_block_spec")(config.num_layers)
    return core("models.T5").T5Model(
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


_DATASETS = {
    "gpt": ("gpt_dataset", "GPTDataset"),
    "bert": ("bert_dataset", "BERTMaskedWordPieceDataset"),
    "t5": ("t5_dataset", "T5MaskedWordPieceDataset"),
}
"""Family -> module and class of its datasets; the class of their configuration ends in "Config"."""


def build_datasets(train_val_test_num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Build the datasets for training, validation and test; called on all ranks."""
    args = get_args()
    if args.model_type_name not in _DATASETS:
        reason = f"there are datasets for {', '.join(_DATASETS)}"
        fix = "Pass custom_megatron_datasets_provider_function to MegatronLMPlugin"
        raise wrong_value("model_type_name", args.model_type_name, reason, fix)
    file, name = _DATASETS[args.model_type_name]
    module, groups = core(f"datasets.{file}"), core("parallel_state")
    config = getattr(module, f"{name}Config")(**_dataset_options(args))
    if name == "GPTDataset" and getattr(args, "mock_data", False):
        name = "MockGPTDataset"

    def reads() -> bool:
        is_end = groups.is_pipeline_first_stage() or groups.is_pipeline_last_stage()
        return bool(is_end and groups.get_tensor_model_parallel_rank() == 0)

    builder = core("datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    return builder(getattr(module, name), train_val_test_num_samples, reads, config).build()


def _dataset_options(args: Any) -> dict[str, Any]:
    blend = core("datasets.utils").get_blend_from_list
    paths = (args.train_data_path, args.valid_data_path, args.test_data_path)
    options = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend(args.data_path),
        "blend_per_split": [blend(path) for path in paths] if any(paths) else None,
        "split": args.split,
        "path_to_cache": args.data_cache_path,
        "tokenizer": training("global_vars").get_tokenizer(),
    }
    if args.model_type_name == "gpt":
        names = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        options.update({name: getattr(args, name) for name in names})
        return {**options, "create_attention_mask": False}  # the train step makes it
    is_t5 = args.model_type_name == "t5"
    options.update(
        masking_max_ngram=10 if is_t5 else 3,
        masking_use_geometric_distribution=is_t5,
        masking_probability=args.mask_prob,
        short_sequence_probability=args.short_seq_prob,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
    )
    if not is_t5:
        return {**options, "classification_head": args.bert_binary_head}
    options.update(sequence_length=args.encoder_seq_length, sequence_length_decoder=args.decoder_seq_length)
    return options
