"""Keyword arguments for torch objects that are built on the user's behalf."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from accelerate.base import CommunicationHookName, DDPCommunicationHookType, wrong_value
from accelerate.plugins.checks import at_least, member

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

_NO_HOOK = DDPCommunicationHookType.NO
_NUMBER_FORMATS = (_NO_HOOK, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16)


class KwargsHandler:
    """A dataclass whose fields are keyword arguments of something that is built later."""

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name; the containers are copies."""
        values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}  # type: ignore[arg-type]
        containers = (dict, list, set)
        return {name: copy.copy(v) if isinstance(v, containers) else v for name, v in values.items()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return only the fields whose values differ from those of a handler built without arguments."""
        defaults = type(self)().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != defaults[name]}

    def fill(self, values: Mapping[str, Any]) -> None:
        """Set those fields that were not given.

        Args:
            values: Field name -> value; fields that are not None keep what they hold.
        """
        for name, value in values.items():
            if getattr(self, name) is None:
                setattr(self, name, value)


@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`.

    Args:
        enabled: whether the forward runs in low precision.
        cache_enabled: whether casts of weights are kept within one autocast region; None leaves it to torch.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of the gradient scaler that fp16 training uses.

    Args:
        init_scale: first factor that losses are multiplied with.
        growth_factor: what the factor is multiplied with after `growth_interval` good steps.
        backoff_factor: what the factor is multiplied with after a step with infinite gradients.
        growth_interval: number of consecutive good steps before the factor grows.
        enabled: False makes the scaler do nothing.

    Raises:
        ConfigurationError: the numbers cannot work as a scale.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True

    def __post_init__(self) -> None:
        for name, is_valid, reason, span in (
            ("init_scale", self.init_scale > 0, "a scale is positive", "above 0"),
            ("growth_factor", self.growth_factor > 1, "the scale would not grow", "above 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "the scale would not shrink", "between 0 and 1"),
        ):
            if not is_valid:
                raise wrong_value(name, getattr(self, name), reason, f"Give a number {span}")
        at_least("growth_interval", self.growth_interval, 1)


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Arguments of `torch.distributed.init_process_group`.

    Args:
        backend: name of the communication library; the default is passed on as "whatever suits the device".
        init_method: URL that tells how the processes find each other; None takes it from the environment.
        timeout: how long a collective may wait; None is torch's own limit, ten minutes for nccl and thirty
            for the others.

    Raises:
        ConfigurationError: the timeout is not a positive `datetime.timedelta`.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None

    def __post_init__(self) -> None:
        self._timeout_was_given = self.timeout is not None
        if self.timeout is None:
            self.timeout = timedelta(minutes=10 if self.backend == "nccl" else 30)
        fix = "For seconds, write timedelta(seconds=...)"
        if not isinstance(self.timeout, timedelta):
            raise wrong_value("timeout", self.timeout, "it is not a datetime.timedelta", fix)
        if self.timeout <= timedelta(0):
            raise wrong_value("timeout", self.timeout, "every collective would fail", "Give a positive time")

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, and the timeout whenever the user gave one."""
        kwargs = super().to_kwargs()
        kwargs.pop("timeout", None)
        return {**kwargs, "timeout": self.timeout} if self._timeout_was_given else kwargs


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Arguments of `torch.nn.parallel.DistributedDataParallel`, and how gradients travel.

    Args:
        dim: dimension along which inputs are scattered.
        broadcast_buffers: whether buffers are broadcast from the first process at each forward.
        bucket_cap_mb: size in MiB of the buckets that gradients are gathered into.
        find_unused_parameters: whether each step looks for parameters that got no gradient.
        check_reduction: kept for older scripts; torch ignores it.
        gradient_as_bucket_view: whether gradients live inside the buckets, which saves memory.
        static_graph: whether the same parameters are used in every step.
        comm_hook: compression of gradients; a member or its value ("fp16", "power_sgd", ...).
        comm_wrapper: a number format that the compressed gradients are cast to on top: "no", "fp16", "bf16".
        comm_state_option: arguments of `PowerSGDState` for the two PowerSGD hooks.

    Raises:
        ConfigurationError: an unknown hook or wrapper, or a bucket without a size.
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
        if self.bucket_cap_mb <= 0:
            fix = "Give a size in MiB above 0"
            raise wrong_value("bucket_cap_mb", self.bucket_cap_mb, "a bucket holds something", fix)
        self.comm_hook = member("comm_hook", self.comm_hook, DDPCommunicationHookType)
        self.comm_wrapper = member("comm_wrapper", self.comm_wrapper, DDPCommunicationHookType)
        if self.comm_wrapper not in _NUMBER_FORMATS:
            reason, fix = "it is not a number format", "Choose no, fp16 or bf16"
            raise wrong_value("comm_wrapper", self.comm_wrapper.value, reason, fix)

    def to_dict(
        self, ignore_keys: Iterable[str] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return the fields by name, those of the communication hook left out.

        Args:
            ignore_keys: names to leave out.
        """
        ignored = set(ignore_keys)
        return {name: value for name, value in super().to_dict().items() if name not in ignored}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Tell a model how its gradients travel. Called on every rank, once, before the first backward.

        Args:
            model: the wrapped model.
        """
        from accelerate.plugins import comm_hooks

        kind = DDPCommunicationHookType(self.comm_hook)
        if kind != _NO_HOOK:
            wrap = comm_hooks.WRAPPERS[DDPCommunicationHookType(self.comm_wrapper)]
            state = comm_hooks.state_of(kind, self.comm_state_option)
            model.register_comm_hook(state, wrap(comm_hooks.HOOKS[kind]))
            return
        for name in ("comm_wrapper", "comm_state_option"):
            value = getattr(self, name)
            if value not in (_NO_HOOK, {}):
                text = f"{name}={value} has no effect without comm_hook; choose a comm_hook or leave it out."
                warnings.warn(text, stacklevel=2)
