"""Plugin with the options of Megatron-LM, which it converts to the arguments of that library.

Users pass it to `Accelerator`. `strategies/megatron` reads it when objects are prepared. Source: the
arguments of https://github.com/NVIDIA/Megatron-LM (megatron/training/arguments.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from accelerate.base import environ, shown, wrong_value
from accelerate.plugins.checks import fill, plain_fields
from accelerate.plugins.megatron_models import MODEL_CONFIGS_TO_MEGATRON_PARSERS
from accelerate.settings import read_with_problems, refuse_all
from accelerate.settings.sections import MegatronSection

if TYPE_CHECKING:
    import torch
    from torch import nn

_DEFAULTS: dict[str, Any] = {
    **{row.field: row.default for row in MegatronSection.options() if row.default is not None},
    "num_micro_batches": 1,
    **dict.fromkeys(("sequence_parallelism", "recompute_activations", "use_distributed_optimizer"), False),
    **dict.fromkeys(
        ("expert_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size"), 1
    ),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0),
    **dict.fromkeys(("attention_softmax_in_fp32", "calculate_per_token_loss"), True),
}
"""Defaults of fields. Other fields stay None and have the value of the model or of Megatron-LM."""

_ARGUMENTS = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}
"""Fields -> their argument of Megatron-LM, if it has another name."""

_PASSED = (
    *(row.field for row in MegatronSection.options() if row.field != "recompute_activations"),
    "num_layers_per_virtual_pipeline_stage",
    "consumed_samples",
    "no_wd_decay_cond",
    "scale_lr_cond",
    "lr_mult",
    "megatron_dataset_flag",
    "eval_iters",
    "eval_interval",
)
"""Fields that are passed to Megatron-LM unchanged."""

_LOGGING = {
    "log_params_norm": True,
    "log_num_zeros_in_grad": True,
    "log_timers_to_tensorboard": True,
    "log_validation_ppl_to_tensorboard": True,
    "log_memory_to_tensorboard": True,
    "log_world_size_to_tensorboard": True,
    "log_learning_rate_to_tensorboard": True,
    "log_loss_scale_to_tensorboard": True,
    "tensorboard_log_interval": 1,
    "tensorboard_queue_size": 1000,
    "timing_log_level": 0,
}
"""All logging options of Megatron-LM. Options that are set already keep their values."""

_OPTIMIZERS: dict[str, dict[str, str]] = {"adam": {"adam_eps": "eps"}, "sgd": {"sgd_momentum": "momentum"}}
"""Optimizers of Megatron-LM -> their arguments -> names of these in torch's optimizer."""


_MAY_BE_ZERO = ("pipeline_model_parallel_split_rank", "lr_warmup_iters", "lr_warmup_samples")
"""Integer fields that may be 0 or are never accepted. The others are at least 1."""

_FRACTIONS = ("attention_dropout", "hidden_dropout", "lr_warmup_fraction")

_CHOICES = {
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "weight_decay_incr_style": ("constant", "linear", "cosine"),
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
}

_REQUIREMENTS = (
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
"""Fields, the other field that each requires, and the reason."""

_WSD = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")

_EXCLUSIVE: tuple[tuple[str, str], ...] = (
    ("train_iters", "train_samples"),
    ("train_iters", "lr_decay_samples"),
    ("train_iters", "lr_warmup_samples"),
    ("train_samples", "lr_decay_iters"),
    ("train_samples", "lr_warmup_iters"),
    ("lr_warmup_iters", "lr_warmup_fraction"),
    ("lr_warmup_samples", "lr_warmup_fraction"),
)
"""Pairs of fields that are the same quantity in different units."""


@dataclass
class MegatronLMPlugin:
    """Options of training with Megatron-LM.

    Fields that are None are read from the environment when the object is built. Their variable, which the
    launcher sets, is MEGATRON_LM_ with the name in capitals. Fields are read when objects are prepared, so
    they can be changed until then.

    Args:
        tp_degree: Tensor-parallel size. Default: 1.
        pp_degree: Number of pipeline stages. Default: 1.
        use_custom_fsdp: Whether the FSDP of Megatron-LM shards parameters. Default: False.
        overlap_cpu_optimizer_d2h_h2d: Whether copies of an offloaded optimizer overlap. Default: False.
        no_load_optim: Whether checkpoints are loaded without the optimizer. Default: False.
        eod_mask_loss: Whether the loss ignores end-of-document tokens. Default: False.
        no_save_optim: Whether checkpoints are saved without the optimizer. Default: False.
        optimizer_cpu_offload: Whether the optimizer runs on the CPU. Default: False.
        use_precision_aware_optimizer: Whether optimizer states may have low precision. Default: False.
        decoder_last_pipeline_num_layers: Number of layers of the last stage. Default: all stages have the
            same number.
        recompute_granularity: Activations that are recomputed in backward, "full" or "selective".
            Default: none.
        recompute_method: Selection of layers with "full", "uniform" or "block".
        recompute_num_layers: Number of layers that are recomputed together.
        attention_backend: "flash", "fused", "unfused", "local" or "auto". True is "auto".
        expert_model_parallel_size: Number of ranks that the experts of a layer are distributed over.
            Default: 1.
        context_parallel_size: Number of ranks that each sequence is sharded across. Default: 1.
        attention_dropout: Dropout probability of attention weights. Default: 0.
        hidden_dropout: Dropout probability of hidden states. Default: 0.
        attention_softmax_in_fp32: Whether softmax is computed in float32. Default: True.
        expert_tensor_parallel_size: Number of ranks that each expert is sharded across. Default: 1.
        calculate_per_token_loss: Whether the loss is a mean over all tokens of a step, and not over
            micro-batches. Default: True.
        use_rotary_position_embeddings: Whether position embeddings are rotary. Default: those of the model.
        num_micro_batches: Number of micro-batches of one step, which replace gradient accumulation.
            Default: 1.
        gradient_clipping: Maximum norm of the gradients, 0 for no limit. Default: 1.
        sequence_parallelism: Whether sequences are sharded between tensor-parallel layers. Default: False.
        recompute_activations: Short for `recompute_granularity="selective"`.
        use_distributed_optimizer: Whether optimizer states are sharded across data-parallel ranks.
            Default: False.
        pipeline_model_parallel_split_rank: Not accepted, because Megatron-LM no longer splits the encoder
            from the decoder.
        num_layers_per_virtual_pipeline_stage: Number of layers of a virtual pipeline stage, for interleaved
            schedules.
        is_train_batch_min: Whether the micro-batch size is the smallest batch size of the prepared loaders
            instead of the largest.
        train_iters: Number of steps of the whole training.
        train_samples: Number of samples of the whole training, instead of steps.
        weight_decay_incr_style: "constant", "linear" or "cosine".
        start_weight_decay: Weight decay at the beginning.
        end_weight_decay: Weight decay at the end.
        lr_decay_style: "constant", "linear", "cosine", "inverse-square-root" or "WSD".
        lr_decay_iters: Number of steps over which the learning rate decays.
        lr_decay_samples: The same number in samples.
        lr_warmup_iters: Number of steps over which the learning rate rises first.
        lr_warmup_samples: The same number in samples.
        lr_warmup_fraction: The same number as a fraction of the decay.
        min_lr: Minimum learning rate.
        consumed_samples: Numbers of samples of training, validation and test that were consumed before.
        no_wd_decay_cond: Function that returns whether a parameter has no weight decay.
        scale_lr_cond: Function that returns whether the learning rate of a parameter is multiplied by
            `lr_mult`.
        lr_mult: Factor of these learning rates.
        megatron_dataset_flag: Whether the data are datasets of Megatron-LM.
        seq_length: Sequence length in tokens. Default: that of the first batch, or the maximum of the model.
        encoder_seq_length: Sequence length of an encoder, in tokens.
        decoder_seq_length: Sequence length of a decoder, in tokens.
        tensorboard_dir: Folder for TensorBoard.
        set_all_logging_options: Whether to enable all logging options.
        eval_iters: Number of steps of one evaluation.
        eval_interval: Number of training steps between evaluations.
        return_logits: Whether steps return logits, too.
        custom_train_step_class: Class of the train step, instead of the one of the model family.
        custom_train_step_kwargs: Keyword arguments of that class.
        custom_model_provider_function: Function that builds the model, instead of the one of the family.
        custom_prepare_model_function: Function that builds and wraps the model, instead of Megatron-LM's
            `get_model`.
        custom_megatron_datasets_provider_function: Function that builds training, validation and test data.
        custom_get_batch_function: Function that converts a batch to the inputs of the model.
        custom_loss_function: Function that computes the loss.
        other_megatron_args: Other arguments of Megatron-LM by name.

    Attributes:
        megatron_lm_default_args: Arguments of Megatron-LM that are known so far.
        micro_batch_size: Number of samples of one micro-batch, after `prepare`.
        data_parallel_size: Number of data-parallel replicas of the model, after `prepare`.
        global_batch_size: Number of samples of one step over all ranks, after `prepare`.

    Raises:
        ConfigurationError: Values are not valid. The message has all of them.
    """

    tp_degree: int | None = None
    pp_degree: int | None = None
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: bool | str | None = None
    expert_model_parallel_size: int | None = None
    context_parallel_size: int | None = None
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int | None = None
    gradient_clipping: float | None = None
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., bool] | None = None
    scale_lr_cond: Callable[..., bool] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        options, problems = read_with_problems(environ.current(), (MegatronSection,))
        variables = {row.field: options[row.name] for row in MegatronSection.options() if row.name in options}
        fill(self, {**_DEFAULTS, **variables})
        if self.recompute_activations and self.recompute_granularity is None:
            self.recompute_granularity = "selective"
        self.attention_backend = read_backend(self.attention_backend)
        refuse_all([*problems, *find_wrong_values(self)])
        self.DDP_impl = "local"
        self.micro_batch_size: int | None = None
        self.data_parallel_size: int | None = None
        self.global_batch_size: int | None = None
        self.dataset_args: dict[str, Any] = {}
        values = {_ARGUMENTS.get(field, field): getattr(self, field) for field in _PASSED}
        self.megatron_lm_default_args = {name: value for name, value in values.items() if value is not None}
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
        if self.set_all_logging_options:
            self.set_tensorboard_logging_options()
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    def set_network_size_args(self, model: nn.Module, batch_data: object = None) -> None:
        """Sets the sizes of the network from the configuration of a model.

        Args:
            model: Model with `config.model_type`.
            batch_data: Batch of its loader, which gives the sequence length.

        Raises:
            ConfigurationError: No function is registered for that model type.
        """
        model_type = str(getattr(getattr(model, "config", None), "model_type", None))
        if model_type not in MODEL_CONFIGS_TO_MEGATRON_PARSERS:
            raise wrong_value(
                "model_type",
                model_type,
                f"a {type(model).__name__} cannot be converted to Megatron-LM; supported types are "
                f"{', '.join(MODEL_CONFIGS_TO_MEGATRON_PARSERS)}",
                "Choose another model, or write a function for this one and register it with "
                "@add_model_config_to_megatron_parser(model_type)",
            )
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type](self, model, batch_data)
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Sets the mixed precision.

        Args:
            mixed_precision: "no", "fp16", "bf16" or "fp8".
        """
        fp8: dict[str, Any] = {"bf16": True, "fp8": "hybrid"}
        arguments = {"fp16": {"fp16": True}, "bf16": {"bf16": True}, "fp8": fp8}
        self.megatron_lm_default_args.update(arguments.get(mixed_precision, {}))

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Sets the batch sizes.

        Args:
            micro_batch_size: Number of samples of a micro-batch.
            dp_degree: Number of data-parallel replicas.
        """
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * int(self.num_micro_batches or 1)
        for name in ("data_parallel_size", "micro_batch_size", "global_batch_size"):
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_optimizer_type(self, optimizer: torch.optim.Optimizer) -> None:
        """Sets kind, learning rate and weight decay from a torch optimizer.

        Args:
            optimizer: Adam, AdamW or SGD. Megatron-LM builds its own optimizer of this kind.

        Raises:
            ConfigurationError: Megatron-LM has no such optimizer.
        """
        kind = optimizer_kind(optimizer)
        values, arguments = optimizer.defaults, self.megatron_lm_default_args
        arguments["optimizer"] = kind
        arguments.update({name: values[key] for name, key in _OPTIMIZERS[kind].items() if key in values})
        if kind == "adam":
            arguments["adam_beta1"], arguments["adam_beta2"] = values["betas"]
        arguments["lr"] = values["lr"]
        decays = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
        arguments["weight_decay"] = max(decays, default=values.get("weight_decay", 0.0))
        arguments.update(self.other_megatron_args or {})

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Sets the number of steps of training and warm-up from a dummy scheduler of Megatron-LM.

        Args:
            scheduler: Scheduler with `total_num_steps` and `warmup_num_steps`, in batches of one process.
        """
        num_replicas = self.data_parallel_size or 1
        if self.train_iters is None and scheduler.total_num_steps is not None:
            self.train_iters = max(1, scheduler.total_num_steps // num_replicas)
            self.train_samples = None  # Megatron-LM accepts only one of both
        warmup = (self.lr_warmup_iters, self.lr_warmup_samples, self.lr_warmup_fraction)
        if all(value is None for value in warmup):
            self.lr_warmup_iters = scheduler.warmup_num_steps // num_replicas
            self.lr_warmup_samples = 0
        self.set_schedule_args()

    def set_schedule_args(self) -> None:
        """Sets the arguments of Megatron-LM for the length of training, warm-up and decays."""
        lengths = ("train_iters", "train_samples", "lr_decay_iters", "lr_decay_samples")
        warmup = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
        styles = ("lr_decay_style", "weight_decay_incr_style")
        names = (*lengths, *warmup, *styles, "start_weight_decay", "end_weight_decay", "min_lr")
        self.megatron_lm_default_args.update({name: getattr(self, name) for name in names})
        for name in ("lr_warmup_iters", "lr_warmup_samples"):  # Megatron-LM requires numbers
            self.megatron_lm_default_args[name] = getattr(self, name) or 0
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    def set_tensorboard_logging_options(self) -> None:
        """Enables all logging options, except for those that are set already."""
        for name, value in _LOGGING.items():
            self.megatron_lm_default_args.setdefault(name, value)


def optimizer_kind(optimizer: torch.optim.Optimizer) -> str:
    """Returns Megatron-LM's name for the kind of a torch optimizer.

    Raises a `ConfigurationError` if Megatron-LM has no such optimizer.
    """
    name = type(optimizer).__name__
    for kind in _OPTIMIZERS:
        if kind in name.lower():
            return kind
    reason = "Megatron-LM builds its own optimizer, and has none of this kind"
    raise wrong_value("optimizer", name, reason, "Pass torch.optim.AdamW, Adam or SGD")


# The checks below yield one line for each problem.


def read_backend(value: object) -> Any:
    """Returns the name of an attention backend, "auto" for True, and None for False."""
    words: dict[Any, str | None] = {True: "auto", "true": "auto", False: None, "false": None}
    key = value.lower() if isinstance(value, str) else value
    return words.get(key, key)


def find_wrong_values(plugin: MegatronLMPlugin) -> list[str]:
    """Returns one line for each problem with the values of the fields."""
    return [*_wrong_fields(plugin), *_wrong_combinations(plugin)]


def _wrong_fields(plugin: MegatronLMPlugin) -> Iterator[str]:
    integers = (field.name for field in fields(plugin) if field.type == "int | None")
    for name in (name for name in integers if name not in _MAY_BE_ZERO):
        value = getattr(plugin, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            yield f"{name}={shown(value)}: it is not a count. Give a whole number of at least 1"
    for name in _FRACTIONS:
        value = getattr(plugin, name)
        if value is not None and not 0 <= value <= 1:
            yield f"{name}={shown(value)}: it is not a fraction. Give a number from 0 to 1"
    if plugin.gradient_clipping is not None and plugin.gradient_clipping < 0:
        yield f"gradient_clipping={plugin.gradient_clipping!r}: a norm is never negative. Give 0 for no limit"
    for name, choices in _CHOICES.items():
        value = getattr(plugin, name)
        if value is not None and value not in choices:
            yield f"{name}={shown(value)}: it is not a known choice. Choose one of {', '.join(choices)}"
    if plugin.pipeline_model_parallel_split_rank is not None:
        yield (
            f"pipeline_model_parallel_split_rank={plugin.pipeline_model_parallel_split_rank!r}: Megatron-LM "
            "no longer splits the encoder from the decoder. Leave it out"
        )
    for names in _EXCLUSIVE:
        first, second = (f"{name}={getattr(plugin, name)!r}" for name in names)
        if all(getattr(plugin, name) for name in names):
            yield f"{first} and {second} count in different units. Give one of them"


def _wrong_combinations(plugin: MegatronLMPlugin) -> Iterator[str]:
    if plugin.recompute_method is not None and plugin.recompute_granularity != "full":
        yield (
            f"recompute_method={plugin.recompute_method!r}: it selects layers that are recomputed as a "
            "whole. Set recompute_granularity='full', or leave it out"
        )
    if plugin.recompute_granularity == "full" and plugin.recompute_method is None:
        yield (
            "recompute_granularity='full': the layers to recompute are not given. Set recompute_method to "
            "'uniform' or 'block', and recompute_num_layers"
        )
    for field, required, reason in _REQUIREMENTS:
        if getattr(plugin, field) and not getattr(plugin, required):
            yield f"{field}=True: {reason}. Set {required}=True"
    if plugin.num_layers_per_virtual_pipeline_stage is not None and (plugin.pp_degree or 1) < 2:
        yield (
            f"num_layers_per_virtual_pipeline_stage={plugin.num_layers_per_virtual_pipeline_stage!r}: there "
            "is not a pipeline. Set pp_degree to 2 or more, or leave it out"
        )
    weight_decays = (plugin.start_weight_decay, plugin.end_weight_decay)
    if plugin.weight_decay_incr_style != "constant" and None in weight_decays:
        yield (
            f"weight_decay_incr_style={plugin.weight_decay_incr_style!r}: the first and last weight decay "
            "are not given. Set start_weight_decay and end_weight_decay"
        )
    other_arguments = plugin.other_megatron_args or {}
    if plugin.lr_decay_style == "WSD" and not any(name in other_arguments for name in _WSD):
        yield (
            "lr_decay_style='WSD': the number of steps of the final decay is not given. Set "
            "other_megatron_args={'lr_wsd_decay_iters': ...}"
        )
    if plugin.custom_train_step_class is not None and not isinstance(plugin.custom_train_step_class, type):
        yield (
            "custom_train_step_class: it is not a class. Pass the class, and its arguments in "
            "custom_train_step_kwargs"
        )
