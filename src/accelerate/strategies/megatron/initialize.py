"""Start Megatron-LM from the plugin: arguments, groups, seeds, model, optimizer and scheduler."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import nn

from accelerate.base import StateError
from accelerate.logging import get_logger
from accelerate.strategies.megatron import library
from accelerate.strategies.megatron.families import build_model

logger = get_logger(__name__)

_RENAMED = {"use_custom_fsdp": "use_megatron_fsdp"}
"""Arguments that have another name in newer versions."""

_KERNELS: tuple[tuple[str, str, Any], ...] = (
    ("transformer_engine", "transformer_impl", "local"),
    ("transformer_engine", "apply_rope_fusion", False),
    ("apex", "no_persist_layer_norm", True),
    ("fused_weight_gradient_mlp_cuda", "gradient_accumulation_fusion", False),
    ("scaled_masked_softmax_cuda", "masked_softmax_fusion", False),
)
"""Modules that may be missing, and the values of the arguments by which Megatron-LM does without them."""

_COMPANIONS: dict[Any, dict[str, Any]] = {"local": {"spec": ["local"], "transformer_impl": "local"}}
"""Attention kernels -> further arguments without which Megatron-LM refuses them."""

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

_GROUPS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "hierarchical_context_parallel_sizes",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "num_distributed_optimizer_instances",
    "pipeline_model_parallel_comm_backend",
    "nccl_communicator_config_path",
    "distributed_timeout_minutes",
)
"""Arguments that say how processes are grouped."""

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
    if library.is_running():
        raise StateError(
            "Megatron-LM runs in this process already, and keeps its state there. Prepare everything in "
            "one call of `prepare`, and start another process for another run."
        )
    plugin, arguments = accelerator.state.megatron_lm_plugin, library.training("arguments")
    with _without_command_line():
        args = arguments.parse_args(extra_args_provider, ignore_unknown_args=True)
    _lay_over(args, {**(args_defaults or {}), **plugin.megatron_lm_default_args})
    args.rank, args.world_size = accelerator.process_index, accelerator.num_processes
    args.local_rank = accelerator.local_process_index
    arguments.validate_args(args)
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    args.padded_vocab_size = int(-(-args.orig_vocab_size // multiple) * multiple)
    own_data = bool(plugin.megatron_dataset_flag)
    library.training("global_vars").set_global_variables(args, build_tokenizer=own_data)
    finish_mpu_init()


def finish_mpu_init() -> None:
    """Set up the process groups of Megatron-LM and seed all generators; called on all ranks."""
    args, groups = library.get_args(), library.core("parallel_state")
    if not torch.distributed.is_initialized():  # one process, which needs a group all the same
        torch.distributed.init_process_group(
            "nccl" if torch.cuda.is_available() and torch.distributed.is_nccl_available() else "gloo",
            store=torch.distributed.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
        )
    if not groups.model_parallel_is_initialized():
        known = signature(groups.initialize_model_parallel).parameters
        given = {name: getattr(args, name) for name in _GROUPS if name in known and hasattr(args, name)}
        if getattr(args, "use_tp_pp_dp_mapping", False):
            given["order"] = "tp-cp-ep-pp-dp"
        groups.initialize_model_parallel(**given)
    _seed(args, groups)


def _seed(args: Any, groups: Any) -> None:
    seed = args.seed + _SEEDS_BETWEEN_STAGES * groups.get_pipeline_model_parallel_rank()
    if args.data_parallel_random_init:
        seed += _SEEDS_BETWEEN_COPIES * groups.get_data_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    library.core("tensor_parallel.random").model_parallel_cuda_manual_seed(seed)
    if getattr(args, "num_experts", None) is not None:
        scaler = library.core("transformer.moe.moe_utils").MoEAuxLossAutoScaler
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
    return build_model(library.get_args(), pre_process, post_process, add_encoder, add_decoder, **options)


def prepare_model_optimizer_scheduler(accelerator: Any) -> tuple[list[nn.Module], Any, Any]:
    """Let Megatron-LM build its model, optimizer and scheduler; called on all ranks.

    Args:
        accelerator: has `state.megatron_lm_plugin`.

    Returns:
        The parts of the model on this process, its optimizer and its scheduler.
    """
    plugin, training = accelerator.state.megatron_lm_plugin, library.training("training")
    given = {
        "model_provider_func": plugin.custom_model_provider_function or model_provider_func,
        "model_type": library.core("enums").ModelType.encoder_or_decoder,
    }  # by name: versions differ in their order
    if plugin.custom_prepare_model_function is not None:
        parts = plugin.custom_prepare_model_function()
        model = list(parts) if isinstance(parts, (list, tuple)) else [parts]
    elif plugin.no_wd_decay_cond is not None or plugin.scale_lr_cond is not None:
        model = training.get_model(**given)
    else:
        model, optimizer, scheduler = training.setup_model_and_optimizer(**given)
        return model, optimizer, scheduler
    optimizer = prepare_optimizer(accelerator, model)
    return model, optimizer, prepare_scheduler(accelerator, optimizer, None)


def prepare_optimizer(accelerator: Any, model: list[nn.Module]) -> Any:
    """Return Megatron-LM's optimizer for a model that is wrapped already.

    Args:
        accelerator: has `state.megatron_lm_plugin`.
        model: its parts on this process.
    """
    built = library.training("training").get_megatron_optimizer_config(library.get_args())
    # Newer versions return what differs from parameter to parameter apart.
    config, overrides = built if isinstance(built, tuple) else (built, None)
    overrides = _with_conditions(accelerator.state.megatron_lm_plugin, overrides)
    further = {} if overrides is None else {"config_overrides": overrides}
    return library.core("optimizer").get_megatron_optimizer(config, model, **further)


def _with_conditions(plugin: Any, overrides: dict[Any, Any] | None) -> dict[Any, Any] | None:
    """Return what differs from parameter to parameter, with what the user's own conditions say."""
    conditions: dict[Any, Any] = {}
    if plugin.no_wd_decay_cond is not None:
        overrides = {key: value for key, value in (overrides or {}).items() if "wd_mult" not in value}
        conditions[_key("no_wd_decay_cond", plugin.no_wd_decay_cond)] = {"wd_mult": 0.0}
    if plugin.scale_lr_cond is not None:
        args, factor = library.get_args(), plugin.lr_mult
        rates = {"max_lr": args.lr * factor, "min_lr": args.min_lr * factor}
        conditions[_key("scale_lr_cond", plugin.scale_lr_cond)] = rates
    return {**(overrides or {}), **conditions} if conditions else overrides


def _key(name: str, condition: Callable[[str, Any], bool]) -> Any:
    """Return Megatron-LM's key for the parameters that meet a condition on name and parameter."""
    module = library.core("optimizer.optimizer_config")
    predicate = module.ParamWithNamePredicate(
        name=name, fn=lambda parameter, path: condition(path, parameter)
    )
    return module.ParamKey(with_name_predicate=predicate)


def prepare_scheduler(accelerator: Any, optimizer: Any, scheduler: Any) -> Any:
    """Return the scheduler of Megatron-LM for an optimizer of its own.

    Args:
        accelerator: has `state.megatron_lm_plugin`.
        optimizer: Megatron-LM's.
        scheduler: what the user gave; the plugin has its lengths already.
    """
    return library.training("training").get_optimizer_param_scheduler(optimizer)


@contextmanager
def _without_command_line() -> Iterator[None]:
    """Keep the script's own flags from Megatron-LM's parser, which reads `sys.argv`."""
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments


def _lay_over(args: Any, values: Mapping[str, Any]) -> None:
    unknown = [name for name in values if not hasattr(args, name) and name not in _SET_LATER]
    for name, value in values.items():
        setattr(args, name, value)
        newer = _RENAMED.get(name)
        if newer is not None and hasattr(args, newer):
            setattr(args, newer, value)
            unknown = [argument for argument in unknown if argument != name]
    backend = values.get("attention_backend")
    if isinstance(backend, str):
        args.attention_backend = library.core("transformer.enums").AttnBackend[backend]
    for name, value in _COMPANIONS.get(backend, {}).items():
        setattr(args, name, values.get(name, value))
    if values.get("use_custom_fsdp") and "ckpt_format" not in values:
        args.ckpt_format = "fsdp_dtensor"  # the only one that Megatron's own FSDP has
    for module, name, value in _KERNELS:
        if name not in values and not library.exists(module):
            setattr(args, name, value)
    if unknown:
        logger.warning(
            f"This Megatron-LM has no arguments {', '.join(unknown)}: they are set, and maybe never read."
        )
