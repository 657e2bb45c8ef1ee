"""The attention that context parallelism computes: causal, over the whole sequence, without a mask.

Modules of a model that ask for another attention raise an error while a sequence is sharded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelerate.base import ConfigurationError
from accelerate.state import services

REASON = "context parallelism computes causal attention over whole sequences only"
FIX = "Use full causal attention, or set cp_size=1"
WINDOWS = {
    "sliding": ("sliding_window", "sliding_window_size", "local_attention"),
    "chunked": ("attention_chunk_size",),
}
"""Kind of a layer -> fields, of a layer or a config, with the number of positions that it attends to."""
COMPUTED = ("full_attention", "attention", "dense", "sparse", "moe")
"""Kinds of layers in `layer_types` that attend to all positions, or to none."""


class Sequences:
    """The sequences that are sharded at this moment, in this process."""

    length: int | None = None  # of the whole sequences; None while none is sharded
    whole: Mapping[int, Tensor] = {}  # copies of buffers before they were sharded, by identity
    checked: dict[tuple[int, ...], Any]  # identities -> tensors, which are kept alive

    def __init__(self) -> None:
        self.checked = {}


class Window(NamedTuple):
    """How many positions a layer attends to, and the field that says so."""

    field: str
    size: int


@contextmanager
def sharded(buffers: Iterable[Tensor], dims: Iterable[int]) -> Iterator[None]:
    """Check the attention of models inside the block, in which buffers of these sequences are sharded."""
    buffers = list(buffers)
    sequences = services.of_process(Sequences)
    sequences.length = max(buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True))
    may_be_checked = [buffer for buffer in buffers if buffer.ndim > 3 or not buffer.is_floating_point()]
    sequences.whole = {id(buffer): buffer.clone() for buffer in may_be_checked}
    sequences.checked = {}
    try:
        yield
    finally:
        sequences.length, sequences.whole, sequences.checked = None, {}, {}


def check_masks(model: nn.Module) -> None:
    """Let the modules of a model raise an error for attention that is not computed, by forward pre-hooks."""
    for name, module in model.named_modules():
        if _is_attention(name, module):
            hook: Callable[..., Any] = partial(_check_layer, name, _config_of(module) or _config_of(model))
            module.register_forward_pre_hook(hook, with_kwargs=True)
            continue
        names = list(inspect.signature(module.forward).parameters)
        if {"input_ids", "attention_mask"} <= set(names):
            hook = partial(_check_inputs, name or type(module).__name__, names)
            module.register_forward_pre_hook(hook, with_kwargs=True)


def _is_attention(name: str, module: nn.Module) -> bool:
    return name.endswith("self_attn") or (hasattr(module, "is_causal") and hasattr(module, "layer_idx"))


def _config_of(module: nn.Module) -> Any:
    config: Any = getattr(module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _refuse(name: str, problem: str, fix: str = FIX) -> ConfigurationError:
    return ConfigurationError(f"{name} {problem}, and {REASON}. {fix}.")


# Layers


def window_of(layer: nn.Module, config: Any) -> Window | None:
    """Return the window of an attention layer; None for one that attends to whole sequences."""
    index, kinds = getattr(layer, "layer_idx", None), getattr(config, "layer_types", None)
    if kinds and isinstance(index, int) and index < len(kinds):
        kind = kinds[index]
        if kind in COMPUTED:
            return None
        fields = next((fields for part, fields in WINDOWS.items() if part in kind), ())
        windows = _windows(layer, fields) or _windows(config, fields)
        return windows[0] if windows else Window(f"layer_types[{index}]={kind!r}", 0)
    if getattr(layer, "is_sliding", None) is False or _uses_no_window(config, index):
        return None
    for fields in WINDOWS.values():
        holder = layer if any(hasattr(layer, field) for field in fields) else config
        if windows := _windows(holder, fields):
            return windows[0]
    return None


def _windows(holder: Any, fields: Iterable[str]) -> list[Window]:
    sizes = {field: getattr(holder, field, None) for field in fields}
    return [
        Window(f"{field}={size}", size)
        for field, size in sizes.items()
        if isinstance(size, int) and not isinstance(size, bool) and size > 0
    ]


def _uses_no_window(config: Any, index: int | None) -> bool:
    used = getattr(config, "use_sliding_window", None)
    if used is None:
        return False
    return not used or (index is not None and index < (getattr(config, "max_window_layers", None) or 0))


def _check_layer(
    name: str, config: Any, layer: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Refuse other attention; otherwise let a layer be causal without its mask, which is that of a shard."""
    length = services.of_process(Sequences).length
    if length is None:
        return None
    window = window_of(layer, config)
    if window is not None and window.size < length:
        kind = type(config).__name__ if config is not None else type(layer).__name__
        problem = f"attends to a part of sequences of {length} by {window.field} of {kind}"
        raise _refuse(name, problem, f"{FIX}; a window that is no shorter than the sequence is fine")
    chosen = getattr(config, "_attn_implementation", None)
    if chosen not in (None, "sdpa"):
        problem = f"computes attention by {chosen!r}, which does not reach over the ranks"
        raise _refuse(name, problem, "Load the model with attn_implementation='sdpa'")
    if kwargs.get("is_causal") is False or getattr(layer, "is_causal", True) is False:
        raise _refuse(name, "attends to later positions, too (is_causal=False)")
    if "attention_mask" not in kwargs:
        return None
    mask = kwargs["attention_mask"]
    if isinstance(mask, Tensor) and _first_time(mask) and _reaches_ahead(mask):
        raise _refuse(name, "gets a mask that lets positions attend to later ones (a prefix, or all tokens)")
    causal = {"is_causal": True} if name.endswith("self_attn") else {}
    return args, {**kwargs, "attention_mask": None, **causal}


def _first_time(*tensors: Tensor | None) -> bool:
    """Return whether these tensors have not been checked yet inside this block."""
    sequences, key = services.of_process(Sequences), tuple(map(id, tensors))
    if key in sequences.checked:
        return False
    sequences.checked[key] = tensors
    return True


def _is_allowed(mask: Tensor) -> Tensor:
    """Return where a mask lets a position attend to another one."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(torch.float16).min / 2


def _reaches_ahead(mask: Tensor) -> bool:
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    return bool(_is_allowed(mask).triu(1).any())


def is_causal_mask(mask: Tensor) -> bool:
    """Return whether a mask of shape [..., queries, keys] is the one of causal attention."""
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    allowed, size = _is_allowed(mask), mask.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=mask.device).tril()
    is_biased = mask.dtype != torch.bool and bool((allowed & (mask != 0)).any())
    return not is_biased and bool((allowed == causal).all())


# Inputs


def _check_inputs(
    name: str, names: list[str], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse padding before tokens, packed sequences, masks that are not causal, and missing positions."""
    sequences = services.of_process(Sequences)
    if sequences.length is None:
        return
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    _check_kinds(name, _config_of(module))
    masks, positions = given.get("attention_mask"), given.get("position_ids")
    for mask in masks.values() if isinstance(masks, Mapping) else [masks]:
        if isinstance(mask, Tensor) and _first_time(mask):
            _check_mask(name, sequences.whole.get(id(mask), mask))
    if positions is None:
        if "position_ids" in names:
            fix = "Pass position_ids, and make them one of the buffers"
            raise ConfigurationError(
                f"{name} gets no position_ids, so each rank would count positions from 0. {fix}."
            )
        return
    mask = masks if isinstance(masks, Tensor) and masks.ndim == 2 else None
    if isinstance(positions, Tensor) and id(positions) in sequences.whole and _first_time(positions, mask):
        real = None if mask is None else sequences.whole.get(id(mask), mask)
        _check_positions(name, sequences.whole[id(positions)], real)


def _check_kinds(name: str, config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = [kind for kind in kinds if kind not in COMPUTED and not any(part in kind for part in WINDOWS)]
    if unknown:
        kind = type(config).__name__
        raise _refuse(name, f"has layers of other kinds by layer_types of {kind} ({', '.join(unknown)})")


def _check_mask(name: str, mask: Tensor) -> None:
    if mask.ndim > 2:
        if not is_causal_mask(mask):
            raise _refuse(name, "gets an attention_mask that is not causal", "Leave the attention_mask out")
        return
    real = mask > 0
    if mask.ndim == 2 and bool((real[:, 1:] & ~real[:, :-1]).any()):
        fix = "Pad on the right, and leave padding out of the loss"
        raise _refuse(name, "gets an attention_mask with padding before tokens", fix)
    if mask.numel() and float(mask.max()) > 1:
        raise _refuse(name, "gets an attention_mask that numbers packed sequences", "Do not pack sequences")


def _check_positions(name: str, positions: Tensor, mask: Tensor | None) -> None:
    if positions.ndim == 3 and positions.shape[0] == 4:  # those of the text, before three of images
        positions = positions[0]
    if positions.ndim > 2:
        return
    restarts = positions.diff(dim=-1) <= 0
    if mask is not None and mask.shape[-1] == positions.shape[-1]:
        restarts = restarts & (mask[..., 1:] > 0)
    if bool(restarts.any()):
        fix = "Do not pack sequences, or set cp_size=1; where these are padding, pass the attention_mask"
        raise _refuse(name, "gets position_ids that restart within a row, so sequences are packed", fix)


# Calls of torch's function

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def causal_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of scaled_dot_product_attention that is causal and has no mask.

    Raises:
        ConfigurationError: the call computes another attention.
    """
    given = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    mask = given.pop("attn_mask", None)
    if mask is not None:
        if not is_causal_mask(mask):
            problem = f"gets an attn_mask of shape {list(mask.shape)} that is not causal"
            raise _refuse("scaled_dot_product_attention", problem)
        given["is_causal"] = True
    if not given.get("is_causal"):
        raise _refuse("scaled_dot_product_attention", "is called with is_causal=False")
    return given
