"""Number formats: full precision, and by `torch.autocast` bfloat16, and float16 with a gradient scaler.

Source: https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp import GradScaler

from accelerate.base import ConfigurationError, DistributedType, FP8BackendType
from accelerate.ops import convert_to_fp32
from accelerate.plugins import AutocastKwargs
from accelerate.state import AcceleratorState


class ScaledOptimizer(Protocol):
    """What a number format needs of a prepared optimizer."""

    optimizer: torch.optim.Optimizer
    scaler: GradScaler | None
    gradients_unscaled: bool


class Precision:
    """Full precision: the null case of every number format.

    A strategy calls, in this order and on every rank: `initialize` for each `prepare` call, `convert` once
    for each prepared model, `autocast` where the user opens a context, `backward` for each loss, `unscale`
    before gradients are read or clipped. `name` is the value of `mixed_precision`.
    """

    scaler: GradScaler | None = None
    fp8_backend: FP8BackendType = FP8BackendType.NO
    """The library whose layers compute in FP8."""

    def __init__(self, name: str = "no") -> None:
        self.name = name

    def initialize(self, models: list[nn.Module], optimizers: list[Any]) -> tuple[list[nn.Module], list[Any]]:
        """Return the new models and optimizers of a `prepare` call, as this format changes them together."""
        return models, optimizers

    def convert(self, model: nn.Module) -> nn.Module:
        """Return `model`, on its device, ready to run its forward in this format; the same object."""
        return model

    def autocast(
        self, enabled: bool = True, cache_enabled: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context in which operations run in this format, unless it is not enabled."""
        return nullcontext()

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of `loss`, a 0-d tensor that is already divided by the accumulation steps."""
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]

    def unscale(self, optimizers: Iterable[ScaledOptimizer]) -> None:
        """Bring the gradients of `optimizers` to their true size, once for each update."""

    def gradient_scale(self) -> float:
        """Return the factor by which gradients are too large before `unscale`."""
        return 1.0

    def adopt(self, optimizers: list[Any]) -> None:
        """Take note of all optimizers that step in this format."""


AUTOCAST_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""The dtype of autocast by `mixed_precision`; what FP8 layers leave over runs in bfloat16."""


class AutocastForward:
    """A module's forward under autocast, with float32 outputs: its instance attribute `forward`.

    Unlike a closure it follows the module through pickle and `copy.deepcopy`.
    """

    def __init__(
        self, module: nn.Module, device_type: str, dtype: torch.dtype, settings: AutocastKwargs
    ) -> None:
        self.module = module
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")
        self.autocast = device_type, dtype, settings.enabled, settings.cache_enabled

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward without autocast; `inspect.signature` follows this name."""
        return self.inner or type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(*self.autocast):
            if self.inner is None:  # not `__wrapped__`: torch before 2.13 does not trace `__get__`
                outputs = type(self.module).forward(self.module, *args, **kwargs)
            else:
                outputs = self.inner(*args, **kwargs)
        return convert_to_fp32(outputs)

    def restore(self, module: nn.Module) -> None:
        """Give `module` back the forward it had before."""
        if self.inner is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self.inner


class MixedPrecision(Precision):
    """bfloat16 by autocast; no scaling is needed because its range is that of float32."""

    def __init__(self, name: str, device_type: str, settings: AutocastKwargs | None = None) -> None:
        super().__init__(name)
        self.device_type = device_type
        self.dtype = AUTOCAST_DTYPES[name]
        self.settings = settings or AutocastKwargs()

    def convert(self, model: nn.Module) -> nn.Module:
        if not isinstance(model.__dict__.get("forward"), AutocastForward):
            model.__dict__["forward"] = AutocastForward(model, self.device_type, self.dtype, self.settings)
        return model

    def autocast(self, enabled: bool = True, cache_enabled: bool | None = None) -> torch.autocast:
        return torch.autocast(self.device_type, self.dtype, enabled, cache_enabled)


@contextmanager
def fp16_gradients_explained(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Name the option where a gradient scaler refuses float16 gradients inside the block."""
    try:
        yield
    except ValueError as error:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        count = sum(gradient is not None and gradient.dtype == torch.float16 for gradient in gradients)
        if "unscale FP16 gradients" not in str(error):
            raise
        raise ConfigurationError(
            f"{count} parameters of {type(optimizer).__name__} are float16, and torch does not unscale such "
            "gradients: small updates are lost in float16 weights. Keep trainable parameters in float32 "
            "(p.data = p.data.float()), use mixed_precision='no', or pass "
            "kwargs_handlers=[GradScalerKwargs(allow_fp16_gradients=True)] to Accelerator."
        ) from error


class ScaledPrecision(MixedPrecision):
    """float16 by autocast, with a gradient scaler against underflow.

    One scaler serves all optimizers. With several of them its scale may change only after the last one has
    stepped, so the update waits for the next backward pass.
    """

    scaler: GradScaler

    def __init__(
        self,
        name: str,
        device_type: str,
        scaler: GradScaler,
        settings: AutocastKwargs | None = None,
    ) -> None:
        super().__init__(name, device_type, settings)
        self.scaler = scaler
        self.updates_due: list[GradScaler] = []
        self.optimizers: list[Any] = []

    def adopt(self, optimizers: list[Any]) -> None:
        """Let several optimizers share the scaler: its update then waits until all of them have stepped."""
        self.optimizers = optimizers
        for optimizer in optimizers:
            optimizer.note_scaled_step = self._postpone_update if len(optimizers) > 1 else None

    def _postpone_update(self, scaler: GradScaler) -> None:
        # Clients may give each optimizer a scaler of its own: the one that stepped is the one to update.
        if not any(scaler is due for due in self.updates_due):
            self.updates_due.append(scaler)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute gradients of the scaled loss."""
        while self.updates_due:
            self.updates_due.pop().update()
        self.scaler.scale(loss).backward(**kwargs)  # type: ignore[no-untyped-call]

    def unscale(self, optimizers: Iterable[ScaledOptimizer]) -> None:
        """Unscale the gradients of each optimizer that has not been since its last step."""
        for optimizer in optimizers:
            if optimizer.gradients_unscaled or optimizer.scaler is None:
                continue
            with fp16_gradients_explained(optimizer.optimizer):
                optimizer.scaler.unscale_(optimizer.optimizer)
            optimizer.gradients_unscaled = True

    def gradient_scale(self) -> float:
        return float(self.scaler.get_scale())


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return the autocast context of the running `AcceleratorState`.

    Args:
        native_amp: `False` gives a context that does nothing.
        autocast_kwargs: arguments for `torch.autocast`; the default enables it.
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    settings = autocast_kwargs or AutocastKwargs()
    dtype = AUTOCAST_DTYPES.get(state.mixed_precision)
    return torch.autocast(state.device.type, dtype, settings.enabled, settings.cache_enabled)


def get_fsdp2_grad_scaler(**kwargs: Any) -> GradScaler:
    """Return a gradient scaler for FSDP 2: torch's own, which asks all ranks about distributed gradients.

    Args:
        **kwargs: arguments of `torch.amp.GradScaler`.
    """
    return get_grad_scaler(DistributedType.FSDP, **kwargs)


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> GradScaler:
    """Return the gradient scaler that suits the device of this process.

    Args:
        distributed_type: the method of the run; accepted for callers that name it, the device decides.
        **kwargs: arguments of `torch.amp.GradScaler`.
    """
    scaler: GradScaler = AcceleratorState().device_backend.grad_scaler(**kwargs)
    return scaler
