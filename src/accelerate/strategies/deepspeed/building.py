"""Construction of DeepSpeed engines.

The strategy calls `begin` once, and for each `prepare` call `complete`, which replaces "auto" in the
configuration, and `build_engine`, which calls `deepspeed.initialize`.

Source: https://deepspeed.readthedocs.io/en/latest/initialize.html
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from accelerate.base import DynamoBackend, PreparationError, environ, packages
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.nested import recursively_apply
from accelerate.plugins import AutoValues, TorchDynamoPlugin, restore_auto
from accelerate.settings import AUTO, look_up, problems_of_counts, refuse_config, straighten
from accelerate.state import Topology, process_group
from accelerate.strategies.deepspeed.checks import check_hardware
from accelerate.strategies.deepspeed.engine import DummyOptim, DummyScheduler
from accelerate.strategies.request import Context
from accelerate.wrappers import compile_regions_deepspeed

if TYPE_CHECKING:
    from accelerate.plugins import DeepSpeedPlugin

logger = get_logger(__name__)

MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
TOTAL = "train_batch_size"
HINTS = {
    MICRO: "pass the loader to prepare, with a batch_size, or write a number into "
    "accelerator.deepspeed_plugin.deepspeed_config",
    TOTAL: f"it is computed from {MICRO}",
    "optimizer.params.": "pass it to DummyOptim(parameters, name=...)",
    "scheduler.params.": "pass it to DummyScheduler(optimizer, name=...)",
}
"""Name in the configuration, or its prefix -> how to give its value if it is "auto"."""


@dataclass(frozen=True)
class EngineInputs:
    """Objects and numbers of a `prepare` call from which the configuration of its engine is completed."""

    model: Any = None
    optimizer: Any = None  # an optimizer of torch, or a `DummyOptim`; None for a model that is not trained
    scheduler: Any = None  # a `DummyScheduler`, or None
    batch_sizes: Sequence[int] = ()  # of the loaders in this call
    known_sizes: Sequence[int] = ()  # of loaders in earlier calls
    smallest: bool = True  # use the smallest of several batch sizes, otherwise the largest
    accumulation: int = 1  # micro-batches per optimizer step
    replicas: int = 1  # number of ranks with different data
    scheduler_steps: int = 1  # per optimizer step

    def choose(self, sizes: Sequence[int]) -> int:
        """Returns one of several batch sizes."""
        return min(sizes) if self.smallest else max(sizes)


def auto_values_of(inputs: EngineInputs, config: Mapping[str, Any]) -> AutoValues:
    """Returns the values that replace "auto" in a configuration."""
    values: dict[str, Any] = {STEPS: inputs.accumulation}
    sources = {STEPS: "Accelerator(gradient_accumulation_steps)"}
    defaults: dict[str, Any] = {"gradient_clipping": 0.0}
    defaults |= _bucket_sizes(inputs.model) | _optimizer_values(inputs.optimizer) | _scheduler_values(inputs)
    micro = _micro_batch_size(inputs, config)
    if micro is not None:
        defaults[MICRO] = micro
        steps = _number(config.get(STEPS), inputs.accumulation)
        values[TOTAL] = micro * steps * inputs.replicas
        sources[TOTAL] = f"{MICRO} {micro} x {STEPS} {steps} x {inputs.replicas} processes"
    if inputs.batch_sizes and _number(config.get(MICRO), None) not in inputs.batch_sizes:
        values[MICRO] = inputs.choose(inputs.batch_sizes)
        sources[MICRO] = "the loader (its batch on one process)"
    return AutoValues(values, sources, defaults=defaults, hints=HINTS)


def _micro_batch_size(inputs: EngineInputs, config: Mapping[str, Any]) -> int | None:
    """Returns the micro-batch size of the configuration or a loader, or the one that the total implies."""
    configured: int | None = _number(config.get(MICRO), None)
    if configured is not None:
        return configured
    sizes = inputs.batch_sizes or inputs.known_sizes
    if sizes:
        return inputs.choose(sizes)
    total: int | None = _number(config.get(TOTAL), None)
    num_micro_batches: int = _number(config.get(STEPS), inputs.accumulation) * inputs.replicas
    if total is not None and total % num_micro_batches == 0:
        return total // num_micro_batches
    return 1 if inputs.optimizer is None else None  # the size has no effect on a model that is not trained


def _number(value: Any, default: Any) -> Any:
    return default if value in (None, AUTO) else int(value)


def _optimizer_values(optimizer: torch.optim.Optimizer | DummyOptim) -> dict[str, Any]:
    if not isinstance(optimizer, DummyOptim):
        return {}
    values = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
    # None selects the default of the optimizer
    return {f"optimizer.params.{name}": values.get(name) for name in ("betas", "eps", "momentum", *values)}


def _scheduler_values(inputs: EngineInputs) -> dict[str, Any]:
    scheduler, optimizer, scheduler_steps = inputs.scheduler, inputs.optimizer, inputs.scheduler_steps
    if not isinstance(scheduler, DummyScheduler):
        return {}
    is_placeholder = isinstance(optimizer, DummyOptim)
    values: dict[str, Any] = {
        "warmup_min_lr": 0,
        "warmup_max_lr": optimizer.lr if is_placeholder else getattr(optimizer, "defaults", {}).get("lr"),
        # DeepSpeed requires at least one step
        "warmup_num_steps": max(1, math.ceil(scheduler.warmup_num_steps / scheduler_steps)),
        **scheduler.kwargs,
    }
    if scheduler.total_num_steps is not None:
        values["total_num_steps"] = math.ceil(scheduler.total_num_steps / scheduler_steps)
    return {f"scheduler.params.{name}": value for name, value in values.items()}


def _bucket_sizes(model: nn.Module) -> dict[str, Any]:
    """Returns the bucket sizes of ZeRO for the hidden size of a model, or None for DeepSpeed's defaults."""
    config, width = getattr(model, "config", None), None
    for part in (getattr(config, "text_config", None), config):  # the last one takes precedence
        size = getattr(part, "hidden_size", None) or max(getattr(part, "hidden_sizes", None) or [0])
        width = int(size) or width
    sizes: dict[str, Any] = {
        "reduce_bucket_size": width and width * width,
        "stage3_prefetch_bucket_size": width and int(0.9 * width * width),
        "stage3_param_persistence_threshold": width and 10 * width,
    }
    return {f"zero_optimization.{name}": size for name, size in sizes.items()}


def batch_sizes_of(loaders: Iterable[Any]) -> list[int]:
    """Returns the batch size per rank of each prepared loader that has one."""
    sizes: list[int] = []
    for loader in loaders:
        owners = (getattr(loader, "plan", None), getattr(loader, "batch_sampler", None), loader)
        known = [getattr(owner, "batch_size", None) for owner in owners]
        sizes += [int(size) for size in known if size][:1]
    return sizes


def begin(context: Context) -> None:
    """Initializes DeepSpeed with the process group of the run, which is created if it does not exist.

    Called once on all ranks.
    """
    packages.require("deepspeed", "Training with DeepSpeedPlugin")
    current = environ.current()
    variables = dict(of_device(context.device).deepspeed_variables) | _rank_variables(context.topology)
    if not process_group.is_open():
        process_group.open_group(context.topology, context.backend)
    environ.assign({name: text for name, text in variables.items() if not current.get(name)})
    import deepspeed

    deepspeed.init_distributed(dist_backend=torch.distributed.get_backend())
    given: Any = context.request.deepspeed
    plugins = given.values() if isinstance(given, dict) else [given]
    check_hardware([plugin.deepspeed_config for plugin in plugins], context.device)


def _rank_variables(topology: Topology) -> dict[str, str]:
    """Returns the environment variables of a rank that DeepSpeed reads."""
    return {
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.size),
        "LOCAL_RANK": str(topology.local_rank),
        "MASTER_ADDR": topology.address or "127.0.0.1",
        "MASTER_PORT": str(topology.port or 29500),
    }


def complete(plugin: DeepSpeedPlugin, inputs: EngineInputs) -> dict[str, Any]:
    """Returns the configuration of a plugin with its "auto" values replaced.

    The configuration of the plugin is changed in place if the model is trained.
    """
    config: dict[str, Any] = plugin.deepspeed_config
    restore_auto(config, plugin.filled)
    straighten(config)
    refuse_config(problems_of_counts(config), "Correct the configuration")
    if TOTAL not in config:
        config.setdefault(MICRO, AUTO)
    if inputs.optimizer is None:  # an engine that never steps
        config = {name: deepcopy(v) for name, v in config.items() if name not in ("optimizer", "scheduler")}
    auto_values = auto_values_of(inputs, config)
    auto_values.fill(config)
    if config is plugin.deepspeed_config:
        plugin.filled = auto_values.filled
    auto_values.check_filled()
    plugin.hf_ds_config.set_stage_and_offload()
    return config


_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
"""Attributes of schedulers of torch that have an element for each parameter group."""


def drop_empty_groups(optimizer: torch.optim.Optimizer | DummyOptim, schedulers: Iterable[Any]) -> None:
    """Removes empty parameter groups from an optimizer and its schedulers, as DeepSpeed does.

    Args:
        optimizer: The optimizer of which an engine is built.
        schedulers: Schedulers. Those of other optimizers are not changed; those inside `SequentialLR` and
            `ChainedScheduler` are.
    """
    groups = optimizer.param_groups
    keeps = [bool(group["params"]) for group in groups]
    if all(keeps):
        return
    groups[:] = compress(groups, keeps)
    pending = [s for s in schedulers if getattr(s, "optimizer", None) is optimizer]
    while pending:
        scheduler = pending.pop()
        pending += getattr(scheduler, "_schedulers", ())
        for name in _PER_GROUP:
            values = getattr(scheduler, name, None)
            if isinstance(values, (list, tuple)) and len(values) == len(keeps):
                setattr(scheduler, name, list(compress(values, keeps)))


def choose_optimizer(optimizer: torch.optim.Optimizer | DummyOptim, config: dict[str, Any]) -> Any:
    """Returns the optimizer for an engine, which is a CPU optimizer of DeepSpeed if states are offloaded.

    The configuration is changed so that DeepSpeed accepts the optimizer.
    """
    offloads = look_up(config, "zero_optimization.offload_optimizer.device") in ("cpu", "nvme")
    chosen = optimizer
    if offloads and config.get("zero_force_ds_cpu_optimizer", True):
        chosen = map_pytorch_optim_to_deepspeed(optimizer)
        if chosen is optimizer and not type(optimizer).__module__.startswith("deepspeed."):
            config["zero_force_ds_cpu_optimizer"] = False
            logger.info(
                f"DeepSpeed has no CPU version of {type(optimizer).__name__}: torch's steps on the CPU."
            )
    config.setdefault("zero_allow_untested_optimizer", True)
    return chosen


def build_engine(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | DummyOptim | None,
    scheduler: object,
    config: dict[str, Any],
    mpu: object = None,
) -> tuple[Any, tuple[Any, Any]]:
    """Returns an engine, and the pair of its optimizer and scheduler.

    Called on all ranks. An engine without an optimizer only runs the model.
    """
    import deepspeed

    arguments: dict[str, Any] = {"model": model, "config": config}
    arguments |= {} if mpu is None else {"mpu": mpu}
    if isinstance(optimizer, DummyOptim):
        arguments["model_parameters"] = optimizer.params
    elif optimizer is not None:
        arguments["optimizer"] = optimizer
    if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is not None:
        arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
    try:
        engine, built_optimizer, _, built_scheduler = deepspeed.initialize(**arguments)
    except (deepspeed.DeepSpeedConfigError, AssertionError, ValueError) as error:
        raise PreparationError(f"DeepSpeed builds no engine from its configuration: {error}") from error
    if look_up(config, "bf16.enabled") is True:
        engine.module.register_forward_pre_hook(_cast_to_bfloat16, with_kwargs=True, prepend=True)
    return engine, (built_optimizer, built_scheduler)


def compile_engine(engine: Any, dynamo: TorchDynamoPlugin) -> None:
    """Compiles the model inside an engine, if the run compiles models."""
    if dynamo.backend == DynamoBackend.NO:
        return
    arguments = dynamo.to_kwargs()
    if dynamo.use_regional_compilation:
        compile_regions_deepspeed(engine.module, **arguments)
        return
    backend = arguments.pop("backend")
    engine.compile(backend=backend, compile_kwargs=arguments)


def _cast_to_bfloat16(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Casts float32 inputs to the dtype of the weights, which DeepSpeed does for float16 only."""
    inputs: tuple[Any, dict[str, Any]] = recursively_apply(
        lambda tensor: tensor.to(torch.bfloat16),
        (args, kwargs),
        test_type=lambda value: isinstance(value, Tensor) and value.dtype == torch.float32,
    )
    return inputs


def cast_without_engine(model: nn.Module, device: torch.device | None, config: dict[str, Any]) -> nn.Module:
    """Returns a model that is not trained, on its device and in the dtype of an engine."""
    if device is not None:
        model = model.to(device)
    if look_up(config, "bf16.enabled") is True:
        model = model.to(torch.bfloat16)
        model.register_forward_pre_hook(_cast_to_bfloat16, with_kwargs=True)
    elif look_up(config, "fp16.enabled") is True:
        model = model.to(torch.float16)
    return model


def torch_optimizer_of(optimizer: object) -> torch.optim.Optimizer | None:
    """Returns the optimizer of torch inside the optimizer of an engine, or None if it has none."""
    while optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


_ADAM = ("adam", "DeepSpeedCPUAdam", ("lr", "betas", "eps", "weight_decay"))
_LION = ("lion", "DeepSpeedCPULion", ("lr", "betas", "weight_decay"))
_CPU_OPTIMIZERS = {
    **dict.fromkeys(("Adam", "AdamW", "AdamW8bit", "Adam8bit"), _ADAM),
    **dict.fromkeys(("Lion", "Lion8bit"), _LION),
    "Adagrad": ("adagrad", "DeepSpeedCPUAdagrad", ("lr", "eps", "weight_decay")),
}
"""Class name of an optimizer -> module, class and options of its CPU version in DeepSpeed."""


def map_pytorch_optim_to_deepspeed(optimizer: torch.optim.Optimizer | DummyOptim) -> Any:
    """Returns the CPU version of an optimizer in DeepSpeed, or the same object if there is none.

    Args:
        optimizer: An optimizer that has not stepped. The new one has the same parameter groups, so that
            schedulers which hold them still set its learning rates.
    """
    kind, defaults = type(optimizer), getattr(optimizer, "defaults", {})
    is_foreign_adam = kind.__name__ == "Adam" and kind is not torch.optim.Adam
    if kind.__name__ not in _CPU_OPTIMIZERS or is_foreign_adam or kind.__module__.startswith("deepspeed."):
        return optimizer
    module, name, names = _CPU_OPTIMIZERS[kind.__name__]
    options = {name: defaults[name] for name in names if name in defaults}
    if module == "adam":
        is_decoupled = bool(defaults.get("decoupled_weight_decay", False))
        options["adamw_mode"] = isinstance(optimizer, torch.optim.AdamW) or is_decoupled
        options.update({"amsgrad": True} if defaults.get("amsgrad") else {})
    return getattr(import_module(f"deepspeed.ops.{module}"), name)(optimizer.param_groups, **options)
