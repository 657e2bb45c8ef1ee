"""Access to the installed Megatron-LM.

The functions check its requirements, initialize it with the arguments of the plugin, and build its models,
optimizers and datasets. The strategy calls them on all ranks, in this order.
"""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from accelerate.base import StateError, environ, wrong_value
from accelerate.logging import get_logger

if TYPE_CHECKING:
    from accelerate.plugins import MegatronLMPlugin

logger = get_logger(__name__)

_FIXES = {
    "megatron.core": "Install it with `pip install megatron-core`",
    "megatron.training": (
        "Install megatron-core 0.17 or newer, which includes it and requires Python 3.12, or clone "
        "https://github.com/NVIDIA/Megatron-LM and put the clone on PYTHONPATH"
    ),
}


QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
BLACKWELL = 10
"""First major compute capability of GPUs that keep the order of kernels in several queues."""


def core(name: str) -> Any:
    """Returns a module of `megatron.core`."""
    return import_module(f"megatron.core.{name}")


def training(name: str) -> Any:
    """Returns a module of `megatron.training`."""
    return import_module(f"megatron.training.{name}")


def get_args() -> Any:
    """Returns the arguments of Megatron-LM as a namespace, after `initialize`."""
    return training("global_vars").get_args()


def find_missing(plugin: MegatronLMPlugin) -> list[str]:
    """Returns one line for each requirement of Megatron-LM that this node does not meet."""
    engine, apex = exists("transformer_engine"), exists("apex")
    uses_context_parallel = (plugin.context_parallel_size or 1) > 1
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
    if uses_context_parallel and not engine:
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
    needs_one_queue = uses_context_parallel or (plugin.tp_degree or 1) > 1
    return problems or _check_queues(bool(plugin.use_custom_fsdp), needs_one_queue)


def _check_queues(uses_megatron_fsdp: bool, needs_one_queue: bool) -> list[str]:
    """Returns one line if the number of hardware queues for kernels is wrong."""
    number = environ.current().get(QUEUES)
    if uses_megatron_fsdp and number == "1":
        return [f"{QUEUES}=1: use_custom_fsdp needs several queues for kernels. Unset it"]
    is_ordered = number == "1" or torch.cuda.get_device_capability()[0] >= BLACKWELL
    if uses_megatron_fsdp or not needs_one_queue or is_ordered:
        return []
    return [
        f"{QUEUES}={number}: tensor and context parallelism of Megatron-LM need one queue for kernels on "
        "this GPU. Set it to 1 before the program starts; `accelerate launch --use_megatron_lm` does"
    ]


def exists(name: str) -> bool:
    """Returns whether a module can be imported."""
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
"""Optional modules, and for each an argument with its value for Megatron-LM without the module."""

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
"""Arguments that the parser of Megatron-LM does not have, and that are read later."""

_SEED_STRIDE_PIPELINE = 100
_SEED_STRIDE_DATA = 10  # both are those of Megatron-LM, so that runs can be compared


def initialize(
    accelerator: Any,
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> None:
    """Initializes Megatron-LM with the arguments of the plugin.

    Called on all ranks, once per process. Megatron-LM does not read the command line, which is that of the
    script.

    Args:
        accelerator: Has `state.megatron_lm_plugin`, with the sizes of model and batches.
        extra_args_provider: Adds arguments to the parser of Megatron-LM.
        args_defaults: Values of arguments that the plugin does not set.

    Raises:
        StateError: Megatron-LM is initialized already.
    """
    if core("parallel_state").model_parallel_is_initialized():
        raise StateError(
            "Megatron-LM runs in this process already, and its state cannot be reset. Prepare everything in "
            "one call of `prepare`, and start another process for another run."
        )
    plugin, arguments = accelerator.state.megatron_lm_plugin, training("arguments")
    script = sys.argv
    sys.argv = script[:1]  # the parser reads it, and the flags are those of the script
    try:
        args = arguments.parse_args(extra_args_provider, ignore_unknown_args=True)
    finally:
        sys.argv = script
    _set_arguments(args, {**(args_defaults or {}), **plugin.megatron_lm_default_args})
    args.rank, args.world_size = accelerator.process_index, accelerator.num_processes
    args.local_rank = accelerator.local_process_index
    arguments.validate_args(args)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = int(-(-args.orig_vocab_size // multiple) * multiple)
    training("global_vars").set_global_variables(args, build_tokenizer=bool(plugin.megatron_dataset_flag))
    finish_mpu_init()


def finish_mpu_init() -> None:
    """Creates the process groups of Megatron-LM and seeds all random generators.

    Called on all ranks.
    """
    args, groups = get_args(), core("parallel_state")
    if not torch.distributed.is_initialized():  # Megatron-LM needs a group for one process, too
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
    seed = args.seed + _SEED_STRIDE_PIPELINE * groups.get_pipeline_model_parallel_rank()
    if args.data_parallel_random_init:
        seed += _SEED_STRIDE_DATA * groups.get_data_parallel_rank()
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
    """Builds the model of this pipeline stage from the arguments.

    Args:
        pre_process: Whether the stage has the embeddings.
        post_process: Whether the stage has the head.
        add_encoder: Whether the stage has the encoder.
        add_decoder: Whether the stage has the decoder.
        **options: Options that some versions of Megatron-LM pass (`config`, `vp_stage`, `pg_collection`).
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
    """Builds the model, optimizer and scheduler of Megatron-LM.

    Called on all ranks.

    Returns:
        The model chunks of this rank, the optimizer and the scheduler.
    """
    plugin, package = accelerator.state.megatron_lm_plugin, training("training")
    given = {
        "model_provider_func": plugin.custom_model_provider_function or model_provider_func,
        "model_type": core("enums").ModelType.encoder_or_decoder,
    }  # passed by name, because versions differ in their order
    if plugin.custom_prepare_model_function is not None:
        chunks = plugin.custom_prepare_model_function()
        model = list(chunks) if isinstance(chunks, (list, tuple)) else [chunks]
    elif plugin.no_wd_decay_cond is not None or plugin.scale_lr_cond is not None:
        model = package.get_model(**given)
    else:
        return package.setup_model_and_optimizer(**given)  # type: ignore[no-any-return]
    optimizer = prepare_optimizer(accelerator, model)
    return model, optimizer, prepare_scheduler(accelerator, optimizer, None)


def prepare_optimizer(accelerator: Any, model: list[nn.Module]) -> Any:
    """Returns the optimizer of Megatron-LM for the wrapped model chunks of this rank."""
    built = training("training").get_megatron_optimizer_config(get_args())
    # Newer versions return a pair of the configuration and its overrides for some parameters.
    config, overrides = built if isinstance(built, tuple) else (built, None)
    overrides = _with_conditions(accelerator.state.megatron_lm_plugin, overrides)
    further = {} if overrides is None else {"config_overrides": overrides}
    return core("optimizer").get_megatron_optimizer(config, model, **further)


def _with_conditions(plugin: MegatronLMPlugin, overrides: dict[Any, Any] | None) -> dict[Any, Any] | None:
    """Returns the overrides of the optimizer configuration with those for the conditions of the plugin."""
    conditions: dict[Any, Any] = {}
    if plugin.no_wd_decay_cond is not None:
        overrides = {key: value for key, value in (overrides or {}).items() if "wd_mult" not in value}
        conditions[_parameter_key(plugin, "no_wd_decay_cond")] = {"wd_mult": 0.0}
    if plugin.scale_lr_cond is not None:
        args, factor = get_args(), plugin.lr_mult
        rates = {"max_lr": args.lr * factor, "min_lr": args.min_lr * factor}
        conditions[_parameter_key(plugin, "scale_lr_cond")] = rates
    return {**(overrides or {}), **conditions} if conditions else overrides


def _parameter_key(plugin: MegatronLMPlugin, name: str) -> Any:
    """Returns the key of Megatron-LM for parameters that meet a condition of the plugin."""
    module, condition = core("optimizer.optimizer_config"), getattr(plugin, name)
    predicate = module.ParamWithNamePredicate(name, lambda parameter, path: condition(path, parameter))
    return module.ParamKey(with_name_predicate=predicate)


def prepare_scheduler(accelerator: object, optimizer: torch.optim.Optimizer, scheduler: object) -> Any:
    """Returns the scheduler of Megatron-LM for its optimizer.

    Args:
        accelerator: Has `state.megatron_lm_plugin`.
        optimizer: The optimizer of Megatron-LM.
        scheduler: The scheduler of the user, whose lengths are in the plugin already.
    """
    return training("training").get_optimizer_param_scheduler(optimizer)


def _set_arguments(args: Namespace, values: Mapping[str, Any]) -> None:
    """Sets arguments of Megatron-LM, with fallbacks for optional modules that are not installed."""
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
    if backend == "local":  # these kernels need both arguments
        args.spec = values.get("spec", ["local"])
        args.transformer_impl = values.get("transformer_impl", "local")
    if values.get("use_custom_fsdp") and "ckpt_format" not in values:
        args.ckpt_format = "fsdp_dtensor"  # the only format of Megatron's own FSDP
    for module, name, value in _KERNELS:
        if name not in values and not exists(module):
            setattr(args, name, value)
    if unknown:
        logger.warning(
            f"This Megatron-LM has no arguments {', '.join(unknown)}: they are set, and may have no effect."
        )


# Models and datasets of each model family


def _build_gpt(args: Namespace, config: object, uses_engine: bool, common: dict[str, Any]) -> Any:
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


def _build_bert(args: Namespace, config: object, uses_engine: bool, common: dict[str, Any]) -> Any:
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
"""Model family -> module and class of its datasets, whose configuration class ends in "Config"."""


def build_datasets(train_val_test_num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Builds the datasets for training, validation and test, on all ranks."""
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

    def reads_data() -> bool:
        is_end = groups.is_pipeline_first_stage() or groups.is_pipeline_last_stage()
        return bool(is_end and groups.get_tensor_model_parallel_rank() == 0)

    builder = core("datasets.blended_megatron_dataset_builder").BlendedMegatronDatasetBuilder
    return builder(getattr(module, name), train_val_test_num_samples, reads_data, config).build()


def _dataset_options(args: Namespace) -> dict[str, Any]:
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
        return {**options, "create_attention_mask": False}  # the train step computes it
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
