"""Whether DeepSpeed can train what was given to `prepare`, on this machine, as its configurations ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from accelerate.base import packages, wrong_value
from accelerate.optimizer import steps_in_backward
from accelerate.settings import look_up
from accelerate.strategies.deepspeed.wrappers import DummyOptim, DummyScheduler


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


def _problems_of_optimizer(optimizer: Any, config: Mapping[str, Any]) -> list[str]:
    name = type(optimizer).__name__
    configured = (config.get("optimizer") or {}).get("type")
    if steps_in_backward(optimizer):
        return [
            f"{name} updates parameters in the backward pass, and an engine keeps gradients until its step. "
            "Take an optimizer that steps, or train without DeepSpeed: FSDP shards parameters too"
        ]
    if isinstance(optimizer, DummyOptim) and "optimizer" not in config:
        return [
            f"{name} stands for the optimizer of DeepSpeed's configuration, which has none. Add an "
            "`optimizer` there, or build one of torch's"
        ]
    if not isinstance(optimizer, DummyOptim) and "optimizer" in config:
        return [
            f"{name}, and DeepSpeed's configuration has the optimizer {configured}. Take one of them away: "
            "DummyOptim(parameters) stands for that of the configuration"
        ]
    return []


def _problems_of_parameters(model: Any, optimizer: Any, config: Mapping[str, Any]) -> list[str]:
    """Return reasons why an engine of a model cannot step what an optimizer steps."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return [
            f"{type(model).__name__} has no parameter that is trained (requires_grad). Prepare it without an "
            "optimizer"
        ]
    groups = [] if isinstance(optimizer, DummyOptim) else optimizer.param_groups
    name, own = type(optimizer).__name__, {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(parameter) not in own for group in groups for parameter in group["params"])
    if foreign:
        return [
            f"{name} has {foreign} tensors that are no parameters of {type(model).__name__}, whose "
            "gradients alone an engine averages. Build it from model.parameters() of that model"
        ]
    stage = (config.get("zero_optimization") or {}).get("stage")
    frozen = [
        n
        for n, group in enumerate(groups)
        if not any(parameter.requires_grad for parameter in group["params"])
    ]
    if frozen and stage in (1, 2):
        numbers = ", ".join(map(str, frozen))
        return [
            f"{name} has groups without a parameter that is trained ({numbers}), which ZeRO stage {stage} "
            "cannot share. Leave them out of the optimizer"
        ]
    return []


def _problems_of_scheduler(scheduler: Any, optimizers: Sequence[Any], config: Mapping[str, Any]) -> list[str]:
    name = type(scheduler).__name__
    configured = (config.get("scheduler") or {}).get("type")
    if not isinstance(scheduler, DummyScheduler):
        if "scheduler" in config:
            return [
                f"{name}, and DeepSpeed's configuration has the scheduler {configured}. Take one of them "
                "away: DummyScheduler(optimizer) stands for that of the configuration"
            ]
        return []
    if not optimizers:
        return [f"{name} without its optimizer: the engine steps both. Give both to one call"]
    if "scheduler" not in config and scheduler.lr_scheduler_callable is None:
        return [
            f"{name} stands for the scheduler of DeepSpeed's configuration, which has none. Add a "
            "`scheduler` there, or pass lr_scheduler_callable, which builds one for an optimizer"
        ]
    return []


def check_abilities(configs: Sequence[dict[str, Any]], device: torch.device) -> None:
    """Refuse what DeepSpeed cannot do on this machine."""
    from deepspeed.accelerator import get_accelerator

    hardware = get_accelerator()
    check_hardware(hardware.device_name(), device.type)
    formats = {"fp16": hardware.is_fp16_supported, "bf16": hardware.is_bf16_supported}
    for config in configs:
        for name, is_supported in formats.items():
            if look_up(config, f"{name}.enabled") is True and not is_supported():
                raise wrong_value(
                    f"{name}.enabled",
                    True,
                    f"DeepSpeed does not compute in this format on {device.type}",
                    "Set mixed_precision to bf16 or no" if name == "fp16" else "Set mixed_precision to no",
                )
        if computes_in_fp8(config):
            packages.require("msamp", "FP8 by DeepSpeed and MS-AMP")
        for name in ("optimizer", "param"):
            if look_up(config, f"zero_optimization.offload_{name}.device") == "nvme" and not reaches_nvme():
                raise wrong_value(
                    f"offload_{name}_device",
                    "nvme",
                    "DeepSpeed's extension async_io, which reads and writes there, cannot be built here",
                    "Install libaio with its headers (libaio-dev or libaio-devel), or offload to cpu",
                )


def check_hardware(found: str, wanted: str) -> None:
    """Refuse a DeepSpeed that has chosen other hardware than the run."""
    if found != wanted:
        raise wrong_value(
            "DS_ACCELERATOR",
            found,
            f"DeepSpeed has chosen this hardware, and the run computes on {wanted}",
            f"Set DS_ACCELERATOR={wanted} before deepspeed is imported, if DeepSpeed knows it; otherwise "
            "train without DeepSpeed",
        )


def computes_in_fp8(config: Mapping[str, Any]) -> bool:
    """Whether MS-AMP's engine takes the place of DeepSpeed's."""
    return bool((config.get("msamp") or {}).get("enabled", False))


def reaches_nvme() -> bool:
    """Whether DeepSpeed's extension for NVMe is there, or can be built."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(installed_ops.get("async_io")) or bool(AsyncIOBuilder().is_compatible(verbose=False))
