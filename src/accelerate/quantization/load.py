"""Replacement of linear layers by those of bitsandbytes, with planning, loading and quantization."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from accelerate.base import CheckpointError, ConfigurationError, listed, require, wrong_value
from accelerate.big_modeling import (
    Memory,
    check_device_map,
    dispatch_model,
    load_checkpoint_in_model,
    plan_device_map,
)
from accelerate.devices import hardware_table
from accelerate.plugins import BnbQuantizationConfig
from accelerate.weights import (
    Folder,
    all_tensors,
    find_tied_parameters,
    get_non_persistent_buffers,
    is_bnb_parameter,
    is_inside,
    load_scales,
    mapped_device,
    resolve_device,
    retie_parameters,
    set_module_tensor_to_device,
)


def replace_with_bnb_layers(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    modules_to_not_convert: Sequence[str] | None = None,
    current_key_name: Sequence[str] | None = None,
) -> nn.Module:
    """Replaces each linear layer of a model by one of bitsandbytes without quantizing its weights.

    Weights are quantized when they are moved from the CPU to a device, or to the CPU itself. A layer whose
    class overrides the forward is not replaced.

    Args:
        model: a module, also one on the meta device, which is changed.
        bnb_quantization_config: options of the quantization.
        modules_to_not_convert: names of modules that are not replaced, including their submodules.
        current_key_name: the parts of the name of `model` in a larger one, which prefix the names above.

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
            "in modules that are not converted. Check skip_modules."
        )
    for name, layer in layers.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, _quantizable(layer, bnb_quantization_config))
    return model


def find_layers(model: nn.Module, skipped: Iterable[str], prefix: str = "") -> dict[str, nn.Linear]:
    """Returns the linear layers of a model that can be replaced by name, except those in `skipped`."""
    names = tuple(skipped)
    return {
        name: layer
        for name, layer in model.named_modules()
        if name and is_replaceable(layer) and not is_inside(f"{prefix}{name}", names)
    }


def get_keys_to_not_convert(model: nn.Module) -> list[str]:
    """Returns the names of modules that should not be quantized, the output layer and tied modules.

    Args:
        model: a module.

    Returns:
        Names without duplicates. The list is empty for a model without an output layer, if it declares so
        (`base_model_prefix`), and for a single layer.
    """
    tied = [name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group]
    prefix = getattr(model, "base_model_prefix", "")
    children = [name for name, _ in model.named_children()]
    is_body = bool(prefix) and (not hasattr(model, prefix) or children == [prefix])
    last = [] if is_body and not tied else children[-1:]
    return list(dict.fromkeys([*tied, *last]))


def has_4bit_bnb_layers(model: nn.Module) -> bool:
    """Returns whether a model has layers of bitsandbytes in 4 bits.

    Args:
        model: a module.
    """
    return any(kind.__name__ == "Linear4bit" for layer in model.modules() for kind in type(layer).__mro__)


def get_parameter_device(parameter: nn.Module) -> torch.device:
    """Returns the device of the first parameter of a module.

    Args:
        parameter: a module with parameters.
    """
    return next(parameter.parameters()).device


def require_bitsandbytes(config: BnbQuantizationConfig) -> None:
    """Raises an error if bitsandbytes is not installed or `config` is not a `BnbQuantizationConfig`."""
    if not isinstance(config, BnbQuantizationConfig):
        raise wrong_value(
            "bnb_quantization_config",
            config,
            "it is not a BnbQuantizationConfig",
            "Pass BnbQuantizationConfig(load_in_8bit=True) or BnbQuantizationConfig(load_in_4bit=True)",
            AttributeError,
        )
    require("bitsandbytes", "load_in_8bit" if config.load_in_8bit else "load_in_4bit")


def is_replaceable(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Returns whether a layer is a linear layer with the forward of torch."""
    if not isinstance(layer, nn.Linear) or is_bnb_parameter(layer.weight):
        return False
    # Attention reads the weight of this class directly, and could not read a packed one.
    is_read_by_others = isinstance(layer, NonDynamicallyQuantizableLinear)
    return type(layer).forward is nn.Linear.forward and not is_read_by_others


def _quantizable(layer: nn.Linear, config: BnbQuantizationConfig) -> nn.Module:
    """Returns a layer of bitsandbytes that shares the weight and bias of a layer."""
    import bitsandbytes.nn as bnb

    if config.load_in_8bit:
        factory = partial(bnb.Linear8bitLt, has_fp16_weights=False, threshold=config.llm_int8_threshold)
    else:
        factory = partial(
            bnb.Linear4bit,
            compute_dtype=config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
        )
    new = factory(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    new.register_load_state_dict_pre_hook(load_scales)
    new.weight = type(new.weight)(layer.weight.detach(), requires_grad=False, **vars(new.weight))
    new.bias = layer.bias
    return new.requires_grad_(False).train(layer.training)  # type: ignore[no-any-return]


logger = logging.getLogger(__name__)  # also used without a `PartialState`

DISK = "disk"
Model = TypeVar("Model", bound=nn.Module)


def load_and_quantize_model(
    model: Model,
    bnb_quantization_config: BnbQuantizationConfig,
    weights_location: Folder | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    max_memory: Memory | None = None,
    offload_folder: Folder | None = None,
    offload_state_dict: bool = False,
) -> Model:
    """Quantizes the linear layers of a model to 8 or 4 bits with bitsandbytes, and dispatches it.

    A model on the meta device is loaded from files, weight by weight. A model with weights is quantized
    directly.

    Args:
        model: a module, which is changed.
        bnb_quantization_config: options of the quantization, including the modules to skip.
        weights_location: files of weights (`load_checkpoint_in_model`), required on the meta device.
        device_map: device of each module, or a method, which is "auto" or "balanced" (evenly),
            "balanced_low_0" (as little as possible on the first) or "sequential". None: the device of this
            process.
        no_split_module_classes: names of classes that are not split.
        max_memory: bytes by device.
        offload_folder: folder of weights on the "disk".
        offload_state_dict: ignored, for compatibility.

    Returns:
        The model, with `hf_device_map` and `is_loaded_in_8bit` or `is_loaded_in_4bit`.

    Raises:
        MissingPackageError: bitsandbytes is not installed.
        ConfigurationError: the arguments are inconsistent.
        CheckpointError: the files lack weights.
    """
    require_bitsandbytes(bnb_quantization_config)
    is_empty = get_parameter_device(model).type == "meta"
    if is_empty and weights_location is None:
        raise ConfigurationError(
            "The model is on the meta device and has no weights. Pass weights_location, the folder or file "
            "they are in."
        )
    config = name_unquantized(model, bnb_quantization_config, device_map)
    devices = get_quantized_model_device_map(model, config, device_map, max_memory, no_split_module_classes)
    check_device_map(model, devices)
    if DISK in devices.values() and not is_empty:
        raise ConfigurationError(
            'device_map puts modules on the "disk", and the model has its weights in memory already. Build '
            "it under init_empty_weights() and pass weights_location."
        )
    replace_with_bnb_layers(model, config, config.unquantized_modules)
    if weights_location is not None and is_empty:
        load_checkpoint_in_model(
            model,
            weights_location,
            devices,
            offload_folder=offload_folder,
            dtype=config.torch_dtype,
            offload_state_dict=offload_state_dict,
            keep_in_fp32_modules=config.keep_in_fp32_modules,
            offload_8bit_bnb=config.load_in_8bit,
        )
    _move_rest(model, config, devices, is_empty)
    attributes: Any = model
    attributes.hf_device_map = dict(devices)
    if len(set(devices.values())) > 1 or DISK in devices.values():
        dispatch_model(model, devices, offload_dir=offload_folder)
    attributes.is_loaded_in_8bit, attributes.is_loaded_in_4bit = config.load_in_8bit, config.load_in_4bit
    return model


def _move_rest(
    model: nn.Module, config: BnbQuantizationConfig, devices: Mapping[str, Any], is_filled: bool
) -> None:
    """Moves tensors that were not loaded from files to their devices and dtypes, which quantizes weights."""
    tied = find_tied_parameters(model)
    same_dtype = get_non_persistent_buffers(model, recurse=True, fqns=True)
    missing = []
    for name, tensor in all_tensors(model).items():
        device = mapped_device(name, devices)
        if device == DISK:
            continue
        if tensor.is_meta:
            missing.append(name)
        elif not is_filled or resolve_device(device) != tensor.device:
            dtype = tensor.dtype if is_filled or name in same_dtype else dtype_of(name, tensor, config)
            set_module_tensor_to_device(model, name, device, dtype=dtype, clear_cache=False)
    if missing:
        raise CheckpointError(
            f"The files have no value for {listed(missing)}. Use the files of this model; buffers that are "
            "not saved get values under init_empty_weights(include_buffers=False)."
        )
    retie_parameters(model, tied)


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Memory | None = None,
    no_split_module_classes: Collection[str] | None = None,
) -> Mapping[str, Any]:
    """Returns the device of each module of a quantized model.

    Args:
        model: a module, quantized or not, also one on the meta device.
        bnb_quantization_config: options of the quantization, including the modules to skip.
        device_map: as in `load_and_quantize_model`.
        max_memory: bytes by device.
        no_split_module_classes: names of classes that are not split.

    Returns:
        Device of each module.

    Raises:
        ConfigurationError: there is no such method, or layers in 4 bits would be offloaded.
    """
    if device_map is None:
        backend = hardware_table.detect()
        return {"": backend.name if backend.shares_host_memory else backend.current()}
    devices = device_map
    if isinstance(devices, str):
        sizes = {
            "no_split_module_classes": no_split_module_classes,
            "dtype": bnb_quantization_config.target_dtype,
            "special_dtypes": _dtypes_of_rest(model, bnb_quantization_config),
        }
        devices = plan_device_map(model, devices, max_memory, **sizes)
    _check_offloaded(model, bnb_quantization_config, devices)
    return devices


def _offload_devices() -> tuple[str, ...]:
    """Returns the devices that store weights and do not compute."""
    return (DISK,) if hardware_table.detect().is_host else ("cpu", DISK)


def name_unquantized(
    model: nn.Module, config: BnbQuantizationConfig, device_map: str | Mapping[str, Any] | None
) -> BnbQuantizationConfig:
    """Returns options that list all modules that are not quantized, in 4 bits including offloaded ones."""
    skipped = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    mapped = device_map if isinstance(device_map, Mapping) else {}
    offloaded = [name for name, device in mapped.items() if device in _offload_devices()]
    return replace(config, skip_modules=[*skipped, *(offloaded if config.load_in_4bit else ())])


def _dtypes_of_rest(model: nn.Module, config: BnbQuantizationConfig) -> dict[str, torch.dtype]:
    """Returns the dtypes of all tensors that are not quantized."""
    quantized = _quantized_weights(model, config)
    non_persistent = get_non_persistent_buffers(model, recurse=True, fqns=True)
    return {
        name: tensor.dtype if name in non_persistent else dtype_of(name, tensor, config)
        for name, tensor in all_tensors(model).items()
        if name not in quantized
    }


def _quantized_weights(model: nn.Module, config: BnbQuantizationConfig) -> set[str]:
    """Returns the names of weights that are or will be in 8 or 4 bits."""
    replaced = {f"{name}.weight" for name in find_layers(model, config.unquantized_modules)}
    return replaced | {name for name, tensor in all_tensors(model).items() if is_bnb_parameter(tensor)}


def dtype_of(name: str, tensor: torch.Tensor, config: BnbQuantizationConfig) -> torch.dtype:
    if not tensor.is_floating_point():
        return tensor.dtype
    if is_inside(name, config.keep_in_fp32_modules or ()):
        return torch.float32
    return config.torch_dtype  # type: ignore[return-value]  # a torch dtype after construction


def _check_offloaded(model: nn.Module, config: BnbQuantizationConfig, devices: Mapping[str, Any]) -> None:
    offload = _offload_devices()
    names = [name for name in _quantized_weights(model, config) if mapped_device(name, devices) in offload]
    if names and config.load_in_4bit:
        raise ConfigurationError(
            f"device_map puts {listed(sorted(names))} on the CPU or the disk, and layers in 4 bits cannot be "
            "offloaded. Give accelerators more of max_memory, use load_in_8bit, or name these modules in "
            "skip_modules."
        )
    if names:
        logger.info("Weights on the CPU or the disk are stored in 8 bits, too, and loaded for each forward.")
