"""Which module of a quantized model goes where."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from accelerate.base import ConfigurationError, listed
from accelerate.big_modeling import Memory, get_balanced_memory, infer_auto_device_map
from accelerate.devices import hardware_table
from accelerate.plugins import BnbQuantizationConfig, one_of
from accelerate.quantization.layers import find_layers, get_keys_to_not_convert, is_in
from accelerate.weights import all_tensors, get_non_persistent_buffers, mapped_device, quantizes_itself

logger = logging.getLogger(__name__)  # also used where no run is set up

DISK = "disk"
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")


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
        return {"": _own_device()}
    devices = device_map
    if isinstance(devices, str):
        devices = _plan_device_map(
            model,
            bnb_quantization_config,
            one_of("device_map", devices, MAPS),
            max_memory,
            no_split_module_classes,
        )
    _check_offloaded(model, bnb_quantization_config, devices)
    return devices


def _own_device() -> int | str:
    """The device of this process, as device maps write it."""
    backend = hardware_table.detect()
    return backend.name if backend.shares_host_memory else backend.current()


def _offload_devices() -> tuple[str, ...]:
    """Devices that store weights and do not compute."""
    return (DISK,) if hardware_table.detect().is_host else ("cpu", DISK)


def name_kept(
    model: nn.Module, config: BnbQuantizationConfig, device_map: str | Mapping[str, Any] | None
) -> BnbQuantizationConfig:
    """Return options in which all modules that stay as they are have names; the user's own object stays.

    Args:
        model: a module, not quantized yet.
        config: the user's options.
        device_map: see `load_and_quantize_model`; in 4 bits, modules that it offloads are not quantized.
    """
    skipped = get_keys_to_not_convert(model) if config.skip_modules is None else config.skip_modules
    mapped = device_map if isinstance(device_map, Mapping) else {}
    offloaded = (
        [name for name, device in mapped.items() if device in _offload_devices()]
        if config.load_in_4bit
        else []
    )
    return replace(config, skip_modules=[*skipped, *offloaded])


def _plan_device_map(
    model: nn.Module,
    config: BnbQuantizationConfig,
    method: str,
    max_memory: Memory | None,
    whole: Collection[str] | None,
) -> Mapping[str, Any]:
    sizes: dict[str, Any] = {
        "no_split_module_classes": whole,
        "dtype": config.target_dtype,
        "special_dtypes": _dtypes_of_rest(model, config),
    }
    if method != "sequential":
        low_zero = method == "balanced_low_0"
        max_memory = get_balanced_memory(model, max_memory, low_zero=low_zero, **sizes)
    return infer_auto_device_map(model, max_memory, **sizes)


def _dtypes_of_rest(model: nn.Module, config: BnbQuantizationConfig) -> dict[str, torch.dtype]:
    """The dtypes of all that is not quantized."""
    quantized = _quantized_weights(model, config)
    kept = get_non_persistent_buffers(model, recurse=True, fqns=True)
    return {
        name: tensor.dtype if name in kept else dtype_of(name, tensor, config)
        for name, tensor in all_tensors(model).items()
        if name not in quantized
    }


def _quantized_weights(model: nn.Module, config: BnbQuantizationConfig) -> set[str]:
    """The names of weights that are, or are going to be, in 8 or 4 bits."""
    swapped = {f"{name}.weight" for name in find_layers(model, config.unquantized_modules)}
    return swapped | {name for name, tensor in all_tensors(model).items() if quantizes_itself(tensor)}


def dtype_of(name: str, tensor: torch.Tensor, config: BnbQuantizationConfig) -> torch.dtype:
    """Return the dtype that a tensor gets unless it is quantized."""
    if not tensor.is_floating_point():
        return tensor.dtype
    if is_in(name, config.keep_in_fp32_modules or ()):
        return torch.float32
    return config.torch_dtype  # type: ignore[return-value]  # torch's own after construction


def _check_offloaded(model: nn.Module, config: BnbQuantizationConfig, devices: Mapping[str, Any]) -> None:
    offload = _offload_devices()
    names = [name for name in _quantized_weights(model, config) if mapped_device(name, devices) in offload]
    if not names:
        return
    if config.load_in_4bit:
        raise ConfigurationError(
            f"device_map puts {listed(sorted(names))} on the CPU or the disk, and layers in 4 bits cannot be "
            "offloaded. Give accelerators more of max_memory, use load_in_8bit, or name these modules in "
            "skip_modules."
        )
    logger.info("Weights on the CPU or the disk are stored in 8 bits, too, and loaded for each forward.")
