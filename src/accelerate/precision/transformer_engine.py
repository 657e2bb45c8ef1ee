"""FP8 through Transformer Engine: its layers instead of torch's, and its autocast around the forward.

Source: https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import nn

from accelerate.base import FP8BackendType, PreparationError, require, wrong_value
from accelerate.plugins import TERecipeKwargs
from accelerate.precision.amp import AutocastForward
from accelerate.precision.fp8 import TILE, Fp8Precision

Model = TypeVar("Model", bound=nn.Module)

_LIBRARIES = {"cuda": "transformer_engine", "hpu": "intel_transformer_engine"}
_OURS_ALONE = ("use_autocast_during_eval", "use_mxfp8_block_scaling", "backend", "opt_level", "fp8_format")


def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> None:
    """Replace linear layers and layer norms in a model by those of Transformer Engine, or back; in place.

    The new layers have the weights of the old ones, as parameters of their own. A linear layer whose sizes
    are no multiples of 16 stays.

    Args:
        model: holds the layers; is not replaced itself.
        to_transformer_engine: `False` restores torch's layers.
        _convert_linear: whether linear layers are replaced.
        _convert_ln: whether layer norms are replaced.
    """
    engine = _layers_of(model)
    source, target = (nn, engine) if to_transformer_engine else (engine, nn)
    asked = {"Linear": _convert_linear, "LayerNorm": _convert_ln}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            for kind in (kind for kind, is_asked in asked.items() if is_asked):
                if isinstance(child, getattr(source, kind)) and (target is nn or _fits(child)):
                    setattr(parent, name, _with_weights_of(child, _like(child, kind, target)))


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether layers of Transformer Engine are in a model.

    Args:
        model: any module.
    """
    engine = _layers_of(model)
    kinds = (engine.LayerNorm, engine.Linear, engine.TransformerLayer)
    return any(isinstance(module, kinds) for module in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Return a forward that runs under the FP8 autocast of Transformer Engine.

    Args:
        model_forward: a bound method of a module.
        fp8_recipe: of Transformer Engine.
        use_during_eval: whether it computes in FP8 when the module evaluates, too.
    """
    model: nn.Module = model_forward.__self__  # type: ignore[attr-defined]  # a bound method
    engine = _layers_of(model)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with engine.fp8_autocast(enabled=use_during_eval or model.training, fp8_recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    return update_wrapper(forward, model_forward)


def apply_fp8_autowrap(model: Model, fp8_recipe_handler: TERecipeKwargs | None) -> Model:
    """Let the forward of a model run under the FP8 autocast of Transformer Engine.

    Args:
        model: changed in place, and returned.
        fp8_recipe_handler: how FP8 numbers are scaled; the defaults otherwise.
    """
    handler = fp8_recipe_handler or TERecipeKwargs()
    forward = contextual_fp8_autocast(
        model.forward, build_recipe(model, handler), bool(handler.use_autocast_during_eval)
    )
    model.__dict__["forward"] = forward
    return model


def build_recipe(model: nn.Module, handler: TERecipeKwargs) -> Any:
    """Return the recipe of Transformer Engine for the arguments of a user."""
    recipes = import_module(f"{_library_of(model)}.common.recipe")
    scaling = recipes.MXFP8BlockScaling if handler.use_mxfp8_block_scaling else recipes.DelayedScaling
    given = {name: value for name, value in handler.to_kwargs().items() if name not in _OURS_ALONE}
    if handler.use_mxfp8_block_scaling and given:
        raise wrong_value(
            "use_mxfp8_block_scaling",
            True,
            f"MXFP8 scales blocks by themselves and knows no {', '.join(given)}",
            "Leave these arguments out",
        )
    return scaling(fp8_format=getattr(recipes.Format, str(handler.fp8_format)), **given)


class TransformerEnginePrecision(Fp8Precision):
    """Layers of Transformer Engine, the rest under bfloat16 autocast."""

    library = "Transformer Engine"
    device_types = tuple(_LIBRARIES)
    fp8_backend = FP8BackendType.TE

    def convert(self, model: nn.Module) -> nn.Module:
        """Convert the layers of `model`, unless some are already, and let it run in FP8 and autocast."""
        if isinstance(model.__dict__.get("forward"), AutocastForward):  # it was converted before
            return model
        if not has_transformer_engine_layers(model):
            convert_model(model)
            if not has_transformer_engine_layers(model):
                raise PreparationError(
                    f"{type(model).__name__} has no layer that can compute in FP8: linear layers whose sizes "
                    "are multiples of 16, or layer norms. Pad its sizes, or use mixed_precision='bf16'."
                )
        apply_fp8_autowrap(model, self.recipe)
        return super().convert(model)


def _fits(layer: Any) -> bool:
    """Whether FP8 kernels take the sizes of a layer of torch."""
    if isinstance(layer, nn.LayerNorm):
        return len(layer.normalized_shape) == 1 and layer.elementwise_affine
    return all(size % TILE == 0 for size in layer.weight.shape)


def _like(layer: Any, kind: str, library: Any) -> Any:
    """Return a new layer of torch or Transformer Engine with the sizes of another one."""
    weight = layer.weight
    options = {"device": weight.device, "dtype" if library is nn else "params_dtype": weight.dtype}
    if kind == "LayerNorm":
        return library.LayerNorm(weight.shape[0], eps=layer.eps, **options)
    has_bias = getattr(layer, "bias", None) is not None
    return library.Linear(layer.in_features, layer.out_features, bias=has_bias, **options)


@torch.no_grad()
def _with_weights_of(old: nn.Module, new: nn.Module) -> nn.Module:
    for name, parameter in old.named_parameters(recurse=False):
        successor = getattr(new, name)
        successor.copy_(parameter)
        successor.requires_grad_(parameter.requires_grad)
    return new.train(old.training)


def _library_of(model: nn.Module) -> str:
    kinds = {parameter.device.type for parameter in model.parameters()}
    name = _LIBRARIES["hpu" if "hpu" in kinds else "cuda"]
    if name == "transformer_engine":
        require(name, "FP8 by Transformer Engine")
    return name


def _layers_of(model: nn.Module) -> Any:
    return import_module(f"{_library_of(model)}.pytorch")
