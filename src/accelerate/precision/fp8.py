"""FP8: what its libraries have in common, torchao, and MS-AMP.

Sources: https://docs.pytorch.org/ao/stable/workflows/training.html and
https://azure.github.io/MS-AMP/docs/user-tutorial/usage
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from accelerate.base import FP8BackendType, PreparationError, torchao_required, wrong_value
from accelerate.plugins import AORecipeKwargs, AutocastKwargs, MSAMPRecipeKwargs
from accelerate.precision.amp import MixedPrecision

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig

Filter = Callable[[nn.Module, str], bool]
ConvertLayers = Callable[[nn.Module, Any, Any], object]
TILE = 16
"""FP8 kernels take sizes that are multiples of this."""


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer of a model; `None` where there is none.

    Args:
        model: any module.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Sequence[str | None]) -> bool:
    """Return whether a module shall compute in FP8.

    Args:
        module: of a model.
        fqn: its name in the model.
        layers_to_filter: names of modules that shall not.

    Returns:
        `False` for those, and for linear layers of sizes that FP8 kernels do not take.
    """
    if isinstance(module, nn.Linear) and (module.in_features % TILE or module.out_features % TILE):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return whether a module shall compute in FP8, if not for the first and last linear layer in it.

    Args:
        module: of a model.
        fqn: its name in the model.
    """
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Return whether linear layers of torchao's float8 are in a model.

    Args:
        model: any module.
    """
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module, config: Float8LinearConfig | None = None, module_filter_func: Filter | None = None
) -> None:
    """Let linear layers of a model compute in float8, in place.

    Args:
        model: any module.
        config: how; torchao's defaults otherwise.
        module_filter_func: called with a module and its name, whether it is converted. Otherwise all linear
            layers are, but the first and the last one and those of sizes that FP8 kernels do not take.
    """
    from torchao.float8 import convert_to_float8_training

    ends = find_first_last_linear_layers(model)
    chosen = module_filter_func or partial(filter_linear_layers, layers_to_filter=ends)
    convert_to_float8_training(model, module_filter_fn=chosen, config=config)


class Fp8Precision(MixedPrecision):
    """Layers of a library compute in FP8, the rest under bfloat16 autocast.

    `recipe`, how the library converts layers, is a live object that is read when a model is converted.
    """

    library: str
    device_types: Collection[str] = ()
    """Those that the library runs on; empty: all."""

    def __init__(self, device_type: str, recipe: Any, settings: AutocastKwargs | None = None) -> None:
        if self.device_types and device_type not in self.device_types:
            devices = " and ".join(self.device_types)
            raise wrong_value(
                "mixed_precision",
                "fp8",
                f"{self.library} computes on {devices}, and this run is on {device_type}",
                "Set fp8_backend to ao, which computes everywhere, or mixed_precision to bf16",
            )
        super().__init__("fp8", device_type, settings)
        self.recipe = recipe


class TorchaoPrecision(Fp8Precision):
    """Linear layers of torchao's float8 under bfloat16 autocast.

    Where FSDP 2 gathers the weights of layers, it may send them in float8.
    """

    library = "torchao"
    fp8_backend = FP8BackendType.AO

    def __init__(
        self,
        device_type: str,
        recipe: AORecipeKwargs,
        settings: AutocastKwargs | None = None,
        gathers_shards: bool = False,
        convert_layers: ConvertLayers = convert_model_to_fp8_ao,
    ) -> None:
        super().__init__(device_type, recipe, settings)
        self.gathers_shards = gathers_shards
        self.convert_layers = convert_layers

    def convert(self, model: nn.Module) -> nn.Module:
        if not has_ao_layers(model):
            config = self.recipe.config
            if config is not None and config.enable_fsdp_float8_all_gather and not self.gathers_shards:
                # All-gathers in float8 make new parameters, which no optimizer knows; nothing is sent here.
                config = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
            self.convert_layers(model, config, self.recipe.module_filter_func)
        return super().convert(model)


class MsAmpPrecision(Fp8Precision):
    """MS-AMP, which is no longer maintained: weights, gradients and, with O2, optimizer states in FP8."""

    library = "MS-AMP"
    device_types = ("cuda",)
    fp8_backend = FP8BackendType.MSAMP

    def __init__(
        self, device_type: str, recipe: MSAMPRecipeKwargs, settings: AutocastKwargs | None = None
    ) -> None:
        super().__init__(device_type, recipe, settings)
        warnings.warn(
            "MS-AMP is no longer maintained, and support for it will go. Set fp8_backend to ao (torchao) or "
            "te (Transformer Engine).",
            FutureWarning,
            stacklevel=2,
        )

    def initialize(self, models: list[nn.Module], optimizers: list[Any]) -> tuple[list[nn.Module], list[Any]]:
        """Return a model and its optimizer as MS-AMP changes them together."""
        if len(models) != 1 or len(optimizers) != 1:
            raise PreparationError(
                f"MS-AMP changes one model and its optimizer together, and this call of `prepare` has "
                f"{len(models)} models and {len(optimizers)} optimizers. Give it one of each."
            )
        model, optimizer = import_module("msamp").initialize(
            models[0], optimizers[0], opt_level=self.recipe.opt_level
        )
        return [model], [optimizer]
