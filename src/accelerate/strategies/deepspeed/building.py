"""Build an engine: complete DeepSpeed's configuration, choose the optimizer, call `deepspeed.initialize`.

Source: https://deepspeed.readthedocs.io/en/latest/initialize.html
"""

from __future__ import annotations

from copy import deepcopy
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from accelerate.base import PreparationError, environ, packages
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.nested import recursively_apply
from accelerate.plugins import TorchDynamoPlugin, undo_filling
from accelerate.settings import AUTO, problems_of_counts, refuse_config, straighten
from accelerate.state import Topology, process_group
from accelerate.strategies.deepspeed.configuration import (
    MICRO,
    TOTAL,
    Given,
    check_abilities,
    computes_in_fp8,
    filling_of,
)
from accelerate.strategies.deepspeed.engine import DummyOptim, DummyScheduler
from accelerate.strategies.session import Context
from accelerate.wrappers import compile_regions_deepspeed

logger = get_logger(__name__)


def begin(context: Context) -> None:
    """Let DeepSpeed use the process group of the run, and open one where a run has a single process.

    Called on all ranks, once; again it does nothing.
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
    undo_filling(config, plugin.filled)
    straighten(config)
    refuse_config(problems_of_counts(config), "Correct the configuration")
    if TOTAL not in config:
        config.setdefault(MICRO, AUTO)
    if given.optimizer is None:
        config = without_training(config)
    filling = filling_of(given, config)
    filling.fill(config)
    if config is plugin.deepspeed_config:
        plugin.filled = filling.filled
    filling.check_filled()
    plugin.hf_ds_config.set_stage_and_offload()
    return config


def without_training(config: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration for an engine that runs a model and never steps."""
    return {name: deepcopy(part) for name, part in config.items() if name not in ("optimizer", "scheduler")}


def choose_optimizer(optimizer: Any, config: dict[str, Any]) -> Any:
    """Return the optimizer for states that may be kept on the CPU, and allow it in the configuration."""
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    offloads = offload.get("device") in ("cpu", "nvme")
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
) -> tuple[Any, Any, Any]:
    """Return engine, optimizer and scheduler; without an optimizer the model is not trained. On all ranks."""
    import deepspeed

    arguments: dict[str, Any] = {"model": model, "config": config}
    if mpu is not None:
        arguments["mpu"] = mpu
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
    if config.get("bf16", {}).get("enabled") is True:
        engine.module.register_forward_pre_hook(_in_bfloat16, with_kwargs=True, prepend=True)
    return engine, built_optimizer, built_scheduler


def compile_engine(engine: Any, dynamo: TorchDynamoPlugin) -> None:
    """Compile the model inside an engine as the run asks; nothing when it does not."""
    if str(getattr(dynamo.backend, "value", dynamo.backend)).lower() == "no":
        return
    arguments = dynamo.to_kwargs()
    if dynamo.use_regional_compilation:
        compile_regions_deepspeed(engine.module, **arguments)
        return
    backend = arguments.pop("backend")
    engine.compile(backend=backend, compile_kwargs=arguments)


def _in_bfloat16(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Cast float32 inputs to the format of the weights, as DeepSpeed itself does for float16 only."""

    def is_float32(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype == torch.float32

    inputs: tuple[Any, dict[str, Any]] = recursively_apply(
        lambda tensor: tensor.to(torch.bfloat16), (args, kwargs), test_type=is_float32
    )
    return inputs


def run_only(model: nn.Module, device: torch.device | None, config: dict[str, Any]) -> nn.Module:
    """Return a model as an engine would compute it, without an engine: it is not trained."""
    if device is not None:
        model = model.to(device)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(name, {}).get("enabled") is True:
            model = model.to(dtype)
    if config.get("bf16", {}).get("enabled") is True:
        model.register_forward_pre_hook(_in_bfloat16, with_kwargs=True)
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
