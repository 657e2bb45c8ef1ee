"""Replace linear layers by those of bitsandbytes; plan where modules go; load and quantize them there."""

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
        make = partial(bnb.Linear8bitLt, has_fp16_weights=False, threshold=config.llm_int8_threshold)
    else:
        make = partial(
            bnb.Linear4bit,
            compute_dtype=config.bnb_4bit_compute_dtype,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
        )
    made = make(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    made.register_load_state_dict_pre_hook(load_scales)
    made.weight = type(made.weight)(layer.weight.detach(), requires_grad=False, **vars(made.weight))
    made.bias = layer.bias
    return made.requires_grad_(False).train(layer.training)  # type: ignore[no-any-return]


logger = logging.getLogger(__name__)  # also used where no run is set up

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
    """Let bitsandbytes compute the linear layers of a model in 8 or 4 bits, and move it to its devices.

    A model on the meta device is filled from files, weight by weight; one that has its weights is quantized
    as it is.

    Args:
        model: a module; it is changed.
        bnb_quantization_config: how many bits, and which modules stay as they are.
        weights_location: files of weights: see `load_checkpoint_in_model`. Needed on the meta device.
        device_map: devices by module, or how to plan them: "auto" or "balanced" (evenly), "balanced_low_0"
            (as little as possible on the first) or "sequential". None is the device of this process.
        no_split_module_classes: names of classes whose modules stay on one device.
        max_memory: bytes by device.
        offload_folder: where weights on the "disk" go.
        offload_state_dict: taken for compatibility.

    Returns:
        The model, with `hf_device_map` and `is_loaded_in_8bit` or `is_loaded_in_4bit`.

    Raises:
        MissingPackageError: bitsandbytes is not installed.
        ConfigurationError: what is asked for does not go together.
        CheckpointError: the files do not have all weights.
    """
    require_bitsandbytes(bnb_quantization_config)
    is_empty = get_parameter_device(model).type == "meta"
    if is_empty and weights_location is None:
        raise ConfigurationError(
            "The model is on the meta device and has no weights. Pass weights_location, the folder or file "
            "they are in."
        )
    config = name_kept(model, bnb_quantization_config, device_map)
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
    """Move what was not filled from files to its device, in its dtype; that quantizes weights."""
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
            f"The files have no value for {listed(missing)}. Take those of this model; buffers that are "
            "never saved get theirs under init_empty_weights(include_buffers=False)."
        )
    retie_parameters(model, tied)


def get_quantized_model_device_map(
    model: nn.Module,
    bnb_quantization_config: BnbQuantizationConfig,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Memory | None = None,
    no_split_module_classes: Collection[str] | None = None,
) -> Mapping[str, Any]:
    """Return where each module of a model goes once it is quantized.

    Args:
        model: a module, quantized or not, also one on the meta device.
        bnb_quantization_config: how many bits, and which modules stay as they are.
        device_map: see `load_and_quantize_model`.
        max_memory: bytes by device.
        no_split_module_classes: names of classes whose modules stay on one device.

    Returns:
        Devices by module.

    Raises:
        ConfigurationError: there is no such method, or layers in 4 bits would not be on an accelerator that
            computes with them.
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
    """Return the devices that store weights and do not compute."""
    return (DISK,) if hardware_table.detect().is_host else ("cpu", DISK)


def name_kept(
    model: nn.Module, config: BnbQuantizationConfig, device_map: str | Mapping[str, Any] | None
) -> BnbQuantizationConfig:
    """Return options that name all modules that are not quantized: in 4 bits also offloaded ones."""
    skipped = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    mapped = device_map if isinstance(device_map, Mapping) else {}
    offloaded = [name for name, device in mapped.items() if device in _offload_devices()]
    return replace(config, skip_modules=[*skipped, *(offloaded if config.load_in_4bit else ())])


def _dtypes_of_rest(model: nn.Module, config: BnbQuantizationConfig) -> dict[str, torch.dtype]:
    """Return the dtypes of all tensors that are not quantized."""
    quantized = _quantized_weights(model, config)
    kept = get_non_persistent_buffers(model, recurse=True, fqns=True)
    return {
        name: tensor.dtype if name in kept else dtype_of(name, tensor, config)
        for name, tensor in all_tensors(model).items()
        if name not in quantized
    }


def _quantized_weights(model: nn.Module, config: BnbQuantizationConfig) -> set[str]:
    """Return the names of weights that are, or are going to be, in 8 or 4 bits."""
    swapped = {f"{name}.weight" for name in find_layers(model, config.unquantized_modules)}
    return swapped | {name for name, tensor in all_tensors(model).items() if is_bnb_parameter(tensor)}


def dtype_of(name: str, tensor: torch.Tensor, config: BnbQuantizationConfig) -> torch.dtype:
    """Return the dtype that a tensor gets unless it is quantized."""
    if not tensor.is_floating_point():
        return tensor.dtype
    if is_inside(name, config.keep_in_fp32_modules or ()):
        return torch.float32
    return config.torch_dtype  # type: ignore[return-value]  # torch's own after construction


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
