"""FP8 layers of torchao and Transformer Engine, and the choice of the layers to convert.

`precision/resolve.py` creates the `Precision` of the library of a run, and some functions are public.
Sources: https://docs.pytorch.org/ao/stable/workflows/training.html and
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from accelerate.base import FP8BackendType, PreparationError, listed, torchao_required, wrong_value
from accelerate.logging import get_logger
from accelerate.plugins import AORecipeKwargs, AutocastKwargs
from accelerate.precision.amp import MixedPrecision
from accelerate.state import PartialState

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig
from functools import update_wrapper
from typing import TypeVar

import torch

from accelerate.base import require
from accelerate.plugins import TERecipeKwargs
from accelerate.precision.amp import AutocastForward

logger = get_logger(__name__)

Filter = Callable[[nn.Module, str], bool]
ConvertLayers = Callable[[nn.Module, Any, Any], object]
TILE = 16
"""Divisor of all sizes that FP8 kernels support."""
ROUTER = re.compile(r"(^|[._])(routers?|gating|gates?(?!\w*_(up|proj)))([._]|$)")
"""Word in the names of routers of experts, whose scores in FP8 become NaN or select other experts.

Layers of gated MLPs, such as `gate_proj` and `gate_up_proj`, are not routers.
"""
NO_ROUTER = re.compile(r"(attn|attention|(^|\.)experts|(^|\.)shared_experts?)\.|_proj$", re.IGNORECASE)
"""Names of layers of attention and of experts, whose number of outputs may equal the number of experts."""
NUM_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
    "n_experts",
)
"""Fields of model configs with the number of experts, which is the number of outputs of a router."""


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Returns the names of the first and the last linear layer of a model.

    Args:
        model: Any module.

    Returns:
        The two names, or None and None without a linear layer.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Sequence[str | None]) -> bool:
    """Returns whether a module is to compute in FP8.

    Args:
        module: Module of a model.
        fqn: Its fully qualified name in the model.
        layers_to_filter: Names of modules that are not to compute in FP8.

    Returns:
        False for modules in `layers_to_filter`, for routers of experts (with a word such as `gate` or
        `router` in the name), and for linear layers with sizes that FP8 kernels do not support.
    """
    if ROUTER.search(fqn.lower()):
        return False
    if isinstance(module, nn.Linear) and (module.in_features % TILE or module.out_features % TILE):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Returns whether a module is to compute in FP8, except for the first and last linear layer in it.

    Args:
        module: Module of a model.
        fqn: Its fully qualified name in the model.

    Returns:
        As `filter_linear_layers`, with these two layers in `layers_to_filter`.
    """
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


def find_routers(model: nn.Module) -> set[str]:
    """Returns the names of the linear layers that route to experts, by name, class or number of outputs."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs += [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    counts = {getattr(config, field, None) for config in configs for field in NUM_EXPERTS} - {1}
    modules = dict(model.named_modules())
    routers = tuple(f"{name}." for name, module in modules.items() if name and _is_router(name, module))
    return {
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear)
        and (f"{name}.".startswith(routers) or (module.out_features in counts and not NO_ROUTER.search(name)))
    }


def _is_router(name: str, module: nn.Module) -> bool:
    """Returns whether the name of a module or of its class contains the word for a router."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(module).__name__)
    return any(ROUTER.search(text.lower()) for text in (name, words))


def _log_converted(model: nn.Module, linear: Sequence[str]) -> None:
    """Logs the names of the linear layers that compute in FP8, and of those that do not.

    Args:
        linear: Names of the linear layers before the conversion.
    """
    if not PartialState._shared_state:  # the logger needs the rank
        return
    modules = dict(model.named_modules())
    kept = [name for name in linear if type(modules[name]) is nn.Linear]
    converted = [name for name in linear if name not in kept]
    logger.info(
        f"FP8: {len(converted)} linear layers of {type(model).__name__} are converted ({listed(converted)}), "
        f"{len(kept)} are not ({listed(kept)})."
    )


def _linear_layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is nn.Linear]


@torchao_required
def has_ao_layers(model: nn.Module) -> bool:
    """Returns whether a model contains float8 linear layers of torchao.

    Args:
        model: Any module.
    """
    from torchao.float8.float8_linear import Float8Linear

    return any(isinstance(module, Float8Linear) for module in model.modules())


@torchao_required
def convert_model_to_fp8_ao(
    model: nn.Module, config: Float8LinearConfig | None = None, module_filter_func: Filter | None = None
) -> None:
    """Converts linear layers of a model in place to float8 linear layers of torchao.

    Args:
        model: Any module.
        config: Configuration of torchao. The default is that of torchao.
        module_filter_func: Predicate of a module and its name that selects the layers to convert. The default
            selects all linear layers except the first and the last one, routers of experts, and layers with
            sizes that FP8 kernels do not support.
    """
    from torchao.float8 import convert_to_float8_training

    kept = [*find_first_last_linear_layers(model), *find_routers(model)]
    selected = module_filter_func or partial(filter_linear_layers, layers_to_filter=kept)
    convert_to_float8_training(model, module_filter_fn=selected, config=config)


class Fp8Precision(MixedPrecision):
    """Base class of mixed precision with FP8 layers of a library, and bfloat16 autocast outside of them.

    Args:
        recipe: Configuration of the conversion, which is read when a model is converted. Users may change it
            until then.
    """

    library: str
    device_types: Collection[str] = ()
    """Device types that the library supports, or an empty collection for all."""

    def __init__(self, device_type: str, recipe: Any, settings: AutocastKwargs | None = None) -> None:
        if self.device_types and device_type not in self.device_types:
            devices = " and ".join(self.device_types)
            reason = f"{self.library} computes on {devices}, and this run is on {device_type}"
            fix = "Set fp8_backend to ao, which computes everywhere, or mixed_precision to bf16"
            raise wrong_value("mixed_precision", "fp8", reason, fix)
        super().__init__("fp8", device_type, settings)
        self.recipe = recipe


class TorchaoPrecision(Fp8Precision):
    """Mixed precision with float8 linear layers of torchao, whose weights FSDP 2 can all-gather in float8."""

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
                # The option replaces parameters, which optimizers would not have, and without FSDP 2 there is
                # no all-gather.
                config = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
            linear = _linear_layers(model)
            self.convert_layers(model, config, self.recipe.module_filter_func)
            _log_converted(model, linear)
        return super().convert(model)


Model = TypeVar("Model", bound=nn.Module)

_LIBRARIES = {"cuda": "transformer_engine", "hpu": "intel_transformer_engine"}
_NOT_IN_RECIPE = ("use_autocast_during_eval", "use_mxfp8_block_scaling", "backend", "opt_level", "fp8_format")


def convert_model(
    model: nn.Module,
    to_transformer_engine: bool = True,
    _convert_linear: bool = True,
    _convert_ln: bool = True,
) -> None:
    """Replaces linear layers and layer norms of a model in place by those of Transformer Engine, or back.

    The new layers have new parameters with the values of the old ones. Linear layers whose sizes are not
    multiples of 16, routers of experts, and layers with a parameter of another module, such as a head that is
    tied to an embedding, are not replaced.

    Args:
        model: Module that contains the layers, and is not replaced itself.
        to_transformer_engine: Whether to replace the layers of torch. False replaces those of Transformer
            Engine instead. The default is True.
        _convert_linear: Whether to replace linear layers. The default is True.
        _convert_ln: Whether to replace layer norms. The default is True.
    """
    engine = _layers_of(model)
    source, target = (nn, engine) if to_transformer_engine else (engine, nn)
    kinds = [*(["Linear"] if _convert_linear else []), *(["LayerNorm"] if _convert_ln else [])]
    routers = {model.get_submodule(name) for name in find_routers(model)}
    uses = Counter(parameter for part in model.modules() for parameter in part.parameters(recurse=False))
    replaced: dict[nn.Module, nn.Module] = {}  # modules may have the same layer
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            is_kept = child is None or any(uses[each] > 1 for each in child.parameters(recurse=False))
            if is_kept or (to_transformer_engine and child in routers):
                continue
            for kind in kinds:
                if isinstance(child, getattr(source, kind)) and (target is nn or _fits(child)):
                    if child not in replaced:
                        replaced[child] = _copy_weights(child, _empty_layer_like(child, kind, target))
                    setattr(parent, name, replaced[child])


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Returns whether a model contains layers of Transformer Engine.

    Args:
        model: Any module.
    """
    engine = _layers_of(model)
    kinds = (engine.LayerNorm, engine.Linear, engine.TransformerLayer)
    return any(isinstance(module, kinds) for module in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Wraps the forward of a module in the FP8 autocast of Transformer Engine.

    Args:
        model_forward: Bound method of a module.
        fp8_recipe: Recipe of Transformer Engine.
        use_during_eval: Whether to compute in FP8 if the module is in evaluation mode as well. The default is
            False.

    Returns:
        The wrapped forward.
    """
    model: nn.Module = model_forward.__self__  # type: ignore[attr-defined]  # a bound method
    engine = _layers_of(model)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with engine.fp8_autocast(enabled=use_during_eval or model.training, fp8_recipe=fp8_recipe):
            return model_forward(*args, **kwargs)

    return update_wrapper(forward, model_forward)


def apply_fp8_autowrap(model: Model, fp8_recipe_handler: TERecipeKwargs | None) -> Model:
    """Wraps the forward of a model in place in the FP8 autocast of Transformer Engine.

    Args:
        model: Any module.
        fp8_recipe_handler: Configuration of the scaling of FP8 tensors. None uses the defaults.

    Returns:
        The argument `model`.
    """
    handler = fp8_recipe_handler or TERecipeKwargs()
    forward = contextual_fp8_autocast(
        model.forward, build_recipe(model, handler), bool(handler.use_autocast_during_eval)
    )
    model.__dict__["forward"] = forward
    return model


def build_recipe(model: nn.Module, handler: TERecipeKwargs) -> Any:
    """Returns the recipe of Transformer Engine for the arguments of a user."""
    recipes = import_module(f"{_library_of(model)}.common.recipe")
    scaling = recipes.MXFP8BlockScaling if handler.use_mxfp8_block_scaling else recipes.DelayedScaling
    arguments = {name: value for name, value in handler.to_kwargs().items() if name not in _NOT_IN_RECIPE}
    if handler.use_mxfp8_block_scaling and arguments:
        reason = f"MXFP8 scales blocks by themselves and has no {', '.join(arguments)}"
        raise wrong_value("use_mxfp8_block_scaling", True, reason, "Leave these arguments out")
    return scaling(fp8_format=getattr(recipes.Format, str(handler.fp8_format)), **arguments)


class TransformerEnginePrecision(Fp8Precision):
    """Mixed precision with layers of Transformer Engine, and bfloat16 autocast outside of them."""

    library = "Transformer Engine"
    device_types = tuple(_LIBRARIES)
    fp8_backend = FP8BackendType.TE

    def convert(self, model: nn.Module) -> nn.Module:
        """Converts the layers of a model, unless it has some already, and wraps its forward in autocast."""
        if isinstance(model.__dict__.get("forward"), AutocastForward):  # the model is converted already
            return model
        if not has_transformer_engine_layers(model):
            linear = _linear_layers(model)
            convert_model(model)
            _log_converted(model, linear)
            if not has_transformer_engine_layers(model):
                raise PreparationError(
                    f"{type(model).__name__} has no layer that can compute in FP8: linear layers whose sizes "
                    "are multiples of 16, or layer norms. Pad its sizes, or use mixed_precision='bf16'."
                )
        apply_fp8_autowrap(model, self.recipe)
        return super().convert(model)


def _fits(layer: Any) -> bool:
    """Returns whether FP8 kernels support the sizes of a layer of torch."""
    if isinstance(layer, nn.LayerNorm):
        return len(layer.normalized_shape) == 1 and layer.elementwise_affine
    return all(size % TILE == 0 for size in layer.weight.shape)


def _empty_layer_like(layer: Any, kind: str, library: Any) -> Any:
    """Returns a new layer of torch or Transformer Engine with the sizes and dtype of another."""
    weight = layer.weight
    options = {"device": weight.device, "dtype" if library is nn else "params_dtype": weight.dtype}
    if kind == "LayerNorm":
        return library.LayerNorm(weight.shape[0], eps=layer.eps, **options)
    has_bias = getattr(layer, "bias", None) is not None
    return library.Linear(layer.in_features, layer.out_features, bias=has_bias, **options)


@torch.no_grad()
def _copy_weights(old: nn.Module, new: nn.Module) -> nn.Module:
    """Copies parameters and training mode of a layer to a new one, and returns that."""
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
