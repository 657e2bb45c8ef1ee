"""FP8: what its libraries have in common, torchao, MS-AMP, and Transformer Engine.

Sources: https://docs.pytorch.org/ao/stable/workflows/training.html,
https://azure.github.io/MS-AMP/docs/user-tutorial/usage and
https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/pytorch.html
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import nn

from accelerate.base import FP8BackendType, PreparationError, listed, torchao_required, wrong_value
from accelerate.logging import get_logger
from accelerate.plugins import AORecipeKwargs, AutocastKwargs, MSAMPRecipeKwargs
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
"""FP8 kernels take sizes that are multiples of this."""
ROUTERS = frozenset({"gate", "router"})
"""Parts of names of modules that choose experts: rounded to FP8, their scores become NaN or choose others."""
NUM_EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_routed_experts",
    "moe_num_experts",
    "n_experts",
)
"""Fields of configs with the number of experts, which is the number of outputs of a router."""


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of the first and the last linear layer of a model; `None` where there is none."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return (names[0], names[-1]) if names else (None, None)


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Sequence[str | None]) -> bool:
    """Return whether a module shall compute in FP8.

    Args:
        module: of a model.
        fqn: its name in the model.
        layers_to_filter: names of modules that shall not.

    Returns:
        `False` for those, for routers (`gate` or `router` in the name), and for linear layers of sizes that
        FP8 kernels do not take.
    """
    if ROUTERS & set(fqn.split(".")):
        return False
    if isinstance(module, nn.Linear) and (module.in_features % TILE or module.out_features % TILE):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return whether a module shall compute in FP8, if not for the first and last linear layer in it."""
    return filter_linear_layers(module, fqn, find_first_last_linear_layers(module))


def find_routers(model: nn.Module) -> set[str]:
    """Return the names of the linear layers that choose experts, by their names or numbers of outputs."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs += [config.get_text_config() for config in configs if hasattr(config, "get_text_config")]
    counts = {getattr(config, field, None) for config in configs for field in NUM_EXPERTS}
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (ROUTERS & set(name.split(".")) or (module.out_features > 1 and module.out_features in counts))
    }


def _log_converted(model: nn.Module, linear: Sequence[str]) -> None:
    """Log which of the layers that were linear layers of torch compute in FP8."""
    if not PartialState._shared_state:  # nothing says which rank this is
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
    """Return whether linear layers of torchao's float8 are in a model."""
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
            layers are, but the first and the last one, routers of experts, and those of sizes that FP8
            kernels do not take.
    """
    from torchao.float8 import convert_to_float8_training

    kept = [*find_first_last_linear_layers(model), *find_routers(model)]
    chosen = module_filter_func or partial(filter_linear_layers, layers_to_filter=kept)
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
            reason = f"{self.library} computes on {devices}, and this run is on {device_type}"
            fix = "Set fp8_backend to ao, which computes everywhere, or mixed_precision to bf16"
            raise wrong_value("mixed_precision", "fp8", reason, fix)
        super().__init__("fp8", device_type, settings)
        self.recipe = recipe


class TorchaoPrecision(Fp8Precision):
    """Linear layers of torchao's float8 under bfloat16 autocast; FSDP 2 may gather weights in float8."""

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
            linear = _linear_layers(model)
            self.convert_layers(model, config, self.recipe.module_filter_func)
            _log_converted(model, linear)
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
    are no multiples of 16 stays, and so does a router of experts.

    Args:
        model: holds the layers; is not replaced itself.
        to_transformer_engine: `False` restores torch's layers.
        _convert_linear: whether linear layers are replaced.
        _convert_ln: whether layer norms are replaced.
    """
    engine = _layers_of(model)
    source, target = (nn, engine) if to_transformer_engine else (engine, nn)
    kinds = [*(["Linear"] if _convert_linear else []), *(["LayerNorm"] if _convert_ln else [])]
    routers = {model.get_submodule(name) for name in find_routers(model)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if to_transformer_engine and child in routers:
                continue
            for kind in kinds:
                if isinstance(child, getattr(source, kind)) and (target is nn or _fits(child)):
                    setattr(parent, name, _with_weights_of(child, _like(child, kind, target)))


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether layers of Transformer Engine are in a model."""
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
        reason = f"MXFP8 scales blocks by themselves and knows no {', '.join(given)}"
        raise wrong_value("use_mxfp8_block_scaling", True, reason, "Leave these arguments out")
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
