"""Build an engine: check what was given, complete DeepSpeed's configuration, call `deepspeed.initialize`.

Source: https://deepspeed.readthedocs.io/en/latest/initialize.html
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import DynamoBackend, PreparationError, environ, packages, wrong_value
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.nested import recursively_apply
from accelerate.optimizer import steps_in_backward
from accelerate.plugins import AutoValues, TorchDynamoPlugin, restore_auto
from accelerate.settings import AUTO, look_up, problems_of_counts, refuse_config, straighten
from accelerate.state import Topology, process_group
from accelerate.strategies.deepspeed.engine import DummyOptim, DummyScheduler
from accelerate.strategies.request import Context
from accelerate.wrappers import compile_regions_deepspeed

logger = get_logger(__name__)

MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
TOTAL = "train_batch_size"
HINTS = {
    MICRO: "give the loader to prepare, with a batch_size, or write a number into "
    "accelerator.deepspeed_plugin.deepspeed_config",
    TOTAL: f"it follows from {MICRO}",
    "optimizer.params.": "DummyOptim(parameters, name=...) tells it",
    "scheduler.params.": "DummyScheduler(optimizer, name=...) tells it",
}
"""Names, or how they begin -> what provides such a value where it is "auto"."""


@dataclass(frozen=True)
class Given:
    """What a configuration is filled from."""

    model: Any
    optimizer: Any = (
        None  # torch's, or a placeholder for DeepSpeed's; None to run a model without training it
    )
    scheduler: Any = None
    batch_sizes: Sequence[int] = ()
    known_sizes: Sequence[int] = ()
    smallest: bool = True  # whether the smallest counts, and not the largest
    accumulation: int = 1  # batches for each step
    replicas: int = 1  # number of processes that see different data
    pace: int = 1  # steps of a schedule for each step of the optimizer

    def choose(self, sizes: Sequence[int]) -> int:
        """Return the batch size that counts."""
        return min(sizes) if self.smallest else max(sizes)


def filling_of(given: Given, config: Mapping[str, Any]) -> AutoValues:
    """Return the values for a configuration."""
    values: dict[str, Any] = {STEPS: given.accumulation}
    sources = {STEPS: "Accelerator(gradient_accumulation_steps)"}
    usual: dict[str, Any] = {"gradient_clipping": 0.0}
    usual |= _sizes_of_buckets(given.model) | _of_optimizer(given.optimizer) | _of_scheduler(given)
    micro = _micro_batch(given, config)
    if micro is not None:
        usual[MICRO] = micro
        steps = _number(config.get(STEPS), given.accumulation)
        values[TOTAL] = micro * steps * given.replicas
        sources[TOTAL] = f"{MICRO} {micro} x {STEPS} {steps} x {given.replicas} processes"
    if given.batch_sizes and _number(config.get(MICRO), None) not in given.batch_sizes:
        values[MICRO] = given.choose(given.batch_sizes)
        sources[MICRO] = "the loader (its batch on one process)"
    return AutoValues(values, sources, defaults=usual, hints=HINTS)


def _micro_batch(given: Given, config: Mapping[str, Any]) -> int | None:
    """Return the batch of one process and round: as configured, else of a loader, else from the whole."""
    configured: int | None = _number(config.get(MICRO), None)
    if configured is not None:
        return configured
    sizes = given.batch_sizes or given.known_sizes
    if sizes:
        return given.choose(sizes)
    whole: int | None = _number(config.get(TOTAL), None)
    share: int = _number(config.get(STEPS), given.accumulation) * given.replicas
    if whole is not None and whole % share == 0:
        return whole // share
    return 1 if given.optimizer is None else None  # a model that is only run has no batches to count


def _number(value: Any, otherwise: Any) -> Any:
    return otherwise if value in (None, AUTO) else int(value)


def _of_optimizer(optimizer: Any) -> dict[str, Any]:
    if not isinstance(optimizer, DummyOptim):
        return {}
    values = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay, **optimizer.kwargs}
    # None leaves the value to the optimizer
    return {f"optimizer.params.{name}": values.get(name) for name in ("betas", "eps", "momentum", *values)}


def _of_scheduler(given: Given) -> dict[str, Any]:
    scheduler, optimizer, pace = given.scheduler, given.optimizer, given.pace
    if not isinstance(scheduler, DummyScheduler):
        return {}
    is_dummy = isinstance(optimizer, DummyOptim)
    values: dict[str, Any] = {
        "warmup_min_lr": 0,
        "warmup_max_lr": optimizer.lr if is_dummy else getattr(optimizer, "defaults", {}).get("lr"),
        # DeepSpeed refuses a warm-up of no steps
        "warmup_num_steps": max(1, math.ceil(scheduler.warmup_num_steps / pace)),
        **scheduler.kwargs,
    }
    if scheduler.total_num_steps is not None:
        values["total_num_steps"] = math.ceil(scheduler.total_num_steps / pace)
    return {f"scheduler.params.{name}": value for name, value in values.items()}


def _sizes_of_buckets(model: Any) -> dict[str, Any]:
    """Return sizes of ZeRO's buckets by the width of a model; None, for DeepSpeed's own, without a width."""
    config, width = getattr(model, "config", None), None
    for part in (getattr(config, "text_config", None), config):  # the last one counts
        size = getattr(part, "hidden_size", None) or max(getattr(part, "hidden_sizes", None) or [0])
        width = int(size) or width
    sizes: dict[str, Any] = {
        "reduce_bucket_size": width and width * width,
        "stage3_prefetch_bucket_size": width and int(0.9 * width * width),
        "stage3_param_persistence_threshold": width and 10 * width,
    }
    return {f"zero_optimization.{name}": size for name, size in sizes.items()}


def batch_sizes_of(loaders: Iterable[Any]) -> list[int]:
    """Return the batch size of one process for each prepared loader that has one."""
    sizes: list[int] = []
    for loader in loaders:
        owners = (getattr(loader, "plan", None), getattr(loader, "batch_sampler", None), loader)
        known = [getattr(owner, "batch_size", None) for owner in owners]
        sizes += [int(size) for size in known if size][:1]
    return sizes


def problems_of(
    models: Sequence[Any], optimizers: Sequence[Any], schedulers: Sequence[Any], config: Mapping[str, Any]
) -> list[str]:
    """Return one line for each reason why no engine can be built."""
    problems = []
    for name, objects in (("models", models), ("optimizers", optimizers)):
        if len(objects) > 1:
            kinds = ", ".join(type(obj).__name__ for obj in objects)
            problems.append(
                f"{len(objects)} {name} ({kinds}): an engine has one model and one optimizer. Prepare each "
                "model in a call of its own, with its optimizer; state.select_deepspeed_plugin(name) "
                "between the calls gives it a configuration of its own"
            )
    if optimizers and not models:
        problems.append(
            f"{type(optimizers[0]).__name__} without its model: an engine is built from both. Give both to "
            "one call"
        )
    for optimizer in optimizers:
        problems += _first(
            (
                steps_in_backward(optimizer),
                f"{type(optimizer).__name__} updates parameters in the backward pass, and an engine keeps "
                "gradients until its step. Take an optimizer that steps, or train without DeepSpeed: FSDP "
                "shards parameters too",
            ),
            *_problems_of_section("optimizer", optimizer, config),
        )
    if len(models) == len(optimizers) == 1:
        problems += _problems_of_parameters(models[0], optimizers[0], config)
    for scheduler in schedulers:
        is_alone = isinstance(scheduler, DummyScheduler) and not optimizers
        problems += _first(
            (
                is_alone,
                f"{type(scheduler).__name__} without its optimizer: the engine steps both. Give both to one "
                "call",
            ),
            *_problems_of_section("scheduler", scheduler, config),
        )
    return problems


def _first(*rows: tuple[bool, str]) -> list[str]:
    """Return the message of the first row whose condition holds, in a list."""
    return [message for holds, message in rows if holds][:1]


_PLACEHOLDERS = {
    "optimizer": ("DummyOptim(parameters)", "Add an `optimizer` there, or build one of torch's"),
    "scheduler": (
        "DummyScheduler(optimizer)",
        "Add a `scheduler` there, or pass lr_scheduler_callable, which builds one for an optimizer",
    ),
}
"""Section of the configuration -> the placeholder for what it builds, and the fix where it is missing."""


def _problems_of_section(section: str, obj: Any, config: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """Return what is wrong where an object, or a section of the configuration, comes without the other."""
    name, (placeholder, fix) = type(obj).__name__, _PLACEHOLDERS[section]
    is_dummy, is_configured = isinstance(obj, (DummyOptim, DummyScheduler)), section in config
    builds_itself = getattr(obj, "lr_scheduler_callable", None) is not None
    return [
        (
            is_dummy and not is_configured and not builds_itself,
            f"{name} is a placeholder for the {section} of DeepSpeed's configuration, which has none. {fix}",
        ),
        (
            not is_dummy and is_configured,
            f"{name}, and DeepSpeed's configuration has the {section} {look_up(config, f'{section}.type')}. "
            f"Take one of them away: {placeholder} is a placeholder for that of the configuration",
        ),
    ]


def _problems_of_parameters(model: Any, optimizer: Any, config: Mapping[str, Any]) -> list[str]:
    """Return reasons why an engine of a model cannot step what an optimizer steps."""
    groups = [] if isinstance(optimizer, DummyOptim) else optimizer.param_groups
    name, own = type(optimizer).__name__, {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(parameter) not in own for group in groups for parameter in group["params"])
    stage = (config.get("zero_optimization") or {}).get("stage")
    frozen = [
        str(number)
        for number, group in enumerate(groups)
        if group["params"] and not any(parameter.requires_grad for parameter in group["params"])
    ]
    return _first(
        (
            bool(groups) and not any(group["params"] for group in groups),
            f"{name} has no parameters. Build it from the parameters of {type(model).__name__}",
        ),
        (
            not any(parameter.requires_grad for parameter in model.parameters()),
            f"{type(model).__name__} has no parameter that is trained (requires_grad). Prepare it without an "
            "optimizer",
        ),
        (
            foreign > 0,
            f"{name} has {foreign} tensors that are no parameters of {type(model).__name__}, whose "
            "gradients alone an engine averages. Build it from model.parameters() of that model",
        ),
        (
            bool(frozen) and stage in (1, 2),
            f"{name} has groups without a parameter that is trained ({', '.join(frozen)}), which ZeRO stage "
            f"{stage} cannot share. Leave them out of the optimizer",
        ),
    )


def check_abilities(configs: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Refuse what DeepSpeed cannot do on this machine."""
    from deepspeed.accelerator import get_accelerator

    hardware = get_accelerator()
    if (name := hardware.device_name()) != device.type:
        raise wrong_value(
            "DS_ACCELERATOR",
            name,
            f"DeepSpeed has chosen this hardware, and the run computes on {device.type}",
            f"Set DS_ACCELERATOR={device.type} before deepspeed is imported, if DeepSpeed knows it; "
            "otherwise train without DeepSpeed",
        )
    formats = {"fp16": hardware.is_fp16_supported, "bf16": hardware.is_bf16_supported}
    for config in configs:
        for name, is_supported in formats.items():
            if look_up(config, f"{name}.enabled") is True and not is_supported():
                reason = f"DeepSpeed does not compute in this format on {device.type}"
                fix = "Set mixed_precision to bf16 or no" if name == "fp16" else "Set mixed_precision to no"
                raise wrong_value(f"{name}.enabled", True, reason, fix)
        if computes_in_fp8(config):
            packages.require("msamp", "FP8 by DeepSpeed and MS-AMP")
        for name in ("optimizer", "param"):
            if look_up(config, f"zero_optimization.offload_{name}.device") == "nvme" and not reaches_nvme():
                reason = "DeepSpeed's extension async_io, which reads and writes there, cannot be built here"
                fix = "Install libaio with its headers (libaio-dev or libaio-devel), or offload to cpu"
                raise wrong_value(f"offload_{name}_device", "nvme", reason, fix)


def computes_in_fp8(config: Mapping[str, Any]) -> bool:
    """Whether MS-AMP's engine takes the place of DeepSpeed's."""
    return bool(look_up(config, "msamp.enabled"))


def reaches_nvme() -> bool:
    """Whether DeepSpeed's extension for NVMe is there, or can be built."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(installed_ops.get("async_io")) or bool(AsyncIOBuilder().is_compatible(verbose=False))


def begin(context: Context) -> None:
    """Let DeepSpeed use the process group of the run, and open one where a run has a single process."""
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
    check_abilities([plugin.deepspeed_config for plugin in plugins], context.device)


def _rank_variables(topology: Topology) -> dict[str, str]:
    """Return the variables of a rank that DeepSpeed reads, whatever started the process."""
    return {
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.size),
        "LOCAL_RANK": str(topology.local_rank),
        "MASTER_ADDR": topology.address or "127.0.0.1",
        "MASTER_PORT": str(topology.port or 29500),
    }


def complete(plugin: Any, given: Given) -> dict[str, Any]:
    """Return a plugin's configuration, filled in from a `prepare` call; in place if the model is trained."""
    config: dict[str, Any] = plugin.deepspeed_config
    restore_auto(config, plugin.filled)
    straighten(config)
    refuse_config(problems_of_counts(config), "Correct the configuration")
    if TOTAL not in config:
        config.setdefault(MICRO, AUTO)
    if given.optimizer is None:  # an engine that runs a model and never steps
        kept = (name for name in config if name not in ("optimizer", "scheduler"))
        config = {name: deepcopy(config[name]) for name in kept}
    filling = filling_of(given, config)
    filling.fill(config)
    if config is plugin.deepspeed_config:
        plugin.filled = filling.filled
    filling.check_filled()
    plugin.hf_ds_config.set_stage_and_offload()
    return config


_BY_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
"""Attributes of torch's schedulers that have an element for each parameter group."""


def drop_empty_groups(optimizer: Any, schedulers: Iterable[Any]) -> None:
    """Remove parameter groups without parameters, as DeepSpeed does, from schedulers too.

    Args:
        optimizer: the optimizer that the engine is built from.
        schedulers: those of this optimizer change, also inside `SequentialLR` and `ChainedScheduler`.
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
        for name in _BY_GROUP:
            values = getattr(scheduler, name, None)
            if isinstance(values, (list, tuple)) and len(values) == len(keeps):
                setattr(scheduler, name, list(compress(values, keeps)))


def choose_optimizer(optimizer: Any, config: dict[str, Any]) -> Any:
    """Return the optimizer for states that may be kept on the CPU, and allow it in the configuration."""
    offloads = look_up(config, "zero_optimization.offload_optimizer.device") in ("cpu", "nvme")
    chosen = optimizer
    if offloads and config.get("zero_force_ds_cpu_optimizer", True):
        chosen = map_pytorch_optim_to_deepspeed(optimizer)
        if chosen is optimizer and not type(optimizer).__module__.startswith("deepspeed."):
            config["zero_force_ds_cpu_optimizer"] = False
            logger.info(f"DeepSpeed has no {type(optimizer).__name__} of its own: torch's steps on the CPU.")
    config.setdefault("zero_allow_untested_optimizer", True)
    return chosen


def build_engine(
    model: nn.Module, optimizer: Any, scheduler: Any, config: dict[str, Any], mpu: Any = None
) -> tuple[Any, tuple[Any, Any]]:
    """Return an engine, and its optimizer and scheduler; without an optimizer it only runs. On all ranks."""
    import deepspeed

    arguments: dict[str, Any] = {"model": model, "config": config}
    arguments |= {} if mpu is None else {"mpu": mpu}
    if isinstance(optimizer, DummyOptim):
        arguments["model_parameters"] = optimizer.params
    elif optimizer is not None:
        arguments.update(optimizer=optimizer)
    if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is not None:
        arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
    package = import_module("msamp.deepspeed") if computes_in_fp8(config) else deepspeed
    try:
        engine, built_optimizer, _, built_scheduler = package.initialize(**arguments)
    except (deepspeed.DeepSpeedConfigError, AssertionError, ValueError) as error:
        raise PreparationError(f"DeepSpeed builds no engine from its configuration: {error}") from error
    if look_up(config, "bf16.enabled") is True:
        engine.module.register_forward_pre_hook(_in_bfloat16, with_kwargs=True, prepend=True)
    return engine, (built_optimizer, built_scheduler)


def compile_engine(engine: Any, dynamo: TorchDynamoPlugin) -> None:
    """Compile the model inside an engine as the run asks; nothing when it does not."""
    if dynamo.backend == DynamoBackend.NO:
        return
    arguments = dynamo.to_kwargs()
    if dynamo.use_regional_compilation:
        compile_regions_deepspeed(engine.module, **arguments)
        return
    backend = arguments.pop("backend")
    engine.compile(backend=backend, compile_kwargs=arguments)


def _in_bfloat16(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Cast float32 inputs to the format of the weights, as DeepSpeed itself does for float16 only."""
    inputs: tuple[Any, dict[str, Any]] = recursively_apply(
        lambda tensor: tensor.to(torch.bfloat16),
        (args, kwargs),
        test_type=lambda value: isinstance(value, Tensor) and value.dtype == torch.float32,
    )
    return inputs


def run_only(model: nn.Module, device: torch.device | None, config: dict[str, Any]) -> nn.Module:
    """Return a model as an engine would compute it, without an engine: it is not trained."""
    if device is not None:
        model = model.to(device)
    if look_up(config, "bf16.enabled") is True:
        model = model.to(torch.bfloat16)
        model.register_forward_pre_hook(_in_bfloat16, with_kwargs=True)
    elif look_up(config, "fp16.enabled") is True:
        model = model.to(torch.float16)
    return model


def innermost(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return torch's optimizer inside DeepSpeed's; None where there is none."""
    while optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


_ADAM = ("adam", "DeepSpeedCPUAdam", ("lr", "betas", "eps", "weight_decay"))
_LION = ("lion", "DeepSpeedCPULion", ("lr", "betas", "weight_decay"))
_ON_CPU = {
    **dict.fromkeys(("Adam", "AdamW", "AdamW8bit", "Adam8bit"), _ADAM),
    **dict.fromkeys(("Lion", "Lion8bit"), _LION),
    "Adagrad": ("adagrad", "DeepSpeedCPUAdagrad", ("lr", "eps", "weight_decay")),
}
"""Name of an optimizer -> module and class of DeepSpeed's for states on the CPU, and the options it has."""


def map_pytorch_optim_to_deepspeed(optimizer: Any) -> Any:
    """Return DeepSpeed's optimizer for states on the CPU; the very object where it has none of that kind.

    Args:
        optimizer: fresh, not stepped yet. Its groups become those of the new one, so that schedulers which
            hold them keep setting its learning rates.
    """
    kind, defaults = type(optimizer), getattr(optimizer, "defaults", {})
    is_foreign_adam = kind.__name__ == "Adam" and kind is not torch.optim.Adam
    if kind.__name__ not in _ON_CPU or is_foreign_adam or kind.__module__.startswith("deepspeed."):
        return optimizer
    module, name, names = _ON_CPU[kind.__name__]
    options = {name: defaults[name] for name in names if name in defaults}
    if module == "adam":
        is_decoupled = bool(defaults.get("decoupled_weight_decay", False))
        options["adamw_mode"] = isinstance(optimizer, torch.optim.AdamW) or is_decoupled
        options.update({"amsgrad": True} if defaults.get("amsgrad") else {})
    return getattr(import_module(f"deepspeed.ops.{module}"), name)(optimizer.param_groups, **options)
