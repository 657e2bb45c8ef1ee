"""Full precision, and mixed precision by `torch.autocast` in bfloat16, or in float16 with a gradient scaler.

The strategies call the `Precision` of a run, and `precision/resolve.py` creates it.
Source: https://docs.pytorch.org/docs/stable/amp.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.amp import GradScaler

from accelerate import torch_private
from accelerate.base import ConfigurationError, DistributedType, FP8BackendType, StateError
from accelerate.ops import convert_to_fp32
from accelerate.plugins import AutocastKwargs
from accelerate.state import AcceleratorState, WeakReference


class ScaledOptimizer(Protocol):
    """Protocol of a prepared optimizer whose gradients `Precision.unscale` divides by their scale."""

    parameters: Callable[[], Iterable[torch.Tensor]]
    optimizer: torch.optim.Optimizer
    scaler: GradScaler | None
    gradients_unscaled: bool


class Precision:
    """Full precision, and the interface of mixed precision.

    A strategy calls these methods on all ranks in this order: `initialize` for each `prepare` call, `convert`
    once for each prepared model, `autocast` if the user enters the context, `scale_loss` for each loss, and
    `unscale` before gradients are read or clipped.

    Args:
        name: Value of `mixed_precision`.
    """

    scaler: GradScaler | None = None
    fp8_backend: FP8BackendType = FP8BackendType.NO
    """Library whose layers compute in FP8."""
    recipe: Any = None
    """Recipe of that library."""
    scale_loss: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Returns a loss times the scale of the gradients. None leaves losses as they are."""

    def __init__(self, name: str = "no") -> None:
        self.name = name

    def convert(self, model: nn.Module) -> nn.Module:
        """Converts a model, which is on its device, in place, and returns it."""
        return model

    def autocast(
        self, enabled: bool = True, cache_enabled: bool | None = None
    ) -> AbstractContextManager[Any]:
        """Returns the autocast context, which has no effect unless it is enabled."""
        return nullcontext()

    def unscale(self, optimizers: Iterable[ScaledOptimizer]) -> None:
        """Divides the gradients of optimizers by their scale, once for each step."""

    def gradient_scale(self) -> float:
        """Returns the scale of the gradients before `unscale`."""
        return 1.0

    def set_optimizers(self, optimizers: list[Any]) -> None:
        """Sets the prepared optimizers of the run."""

    def finish_updates(self) -> None:
        """Makes postponed updates of the scaler before its state is saved or loaded."""

    def forget_gradients(self) -> None:
        """Forgets which gradients are unscaled, after all of them were removed."""
        if self.scaler is not None:
            torch_private.reset_unscaled(self.scaler)


AUTOCAST_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
"""Dtype of autocast by `mixed_precision`, where operations outside of FP8 layers run in bfloat16."""


class AutocastForward:
    """Callable that runs the forward of a module under autocast and converts its outputs to float32.

    It is the instance attribute `forward` of the module, to which it has a weak reference. Unlike a closure
    it can be pickled and copied with the module.
    """

    def __init__(
        self, module: nn.Module, device_type: str, dtype: torch.dtype, settings: AutocastKwargs
    ) -> None:
        self._module = WeakReference(module)
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")
        self.autocast = device_type, dtype, settings.enabled, settings.cache_enabled

    @property
    def module(self) -> nn.Module:
        """Module whose forward this is."""
        module: nn.Module | None = self._module()
        if module is None:
            raise StateError("The model of this forward has been deleted. Keep a reference to the model.")
        return module

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Forward without autocast, for `inspect.signature`."""
        return self.inner or type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(*self.autocast):
            if self.inner is None:  # not `__wrapped__`, as torch before 2.13 does not trace `__get__`
                module = self._module.find()
                if module is None:
                    module = self.module  # raises an error
                outputs = type(module).forward(module, *args, **kwargs)
            else:
                outputs = self.inner(*args, **kwargs)
        return convert_to_fp32(outputs)

    def restore(self, module: nn.Module) -> None:
        if self.inner is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self.inner


class MixedPrecision(Precision):
    """Mixed precision by autocast without a gradient scaler, as bfloat16 has the range of float32."""

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
def explain_fp16_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replaces the error of a gradient scaler about float16 gradients by one that names the option."""
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
    """Mixed precision by autocast in float16, with a gradient scaler that prevents underflow.

    All optimizers share one scaler. With several of them, its scale may change only after the last one has
    stepped, so the update is postponed to the next backward pass.
    """

    scaler: GradScaler

    def __init__(
        self, name: str, device_type: str, scaler: GradScaler, settings: AutocastKwargs | None = None
    ) -> None:
        super().__init__(name, device_type, settings)
        self.scaler = scaler
        self.updates_due: dict[GradScaler, float | None] = {}  # with the next scale if it is given
        self.optimizers: list[Any] = []

    def set_optimizers(self, optimizers: list[Any]) -> None:
        """Sets the prepared optimizers, and postpones updates of the scaler if there are several."""
        self.optimizers = optimizers
        for optimizer in optimizers:
            postpone = partial(_postpone_update, self.updates_due)
            optimizer.update_scaler = postpone if len(optimizers) > 1 else None

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns a loss times the scale of the gradients, after postponed updates of the scaler."""
        self._update()
        return self.scaler.scale(loss)

    def _update(self) -> None:
        while self.updates_due:
            scaler, scale = self.updates_due.popitem()
            scaler.update(scale)

    def finish_updates(self) -> None:
        """Makes postponed updates, unless an optimizer is to step with gradients of this scale."""
        if not any(map(self._must_step, self.optimizers)):
            self._update()

    @staticmethod
    def _must_step(optimizer: ScaledOptimizer) -> bool:
        has_gradients = any(parameter.grad is not None for parameter in optimizer.parameters())
        return has_gradients and not torch_private.has_stepped(optimizer.optimizer, optimizer.scaler)

    def forget_gradients(self) -> None:
        self.updates_due.clear()
        super().forget_gradients()

    def unscale(self, optimizers: Iterable[ScaledOptimizer]) -> None:
        """Unscales the gradients of each optimizer, once after each of its steps."""
        for optimizer in optimizers:
            if optimizer.gradients_unscaled or optimizer.scaler is None:
                continue
            with explain_fp16_gradients(optimizer.optimizer):
                optimizer.scaler.unscale_(optimizer.optimizer)
            optimizer.gradients_unscaled = True

    def gradient_scale(self) -> float:
        return float(self.scaler.get_scale())


def _postpone_update(
    updates_due: dict[GradScaler, float | None], scaler: GradScaler, scale: float | None = None
) -> None:
    # Clients may set a separate scaler for each optimizer, so the scaler of the step is updated.
    updates_due[scaler] = updates_due.get(scaler) if scale is None else scale


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Returns the autocast context for the mixed precision of `AcceleratorState`.

    Args:
        native_amp: Whether to use autocast. The default, False, returns a context that does nothing.
        autocast_kwargs: Arguments of `torch.autocast`. The default enables it.
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    settings = autocast_kwargs or AutocastKwargs()
    dtype = AUTOCAST_DTYPES.get(state.mixed_precision)
    return torch.autocast(state.device.type, dtype, settings.enabled, settings.cache_enabled)


def get_fsdp2_grad_scaler(**kwargs: Any) -> GradScaler:
    """Returns the gradient scaler for FSDP 2.

    It is the one of torch, which reduces the check for infinite gradients over the ranks of a distributed
    tensor.

    Args:
        **kwargs: Arguments of `torch.amp.GradScaler`.
    """
    return get_grad_scaler(DistributedType.FSDP, **kwargs)


def get_grad_scaler(distributed_type: DistributedType | None = None, **kwargs: Any) -> GradScaler:
    """Returns the gradient scaler for the device of this process.

    Args:
        distributed_type: Has no effect, because the scaler depends only on the device.
        **kwargs: Arguments of `torch.amp.GradScaler`.
    """
    scaler: GradScaler = AcceleratorState().device_backend.grad_scaler(**kwargs)
    return scaler
