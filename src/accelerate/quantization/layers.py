"""Swap linear layers for those of bitsandbytes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from accelerate.base import require, wrong_value
from accelerate.plugins import BnbQuantizationConfig
from accelerate.weights import find_tied_parameters, is_bnb_parameter, is_inside, load_scales

logger = logging.getLogger(__name__)  # also used where no run is set up


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> nn.Module:
    """Replace each linear layer of a model by one of bitsandbytes; weights are not quantized yet.

    They are when they are moved to a device from the CPU, also to the CPU itself. A layer whose class
    computes in its own way stays.

    Args:
        model: a module, also one on the meta device; it is changed.
        bnb_quantization_config: how many bits.
        modules_to_not_convert: names of modules that stay, with all that is in them.
        current_key_name: the parts of the name that `model` has in a larger one; the names above begin there.

    Returns:
        The model.

    Raises:
        MissingPackageError: bitsandbytes is not installed.
    """
    require_bitsandbytes(bnb_quantization_config)
    prefix = "".join(f"{part}." for part in current_key_name or ())
    layers = find_layers(model, modules_to_not_convert or (), prefix)
    if not layers:
        logger.warning(
            f"No linear layer of this {type(model).__name__} is quantized: it has none, or all of them are "
            "in modules that are kept as they are. Look at skip_modules."
        )
    for name, layer in layers.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, _quantizable(layer, bnb_quantization_config))
    return model


def find_layers(model: nn.Module, kept: Iterable[str], prefix: str = "") -> dict[str, nn.Linear]:
    """Return the layers of a model that can be swapped, by name, but for those in the modules `kept`."""
    names = tuple(kept)
    return {
        name: layer
        for name, layer in model.named_modules()
        if name and is_swappable(layer) and not is_inside(f"{prefix}{name}", names)
    }


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Return the modules that lose too much by being quantized: the output layer, and those tied to another.

    Args:
        model: a module.

    Returns:
        Names, each once. Nothing for a bare body without an output layer, as far as it says that it is one
        (`base_model_prefix`), or for a single layer.
    """
    tied = [name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group]
    prefix = getattr(model, "base_model_prefix", "")
    children = [name for name, _ in model.named_children()]
    is_body = bool(prefix) and (not hasattr(model, prefix) or children == [prefix])
    last = [] if is_body and not tied else children[-1:]
    return list(dict.fromkeys([*tied, *last]))


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Return whether a model has layers of bitsandbytes in 4 bits.

    Args:
        model: a module.
    """
    return any(kind.__name__ == "Linear4bit" for layer in model.modules() for kind in type(layer).__mro__)


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Return the device of a module's first parameter.

    Args:
        parameter: a module with parameters.
    """
    return next(parameter.parameters()).device


def require_bitsandbytes(config: BnbQuantizationConfig) -> None:
    """Raise unless bitsandbytes is installed, or for objects that are no such options."""
    if not isinstance(config, BnbQuantizationConfig):
        raise wrong_value(
            "bnb_quantization_config",
            config,
            "it is not a BnbQuantizationConfig",
            "Pass BnbQuantizationConfig(load_in_8bit=True) or BnbQuantizationConfig(load_in_4bit=True)",
            AttributeError,
        )
    require("bitsandbytes", "load_in_8bit" if config.load_in_8bit else "load_in_4bit")


def is_swappable(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Return whether this is torch's linear layer, or one that adds nothing to what it computes."""
    if not isinstance(layer, nn.Linear) or is_bnb_parameter(layer.weight):
        return False
    # Attention reads the weight of this one itself, and could not read a packed one.
    is_read_by_others = isinstance(layer, NonDynamicallyQuantizableLinear)
    return type(layer).forward is nn.Linear.forward and not is_read_by_others


def _quantizable(layer: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    """Return a layer of bitsandbytes with the weight and bias of another, which is not copied."""
    import bitsandbytes.nn as bnb

    if config.load_in_8bit:
        kind: Any = bnb.Linear8bitLt
        options: dict[str, Any] = {"has_fp16_weights": False, "threshold": config.llm_int8_threshold}
    else:
        kind = bnb.Linear4bit
        options = {
            "compute_dtype": config.bnb_4bit_compute_dtype,
            "compress_statistics": config.bnb_4bit_use_double_quant,
            "quant_type": config.bnb_4bit_quant_type,
        }
    made = kind(layer.in_features, layer.out_features, layer.bias is not None, device="meta", **options)
    made.register_load_state_dict_pre_hook(load_scales)
    made.weight = type(made.weight)(layer.weight.detach(), requires_grad=False, **vars(made.weight))
    made.bias = layer.bias
    return made.requires_grad_(False).train(layer.training)  # type: ignore[no-any-return]
