"""Layouts of optimizer states that have another shape than their distributed parameters.

A checkpoint has whole tensors. A state with the shape of its parameter is distributed like it, also with
another world size. For other states of distributed parameters a checkpoint has their layouts too, by which
they are loaded as the distributed or plain tensors that they were.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from accelerate.base import CheckpointError
from accelerate.nested import iterate_tensors
from accelerate.ops import is_dtensor

if TYPE_CHECKING:
    import torch

LAYOUTS = "layouts"
"""Key of the layouts in a state dict of an optimizer, by parameter and key of the state."""
PLAIN = ["plain"]
"""Layout of a plain tensor. That of a distributed one has an entry for each mesh dimension: "R" if it is
replicated, "=0" if it is sharded like its parameter, in dimension 0, and "S0" if only the state is."""

Layouts = Mapping[Any, Mapping[str, Sequence[str]]]


def layouts_of(states: Mapping[Any, Any], parameters: Mapping[Any, Any]) -> dict[Any, dict[str, list[str]]]:
    """Returns the layouts of the states that are not distributed like their parameters.

    Args:
        parameters: Parameters by the same keys, or None for those whose states are whole.

    Raises:
        CheckpointError: A state cannot be saved.
    """
    found = {
        key: {
            name: layout
            for name, value in values.items()
            if (layout := _layout_of(f"{name!r} of parameter {key}", value, parameters[key])) is not None
        }
        for key, values in states.items()
        if parameters.get(key) is not None
    }
    return {key: layouts for key, layouts in found.items() if layouts}


def refuse_inner_dtensors(name: str, value: object) -> None:
    """Raises for DTensors inside a list, tuple or dictionary, which are not saved in shards."""
    if not isinstance(value, Tensor) and any(map(is_dtensor, iterate_tensors(value))):
        raise CheckpointError(
            f"The state {name} of the optimizer is a {type(value).__name__} with DTensors, which cannot be "
            "saved: keep each under a key of its own in the state of a parameter, or use another optimizer."
        )


def _layout_of(name: str, value: Any, parameter: Any) -> list[str] | None:
    refuse_inner_dtensors(name, value)
    if not is_dtensor(value):
        has_rule = not isinstance(value, Tensor) or value.shape != parameter.shape
        has_rule = has_rule and (not isinstance(value, Tensor) or value.numel() <= 1)
        return None if has_rule or not is_dtensor(parameter) else PLAIN
    if not is_dtensor(parameter) or value.device_mesh != parameter.device_mesh:
        reason = "is on another device mesh than its parameter, and cannot be saved"
        raise CheckpointError(f"The state {name} of the optimizer {reason}.")
    if value.shape == parameter.shape and value.placements == parameter.placements:
        return None
    pairs = zip(value.placements, parameter.placements, strict=True)
    return [_encode(name, own, like) for own, like in pairs]


def _encode(name: str, own: Any, like: torch.Tensor) -> str:
    if own.is_replicate():
        return "R"
    if own == like and hasattr(own, "dim"):
        return f"={own.dim}"
    if own.is_shard():
        return f"S{own.dim}"
    raise CheckpointError(
        f"The state {name} has the placement {own!r}, whose values are not reduced yet and cannot be saved. "
        " Let the optimizer redistribute it to Replicate() when it computes it."
    )


def place_state(
    name: str, value: Any, parameter: Any, layout: Sequence[str] | None = None, live: object = None
) -> Any:
    """Returns the placements of the state of a parameter, or None for a plain tensor or another value.

    Args:
        name: Name of the state, for messages.
        value: The whole state, or a tensor of its shape.
        live: The state that the optimizer has now, if it has one.

    Raises:
        CheckpointError: The placements are not known, or not defined for this mesh.
    """
    if not is_dtensor(parameter) or not isinstance(value, Tensor) or layout == PLAIN:
        return None
    if layout is not None:
        return _decode(name, layout, parameter)
    if value.shape == parameter.shape:
        return parameter.placements
    if getattr(live, "shape", None) == value.shape:
        return getattr(live, "placements", None)
    if value.numel() <= 1 or not set(value.shape) <= {1, *parameter.shape}:
        return None
    raise CheckpointError(
        f"The state {name} has the shape {tuple(value.shape)}, and its distributed parameter "
        f"{tuple(parameter.shape)}. The checkpoint does not say how it is distributed, because it was saved "
        "with whole parameters. Load it with whole parameters, or begin with a new optimizer."
    )


def _decode(name: str, layout: Sequence[str], parameter: Any) -> tuple[Any, ...]:
    from torch.distributed.tensor import Replicate, Shard

    like, sharded = parameter.placements, {kind for kind in layout if kind != "R"}
    is_same = len(layout) == len(like)
    if not is_same and len(sharded) > 1 or (not is_same and any(kind[0] == "S" for kind in sharded)):
        raise _undefined(name, layout, parameter)
    placements: list[Any] = []
    for number, own in enumerate(like):
        kind = layout[number] if is_same else next(iter(sharded), "R")
        has_dimension = hasattr(own, "dim") and kind[1:] == str(own.dim)
        if kind[0] == "S":
            placements.append(Shard(int(kind[1:])))
        elif kind[0] == "R" or own.is_replicate() or not (has_dimension or is_same):
            placements.append(Replicate())
        elif has_dimension:
            placements.append(own)
        else:
            raise _undefined(name, layout, parameter)
    return tuple(placements)


def _undefined(name: str, layout: Sequence[str], parameter: Any) -> CheckpointError:
    return CheckpointError(
        f"The state {name} was saved with the layout {' '.join(layout)}, which is not defined for its "
        f"parameter with the placements {parameter.placements}: load it with the same parallelism."
    )


def distribute(value: Tensor, parameter: Any, placements: Any) -> Any:
    """Returns the distributed tensor of a whole one, which all ranks have, without communication."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, parameter.device_mesh, placements, src_data_rank=None)
