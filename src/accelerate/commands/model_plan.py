"""The device map of a model, from its tensors alone, for devices that need not be present."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from accelerate.base import CustomDtype, wrong_value
from accelerate.commands.model_tensors import Weight

if TYPE_CHECKING:
    from torch import nn

WHOLE = "_Block"
MOST_DIGITS = 6
"""Of the number of a device."""
DEVICES = ("mps", "cpu", "disk")


def parse_memory(words: Sequence[str]) -> dict[Any, int] | None:
    """Read the limits of devices.

    Args:
        words: such as "0=24GB" or "cpu=64GB"; without any, what is free on this machine counts.

    Raises:
        ConfigurationError: a word has another form.
    """
    if not words:
        return None
    from accelerate.big_modeling import get_max_memory

    limits: dict[Any, str] = {}
    for word in words:
        device, equals, size = word.partition("=")
        is_number = device.isdecimal() and len(device) <= MOST_DIGITS
        if not equals or not (is_number or device in DEVICES):
            fix = "write 0=24GB, or cpu=64GB"
            raise wrong_value("--device_map", word, "this is no device with its memory", fix)
        limits[int(device) if is_number else device] = size
    return get_max_memory(limits)


def plan_of(
    weights: Iterable[Weight], dtype: str, memory: Mapping[Any, int] | None
) -> tuple[dict[str, Any], str]:
    """Plan a device map.

    Args:
        weights: all tensors of the model.
        dtype: number format of the model once it is loaded.
        memory: bytes by device; None: what is free on this machine, without a tenth for activations.

    Returns:
        Devices by module, and the plan as a table.
    """
    from accelerate.big_modeling import explain_device_map, infer_auto_device_map, plan_memory

    model = _build(weights)
    number_format = CustomDtype.INT4 if dtype == "int4" else dtype
    limits = plan_memory(memory)
    device_map = infer_auto_device_map(model, limits, [WHOLE], number_format)
    return dict(device_map), explain_device_map(model, device_map, limits, number_format)


def _build(weights: Iterable[Weight]) -> nn.Module:
    """Build modules that have the names and sizes of a model's; numbered ones are blocks that stay whole."""
    import torch
    from torch import nn

    class _Plain(nn.Module):
        def forward(self) -> None:
            """Say that it can be called, as modules that are no lists can."""

    class _Block(_Plain):
        pass

    root = _Plain()
    for weight in weights:
        *path, name = weight.name.split(".")
        module: nn.Module = root
        for part, following in zip(path, [*path[1:], ""], strict=True):
            if part not in module._modules:
                kind = nn.ModuleList if following.isdecimal() else _Block if part.isdecimal() else _Plain
                module.add_module(part, kind())
            module = module.get_submodule(part)
        shape = weight.shape if weight.is_float else (weight.stored_bytes,)
        number_format = torch.float32 if weight.is_float else torch.uint8
        tensor = torch.empty(shape, dtype=number_format, device="meta")
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return root
