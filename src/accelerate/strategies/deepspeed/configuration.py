"""DeepSpeed's configuration: the values that prepared objects give it, and what prevents an engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerate.base import packages, wrong_value
from accelerate.optimizer import steps_in_backward
from accelerate.plugins import Filling
from accelerate.settings import AUTO, look_up
from accelerate.strategies.deepspeed.engine import DummyOptim, DummyScheduler

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
    """What a configuration is filled from.

    Attributes:
        optimizer: torch's, or a placeholder for DeepSpeed's; None to run a model without training it.
        smallest: whether the smallest counts, and not the largest.
        accumulation: batches for each step.
        replicas: number of processes that see different data.
        pace: steps of a schedule for each step of the optimizer.
    """

    model: Any
    optimizer: Any = None
    scheduler: Any = None
    batch_sizes: Sequence[int] = ()
    known_sizes: Sequence[int] = ()
    smallest: bool = True
    accumulation: int = 1
    replicas: int = 1
    pace: int = 1

    def choose(self, sizes: Sequence[int]) -> int:
        """Return the batch size that counts."""
        return min(sizes) if self.smallest else max(sizes)


def filling_of(given: Given, config: Mapping[str, Any]) -> Filling:
    """Return the values for a configuration."""
    values: dict[str, Any] = {STEPS: given.accumulation}
    sources = {STEPS: "Accelerator(gradient_accumulation_steps)"}
    usual: dict[str, Any] = {"gradient_clipping": 0.0, **_sizes_of_buckets(given.model)}
    micro = _micro_batch(given, config)
    if micro is not None:
        usual[MICRO] = micro
        steps = _number(config.get(STEPS), given.accumulation)
        values[TOTAL] = micro * steps * given.replicas
        sources[TOTAL] = f"{MICRO} {micro} x {STEPS} {steps} x {given.replicas} processes"
    if given.batch_sizes and _number(config.get(MICRO), None) not in given.batch_sizes:
        values[MICRO] = given.choose(given.batch_sizes)
        sources[MICRO] = "the loader (its batch on one process)"
    usual.update(_of_optimizer(given.optimizer))
    usual.update(_of_scheduler(given.scheduler, given.optimizer, given.pace))
    return Filling(values, sources, usual=usual, hints=HINTS)


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


def _of_scheduler(scheduler: Any, optimizer: Any, pace: int) -> dict[str, Any]:
    if not isinstance(scheduler, DummyScheduler):
        return {}
    is_dummy = isinstance(optimizer, DummyOptim)
    rate = optimizer.lr if is_dummy else getattr(optimizer, "defaults", {}).get("lr")
    values: dict[str, Any] = {
        "warmup_min_lr": 0,
        "warmup_max_lr": rate,
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
        problems += _problems_of_optimizer(optimizer, config)
    if len(models) == len(optimizers) == 1:
        problems += _problems_of_parameters(models[0], optimizers[0], config)
    for scheduler in schedulers:
        problems += _problems_of_scheduler(scheduler, optimizers, config)
    return problems


def _first(*rows: tuple[bool, str]) -> list[str]:
    """Return the message of the first row whose condition holds, in a list."""
    return [message for holds, message in rows if holds][:1]


def _problems_of_optimizer(optimizer: Any, config: Mapping[str, Any]) -> list[str]:
    name, is_dummy = type(optimizer).__name__, isinstance(optimizer, DummyOptim)
    return _first(
        (
            steps_in_backward(optimizer),
            f"{name} updates parameters in the backward pass, and an engine keeps gradients until its step. "
            "Take an optimizer that steps, or train without DeepSpeed: FSDP shards parameters too",
        ),
        (
            is_dummy and "optimizer" not in config,
            f"{name} is a placeholder for the optimizer of DeepSpeed's configuration, which has none. Add an "
            "`optimizer` there, or build one of torch's",
        ),
        (
            not is_dummy and "optimizer" in config,
            f"{name}, and DeepSpeed's configuration has the optimizer {_type_of('optimizer', config)}. Take "
            "one of them away: DummyOptim(parameters) is a placeholder for that of the configuration",
        ),
    )


def _problems_of_parameters(model: Any, optimizer: Any, config: Mapping[str, Any]) -> list[str]:
    """Return reasons why an engine of a model cannot step what an optimizer steps."""
    groups = [] if isinstance(optimizer, DummyOptim) else optimizer.param_groups
    name, own = type(optimizer).__name__, {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(parameter) not in own for group in groups for parameter in group["params"])
    stage = (config.get("zero_optimization") or {}).get("stage")
    frozen = [
        str(number)
        for number, group in enumerate(groups)
        if not any(parameter.requires_grad for parameter in group["params"])
    ]
    return _first(
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


def _problems_of_scheduler(scheduler: Any, optimizers: Sequence[Any], config: Mapping[str, Any]) -> list[str]:
    name, is_dummy = type(scheduler).__name__, isinstance(scheduler, DummyScheduler)
    is_configured = "scheduler" in config
    return _first(
        (
            not is_dummy and is_configured,
            f"{name}, and DeepSpeed's configuration has the scheduler {_type_of('scheduler', config)}. Take "
            "one of them away: DummyScheduler(optimizer) is a placeholder for that of the configuration",
        ),
        (
            is_dummy and not optimizers,
            f"{name} without its optimizer: the engine steps both. Give both to one call",
        ),
        (
            is_dummy and not is_configured and scheduler.lr_scheduler_callable is None,
            f"{name} is a placeholder for the scheduler of DeepSpeed's configuration, which has none. Add a "
            "`scheduler` there, or pass lr_scheduler_callable, which builds one for an optimizer",
        ),
    )


def _type_of(section: str, config: Mapping[str, Any]) -> Any:
    return (config.get(section) or {}).get("type")


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
    return bool((config.get("msamp") or {}).get("enabled", False))


def reaches_nvme() -> bool:
    """Whether DeepSpeed's extension for NVMe is there, or can be built."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(installed_ops.get("async_io")) or bool(AsyncIOBuilder().is_compatible(verbose=False))
