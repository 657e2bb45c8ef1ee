"""AcceleratorState: the facts of `PartialState`, and with which number format and plugins this run trains."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

import torch

from accelerate.base import (
    ConfigurationError,
    DistributedType,
    PrecisionName,
    PrecisionType,
    StateError,
    as_builtin,
    current,
    environ,
    parse_flag_from_env,
    plain_value,
    wrong_value,
)
from accelerate.devices import of_device
from accelerate.state.partial import FACTS, PartialState, RunState
from accelerate.state.shared import SharedDict

Function = TypeVar("Function", bound=Callable[..., Any])

DTYPES = {PrecisionType.FP16.value: torch.float16, PrecisionType.BF16.value: torch.bfloat16}

ONE_STATE = "All `Accelerator`s of a process share one state: leave the argument out, or use a new process"


class AcceleratorState(RunState):
    """The state of a run; made by `Accelerator`, read by everything it prepares.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8"; None takes `ACCELERATE_MIXED_PRECISION`, or the bare
            `MIXED_PRECISION` where that is absent, or "no".
        cpu: as in `PartialState`.
        dynamo_plugin: how models are compiled.
        deepspeed_plugin: how DeepSpeed trains: one plugin, or several by name of which one is selected.
        fsdp_plugin: how FSDP shards; the attribute of that name exists only when it is given.
        torch_tp_plugin: how torch's tensor parallelism works.
        megatron_lm_plugin: how Megatron-LM trains; the attribute of that name exists only when it is given.
        parallelism_config: sizes of the mesh axes.
        _from_accelerator: whether an `Accelerator` is building it.
        **kwargs: as in `PartialState`.

    Attributes:
        distributed_type: label of how the processes work together; assigning it changes nothing else.
        device_mesh: the device mesh of the run; None without one.

    Raises:
        ConfigurationError: no `Accelerator` was built yet, a value differs from the one the run has, or the
            device cannot compute in the number format.
    """

    _shared_state: ClassVar[dict[str, Any]] = SharedDict()
    _pickled = (*FACTS, "_mixed_precision")

    deepspeed_plugins: Any
    torch_tp_plugin: Any
    parallelism_config: Any
    device_mesh: Any
    dynamo_plugin: Any
    _mixed_precision: PrecisionType | PrecisionName

    def __init__(
        self,
        mixed_precision: PrecisionType | PrecisionName | None = None,
        cpu: bool = False,
        dynamo_plugin: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        parallelism_config: Any = None,
        _from_accelerator: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if self.initialized:
            self._check_initialized(mixed_precision, cpu)
            return
        if not _from_accelerator:
            raise ConfigurationError(
                "AcceleratorState is empty, because no `Accelerator` was built yet. Build one first, "
                "`accelerator = Accelerator()`; `PartialState()` alone tells processes and devices."
            )
        asked = _precision_asked_for(mixed_precision)
        partial = PartialState(cpu, **kwargs)
        dtype = DTYPES.get(asked)
        if dtype is not None and not partial.device_backend.supports(dtype):
            label, name = partial.device_backend.label, str(dtype).removeprefix("torch.")
            fix = "choose another number format, or the CPU with cpu=True"
            raise wrong_value("mixed_precision", asked, f"this {label} does not compute in {name}", fix)
        plugins = {"fsdp_plugin": fsdp_plugin, "megatron_lm_plugin": megatron_lm_plugin}
        labels = (
            (deepspeed_plugin, DistributedType.DEEPSPEED),
            (fsdp_plugin, DistributedType.FSDP),
            (megatron_lm_plugin, DistributedType.MEGATRON_LM),
        )
        methods = (label for plugin, label in labels if plugin is not None)
        mesh = None
        if parallelism_config is not None:
            parallelism_config._validate_accelerator(partial)
            mesh = parallelism_config.get_device_mesh(partial.device.type)
        self.__dict__.update(
            partial.__dict__,
            deepspeed_plugins=deepspeed_plugin,
            torch_tp_plugin=torch_tp_plugin,
            parallelism_config=parallelism_config,
            device_mesh=mesh,
            dynamo_plugin=dynamo_plugin,
            _mixed_precision=asked,
            distributed_type=next(methods, partial.distributed_type),
            **{name: plugin for name, plugin in plugins.items() if plugin is not None},
        )
        if partial.device_backend.own_runtime and asked == PrecisionType.BF16:
            # torch_xla computes in bfloat16 instead of all floats, as a variable says, or of float32 only.
            downcast = any(map(parse_flag_from_env, ("ACCELERATE_DOWNCAST_BF16", "XLA_DOWNCAST_BF16")))
            environ.assign({"XLA_USE_BF16": str(int(not downcast)), "XLA_DOWNCAST_BF16": str(int(downcast))})
            self.downcast_bfloat = downcast

    def _check_initialized(
        self, mixed_precision: PrecisionType | PrecisionName | None = None, cpu: bool | None = None
    ) -> None:
        """Refuse what the run cannot change any more."""
        if mixed_precision is not None and str(plain_value(mixed_precision)).lower() != self._mixed_precision:
            reason = f"this process already runs with mixed_precision={self._mixed_precision!r}"
            raise wrong_value("mixed_precision", plain_value(mixed_precision), reason, ONE_STATE)
        if cpu and not of_device(self.device).is_host:
            raise wrong_value("cpu", cpu, f"this process already runs on {self.device}", ONE_STATE)

    @property
    def mixed_precision(self) -> PrecisionType | PrecisionName:
        """The number format: "no", "fp16", "bf16" or "fp8"; under DeepSpeed the one of its configuration."""
        if self.__dict__.get("deepspeed_plugins") is None:
            return self._mixed_precision
        config = self.deepspeed_plugin.deepspeed_config
        formats: tuple[PrecisionName, ...] = ("fp16", "bf16")
        return next((name for name in formats if config.get(name, {}).get("enabled") is True), "no")

    @property
    def fork_launched(self) -> bool:
        """Whether a launcher forked this process out of a running one."""
        return bool(self.__dict__["fork_launched"])

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded by FSDP's second version."""
        plugin = self.__dict__.get("fsdp_plugin")
        return plugin is not None and plugin.fsdp_version == 2

    @property
    def deepspeed_plugin(self) -> Any:
        """The DeepSpeed plugin in use, the selected one of several; None without DeepSpeed.

        Raises:
            StateError: there are several, and none is selected.
        """
        plugins = self.deepspeed_plugins
        if not isinstance(plugins, dict):
            return plugins
        selected = [plugin for plugin in plugins.values() if plugin.selected]
        if len(selected) != 1:
            raise StateError(
                f"Of the DeepSpeed plugins {', '.join(plugins)} {len(selected)} are selected. "
                "Select one with `state.select_deepspeed_plugin(name)`."
            )
        return selected[0]

    def get_deepspeed_plugin(self, name: str) -> Any:
        """Return one of several DeepSpeed plugins.

        Args:
            name: its key in the dictionary that was passed to `Accelerator`.

        Raises:
            ConfigurationError: there is none of that name.
        """
        plugins = self.deepspeed_plugins if isinstance(self.deepspeed_plugins, dict) else {}
        if name not in plugins:
            known = ", ".join(map(str, plugins))
            reason = f"the DeepSpeed plugins are {known}" if known else "no DeepSpeed plugin has a name"
            fix = "Choose one of them" if known else "Pass Accelerator(deepspeed_plugins={name: plugin, ...})"
            raise wrong_value("name", name, reason, fix)
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Select one of several DeepSpeed plugins for what is prepared next.

        Args:
            name: its key in the dictionary that was passed to `Accelerator`; None selects the first.

        Raises:
            StateError: there is only one plugin, or none.
            ConfigurationError: there is none of that name.
        """
        plugins = self.deepspeed_plugins
        if not isinstance(plugins, dict):
            text = "There are no DeepSpeed plugins to select from: pass several to `Accelerator` as a dict."
            raise as_builtin(StateError(text), ValueError)
        chosen = self.get_deepspeed_plugin(next(iter(plugins)) if name is None else name)
        for plugin in plugins.values():
            plugin._unselect()
        chosen.select(_from_accelerator_state=True)

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        """Forget everything: the next `Accelerator` starts anew."""
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        return f"{PartialState()!r}\nMixed precision type: {self.mixed_precision}\n"


def is_initialized() -> bool:
    """Return whether an `Accelerator` has set up the state of this process."""
    return bool(AcceleratorState._shared_state)


def deepspeed_required(func: Function) -> Function:
    """Make a function raise when it is called in a run that does not use DeepSpeed.

    Args:
        func: the function.
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if AcceleratorState._shared_state.get("deepspeed_plugins") is None:
            raise StateError(
                f"`{func.__name__}` works with DeepSpeed only, and this run does not use it. "
                "Pass `deepspeed_plugin=` to `Accelerator`."
            )
        return func(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # same call signature, by functools.wraps


def _precision_asked_for(
    mixed_precision: PrecisionType | PrecisionName | None,
) -> PrecisionType | PrecisionName:
    """Return the number format, from the argument or else the environment."""
    values = {
        "mixed_precision": None if mixed_precision is None else str(plain_value(mixed_precision)),
        "ACCELERATE_MIXED_PRECISION": current().get("ACCELERATE_MIXED_PRECISION"),
        "MIXED_PRECISION": current().get("MIXED_PRECISION"),
    }
    given = ((source, value) for source, value in values.items() if value)
    source, value = next(given, ("mixed_precision", "no"))
    asked = value.lower()
    if asked not in PrecisionType:
        formats = ", ".join(PrecisionType.list())
        raise wrong_value(source, value, "no such number format", f"choose one of {formats}")
    return cast("PrecisionName", asked)
