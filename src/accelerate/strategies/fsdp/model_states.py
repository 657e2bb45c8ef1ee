"""State dicts of models, whole or only their adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from accelerate.strategies.fsdp.base import IN_SHARDS
from accelerate.unwrapping import extract_model_from_parallel, is_peft_model


def _get_model_state_dict(model: nn.Module, adapter_only: bool = False, sd_options: Any = None) -> Any:
    """Return the state of a model, or that of its adapter; on all ranks.

    Args:
        model: prepared or not.
        adapter_only: leave out everything but the adapter of a PEFT model.
        sd_options: torch's `StateDictOptions`; None takes `model.state_dict()`.
    """
    if sd_options is None:
        state = model.state_dict()
    else:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        state = get_model_state_dict(model, options=sd_options)
    return {name: state[own] for name, own in chosen_names(model, list(state), adapter_only).items()}


def _set_model_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any], adapter_only: bool = False, sd_options: Any = None
) -> Any:
    """Load a state into a model, or into its adapter; on all ranks.

    Args:
        model: prepared or not.
        state_dict: as `_get_model_state_dict` returns it.
        adapter_only: it is that of the adapter of a PEFT model.
        sd_options: torch's `StateDictOptions`; None calls `model.load_state_dict`.

    Returns:
        `missing_keys` and `unexpected_keys`.
    """
    names = chosen_names(model, list(model.state_dict()), adapter_only)
    state = {names.get(name, name): value for name, value in state_dict.items()}
    if sd_options is None:
        return model.load_state_dict(state, strict=not adapter_only)
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    options = replace(sd_options, strict=False) if adapter_only else sd_options
    return set_model_state_dict(model, state, options=options)


def _prepare_sd_options(fsdp_plugin: Any) -> Any:
    """Return torch's `StateDictOptions` that suit a plugin; None for FSDP 1, whose modules have their own."""
    if fsdp_plugin.fsdp_version != 2:
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    whole = not saves_shards(fsdp_plugin)
    offload = bool(getattr(fsdp_plugin.state_dict_config, "offload_to_cpu", False))
    return StateDictOptions(full_state_dict=whole, cpu_offload=offload, broadcast_from_rank0=whole)


def saves_shards(plugin: Any) -> bool:
    """Whether states are saved in shards, as a plugin says."""
    return plugin.state_dict_type.name in IN_SHARDS


def chosen_names(model: nn.Module, names: Sequence[str], adapter_only: bool) -> dict[str, str]:
    """Return name in a file -> name in the model, of what is saved or loaded.

    Args:
        model: prepared or not.
        names: of all that its state has.
        adapter_only: leave out everything but the adapter of a PEFT model.
    """
    inner = extract_model_from_parallel(model)
    if not adapter_only or not is_peft_model(inner):
        return {name: name for name in names}
    from peft import get_peft_model_state_dict

    found: dict[str, str] = get_peft_model_state_dict(
        inner,
        state_dict={name: name for name in names},
        adapter_name=inner.active_adapter,
        save_embedding_layers=False,
    )
    return found
