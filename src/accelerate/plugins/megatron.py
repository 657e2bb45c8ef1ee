"""MegatronLMPlugin: how Megatron-LM trains a model.

Source: the arguments of https://github.com/NVIDIA/Megatron-LM (megatron/training/arguments.py)
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

_OPTIONS = {row.name.removeprefix("megatron_lm_"): row for row in MegatronSection.options()}
"""Fields that the environment fills -> their options."""

_DEFAULTS: dict[str, Any] = {
    **{field: row.default for field, row in _OPTIONS.items() if row.default is not None},
    "num_micro_batches": 1,
    **dict.fromkeys(("sequence_parallelism", "recompute_activations", "use_distributed_optimizer"), False),
    **dict.fromkeys(
        ("expert_model_parallel_size", "expert_tensor_parallel_size", "context_parallel_size"), 1
    ),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), 0.0),
    **dict.fromkeys(("attention_softmax_in_fp32", "calculate_per_token_loss"), True),
}
"""Values of fields that neither the user nor the environment sets; the others stay None, so that the model
or Megatron-LM decides."""

_ARGUMENTS = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}
"""Fields whose argument of Megatron-LM has another name."""

_PASSED = (
    *(field for field in _OPTIONS if field != "recompute_activations"),
    "num_layers_per_virtual_pipeline_stage",
    "consumed_samples",
    "no_wd_decay_cond",
    "scale_lr_cond",
    "lr_mult",
    "megatron_dataset_flag",
    "eval_iters",
    "eval_interval",
)
"""Fields that become arguments of Megatron-LM as they are."""

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
"""Every logging option of Megatron-LM; those that are set already keep their values."""

_OPTIMIZERS: dict[str, dict[str, str]] = {"adam": {"adam_eps": "eps"}, "sgd": {"sgd_momentum": "momentum"}}
"""Optimizers of Megatron-LM -> arguments that come from the defaults of torch's."""


_NO_COUNTS = ("pipeline_model_parallel_split_rank", "lr_warmup_iters", "lr_warmup_samples")
"""Integer fields that may be 0, or are refused anyway; the others are counts of at least 1."""

_FRACTIONS = ("attention_dropout", "hidden_dropout", "lr_warmup_fraction")

_CHOICES = {
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "weight_decay_incr_style": ("constant", "linear", "cosine"),
    "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
}

_NEEDED = (
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
"""Fields, other fields that each needs, and why."""

_WSD = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")

_TOGETHER: tuple[tuple[str, str], ...] = (
    ("train_iters", "train_samples"),
    ("train_iters", "lr_decay_samples"),
    ("train_iters", "lr_warmup_samples"),
    ("train_samples", "lr_decay_iters"),
    ("train_samples", "lr_warmup_iters"),
    ("lr_warmup_iters", "lr_warmup_fraction"),
    ("lr_warmup_samples", "lr_warmup_fraction"),
)
"""Pairs of fields that say the same thing in different units."""


@dataclass
class MegatronLMPlugin:
    """How Megatron-LM splits and trains a model.

    What is not given is read from the environment when the object is built (MEGATRON_LM_ and the name in
    capitals, as the launcher sets them). Fields are read when the run is prepared, so they may be changed
    until then.

    Args:
        tp_degree: processes that share each layer; otherwise 1.
        pp_degree: pipeline stages; otherwise 1.
        use_custom_fsdp: whether Megatron's own FSDP shards parameters; otherwise no.
        overlap_cpu_optimizer_d2h_h2d: whether copies of an offloaded optimizer overlap; otherwise no.
        no_load_optim: whether checkpoints are loaded without the optimizer; otherwise no.
        eod_mask_loss: whether end-of-document tokens are left out of the loss; otherwise no.
        no_save_optim: whether checkpoints are saved without the optimizer; otherwise no.
        optimizer_cpu_offload: whether the optimizer works on the CPU; otherwise no.
        use_precision_aware_optimizer: whether optimizer states may be of low precision; otherwise no.
        decoder_last_pipeline_num_layers: layers of the last stage; otherwise all have equally many.
        recompute_granularity: what is recomputed in backward, "full" or "selective"; otherwise nothing.
        recompute_method: how layers are chosen with "full": "uniform" or "block".
        recompute_num_layers: layers that are recomputed together.
        attention_backend: "flash", "fused", "unfused", "local" or "auto"; True means "auto".
        expert_model_parallel_size: processes that share the experts of a layer; otherwise 1.
        context_parallel_size: processes that share each sequence; otherwise 1.
        attention_dropout: dropout of attention weights; otherwise 0.
        hidden_dropout: dropout of hidden states; otherwise 0.
        attention_softmax_in_fp32: whether softmax is computed in float32; otherwise yes.
        expert_tensor_parallel_size: processes that share each expert; otherwise 1.
        calculate_per_token_loss: whether the loss is a mean over all tokens of a step, and not over
            micro-batches; otherwise yes.
        use_rotary_position_embeddings: whether positions are rotary; otherwise as the model has them.
        num_micro_batches: micro-batches of one step; otherwise 1. They take the place of gradient
            accumulation.
        gradient_clipping: largest norm of the gradients, 0 for no limit; otherwise 1.
        sequence_parallelism: whether sequences are split where layers are not; otherwise no.
        recompute_activations: short for `recompute_granularity="selective"`.
        use_distributed_optimizer: whether data-parallel processes share optimizer states; otherwise no.
        pipeline_model_parallel_split_rank: refused, Megatron-LM splits no encoder from its decoder any more.
        num_layers_per_virtual_pipeline_stage: layers of a virtual stage, for interleaved schedules.
        is_train_batch_min: whether the smallest batch size of the prepared loaders is that of a
            micro-batch, and not the largest.
        train_iters: steps of the whole training.
        train_samples: samples of the whole training, instead of steps.
        weight_decay_incr_style: "constant", "linear" or "cosine".
        start_weight_decay: weight decay at the beginning.
        end_weight_decay: weight decay at the end.
        lr_decay_style: "constant", "linear", "cosine", "inverse-square-root" or "WSD".
        lr_decay_iters: steps over which the learning rate falls.
        lr_decay_samples: the same in samples.
        lr_warmup_iters: steps over which it rises first.
        lr_warmup_samples: the same in samples.
        lr_warmup_fraction: the same as a part of the fall.
        min_lr: smallest learning rate.
        consumed_samples: samples of training, validation and test that were read before.
        no_wd_decay_cond: returns whether a parameter has no weight decay.
        scale_lr_cond: returns whether the learning rate of a parameter is multiplied by `lr_mult`.
        lr_mult: that factor.
        megatron_dataset_flag: whether data are Megatron-LM's own datasets.
        seq_length: tokens of a sequence; otherwise those of the first batch, or what the model can take.
        encoder_seq_length: tokens for an encoder.
        decoder_seq_length: tokens for a decoder.
        tensorboard_dir: folder for TensorBoard.
        set_all_logging_options: whether everything that can be logged is.
        eval_iters: steps of one evaluation.
        eval_interval: training steps between evaluations.
        return_logits: whether steps return logits too.
        custom_train_step_class: builds the train step, instead of the one of the model family.
        custom_train_step_kwargs: arguments for it.
        custom_model_provider_function: builds the model, instead of the one of the family.
        custom_prepare_model_function: builds the model and wraps it, instead of Megatron-LM's `get_model`.
        custom_megatron_datasets_provider_function: builds training, validation and test data.
        custom_get_batch_function: turns a batch into what the model takes.
        custom_loss_function: computes the loss.
        other_megatron_args: any further arguments of Megatron-LM by name.

    Attributes:
        megatron_lm_default_args: the arguments of Megatron-LM that are known so far.
        micro_batch_size: samples of one micro-batch, once a run is prepared.
        data_parallel_size: how many copies of the model there are, once a run is prepared.
        global_batch_size: samples of one step, once a run is prepared.

    Raises:
        ConfigurationError: values that cannot be, all of them in one message.
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
        variables = {field: options[row.name] for field, row in _OPTIONS.items() if row.name in options}
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

    def set_network_size_args(self, model: nn.Module, batch_data: Any = None) -> None:
        """Take the sizes of the network from the configuration of a model.

        Args:
            model: has `config.model_type`.
            batch_data: a batch as its loader gives it, for the length of sequences.

        Raises:
            ConfigurationError: Megatron-LM builds no model of that type.
        """
        model_type = str(getattr(getattr(model, "config", None), "model_type", None))
        if model_type not in MODEL_CONFIGS_TO_MEGATRON_PARSERS:
            raise wrong_value(
                "model_type",
                model_type,
                f"nothing says how Megatron-LM builds a {type(model).__name__}; it is known for "
                f"{', '.join(MODEL_CONFIGS_TO_MEGATRON_PARSERS)}",
                "Choose another model, or write a function for this one and register it with "
                "@add_model_config_to_megatron_parser(model_type)",
            )
        MODEL_CONFIGS_TO_MEGATRON_PARSERS[model_type](self, model, batch_data)
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Choose the number format.

        Args:
            mixed_precision: "no", "fp16", "bf16" or "fp8".
        """
        fp8: dict[str, Any] = {"bf16": True, "fp8": "hybrid"}
        formats = {"fp16": {"fp16": True}, "bf16": {"bf16": True}, "fp8": fp8}
        self.megatron_lm_default_args.update(formats.get(mixed_precision, {}))

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the sizes of batches.

        Args:
            micro_batch_size: samples of a micro-batch.
            dp_degree: copies of the model.
        """
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = dp_degree * micro_batch_size * int(self.num_micro_batches or 1)
        for name in ("data_parallel_size", "micro_batch_size", "global_batch_size"):
            self.megatron_lm_default_args[name] = getattr(self, name)

    def set_optimizer_type(self, optimizer: torch.optim.Optimizer) -> None:
        """Take kind, learning rate and weight decay from a torch optimizer.

        Args:
            optimizer: Adam, AdamW or SGD; Megatron-LM builds one of its own like it.

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
        """Take the length of training and warm-up from a dummy scheduler of Megatron-LM.

        Args:
            scheduler: has `total_num_steps` and `warmup_num_steps`, counted in batches of one process.
        """
        copies = self.data_parallel_size or 1
        if self.train_iters is None and scheduler.total_num_steps is not None:
            self.train_iters = max(1, scheduler.total_num_steps // copies)
            self.train_samples = None  # both would say how long training is
        warmup = (self.lr_warmup_iters, self.lr_warmup_samples, self.lr_warmup_fraction)
        if all(given is None for given in warmup):
            self.lr_warmup_iters = scheduler.warmup_num_steps // copies
            self.lr_warmup_samples = 0
        self.set_schedule_args()

    def set_schedule_args(self) -> None:
        """Pass the length of training, warm-up and decays on to Megatron-LM."""
        lengths = ("train_iters", "train_samples", "lr_decay_iters", "lr_decay_samples")
        warmup = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
        styles = ("lr_decay_style", "weight_decay_incr_style")
        names = (*lengths, *warmup, *styles, "start_weight_decay", "end_weight_decay", "min_lr")
        self.megatron_lm_default_args.update({name: getattr(self, name) for name in names})
        for name in ("lr_warmup_iters", "lr_warmup_samples"):  # Megatron-LM counts with them
            self.megatron_lm_default_args[name] = getattr(self, name) or 0
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    def set_tensorboard_logging_options(self) -> None:
        """Log everything that can be logged; what is set already stays."""
        for name, value in _LOGGING.items():
            self.megatron_lm_default_args.setdefault(name, value)


def optimizer_kind(optimizer: Any) -> str:
    """Return Megatron-LM's name for the kind of a torch optimizer; without one, raise an error."""
    name = type(optimizer).__name__
    for kind in _OPTIMIZERS:
        if kind in name.lower():
            return kind
    reason = "Megatron-LM builds its own optimizer, and has none of this kind"
    raise wrong_value("optimizer", name, reason, "Pass torch.optim.AdamW, Adam or SGD")


# Checks: each yields a line for every problem


def read_backend(value: Any) -> Any:
    """Return the name of an attention kernel; a yes leaves the choice to Megatron-LM."""
    words: dict[Any, str | None] = {True: "auto", "true": "auto", False: None, "false": None}
    key = value.lower() if isinstance(value, str) else value
    return words.get(key, key)


def find_wrong_values(plugin: MegatronLMPlugin) -> list[str]:
    """Return what is wrong with the fields themselves, one line each."""
    return [*_wrong_fields(plugin), *_wrong_companions(plugin)]


def _wrong_fields(plugin: MegatronLMPlugin) -> Iterator[str]:
    integers = (field.name for field in fields(plugin) if field.type == "int | None")
    for name in (name for name in integers if name not in _NO_COUNTS):
        value = getattr(plugin, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            yield f"{name}={shown(value)}: it is not a count. Give a whole number of at least 1"
    for name in _FRACTIONS:
        value = getattr(plugin, name)
        if value is not None and not 0 <= value <= 1:
            yield f"{name}={shown(value)}: it is not a part of a whole. Give a number from 0 to 1"
    if plugin.gradient_clipping is not None and plugin.gradient_clipping < 0:
        yield f"gradient_clipping={plugin.gradient_clipping!r}: a norm is never negative. Give 0 for no limit"
    for name, choices in _CHOICES.items():
        value = getattr(plugin, name)
        if value is not None and value not in choices:
            yield f"{name}={shown(value)}: it is not a known choice. Choose one of {', '.join(choices)}"
    if plugin.pipeline_model_parallel_split_rank is not None:
        yield (
            f"pipeline_model_parallel_split_rank={plugin.pipeline_model_parallel_split_rank!r}: Megatron-LM "
            "splits no encoder from its decoder any more. Leave it out"
        )
    for names in _TOGETHER:
        first, second = (f"{name}={getattr(plugin, name)!r}" for name in names)
        if all(getattr(plugin, name) for name in names):
            yield f"{first} and {second} count in different units. Give one of them"


def _wrong_companions(plugin: MegatronLMPlugin) -> Iterator[str]:
    if plugin.recompute_method is not None and plugin.recompute_granularity != "full":
        yield (
            f"recompute_method={plugin.recompute_method!r}: it chooses layers that are recomputed as a "
            "whole. Set recompute_granularity='full', or leave it out"
        )
    if plugin.recompute_granularity == "full" and plugin.recompute_method is None:
        yield (
            "recompute_granularity='full': nothing says which layers are recomputed. Set recompute_method to "
            "'uniform' or 'block', and recompute_num_layers"
        )
    for field, needed, reason in _NEEDED:
        if getattr(plugin, field) and not getattr(plugin, needed):
            yield f"{field}=True: {reason}. Set {needed}=True"
    if plugin.num_layers_per_virtual_pipeline_stage is not None and (plugin.pp_degree or 1) < 2:
        yield (
            f"num_layers_per_virtual_pipeline_stage={plugin.num_layers_per_virtual_pipeline_stage!r}: there "
            "is no pipeline. Set pp_degree to 2 or more, or leave it out"
        )
    weight_decays = (plugin.start_weight_decay, plugin.end_weight_decay)
    if plugin.weight_decay_incr_style != "constant" and None in weight_decays:
        yield (
            f"weight_decay_incr_style={plugin.weight_decay_incr_style!r}: nothing says from where to where. "
            "Set start_weight_decay and end_weight_decay"
        )
    further = plugin.other_megatron_args or {}
    if plugin.lr_decay_style == "WSD" and not any(name in further for name in _WSD):
        yield (
            "lr_decay_style='WSD': nothing says over how many steps the learning rate falls at the end. Set "
            "other_megatron_args={'lr_wsd_decay_iters': ...}"
        )
    if plugin.custom_train_step_class is not None and not isinstance(plugin.custom_train_step_class, type):
        yield "custom_train_step_class: it is not a class. Pass the class, and its arguments apart"
