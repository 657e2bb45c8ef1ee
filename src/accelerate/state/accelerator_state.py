"""State of the run, with the mixed precision, plugins and device mesh in addition to `PartialState`.

`Accelerator` creates it, and prepared objects and clients read it.
"""

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
from accelerate.plugins import version_of
from accelerate.state import process_group
from accelerate.state.partial import PICKLED_ENTRIES, PartialState, RunState
from accelerate.state.shared import SharedDict

Function = TypeVar("Function", bound=Callable[..., Any])

DTYPES = {PrecisionType.FP16.value: torch.float16, PrecisionType.BF16.value: torch.bfloat16}

ONE_STATE = "All `Accelerator`s of a process share one state: leave the argument out, or use a new process"
"""Fix in errors about an argument that the state of this process does not have."""


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Returns the size of each dimension of a device mesh by its name, the outermost first.

    Args:
        mesh: Device mesh, or None for no dimensions.
    """
    return {} if mesh is None else dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))


class AcceleratorState(RunState):
    """State of the run, with the mixed precision and the plugins, shared by all instances in a process.

    Args:
        mixed_precision: "no", "fp16", "bf16" or "fp8". None is the value of `ACCELERATE_MIXED_PRECISION`, or
            of `MIXED_PRECISION` if that is not set, or "no".
        cpu: As in `PartialState`.
        dynamo_plugin: Configuration of `torch.compile`.
        deepspeed_plugin: Configuration of DeepSpeed, or a dictionary of several by name, of which one is
            selected.
        fsdp_plugin: Configuration of FSDP. The attribute of that name exists only if it is passed.
        torch_tp_plugin: Configuration of tensor parallelism by torch.
        megatron_lm_plugin: Configuration of Megatron-LM. The attribute of that name exists only if it is
            passed.
        parallelism_config: Sizes of the mesh dimensions.
        _from_accelerator: Whether an `Accelerator` creates the state.
        **kwargs: As in `PartialState`.

    Attributes:
        distributed_type: Label of the strategy. An assignment changes nothing else.
        device_mesh: Device mesh of the run, or None.

    Raises:
        ConfigurationError: No `Accelerator` has been created yet, a value differs from that of the run, or
            the device does not support the dtype of the mixed precision.
    """

    _shared_state: ClassVar[dict[str, Any]] = SharedDict()
    _pickled = (*PICKLED_ENTRIES, "_mixed_precision")

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
            if (timeout := kwargs.get("timeout")) is not None:
                process_group.set_timeout(timeout)
            return
        if not _from_accelerator:
            raise ConfigurationError(
                "AcceleratorState is empty, because no `Accelerator` was built yet. Build one first, "
                "`accelerator = Accelerator()`; `PartialState()` is enough for the rank and the device."
            )
        precision = _requested_precision(mixed_precision)
        partial = PartialState(cpu, **kwargs)
        dtype = DTYPES.get(precision)
        if dtype is not None and not partial.device_backend.supports(dtype):
            label, name = partial.device_backend.label, str(dtype).removeprefix("torch.")
            fix = "choose another mixed_precision, or the CPU with cpu=True"
            raise wrong_value("mixed_precision", precision, f"this {label} does not compute in {name}", fix)
        plugins = {"fsdp_plugin": fsdp_plugin, "megatron_lm_plugin": megatron_lm_plugin}
        labels = (
            (deepspeed_plugin, DistributedType.DEEPSPEED),
            (fsdp_plugin, DistributedType.FSDP),
            (megatron_lm_plugin, DistributedType.MEGATRON_LM),
        )
        strategies = (label for plugin, label in labels if plugin is not None)
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
            _mixed_precision=precision,
            distributed_type=next(strategies, partial.distributed_type),
            **{name: plugin for name, plugin in plugins.items() if plugin is not None},
        )
        if partial.device_backend.own_runtime and precision == PrecisionType.BF16:
            # torch_xla computes in bfloat16 instead of all floating dtypes, or, if downcast, of float32 only.
            downcast = any(map(parse_flag_from_env, ("ACCELERATE_DOWNCAST_BF16", "XLA_DOWNCAST_BF16")))
            environ.assign({"XLA_USE_BF16": str(int(not downcast)), "XLA_DOWNCAST_BF16": str(int(downcast))})
            self.downcast_bfloat = downcast

    def _check_initialized(
        self, mixed_precision: PrecisionType | PrecisionName | None = None, cpu: bool | None = None
    ) -> None:
        """Raises an error for arguments that differ from the existing state."""
        if mixed_precision is not None and str(plain_value(mixed_precision)).lower() != self._mixed_precision:
            reason = f"this process already runs with mixed_precision={self._mixed_precision!r}"
            raise wrong_value("mixed_precision", plain_value(mixed_precision), reason, ONE_STATE)
        if cpu and not of_device(self.device).is_host:
            raise wrong_value("cpu", cpu, f"this process already runs on {self.device}", ONE_STATE)

    @property
    def mixed_precision(self) -> PrecisionType | PrecisionName:
        """Mixed precision of the run as "no", "fp16", "bf16" or "fp8".

        Under DeepSpeed it is the one of its configuration.
        """
        if self.__dict__.get("deepspeed_plugins") is None:
            return self._mixed_precision
        config = self.deepspeed_plugin.deepspeed_config
        names: tuple[PrecisionName, ...] = ("fp16", "bf16")
        return next((name for name in names if config.get(name, {}).get("enabled") is True), "no")

    @property
    def fork_launched(self) -> bool:
        """True if a launcher forked this process from a running one."""
        return bool(self.__dict__["fork_launched"])

    @property
    def is_fsdp2(self) -> bool:
        """True if models are sharded by FSDP 2."""
        plugin = self.__dict__.get("fsdp_plugin")
        return plugin is not None and version_of(plugin).shards_in_place

    @property
    def deepspeed_plugin(self) -> Any:
        """DeepSpeed plugin of the run, which is the selected one of several, or None without DeepSpeed.

        Raises:
            StateError: There are several plugins, and the number of selected ones is not one.
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
        """Returns one of several DeepSpeed plugins.

        Args:
            name: Key of the plugin in the dictionary that was passed to `Accelerator`.

        Raises:
            ConfigurationError: There is no plugin of that name.
        """
        plugins = self.deepspeed_plugins if isinstance(self.deepspeed_plugins, dict) else {}
        if name not in plugins:
            known = ", ".join(map(str, plugins))
            reason = f"the DeepSpeed plugins are {known}" if known else "no DeepSpeed plugin has a name"
            fix = "Choose one of them" if known else "Pass Accelerator(deepspeed_plugins={name: plugin, ...})"
            raise wrong_value("name", name, reason, fix)
        return plugins[name]

    def select_deepspeed_plugin(self, name: str | None = None) -> None:
        """Selects one of several DeepSpeed plugins for the next call of `prepare`.

        Args:
            name: Key of the plugin in the dictionary that was passed to `Accelerator`. None selects the
                first.

        Raises:
            StateError: `Accelerator` did not get a dictionary of plugins.
            ConfigurationError: There is no plugin of that name.
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
        """Clears the state, so that the next `Accelerator` creates a new one.

        Args:
            reset_partial_state: Whether to clear `PartialState` as well.
        """
        AcceleratorState._shared_state.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        return f"{PartialState()!r}\nMixed precision type: {self.mixed_precision}\n"


def is_initialized() -> bool:
    """Returns whether an `Accelerator` has created the state of this process."""
    return bool(AcceleratorState._shared_state)


def deepspeed_required(func: Function) -> Function:
    """Wraps a function so that it raises an error in a run that does not use DeepSpeed.

    Args:
        func: The function.

    Returns:
        The function, which raises a `StateError` without DeepSpeed.
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


def _requested_precision(
    mixed_precision: PrecisionType | PrecisionName | None,
) -> PrecisionType | PrecisionName:
    """Returns the mixed precision from the argument, or otherwise from the environment."""
    values = {
        "mixed_precision": None if mixed_precision is None else str(plain_value(mixed_precision)),
        "ACCELERATE_MIXED_PRECISION": current().get("ACCELERATE_MIXED_PRECISION"),
        "MIXED_PRECISION": current().get("MIXED_PRECISION"),
    }
    present = ((source, value) for source, value in values.items() if value)
    source, value = next(present, ("mixed_precision", "no"))
    name = value.lower()
    if name not in PrecisionType:
        names = ", ".join(PrecisionType.list())
        raise wrong_value(source, value, "no such mixed precision", f"choose one of {names}")
    return cast("PrecisionName", name)
