"""Parameters that several modules share: find them, check where they go, bring them together again."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelerate.weights.placement import find_home, place_of

logger = logging.getLogger(__name__)  # also used where no run is set up


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the names that stand for one parameter, a sorted list for each such parameter.

    Args:
        model: any module, also one on the meta device.
        **kwargs: taken for compatibility.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether the configuration of a model says that it has tied parameters.

    Args:
        model: one of transformers says so by `tie_word_embeddings`, where it has output embeddings, or by
            `tie_encoder_decoder`; others say nothing.
    """
    config = getattr(model, "config", None)
    embeddings = [getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings")]
    if config is None or not all(map(callable, embeddings)):
        return False
    ties_words = getattr(config, "tie_word_embeddings", False) and embeddings[1]() is not None  # type: ignore[misc]
    ties_halves = getattr(config, "is_encoder_decoder", False) and getattr(
        config, "tie_encoder_decoder", False
    )
    return bool(ties_words or ties_halves)


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Let each group of names stand for one parameter again: the first of them that has a value.

    Args:
        model: the module.
        tied_params: groups of names, as `find_tied_parameters` returns them.
    """
    for group in tied_params:
        homes = [find_home(model, name) for name in group]
        found = [owner._parameters[name] for owner, name in homes]
        kept = next((each for each in found if each is not None and each.device.type != "meta"), found[0])
        for owner, name in homes:
            owner._parameters[name] = kept


def retie_on_same_device(model: nn.Module, tied: Iterable[Iterable[str]]) -> None:
    """Let names that stood for one parameter do so again, where they have the same device and dtype.

    Args:
        model: the module.
        tied: groups of names, as `find_tied_parameters` returns them.
    """
    for group in tied:
        first: dict[tuple[torch.device, torch.dtype], nn.Parameter] = {}
        for owner, name in (find_home(model, each) for each in group):
            parameter = owner.get_parameter(name)
            owner._parameters[name] = first.setdefault((parameter.device, parameter.dtype), parameter)


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]
) -> None:
    """Warn of parameters that a device map puts on several devices, where they are no longer one.

    Args:
        tied_params: groups of names, as `find_tied_parameters` returns them.
        device_map: devices by module.
    """
    for group in tied_params:
        places = {name: place_of(name, device_map) for name in group}
        if len({str(place) for place in places.values()}) > 1:
            logger.warning(
                f"Tied parameters are on different devices, where they are no longer one: {places}. "
                "Put their modules on one device."
            )
