"""Constructor arguments of `Accelerator` and the environment, checked and laid over each other."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from accelerate import plugins, settings, strategies
from accelerate.base import (
    ConfigurationError,
    DynamoBackend,
    DynamoName,
    PrecisionName,
    PrecisionType,
    RNGName,
    RNGType,
    read_flag,
    whole_number,
    wrong_value,
)
from accelerate.parallelism_config import ParallelismConfig
from accelerate.scheduler import StepPolicy
from accelerate.settings import sections
from accelerate.state import is_initialized

_UNSET = object()
"""Default of arguments for which `False` is a choice."""

_PRECISION_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "MIXED_PRECISION")
_ACCUMULATION_VARIABLE = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_CPU_VARIABLE = "ACCELERATE_USE_CPU"
_DEEPSPEED_VARIABLE = "ACCELERATE_USE_DEEPSPEED"
_FSDP_VARIABLE = "ACCELERATE_USE_FSDP"
_MEGATRON_VARIABLE = "ACCELERATE_USE_MEGATRON_LM"
_MESH_VARIABLE = "ACCELERATE_USE_PARALLELISM_CONFIG"
_TENSOR_PARALLEL_VARIABLE = "ACCELERATE_USE_TP"

Given = TypeVar("Given")
Plugin = TypeVar("Plugin")


@dataclass(frozen=True)
class Arguments:
    """The constructor arguments of `Accelerator` that shape a run, as the user gave them."""

    device_placement: bool = True
    split_batches: Any = _UNSET
    mixed_precision: PrecisionType | PrecisionName | None = None
    gradient_accumulation_steps: int = 1
    cpu: bool = False
    dataloader_config: plugins.DataLoaderConfiguration | None = None
    rng_types: Sequence[RNGName | RNGType] | None = None
    project_dir: str | os.PathLike[str] | None = None
    project_config: plugins.ProjectConfiguration | None = None
    gradient_accumulation_plugin: plugins.GradientAccumulationPlugin | None = None
    step_scheduler_with_optimizer: StepPolicy = True
    kwargs_handlers: Sequence[plugins.KwargsHandler] | None = None
    dynamo_backend: DynamoBackend | DynamoName | None = None
    dynamo_plugin: plugins.TorchDynamoPlugin | None = None
    fsdp_plugin: plugins.FullyShardedDataParallelPlugin | None = None
    deepspeed_plugin: plugins.DeepSpeedPlugin | dict[str, plugins.DeepSpeedPlugin] | None = None
    deepspeed_plugins: plugins.DeepSpeedPlugin | dict[str, plugins.DeepSpeedPlugin] | None = None
    torch_tp_plugin: Any = None
    megatron_lm_plugin: plugins.MegatronLMPlugin | None = None
    parallelism_config: ParallelismConfig | None = None


def build_request(arguments: Arguments, environ: Mapping[str, str]) -> strategies.RunRequest:
    """Return the checked request for a run.

    Arguments win over the environment; where both speak and disagree, one line of the log names both.

    Args:
        arguments: what the constructor was given.
        environ: the process's environment variables.

    Raises:
        ConfigurationError: for a value that cannot work.
    """
    _refuse_older_plugin(arguments, environ)
    notes = settings.retired_variables(environ)
    return strategies.RunRequest(
        mixed_precision=_mixed_precision(arguments, environ, notes),
        cpu=arguments.cpu or read_flag(environ, _CPU_VARIABLE),
        device_placement=arguments.device_placement,
        step_scheduler_with_optimizer=_step_policy(arguments),
        rng_types=_rng_types(arguments),
        dataloader_config=_dataloader_config(arguments),
        accumulation=_accumulation(arguments, environ, notes),
        project=_project(arguments),
        dynamo=_dynamo(arguments),
        fsdp=_plugin_of(
            plugins.FullyShardedDataParallelPlugin,
            "fsdp_plugin",
            arguments.fsdp_plugin,
            read_flag(environ, _FSDP_VARIABLE),
        ),
        deepspeed=_deepspeed(arguments, environ),
        megatron=_plugin_of(
            plugins.MegatronLMPlugin,
            "megatron_lm_plugin",
            arguments.megatron_lm_plugin,
            read_flag(environ, _MEGATRON_VARIABLE),
        ),
        fp8_library=settings.decode(sections.Fp8Section, environ).fp8_backend,
        parallelism=_plugin_of(
            ParallelismConfig,
            "parallelism_config",
            arguments.parallelism_config,
            read_flag(environ, _MESH_VARIABLE),
            AttributeError,
        ),
        handlers=tuple(arguments.kwargs_handlers or ()),
        notes=tuple(notes),
        **_handlers(arguments),
    )


def _refuse_older_plugin(arguments: Arguments, environ: Mapping[str, str]) -> None:
    asked = read_flag(environ, _TENSOR_PARALLEL_VARIABLE) and _TENSOR_PARALLEL_VARIABLE
    if arguments.torch_tp_plugin is not None:
        asked = "torch_tp_plugin"
    if asked:
        raise ConfigurationError(
            f"{asked} asks for tensor parallelism by its older plugin, which this version cannot train with. "
            "Pass parallelism_config=ParallelismConfig(tp_size=...) instead."
        )


def _laid_over(
    name: str, argument: Given | None, variable: str, found: Given | None, notes: list[str]
) -> Given | None:
    """Return the argument if there is one, else what the environment holds; note a disagreement."""
    if argument is None:
        return found
    if found not in (None, "no", argument):  # a launcher says "no" where nobody has asked for anything
        notes.append(
            f"{name}={argument!r} was passed to Accelerator and {variable}={found!r} is set: "
            "the argument is used."
        )
    return argument


def _member(name: str, value: Any, known: Sequence[str]) -> str:
    text = str(getattr(value, "value", value)).lower()
    if text not in known:
        raise wrong_value(name, value, f"it is none of {', '.join(known)}", "Choose one of them")
    return text


def _mixed_precision(
    arguments: Arguments, environ: Mapping[str, str], notes: list[str]
) -> PrecisionName | None:
    known = PrecisionType.list()
    variable = next((name for name in _PRECISION_VARIABLES if environ.get(name)), _PRECISION_VARIABLES[0])
    found = _member(variable, environ[variable], known) if environ.get(variable) else None
    given = arguments.mixed_precision
    if given is None and is_initialized():
        return None  # this run has begun, with a number format that may differ from the launcher's
    chosen = None if given is None else _member("mixed_precision", given, known)
    laid = _laid_over("mixed_precision", chosen, variable, found, notes)
    return cast("PrecisionName | None", laid)


def _accumulation(
    arguments: Arguments, environ: Mapping[str, str], notes: list[str]
) -> plugins.GradientAccumulationPlugin:
    given: int | None = arguments.gradient_accumulation_steps
    plugin = arguments.gradient_accumulation_plugin
    if plugin is not None and given != 1:
        raise wrong_value(
            "gradient_accumulation_steps",
            given,
            "gradient_accumulation_plugin was passed too, and both say how many steps there are",
            "Pass one of them",
        )
    if plugin is not None and plugin.num_steps is not None:
        given = plugin.num_steps
    elif given == 1:
        given = None
    steps = _laid_over(
        "gradient_accumulation_steps", given, _ACCUMULATION_VARIABLE, _steps_found(environ), notes
    )
    if plugin is None:
        return plugins.GradientAccumulationPlugin(num_steps=_positive(1 if steps is None else steps))
    return (
        plugin if plugin.num_steps is not None else replace(plugin, num_steps=1 if steps is None else steps)
    )


def _steps_found(environ: Mapping[str, str]) -> int | None:
    text = environ.get(_ACCUMULATION_VARIABLE)
    if not text or text == "auto":
        return None
    try:
        steps = whole_number(text)
    except ValueError:
        steps = 0
    if steps < 1:
        raise wrong_value(
            _ACCUMULATION_VARIABLE, text, "it is not a count of steps", "Set an integer of at least 1"
        )
    return steps


def _positive(steps: int) -> int:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise wrong_value(
            "gradient_accumulation_steps",
            steps,
            "it is not a count of steps",
            "Pass an integer of at least 1",
        )
    return steps


def _step_policy(arguments: Arguments) -> StepPolicy:
    policy = arguments.step_scheduler_with_optimizer
    if policy not in (True, False, "per_update"):
        raise wrong_value(
            "step_scheduler_with_optimizer",
            policy,
            "it is none of True (once per process and update), 'per_update' (once per update) "
            "and False (on each call)",
            "Choose one of them",
        )
    return policy


def _rng_types(arguments: Arguments) -> list[RNGName | RNGType] | None:
    if arguments.rng_types is None:
        return None
    known = [kind.value for kind in RNGType]
    return [RNGType(_member("rng_types", kind, known)) for kind in arguments.rng_types]


def _dataloader_config(arguments: Arguments) -> plugins.DataLoaderConfiguration:
    config = arguments.dataloader_config
    if arguments.split_batches is _UNSET:
        return config if config is not None else plugins.DataLoaderConfiguration()
    if config is None:
        return plugins.DataLoaderConfiguration(split_batches=arguments.split_batches)
    if config.split_batches != arguments.split_batches:
        raise wrong_value(
            "split_batches",
            arguments.split_batches,
            f"dataloader_config.split_batches is {config.split_batches}",
            "Set it in dataloader_config only",
        )
    return config


def _project(arguments: Arguments) -> plugins.ProjectConfiguration:
    project = arguments.project_config or plugins.ProjectConfiguration()
    folder = arguments.project_dir
    if folder is None:
        return project
    folder = os.fspath(folder)
    if project.project_dir is not None and os.fspath(project.project_dir) != folder:
        raise wrong_value(
            "project_dir",
            folder,
            f"project_config.project_dir is {project.project_dir!r}",
            "Set it in one place",
        )
    project.set_directories(folder)
    return project


def _dynamo(arguments: Arguments) -> plugins.TorchDynamoPlugin:
    if arguments.dynamo_plugin is not None and arguments.dynamo_backend is not None:
        raise wrong_value(
            "dynamo_backend",
            arguments.dynamo_backend,
            "dynamo_plugin was passed too, and both name the compiler",
            "Pass one of them",
        )
    if arguments.dynamo_plugin is not None:
        return arguments.dynamo_plugin
    return plugins.TorchDynamoPlugin(backend=arguments.dynamo_backend)


def _plugin_of(
    kind: type[Plugin], name: str, given: Any, is_asked: bool, error: type[Exception] = TypeError
) -> Plugin | None:
    """Return the plugin that was given; without one, that of the environment if the launcher asks for it."""
    if given is None:
        return kind() if is_asked else None
    if not isinstance(given, kind):
        raise wrong_value(
            name, type(given).__name__, f"it is not a {kind.__name__}", f"Pass {kind.__name__}(...)", error
        )
    return given


def _deepspeed(
    arguments: Arguments, environ: Mapping[str, str]
) -> plugins.DeepSpeedPlugin | dict[str, plugins.DeepSpeedPlugin] | None:
    if arguments.deepspeed_plugin is not None and arguments.deepspeed_plugins is not None:
        raise wrong_value(
            "deepspeed_plugins",
            arguments.deepspeed_plugins,
            "deepspeed_plugin was passed too, and both say how DeepSpeed trains",
            "Pass one of them",
        )
    given = arguments.deepspeed_plugin if arguments.deepspeed_plugins is None else arguments.deepspeed_plugins
    if given is None:
        return plugins.DeepSpeedPlugin() if read_flag(environ, _DEEPSPEED_VARIABLE) else None
    several = list(given.values()) if isinstance(given, dict) else [given]
    if not several or not all(isinstance(plugin, plugins.DeepSpeedPlugin) for plugin in several):
        raise wrong_value(
            "deepspeed_plugin",
            ", ".join(type(plugin).__name__ for plugin in several) or "{}",
            "it is neither a DeepSpeedPlugin nor a dictionary of them",
            "Pass DeepSpeedPlugin(...), or {'name': DeepSpeedPlugin(...), ...}; what DeepSpeed itself is "
            "configured by is DeepSpeedPlugin(hf_ds_config=...)",
        )
    return given


def _handlers(arguments: Arguments) -> dict[str, Any]:
    handlers = list(arguments.kwargs_handlers or ())
    for handler in handlers:
        if not isinstance(handler, plugins.KwargsHandler):
            raise wrong_value(
                "kwargs_handlers",
                type(handler).__name__,
                "it is not a KwargsHandler",
                "Pass objects such as DistributedDataParallelKwargs() or AutocastKwargs()",
                AssertionError,
            )
        if sum(type(other) is type(handler) for other in handlers) > 1:
            raise wrong_value(
                "kwargs_handlers",
                type(handler).__name__,
                "it was passed twice",
                "Pass one handler of each kind",
            )
    fields: dict[str, type[plugins.KwargsHandler]] = {
        "ddp": plugins.DistributedDataParallelKwargs,
        "scaler": plugins.GradScalerKwargs,
        "autocast": plugins.AutocastKwargs,
        "process_group": plugins.InitProcessGroupKwargs,
        "profile": plugins.ProfileKwargs,
    }
    return {
        name: next((handler for handler in handlers if isinstance(handler, kind)), None)
        for name, kind in fields.items()
    }
