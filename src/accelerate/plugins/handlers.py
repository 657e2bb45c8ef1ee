"""Handlers with the keyword arguments of torch objects that an `Accelerator` builds.

They are passed in `kwargs_handlers=[...]`. `Accelerator.profile` builds its profiler from `ProfileKwargs`.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from accelerate.base import PROFILE_PATTERN_NAME, CommunicationHookName, DDPCommunicationHookType, wrong_value
from accelerate.plugins.checks import at_least, member, one_of, plain_fields

if TYPE_CHECKING:
    import torch
    import torch.profiler
    from torch.nn.parallel import DistributedDataParallel

ProfilerActivity = Literal["cpu", "xpu", "mtia", "cuda", "hpu"]

_ACTIVITIES: dict[str, str] = {name.lower(): name for name in ("CPU", "XPU", "MTIA", "CUDA", "HPU")}
_PHASES = {"wait": 0, "warmup": 0, "active": 1, "repeat": 0, "skip_first": 0, "skip_first_wait": 0}
_REQUIRED_PHASES = ("wait", "warmup", "active")

_NO_HOOK = DDPCommunicationHookType.NO
_WRAPPERS = (_NO_HOOK, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)


class KwargsHandler:
    """Base class of dataclasses whose fields are keyword arguments of an object that is built later."""

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields by name, with shallow copies of dicts, lists and sets."""
        values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}  # type: ignore[arg-type]
        containers = (dict, list, set)
        return {name: copy.copy(v) if isinstance(v, containers) else v for name, v in values.items()}

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the fields whose values differ from those of a handler built without arguments."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`.

    Args:
        enabled: Whether the forward runs in low precision.
        cache_enabled: Whether casts of weights are cached within one autocast region. None uses torch's
            default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of the gradient scaler of fp16 training.

    Args:
        init_scale: Initial factor that losses are multiplied by.
        growth_factor: Factor by which the scale grows after `growth_interval` steps with finite gradients.
        backoff_factor: Factor by which the scale shrinks after a step with infinite or NaN gradients.
        growth_interval: Number of consecutive steps with finite gradients before the scale grows.
        enabled: Whether the scaler is enabled.
        allow_fp16_gradients: Whether gradients of float16 weights are unscaled. torch refuses them, because
            small updates are lost in float16 weights, and the `eps` of Adam is 0 in float16 below 6e-8.

    Raises:
        ConfigurationError: A number is out of its range.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    allow_fp16_gradients: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments of `torch.amp.GradScaler` by name."""
        return {name: value for name, value in super().to_dict().items() if name != "allow_fp16_gradients"}

    def __post_init__(self) -> None:
        for name, least, most, reason, span in (
            ("init_scale", 0, float("inf"), "a scale is positive", "above 0"),
            ("growth_factor", 1, float("inf"), "the scale would not grow", "above 1"),
            ("backoff_factor", 0, 1, "the scale would not shrink", "between 0 and 1"),
        ):
            value = getattr(self, name)
            if not isinstance(value, Real):
                raise wrong_value(name, value, "it is not a number", f"Give a number {span}", TypeError)
            if not least < float(value) < most:
                raise wrong_value(name, value, reason, f"Give a number {span}")
        at_least("growth_interval", self.growth_interval, 1)


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`.

    Args:
        backend: Name of the backend. The default selects the backend of the device.
        init_method: URL that specifies how the processes find each other. None uses the environment.
        timeout: Timeout of a collective. None is torch's default, ten minutes for nccl and thirty for the
            others.

    Raises:
        ConfigurationError: The timeout is not a positive `datetime.timedelta`.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        self._timeout_was_given = self.timeout is not None
        if self.timeout is None:
            self.timeout = timedelta(minutes=10 if self.backend == "nccl" else 30)
        fix = "For seconds, write timedelta(seconds=...)"
        if not isinstance(self.timeout, timedelta):
            raise wrong_value("timeout", self.timeout, "it is not a datetime.timedelta", fix)
        if self.timeout <= timedelta(0):
            raise wrong_value("timeout", self.timeout, "every collective would fail", "Give a positive time")

    def to_kwargs(self) -> dict[str, Any]:
        """Returns the fields that differ from the defaults, and the timeout if the user gave one."""
        kwargs = super().to_kwargs()
        kwargs.pop("timeout", None)
        return {**kwargs, "timeout": self.timeout} if self._timeout_was_given else kwargs


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, and its communication hook.

    Args:
        dim: Dimension along which inputs are scattered.
        broadcast_buffers: Whether buffers are broadcast from rank 0 at each forward.
        bucket_cap_mb: Size of the gradient buckets, in MiB.
        find_unused_parameters: Whether each step searches for parameters without a gradient.
        check_reduction: Kept for older scripts. torch ignores it.
        gradient_as_bucket_view: Whether gradients are views into the buckets, which saves memory.
        static_graph: Whether the same parameters are used in every step.
        comm_hook: Communication hook that compresses gradients, as a member or its value ("fp16",
            "power_sgd", ...).
        comm_wrapper: Dtype to which gradients are cast around the hook, "no", "fp16" or "bf16".
        comm_state_option: Arguments of `PowerSGDState` for the two PowerSGD hooks.

    Raises:
        ConfigurationError: The hook or the wrapper is unknown, or `bucket_cap_mb` is not positive.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | CommunicationHookName = _NO_HOOK
    comm_wrapper: DDPCommunicationHookType | Literal["no", "fp16", "bf16"] = _NO_HOOK
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size: object = self.bucket_cap_mb
        if not isinstance(size, Real) or size <= 0:
            fix = "Give a size in MiB above 0"
            raise wrong_value("bucket_cap_mb", size, "it is not a positive number", fix)
        self.comm_hook = member("comm_hook", self.comm_hook, DDPCommunicationHookType)
        self.comm_wrapper = member("comm_wrapper", self.comm_wrapper, DDPCommunicationHookType)
        if self.comm_wrapper not in _WRAPPERS:
            reason, fix = "it is not a dtype", "Choose no, fp16 or bf16"
            raise wrong_value("comm_wrapper", self.comm_wrapper.value, reason, fix)

    def to_dict(
        self, ignore_keys: Iterable[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Returns the fields by name, without those of the communication hook.

        Args:
            ignore_keys: Names of fields to omit.
        """
        ignored = set(ignore_keys)
        return {name: value for name, value in super().to_dict().items() if name not in ignored}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Registers the communication hook on a model.

        Called once on every rank, before the first backward.

        Args:
            model: The wrapped model.
        """
        from accelerate.plugins import comm_hooks

        kind = DDPCommunicationHookType(self.comm_hook)
        if kind != _NO_HOOK:
            wrap = comm_hooks.WRAPPERS[DDPCommunicationHookType(self.comm_wrapper)]
            state = comm_hooks.build_state(kind, self.comm_state_option)
            model.register_comm_hook(state, wrap(comm_hooks.HOOKS[kind]))
            return
        for name in ("comm_wrapper", "comm_state_option"):
            value = getattr(self, name)
            if value not in (_NO_HOOK, {}):
                text = f"{name}={value} has no effect without comm_hook; choose a comm_hook or leave it out."
                warnings.warn(text, stacklevel=2)


@dataclass
class ProfileKwargs(KwargsHandler):
    """Activities, schedule and trace folder of the profiler of `Accelerator.profile`.

    Args:
        activities: Activities to record, out of "cpu", "cuda", "xpu", "mtia" and "hpu". None records all
            that this machine supports.
        schedule_option: Number of steps of the phases `wait`, `warmup` and `active`, and optionally
            `repeat` for the number of cycles, and `skip_first`. None records everything.
        on_trace_ready: Function that is called with the profiler at the end of each cycle.
        record_shapes: Whether to record the shapes of inputs.
        profile_memory: Whether to record allocations.
        with_stack: Whether to record the line of source code.
        with_flops: Whether to estimate floating point operations.
        with_modules: Whether to record the module.
        output_trace_dir: Folder in which each rank writes `profile_RANK.json`, and for later cycles
            `profile_RANK_cycle2.json` and so on, for chrome://tracing. None writes nothing.

    Raises:
        ConfigurationError: An activity or a phase is unknown, or the length of a phase is missing.
    """

    activities: list[ProfilerActivity] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[[Any], Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.activities, str):
            raise wrong_value("activities", self.activities, "names in a list are needed", 'write ["cpu"]')
        if self.activities is not None:
            self.activities = [
                one_of("activities", activity, get_args(ProfilerActivity)) for activity in self.activities
            ]
        if self.schedule_option is not None:
            _check_schedule(self.schedule_option)

    def build(self) -> torch.profiler.profile:
        """Returns a profiler that is not started.

        Called on each rank that profiles.
        """
        import torch.profiler

        flags = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")
        return torch.profiler.profile(
            activities=[self._get_profiler_activity(name) for name in self.activities or ()] or None,
            schedule=torch.profiler.schedule(**self.schedule_option) if self.schedule_option else None,
            on_trace_ready=self._trace_callback(),
            **{name: getattr(self, name) for name in flags},
        )

    def _get_profiler_activity(self, activity: ProfilerActivity) -> torch.profiler.ProfilerActivity:
        """Returns torch's member for the name of an activity.

        Raises a `ConfigurationError` if this version of torch has none.
        """
        import torch.profiler

        member = getattr(torch.profiler.ProfilerActivity, _ACTIVITIES.get(activity, ""), None)
        if member is None:
            fix = f"Choose one of {', '.join(_ACTIVITIES)}"
            raise wrong_value("activities", activity, "it is not a known choice", fix)
        return member  # type: ignore[no-any-return]

    def _trace_callback(self) -> Callable[[Any], None] | None:
        callback, folder = self.on_trace_ready, self.output_trace_dir
        if folder is None:
            return callback
        cycles = itertools.count(1)

        def call_and_export(profiler: object) -> None:
            if callback is not None:
                callback(profiler)
            _export_trace(profiler, Path(folder), next(cycles))

        return call_and_export


def _export_trace(profiler: Any, folder: Path, cycle: int) -> None:
    """Writes the trace of one cycle to a separate file.

    A failure is a warning, because a profile must not end the training.
    """
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    path = folder / PROFILE_PATTERN_NAME.format(suffix=f"{rank}_cycle{cycle}" if cycle > 1 else rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
    except OSError as error:
        warnings.warn(f"{path} was not written: {error}. Name another output_trace_dir.", stacklevel=3)
    except RuntimeError as error:  # torch exports a trace only once
        fix = "Export traces either in on_trace_ready or by output_trace_dir."
        warnings.warn(f"{path} was not written: {error} {fix}", stacklevel=3)


def _check_schedule(schedule: dict[str, int]) -> None:
    fix = 'write {"wait": 1, "warmup": 1, "active": 3}'
    if not isinstance(schedule, dict):
        raise wrong_value("schedule_option", schedule, "steps by phase are needed", fix)
    for name in schedule:
        one_of("schedule_option", name, _PHASES, None, TypeError)
    missing = [name for name in _REQUIRED_PHASES if name not in schedule]
    if missing:
        reason, fix = f"it lacks {', '.join(missing)}", "Give wait, warmup and active"
        raise wrong_value("schedule_option", schedule, reason, fix, TypeError)
    for name, length in schedule.items():
        at_least(f"schedule_option[{name!r}]", length, _PHASES[name])
