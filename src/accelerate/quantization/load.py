"""Load and quantize a model, and move it to its devices, in one pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from torch import nn

from accelerate.base import CheckpointError, ConfigurationError, listed
from accelerate.big_modeling import Memory, check_device_map, dispatch_model, load_checkpoint_in_model
from accelerate.plugins import BnbQuantizationConfig
from accelerate.quantization.device_map import (
    DISK,
    dtype_of,
    get_quantized_model_device_map,
    name_kept,
)
from accelerate.quantization.layers import (
    get_parameter_device,
    replace_with_bnb_layers,
    require_bitsandbytes,
)
from accelerate.weights import (
    Folder,
    all_tensors,
    find_tied_parameters,
    get_non_persistent_buffers,
    mapped_device,
    resolve_device,
    retie_parameters,
    set_module_tensor_to_device,
)

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
    _refuse_disk(devices, is_empty)
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
    noted: Any = model
    noted.hf_device_map = dict(devices)
    if len(set(devices.values())) > 1 or DISK in devices.values():
        dispatch_model(model, devices, offload_dir=offload_folder)
    noted.is_loaded_in_8bit, noted.is_loaded_in_4bit = config.load_in_8bit, config.load_in_4bit
    return model


def _refuse_disk(devices: Mapping[str, Any], is_empty: bool) -> None:
    if DISK in devices.values() and not is_empty:
        raise ConfigurationError(
            'device_map puts modules on the "disk", and the model has its weights in memory already. Build '
            "it under init_empty_weights() and pass weights_location."
        )


def _move_rest(
    model: nn.Module, config: BnbQuantizationConfig, devices: Mapping[str, Any], is_filled: bool
) -> None:
    """Move what was not filled from files to its device, in its dtype; that quantizes weights."""
    tied = find_tied_parameters(model)
    same_dtype = get_non_persistent_buffers(model, recurse=True, fqns=True)
    lacking = []
    for name, tensor in all_tensors(model).items():
        device = mapped_device(name, devices)
        if device == DISK:
            continue
        if tensor.device.type == "meta":
            lacking.append(name)
            continue
        dtype = tensor.dtype if is_filled or name in same_dtype else dtype_of(name, tensor, config)
        if not is_filled or resolve_device(device) != tensor.device:
            set_module_tensor_to_device(model, name, device, dtype=dtype, clear_cache=False)
    if lacking:
        raise CheckpointError(
            f"The files have no value for {listed(lacking)}. Take those of this model; buffers that are "
            "never saved get theirs under init_empty_weights(include_buffers=False)."
        )
    retie_parameters(model, tied)
