"""Fill a model that is spread over processes: from files of whole tensors, or of each rank's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from accelerate.base import ConfigurationError, listed, wrong_value
from accelerate.big_modeling.broadcast import Opened
from accelerate.big_modeling.moves import CPU, LoadOptions, check_fit, plan_moves
from accelerate.weights import Weights, all_tensors, find_tied_parameters


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters of a model are spread over processes.

    Args:
        model: any module.
    """
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def check_options(model: nn.Module, options: LoadOptions) -> None:
    """Refuse what cannot be done with parameters that are spread over processes.

    Args:
        model: the module.
        options: of the user.

    Raises:
        ConfigurationError: its tensors would be parted over several places, or change their dtype.
    """
    places = set((options.device_map or {}).values())
    if len(places) > 1 or "disk" in places:
        raise wrong_value(
            "device_map",
            options.device_map,
            "the parameters of this model are spread over processes, and stay where they are",
            "leave device_map out",
        )
    floats = {each.dtype for each in model.parameters() if each.is_floating_point()}
    if options.dtype is not None and floats - {options.dtype}:
        raise wrong_value(
            "dtype",
            options.dtype,
            f"parameters of this model are {listed(sorted(map(str, floats)))}, and spread over processes",
            "convert the model before it is sharded",
        )


def fill_from_whole(model: nn.Module, opened: Opened, strict: bool) -> None:
    """Give each rank its parts of whole tensors; called on all ranks.

    Args:
        model: the sharded module.
        opened: the files.
        strict: whether missing and unexpected names are an error.

    Raises:
        CheckpointError: the files do not fit.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    own = opened.own
    plan = plan_moves(model, opened.weights, LoadOptions(), find_tied_parameters(model))
    check_fit(plan, opened.path, type(model).__name__, strict)
    state: dict[str, Any] = (
        {} if own is None else {move.name: own.read(move.source, CPU) for move in plan.moves}
    )
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=own is not opened.weights, strict=False
    )
    set_model_state_dict(model, state, options=options)


def fill_own_parts(model: nn.Module, path: Path, weights: Weights, strict: bool) -> None:
    """Fill what this rank has of each tensor from a file of just that.

    Args:
        model: the sharded module, with values.
        path: of the files of this rank.
        weights: the opened files.
        strict: whether missing and unexpected names are an error.

    Raises:
        ConfigurationError: the model has no values that could be filled.
        CheckpointError: the files do not fit the parts of this rank.
    """
    own = all_tensors(model)
    empty = [name for name, tensor in own.items() if tensor.is_meta]
    if empty:
        raise ConfigurationError(
            f"{listed(empty)} have no values that could be filled. Call model.to_empty(device=...) first."
        )
    plan = plan_moves(model, weights, LoadOptions(), find_tied_parameters(model), part_of=own_part)
    check_fit(plan, path, f"part of a {type(model).__name__}", strict)
    for move in plan.moves:
        own_part(own[move.name]).detach().copy_(weights.read(move.source, CPU))


def own_part(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor.

    Args:
        tensor: one that is spread over processes, or any other.
    """
    from torch.distributed.tensor import DTensor

    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
