"""Choice of the `Precision` of a run, from `mixed_precision`, the hardware and FP8 recipes.

The strategies call `resolve_precision` once for each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.amp import GradScaler

from accelerate import torch_private
from accelerate.base import is_msamp_available, is_torchao_available, listed, require, wrong_value
from accelerate.devices import DeviceBackend, is_transformer_engine_available
from accelerate.logging import get_logger
from accelerate.plugins import (
    AORecipeKwargs,
    AutocastKwargs,
    FP8RecipeKwargs,
    GradScalerKwargs,
    KwargsHandler,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from accelerate.precision.amp import MixedPrecision, Precision, ScaledPrecision
from accelerate.precision.fp8 import (
    ConvertLayers,
    TorchaoPrecision,
    TransformerEnginePrecision,
    convert_model_to_fp8_ao,
)

logger = get_logger(__name__)


@dataclass(frozen=True)
class PrecisionRequest:
    """Settings of a run that determine its `Precision`."""

    name: str  # value of `mixed_precision`
    backend: DeviceBackend
    autocast: AutocastKwargs | None = None
    scaler: GradScalerKwargs | None = None
    make_scaler: Callable[..., GradScaler] | None = None  # None uses the gradient scaler of the hardware
    recipes: Sequence[KwargsHandler] = ()
    fp8_library: str | None = None  # name in the launch configuration, or None for an installed one
    gathers_shards: bool = False  # whether FSDP 2 shards the model, and all-gathers its parameters
    convert_layers: ConvertLayers = convert_model_to_fp8_ao


def _build_float16(request: PrecisionRequest) -> Precision:
    arguments = request.scaler.to_kwargs() if request.scaler else {}
    make_scaler = request.make_scaler or request.backend.grad_scaler
    scaler = make_scaler(**arguments)
    if request.scaler and request.scaler.allow_fp16_gradients:
        torch_private.allow_fp16_gradients(scaler)
    return ScaledPrecision("fp16", request.backend.name, scaler, request.autocast)


def _build_torchao(request: PrecisionRequest, recipe: AORecipeKwargs) -> Precision:
    require("torchao", "mixed_precision='fp8'")
    device, gathers_shards = request.backend.name, request.gathers_shards
    return TorchaoPrecision(device, recipe, request.autocast, gathers_shards, request.convert_layers)


def _build_transformer_engine(request: PrecisionRequest, recipe: TERecipeKwargs) -> Precision:
    return TransformerEnginePrecision(request.backend.name, recipe, request.autocast)


def _refuse_msamp(request: PrecisionRequest, recipe: MSAMPRecipeKwargs) -> Precision:
    reason, fix = "MS-AMP is no longer maintained", "Set it to ao (torchao) or te (Transformer Engine)"
    raise wrong_value("fp8_backend", "MSAMP", reason, fix)


class _Library(NamedTuple):
    """FP8 library, with its recipe, and the functions that find it and create its `Precision`."""

    recipe: type[KwargsHandler]
    is_installed: Callable[[], bool]
    build: Callable[[PrecisionRequest, Any], Precision]


_FP8 = {
    "AO": _Library(AORecipeKwargs, is_torchao_available, _build_torchao),
    "TE": _Library(TERecipeKwargs, is_transformer_engine_available, _build_transformer_engine),
    "MSAMP": _Library(MSAMPRecipeKwargs, is_msamp_available, _refuse_msamp),
}
"""FP8 libraries by name, in the order of preference."""


def _build_fp8(request: PrecisionRequest) -> Precision:
    if len(request.recipes) > 1:
        names = listed([type(recipe).__name__ for recipe in request.recipes])
        reason, fix = "one library computes in FP8", "Pass the recipe of one of them"
        raise wrong_value("kwargs_handlers", names, reason, fix)
    recipe = request.recipes[0] if request.recipes else None
    by_recipe = (name for name, library in _FP8.items() if isinstance(recipe, library.recipe))
    installed = (name for name, library in _FP8.items() if library.is_installed())
    chosen = recipe.backend if isinstance(recipe, FP8RecipeKwargs) else next(by_recipe, None)
    name = chosen or (request.fp8_library or "").upper() or next(installed, "AO")
    if name not in _FP8:
        raise wrong_value("fp8_backend", name, f"the libraries are {', '.join(_FP8)}", "Choose one of them")
    library = _FP8[name]
    return library.build(request, recipe or library.recipe())


PRECISIONS: dict[str, Callable[[PrecisionRequest], Precision]] = {
    "no": lambda request: Precision(),
    "bf16": lambda request: MixedPrecision("bf16", request.backend.name, request.autocast),
    "fp16": _build_float16,
    "fp8": _build_fp8,
}
"""Functions that create the `Precision`, by the value of `mixed_precision`."""

RECIPES = tuple(library.recipe for library in _FP8.values())
"""Handlers that configure the scaling of FP8 tensors."""


def resolve_precision(request: PrecisionRequest) -> Precision:
    """Returns the `Precision` for a request, or raises an error if the hardware or torch does not support it.

    FP8 recipes have no effect without `mixed_precision="fp8"`, and are logged as a warning.
    """
    build = PRECISIONS.get(request.name)
    if build is None:
        names = f"the values of this version are {', '.join(PRECISIONS)}"
        raise wrong_value("mixed_precision", request.name, names, "Choose one of them")
    if request.recipes and build is not _build_fp8:
        names = listed([type(recipe).__name__ for recipe in request.recipes])
        logger.warning(
            f"{names} has no effect with mixed_precision={request.name!r}: set mixed_precision='fp8'."
        )
    if request.name != "no" and not _has_autocast(request.backend.name):
        reason = f"this build of torch ({torch.__version__}) has no autocast for {request.backend.label}"
        fix = "Choose 'no', or install a torch, or the package of the hardware, that has it"
        raise wrong_value("mixed_precision", request.name, reason, fix)
    return build(request)


def _has_autocast(device_type: str) -> bool:
    try:
        return torch.amp.is_autocast_available(device_type)
    except RuntimeError:  # no package has registered this device type with torch
        return False
