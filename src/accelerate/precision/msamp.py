"""FP8 through MS-AMP, which is no longer maintained.

Source: https://azure.github.io/MS-AMP/docs/user-tutorial/usage
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

from torch import nn

from accelerate.base import FP8BackendType, PreparationError, wrong_value
from accelerate.plugins import AutocastKwargs, MSAMPRecipeKwargs
from accelerate.precision.amp import MixedPrecision


class MsAmpPrecision(MixedPrecision):
    """MS-AMP: weights, gradients and, with O2, optimizer states in FP8; the rest under bfloat16 autocast.

    Args:
        device_type: the torch device type that computes.
        recipe: how much is in FP8; a live object, read when a model is prepared.
        settings: user's autocast arguments.

    Raises:
        ConfigurationError: MS-AMP does not run on this device.
    """

    fp8_backend = FP8BackendType.MSAMP

    def __init__(
        self, device_type: str, recipe: MSAMPRecipeKwargs, settings: AutocastKwargs | None = None
    ) -> None:
        if device_type != "cuda":
            raise wrong_value(
                "mixed_precision",
                "fp8",
                f"MS-AMP computes on cuda, and this run is on {device_type}",
                "Set fp8_backend to ao, which computes everywhere, or mixed_precision to bf16",
            )
        warnings.warn(
            "MS-AMP is no longer maintained, and support for it will go. Set fp8_backend to ao (torchao) or "
            "te (Transformer Engine).",
            FutureWarning,
            stacklevel=2,
        )
        super().__init__("fp8", device_type, settings)
        self.recipe = recipe

    def initialize(self, models: list[nn.Module], optimizers: list[Any]) -> tuple[list[nn.Module], list[Any]]:
        """Return a model and its optimizer as MS-AMP changes them together.

        Raises:
            PreparationError: not one model with one optimizer.
        """
        if len(models) != 1 or len(optimizers) != 1:
            raise PreparationError(
                f"MS-AMP changes one model and its optimizer together, and this call of `prepare` has "
                f"{len(models)} models and {len(optimizers)} optimizers. Give it one of each."
            )
        model, optimizer = import_module("msamp").initialize(
            models[0], optimizers[0], opt_level=self.recipe.opt_level
        )
        return [model], [optimizer]
