"""Request of a run, built from the arguments of `Accelerator` and the environment.

`Accelerator.__init__` calls `build_request`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, fields, replace
from numbers import Integral
from typing import Any, TypeAlias, TypeVar, cast

from accelerate import plugins, settings, strategies
from accelerate.base import (
    ConfigurationError,
    PrecisionName,
    PrecisionType,
    RNGType,
    plain_value,
    read_flag,
    refuse_path,
    whole_number,
    wrong_value,
)
from accelerate.parallelism_config import ParallelismConfig
from accelerate.scheduler import StepPolicy
from accelerate.settings import sections
from accelerate.state import is_initialized

_UNSET: Any = object()
"""Default of arguments that may be False."""

_PRECISION_VARIABLES = ("ACCELERATE_MIXED_PRECISION", "MIXED_PRECISION")
_ACCUMULATION_VARIABLE = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_MESH_VARIABLE = "ACCELERATE_USE_PARALLELISM_CONFIG"
_TENSOR_PARALLEL_VARIABLE = "ACCELERATE_USE_TP"

_EXCLUSIVE = (
    ("gradient_accumulation_steps", "gradient_accumulation_plugin", "say how many steps there are"),
    ("dynamo_backend", "dynamo_plugin", "name the compiler"),
    ("deepspeed_plugins", "deepspeed_plugin", "say how DeepSpeed trains"),
)
"""Pairs of arguments of which at most one may be passed, and their common purpose."""

_PLUGINS: dict[str, tuple[str, Callable[[], type], str, type[Exception]]] = {
    "fsdp": ("fsdp_plugin", lambda: plugins.FullyShardedDataParallelPlugin, "ACCELERATE_USE_FSDP", TypeError),
    "megatron": (
        "megatron_lm_plugin",
        lambda: plugins.MegatronLMPlugin,
        "ACCELERATE_USE_MEGATRON_LM",
        TypeError,
    ),
    "parallelism": ("parallelism_config", lambda: ParallelismConfig, _MESH_VARIABLE, AttributeError),
}
"""Field -> argument, class (imported on use), variable that enables it, and error for other classes."""

_HANDLERS: dict[str, type[plugins.KwargsHandler]] = {
    "ddp": plugins.DistributedDataParallelKwargs,
    "scaler": plugins.GradScalerKwargs,
    "autocast": plugins.AutocastKwargs,
    "process_group": plugins.InitProcessGroupKwargs,
    "profile": plugins.ProfileKwargs,
    "activations": plugins.ActivationCheckpointing,
}
"""Field -> class of its handler in `kwargs_handlers`."""

_KINDS = {
    "dataloader_config": plugins.DataLoaderConfiguration,
    "project_config": plugins.ProjectConfiguration,
    "gradient_accumulation_plugin": plugins.GradientAccumulationPlugin,
    "dynamo_plugin": plugins.TorchDynamoPlugin,
}
"""Argument of `Accelerator` -> class of its value, besides those of `_PLUGINS`."""

DeepSpeedPlugins: TypeAlias = "plugins.DeepSpeedPlugin | dict[str, plugins.DeepSpeedPlugin] | None"

Value = TypeVar("Value")

_Arguments: TypeAlias = Mapping[str, Any]
"""Arguments of `Accelerator` by name."""


def build_request(environ: Mapping[str, str], **arguments: Any) -> strategies.RunRequest:
    """Returns the request of a run from the arguments of `Accelerator` and the environment.

    An argument overrides the environment. If they differ, the request has a note that names both.

    Args:
        **arguments: All arguments of `Accelerator`. `log_with` is not a part of the request.

    Raises:
        ConfigurationError: A value is wrong, or two arguments exclude each other.
    """
    arguments = {name: plain_value(value) for name, value in arguments.items()}
    arguments["kwargs_handlers"] = _listed_handlers(arguments["kwargs_handlers"])
    _refuse_older_plugin(arguments, environ)
    for name, kind in _KINDS.items():
        if arguments[name] is not None:
            _check_kind(name, arguments[name], kind, TypeError)
    handlers = _handlers(arguments)
    _refuse_text_flags(arguments)
    for name, alternative, effect in _EXCLUSIVE:
        value = arguments[name]
        if value not in (None, 1) and arguments[alternative] is not None:
            reason = f"{alternative} was passed too, and both {effect}"
            raise wrong_value(name, value, reason, "Pass one of them")
    notes = settings.retired_variables(environ)
    rng_types = arguments["rng_types"]
    rng_types = [rng_types] if isinstance(rng_types, str) else rng_types
    return strategies.RunRequest(
        mixed_precision=_mixed_precision(arguments, environ, notes),
        cpu=arguments["cpu"] or read_flag(environ, "ACCELERATE_USE_CPU"),
        device_placement=arguments["device_placement"],
        step_scheduler_with_optimizer=_step_policy(arguments),
        rng_types=rng_types and [RNGType(_member("rng_types", kind, RNGType.list())) for kind in rng_types],
        dataloader_config=_dataloader_config(arguments),
        accumulation=_accumulation(arguments, environ, notes),
        project=_project(arguments),
        dynamo=arguments["dynamo_plugin"] or plugins.TorchDynamoPlugin(backend=arguments["dynamo_backend"]),
        deepspeed=_deepspeed(arguments, environ),
        fp8_library=settings.decode(sections.Fp8Section, environ).fp8_backend,
        handlers=tuple(arguments["kwargs_handlers"]),
        notes=tuple(notes),
        **{field: _plugin(arguments, environ, *row) for field, row in _PLUGINS.items()},
        **handlers,
    )


def _refuse_text_flags(arguments: _Arguments) -> None:
    """Raises an error for a flag that is text, such as "false", which Python regards as true."""
    flags = {name: arguments[name] for name in ("device_placement", "cpu", "split_batches")}
    configs = [arguments[name] for name in _KINDS if arguments[name] is not None]
    for config in (*configs, *arguments["kwargs_handlers"]):
        flags.update((entry.name, getattr(config, entry.name)) for entry in fields(config) if _is_flag(entry))
    for name, value in flags.items():
        if isinstance(value, str):
            raise wrong_value(name, value, "it is text, and not a boolean", "Pass True or False", TypeError)


def _is_flag(entry: Field[Any]) -> bool:
    return entry.type in ("bool", "bool | None", bool)


def _refuse_older_plugin(arguments: _Arguments, environ: Mapping[str, str]) -> None:
    source = read_flag(environ, _TENSOR_PARALLEL_VARIABLE) and _TENSOR_PARALLEL_VARIABLE
    if arguments["torch_tp_plugin"] is not None:
        source = "torch_tp_plugin"
    if source:
        raise ConfigurationError(
            f"{source} requests tensor parallelism by its older plugin, which this version does not support. "
            "Pass parallelism_config=ParallelismConfig(tp_size=...) instead."
        )


def _prefer_argument(
    name: str, argument: Value | None, variable: str, set_value: Value | None, notes: list[str]
) -> Value | None:
    """Returns the argument, or the value of the variable if the argument is None.

    Notes a difference.
    """
    if argument is None:
        return set_value
    if set_value not in (None, "no", argument):  # a launcher says "no" where nothing was requested
        notes.append(
            f"{name}={argument!r} was passed to Accelerator and {variable}={set_value!r} is set: "
            "the argument is used."
        )
    return argument


def _member(name: str, value: object, known: Sequence[str]) -> str:
    text = str(plain_value(value)).lower()
    if text not in known:
        raise wrong_value(name, value, f"it is none of {', '.join(known)}", "Choose one of them")
    return text


def _mixed_precision(
    arguments: _Arguments, environ: Mapping[str, str], notes: list[str]
) -> PrecisionName | None:
    known = PrecisionType.list()
    variable = next((name for name in _PRECISION_VARIABLES if environ.get(name)), _PRECISION_VARIABLES[0])
    set_value = _member(variable, environ[variable], known) if environ.get(variable) else None
    argument = arguments["mixed_precision"]
    if argument is None and is_initialized():
        return None  # the state exists, and may have another mixed precision than the launcher sets
    chosen = None if argument is None else _member("mixed_precision", argument, known)
    preferred = _prefer_argument("mixed_precision", chosen, variable, set_value, notes)
    return cast("PrecisionName | None", preferred)


def _accumulation(
    arguments: _Arguments, environ: Mapping[str, str], notes: list[str]
) -> plugins.GradientAccumulationPlugin:
    plugin: plugins.GradientAccumulationPlugin | None = arguments["gradient_accumulation_plugin"]
    argument: int | None = arguments["gradient_accumulation_steps"]
    if plugin is not None and plugin.num_steps is not None:
        argument = plugin.num_steps
    elif argument == 1:
        argument = None
    set_value = _steps_in_environment(environ)
    name = "gradient_accumulation_steps"
    if plugin is not None and plugin.global_batch_size is not None:
        set_value = None
    steps = _prefer_argument(name, argument, _ACCUMULATION_VARIABLE, set_value, notes)
    steps = 1 if steps is None else steps
    if plugin is not None:
        return plugin if plugin.num_steps is not None else replace(plugin, num_steps=steps)
    check_steps(steps)
    return plugins.GradientAccumulationPlugin(num_steps=steps)


def check_steps(steps: object) -> None:
    """Raises an error for a value of `gradient_accumulation_steps` that is not a count of steps."""
    if isinstance(steps, bool) or not isinstance(steps, Integral) or steps < 1:
        fix = "Pass an integer of at least 1"
        raise wrong_value("gradient_accumulation_steps", steps, "it is not a count of steps", fix)


def _steps_in_environment(environ: Mapping[str, str]) -> int | None:
    text = environ.get(_ACCUMULATION_VARIABLE)
    if not text or text == "auto":
        return None
    try:
        steps = whole_number(text)
    except ValueError:
        steps = 0
    if steps < 1:
        fix = "Set an integer of at least 1"
        raise wrong_value(_ACCUMULATION_VARIABLE, text, "it is not a count of steps", fix)
    return steps


def _step_policy(arguments: _Arguments) -> StepPolicy:
    policy: StepPolicy = arguments["step_scheduler_with_optimizer"]
    if policy not in (True, False, "per_update"):
        reason = (
            "it is none of True (once per process and update), 'per_update' (once per update) "
            "and False (on each call)"
        )
        raise wrong_value("step_scheduler_with_optimizer", policy, reason, "Choose one of them")
    plugin: plugins.GradientAccumulationPlugin | None = arguments["gradient_accumulation_plugin"]
    has_constant_batch = plugin is not None and plugin.global_batch_size is not None
    return "per_update" if policy is True and has_constant_batch else policy


def _dataloader_config(arguments: _Arguments) -> plugins.DataLoaderConfiguration:
    config: plugins.DataLoaderConfiguration | None = arguments["dataloader_config"]
    split_batches = arguments["split_batches"]
    if split_batches is _UNSET:
        return config if config is not None else plugins.DataLoaderConfiguration()
    if config is None:
        return plugins.DataLoaderConfiguration(split_batches=split_batches)
    if config.split_batches != split_batches:
        reason = f"dataloader_config.split_batches is {config.split_batches}"
        raise wrong_value("split_batches", split_batches, reason, "Set it in dataloader_config only")
    return config


def _project(arguments: _Arguments) -> plugins.ProjectConfiguration:
    project: plugins.ProjectConfiguration = arguments["project_config"] or plugins.ProjectConfiguration()
    if arguments["project_dir"] is None:
        return project
    refuse_path("project_dir", arguments["project_dir"])
    folder = os.fspath(arguments["project_dir"])
    if project.project_dir is not None and os.fspath(project.project_dir) != folder:
        reason = f"project_config.project_dir is {project.project_dir!r}"
        raise wrong_value("project_dir", folder, reason, "Set it in one place")
    project.set_directories(folder)
    return project


def _plugin(
    arguments: _Arguments,
    environ: Mapping[str, str],
    name: str,
    find_kind: Callable[[], type],
    variable: str,
    error: Any,
) -> Any:
    """Returns the plugin that was passed, or the one of the environment if a variable enables it."""
    plugin = arguments[name]
    if plugin is None and not read_flag(environ, variable):
        return None
    kind = find_kind()
    if plugin is None:
        return kind()
    _check_kind(name, plugin, kind, error)
    return plugin


def _check_kind(name: str, value: object, kind: type, error: Any) -> None:
    if not isinstance(value, kind):
        reason, fix = f"it is not a {kind.__name__}", f"Pass {kind.__name__}(...)"
        raise wrong_value(name, type(value).__name__, reason, fix, error)


def _deepspeed(arguments: _Arguments, environ: Mapping[str, str]) -> DeepSpeedPlugins:
    passed: DeepSpeedPlugins = arguments["deepspeed_plugins"]
    if passed is None:
        passed = arguments["deepspeed_plugin"]
    if passed is None:
        return plugins.DeepSpeedPlugin() if read_flag(environ, "ACCELERATE_USE_DEEPSPEED") else None
    several = list(passed.values()) if isinstance(passed, dict) else [passed]
    if not several or not all(isinstance(plugin, plugins.DeepSpeedPlugin) for plugin in several):
        raise wrong_value(
            "deepspeed_plugin",
            ", ".join(type(plugin).__name__ for plugin in several) or "{}",
            "it is neither a DeepSpeedPlugin nor a dictionary of them",
            "Pass DeepSpeedPlugin(...), or {'name': DeepSpeedPlugin(...), ...}; pass the "
            "configuration of DeepSpeed itself as DeepSpeedPlugin(hf_ds_config=...)",
        )
    return passed


def _listed_handlers(given: object) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, plugins.KwargsHandler):
        name = type(given).__name__
        raise wrong_value("kwargs_handlers", name, "it is not a list", f"Pass [{name}(...)]", TypeError)
    if not isinstance(given, Iterable):
        fix = "Pass a list, such as [AutocastKwargs()]"
        raise wrong_value("kwargs_handlers", given, "it is not a list", fix, TypeError)
    return list(given)


def _handlers(arguments: _Arguments) -> dict[str, Any]:
    handlers: list[Any] = arguments["kwargs_handlers"]
    kinds = [type(handler) for handler in handlers]
    for handler, kind in zip(handlers, kinds, strict=True):
        if not isinstance(handler, plugins.KwargsHandler):
            fix = "Pass objects such as DistributedDataParallelKwargs() or AutocastKwargs()"
            reason = "it is not a KwargsHandler"
            raise wrong_value("kwargs_handlers", kind.__name__, reason, fix, AssertionError)
        if kinds.count(kind) > 1:
            fix = "Pass one handler of each kind"
            raise wrong_value("kwargs_handlers", kind.__name__, "it was passed twice", fix)
    return {
        name: next((handler for handler in handlers if isinstance(handler, kind)), None)
        for name, kind in _HANDLERS.items()
    }
