"""The one place that chooses the number format of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.amp import GradScaler

from accelerate.base.errors import wrong_value
from accelerate.devices.backend import DeviceBackend
from accelerate.plugins.handlers import AutocastKwargs, GradScalerKwargs
from accelerate.precision.amp import MixedPrecision, ScaledPrecision
from accelerate.precision.base import Precision


@dataclass(frozen=True)
class PrecisionRequest:
    """What a run asks of its number format.

    Args:
        name: value of `mixed_precision`.
        backend: the hardware that computes.
        autocast: user's autocast arguments.
        scaler: user's scaler arguments.
    """

    name: str
    backend: DeviceBackend
    autocast: AutocastKwargs | None = None
    scaler: GradScalerKwargs | None = None
    make_scaler: Callable[..., GradScaler] | None = None


def _full(request: PrecisionRequest) -> Precision:
    return Precision()


def _bfloat16(request: PrecisionRequest) -> Precision:
    return MixedPrecision("bf16", request.backend.name, request.autocast)


def _float16(request: PrecisionRequest) -> Precision:
    arguments = request.scaler.to_kwargs() if request.scaler else {}
    make_scaler = request.make_scaler or request.backend.grad_scaler
    return ScaledPrecision("fp16", request.backend.name, make_scaler(**arguments), request.autocast)


FORMATS: dict[str, Callable[[PrecisionRequest], Precision]] = {
    "no": _full,
    "bf16": _bfloat16,
    "fp16": _float16,
}


def resolve(request: PrecisionRequest) -> Precision:
    """Return the number format for `request`.

    Raises:
        ConfigurationError: if no format of that name can run.
    """
    build = FORMATS.get(request.name)
    if build is None:
        raise wrong_value(
            "mixed_precision",
            request.name,
            f"the formats of this version are {', '.join(FORMATS)}",
            "Choose one of them",
        )
    return build(request)
