"""Whole weights of an engine: gathered on each rank for a while, or copied to the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from accelerate.base import ConfigurationError

GATHERS = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


def whole_state(engine: Any) -> dict[str, Any]:
    """Return the whole state of an engine's model on the CPU; called on all ranks.

    Args:
        engine: its shards come together on the main process; other processes get nothing then.

    Raises:
        ConfigurationError: they may not, by DeepSpeed's configuration.
    """
    if engine.zero_optimization_partition_weights():
        if not engine.zero_gather_16bit_weights_on_model_save():
            raise ConfigurationError(
                "The model lies in shards (ZeRO stage 3), and DeepSpeed's configuration does not let them "
                f"come together. Set zero3_save_16bit_model=True, or {GATHERS} to true there; or save "
                "shards by `save_state`, and join them by the zero_to_fp32.py in the checkpoint."
            )
        return dict(engine._zero3_consolidated_16bit_state_dict() or {})
    if getattr(engine, "autotp_size", int)() > 1:
        return dict(engine._consolidated_16bit_state_dict() or {})
    return copy_tied(engine.module.state_dict())


def copy_tied(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with each tensor copied to the CPU; names of one tensor keep sharing one.

    An engine lays parameters side by side in one buffer, of which each would otherwise take the whole.

    Args:
        state: of a module.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copy_of(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place not in copies or not tensor.numel():
            copies[place] = tensor.detach().to("cpu", copy=True)
        return copies[place]

    return {name: copy_of(tensor) for name, tensor in state.items()}


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Have whole parameters on each rank inside the block, where forwards need no other rank.

    Args:
        model: an engine of ZeRO stage 3; any other is left as it is.
    """
    shards = [each for each in model.parameters() if hasattr(each, "ds_id")]
    if not shards:
        yield
        return
    import deepspeed

    keeper: Any = getattr(model.optimizer, "parameter_offload", model.optimizer)
    with deepspeed.zero.GatheredParameters(shards):
        for each in shards:
            each.ds_active_sub_modules.clear()  # type: ignore[attr-defined]  # DeepSpeed's
        keeper._remove_module_hooks()
        try:
            yield
        finally:
            keeper.setup_zero_stage3_hooks()
