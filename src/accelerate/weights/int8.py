"""Quantize one weight to 8 bits and store it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from accelerate.base import require
from accelerate.weights.index import Folder, Index
from accelerate.weights.placement import find_home, read_dtype, set_module_tensor_to_device
from accelerate.weights.store import STATISTICS, beside, offload_weight


def quantize_and_offload_8bit(
    model: nn.Module,
    param: Tensor,
    param_name: str,
    new_dtype: str | torch.dtype | None,
    offload_folder: Folder,
    offload_index: Index,
    fp16_statistics: Tensor | None,
) -> None:
    """Write a weight in 8 bits, and its scales, to files; the model keeps its parameter without a value.

    Args:
        model: the module.
        param: the weight, in 8 bits if it comes with scales.
        param_name: its name in the model.
        new_dtype: dtype of a parameter that is not one of bitsandbytes' and stays as it is; None keeps its.
        offload_folder: where files go.
        offload_index: gets the entries with which they are read back.
        fp16_statistics: the scales of a weight in 8 bits; None if it is not quantized yet.

    Raises:
        MissingPackageError: the weight is to be quantized, and bitsandbytes is not installed.
    """
    owner, name = find_home(model, param_name)
    if fp16_statistics is None and type(getattr(owner, name)).__name__ == "Int8Params":
        param, fp16_statistics = quantize_rows(param)
    elif fp16_statistics is None and new_dtype is not None:
        param = param.to(read_dtype(new_dtype))
    offload_weight(param, param_name, offload_folder, offload_index)
    if fp16_statistics is not None:
        offload_weight(fp16_statistics, beside(param_name, STATISTICS), offload_folder, offload_index)
    set_module_tensor_to_device(
        model, param_name, "meta", torch.empty(param.shape, device="meta"), param.dtype
    )


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in 8 bits and the scale of each row, as bitsandbytes computes them.

    Args:
        weight: a matrix of floating-point numbers.
    """
    require("bitsandbytes", "Quantizing a weight to 8 bits")
    from bitsandbytes.functional import int8_vectorwise_quant

    quantized, scales, _ = int8_vectorwise_quant(weight.detach().to(torch.float16).contiguous())
    return quantized, scales
