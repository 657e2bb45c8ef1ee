"""FP8 through torchao: linear layers compute in float8, what they leave over in bfloat16.

Source: https://docs.pytorch.org/ao/stable/workflows/training.html
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from accelerate.base import FP8BackendType, torchao_required
from accelerate.plugins import AORecipeKwargs, AutocastKwargs
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


class TorchaoPrecision(MixedPrecision):
    """Linear layers of torchao's float8 under bfloat16 autocast.

    Args:
        device_type: the torch device type that computes.
        recipe: how layers are converted; a live object, read when a model is.
        settings: user's autocast arguments.
        gathers_shards: whether FSDP 2 gathers the weights of layers, which may then travel in float8.
        convert_layers: what converts the layers of a model.
    """

    fp8_backend = FP8BackendType.AO

    def __init__(
        self,
        device_type: str,
        recipe: AORecipeKwargs,
        settings: AutocastKwargs | None = None,
        gathers_shards: bool = False,
        convert_layers: ConvertLayers = convert_model_to_fp8_ao,
    ) -> None:
        super().__init__("fp8", device_type, settings)
        self.recipe = recipe
        self.gathers_shards = gathers_shards
        self.convert_layers = convert_layers

    def convert(self, model: nn.Module) -> nn.Module:
        """Convert the linear layers of `model`, unless some are already, and let it run under autocast."""
        if not has_ao_layers(model):
            self.convert_layers(model, self._config(), self.recipe.module_filter_func)
        return super().convert(model)

    def _config(self) -> Any:
        config = self.recipe.config
        if self.gathers_shards or config is None or not config.enable_fsdp_float8_all_gather:
            return config
        # All-gathers in float8 make new parameters, which no optimizer knows; nothing is sent here.
        return dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
