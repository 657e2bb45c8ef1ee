"""Checks that run before a DeepSpeed engine is built.

`problems_of` checks the objects of a `prepare` call against the configuration, and `check_hardware` checks
the configurations against this node. The strategy raises all problems of a `prepare` call in one error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from accelerate.base import wrong_value
from accelerate.optimizer import steps_in_backward
from accelerate.settings import look_up
from accelerate.strategies.deepspeed.engine import DummyOptim, DummyScheduler

if TYPE_CHECKING:
    from torch import nn

_PLACEHOLDERS = {
    "optimizer": ("DummyOptim(parameters)", "Add an `optimizer` there, or build an optimizer of torch"),
    "scheduler": (
        "DummyScheduler(optimizer)",
        "Add a `scheduler` there, or pass lr_scheduler_callable, which builds one for an optimizer",
    ),
}
"""Section of the configuration -> the placeholder for its object, and the fix if the section is missing."""


def problems_of(
    models: Sequence[Any], optimizers: Sequence[Any], schedulers: Sequence[Any], config: Mapping[str, Any]
) -> list[str]:
    """Returns one line for each reason why no engine can be built."""
    problems = []
    for name, objects in (("models", models), ("optimizers", optimizers)):
        if len(objects) > 1:
            kinds = ", ".join(type(obj).__name__ for obj in objects)
            problems.append(
                f"{len(objects)} {name} ({kinds}): an engine has one model and one optimizer. Prepare each "
                "model in a call of its own, with its optimizer; state.select_deepspeed_plugin(name) "
                "between the calls selects its configuration"
            )
    if optimizers and not models:
        problems.append(
            f"{type(optimizers[0]).__name__} without its model: an engine is built from both. Pass both to "
            "one call"
        )
    found: list[str | None] = [_problem_of_optimizer(optimizer, config) for optimizer in optimizers]
    if len(models) == len(optimizers) == 1:
        found.append(_problem_of_parameters(models[0], optimizers[0], config))
    found += [_problem_of_scheduler(scheduler, optimizers, config) for scheduler in schedulers]
    return problems + [problem for problem in found if problem]


def _problem_of_optimizer(
    optimizer: torch.optim.Optimizer | DummyOptim, config: Mapping[str, Any]
) -> str | None:
    if steps_in_backward(optimizer):
        return (
            f"{type(optimizer).__name__} updates parameters in the backward pass, and an engine keeps "
            "gradients until its step. Use an optimizer that steps, or train without DeepSpeed: FSDP "
            "shards parameters too"
        )
    return _problem_of_section("optimizer", optimizer, config)


def _problem_of_scheduler(
    scheduler: torch.optim.lr_scheduler.LRScheduler | DummyScheduler,
    optimizers: Sequence[Any],
    config: Mapping[str, Any],
) -> str | None:
    if isinstance(scheduler, DummyScheduler) and not optimizers:
        return (
            f"{type(scheduler).__name__} without its optimizer: the engine steps both. Pass both to one call"
        )
    return _problem_of_section("scheduler", scheduler, config)


def _problem_of_section(section: str, obj: object, config: Mapping[str, Any]) -> str | None:
    """Returns the problem of a placeholder without its section of the configuration, or of the opposite."""
    name, (placeholder, fix) = type(obj).__name__, _PLACEHOLDERS[section]
    is_placeholder, is_configured = isinstance(obj, (DummyOptim, DummyScheduler)), section in config
    has_builder = getattr(obj, "lr_scheduler_callable", None) is not None
    if is_placeholder and not is_configured and not has_builder:
        return (
            f"{name} is a placeholder for the {section} of DeepSpeed's configuration, which has none. {fix}"
        )
    if is_configured and not is_placeholder:
        return (
            f"{name}, and DeepSpeed's configuration has the {section} {look_up(config, f'{section}.type')}. "
            f"Remove one of them: {placeholder} is a placeholder for that of the configuration"
        )
    return None


def _problem_of_parameters(
    model: nn.Module, optimizer: torch.optim.Optimizer | DummyOptim, config: Mapping[str, Any]
) -> str | None:
    """Returns the reason why an engine of a model cannot step the parameters of an optimizer."""
    groups = [] if isinstance(optimizer, DummyOptim) else optimizer.param_groups
    name, model_name = type(optimizer).__name__, type(model).__name__
    own = {id(parameter) for parameter in model.parameters()}
    if groups and not any(group["params"] for group in groups):
        return f"{name} has no parameters. Build it from the parameters of {model_name}"
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return (
            f"{model_name} has no parameter that is trained (requires_grad). Prepare it without an optimizer"
        )
    if foreign := sum(id(parameter) not in own for group in groups for parameter in group["params"]):
        return (
            f"{name} has {foreign} tensors that are not parameters of {model_name}, and an engine averages "
            "only the gradients of its model. Build it from model.parameters() of that model"
        )
    stage = (config.get("zero_optimization") or {}).get("stage")
    frozen = [
        str(index)
        for index, group in enumerate(groups)
        if group["params"] and not any(parameter.requires_grad for parameter in group["params"])
    ]
    if frozen and stage in (1, 2):
        return (
            f"{name} has groups without a parameter that is trained ({', '.join(frozen)}), which ZeRO stage "
            f"{stage} cannot shard. Leave them out of the optimizer"
        )
    return None


def check_hardware(configs: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Raises an error if DeepSpeed does not support a configuration on this node.

    Raises:
        ConfigurationError: DeepSpeed has chosen other hardware than the run, or does not support a dtype or
            NVMe here, or a configuration uses MS-AMP.
    """
    from deepspeed.accelerator import get_accelerator

    hardware = get_accelerator()
    if (name := hardware.device_name()) != device.type:
        raise wrong_value(
            "DS_ACCELERATOR",
            name,
            f"DeepSpeed has chosen this hardware, and the run computes on {device.type}",
            f"Set DS_ACCELERATOR={device.type} before deepspeed is imported, if DeepSpeed supports it; "
            "otherwise train without DeepSpeed",
        )
    is_supported = {"fp16": hardware.is_fp16_supported, "bf16": hardware.is_bf16_supported}
    for config in configs:
        for name, check in is_supported.items():
            if look_up(config, f"{name}.enabled") is True and not check():
                reason = f"DeepSpeed does not support this dtype on {device.type}"
                fix = "Set mixed_precision to bf16 or no" if name == "fp16" else "Set mixed_precision to no"
                raise wrong_value(f"{name}.enabled", True, reason, fix)
        if look_up(config, "msamp.enabled"):
            reason, fix = "MS-AMP is no longer maintained", "Use mixed_precision='fp8' with torchao"
            raise wrong_value("enable_msamp", True, reason, fix)
        for name in ("optimizer", "param"):
            target = look_up(config, f"zero_optimization.offload_{name}.device")
            if target == "nvme" and not supports_nvme():
                reason = "DeepSpeed's extension async_io, which accesses NVMe, cannot be built here"
                fix = "Install libaio with its headers (libaio-dev or libaio-devel), or offload to cpu"
                raise wrong_value(f"offload_{name}_device", "nvme", reason, fix)


def supports_nvme() -> bool:
    """Returns whether DeepSpeed's extension for NVMe is installed or can be built."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(installed_ops.get("async_io")) or bool(AsyncIOBuilder().is_compatible(verbose=False))
