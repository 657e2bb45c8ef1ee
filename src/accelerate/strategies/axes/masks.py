"""Checks that a model computes causal attention over whole sequences, as context parallelism does.

`ContextAxis` adds the checks to a model as hooks, which raise an error for another attention while sequences
are sharded, and replaces torch's attention by `attend`.
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
"""Kind of a layer -> fields of a layer or a config that are the number of positions that it attends to."""
COMPUTED = ("full_attention", "attention", "dense", "sparse", "moe")
"""Kinds of layers in `layer_types` that attend to all positions, or do not compute attention."""


class LatestShards(NamedTuple):
    """Sequences that were sharded in a block.

    Attributes:
        began_at: When the block began, in nanoseconds of `time.perf_counter_ns`.
        sizes: Dimension and size of each shard.
        mesh: Device mesh with one dimension, that of the ranks which have shards of the same sequences.
    """

    began_at: int
    sizes: frozenset[tuple[int, int]]
    mesh: Any


class ShardedSequences:
    """Sequences of this process that are sharded now."""

    length: int | None = None  # length of the whole sequences, or None while none is sharded
    unsharded: Mapping[int, Tensor] = {}  # id of a buffer -> its copy from before it was sharded
    checked: dict[tuple[int, ...], Any]  # ids of checked tensors -> the tensors, which are kept alive
    layer: tuple[str, Any] | None = None  # name and config of the attention layer that is in its forward
    model: str | None = None  # class of the model whose forward has run in this block
    shards: LatestShards | None = None  # of the latest block

    def __init__(self) -> None:
        self.checked = {}


@contextmanager
def checks_enabled(buffers: Iterable[Tensor], dims: Iterable[int]) -> Iterator[ShardedSequences]:
    """Enables the checks of models inside the block, in which the buffers are sharded."""
    buffers = list(buffers)
    sequences = services.of_process(ShardedSequences)
    sequences.length = max(buffer.shape[dim] for buffer, dim in zip(buffers, dims, strict=True))
    may_be_checked = [buffer for buffer in buffers if buffer.ndim > 3 or not buffer.is_floating_point()]
    sequences.unsharded = {id(buffer): buffer.detach() for buffer in may_be_checked}
    for buffer in buffers:
        buffer.data = buffer.data.clone()  # torch shards in place, and other views would have parts of both
    sequences.checked, sequences.layer, sequences.model = {}, None, None
    try:
        yield sequences
    finally:
        sequences.length, sequences.unsharded, sequences.checked = None, {}, {}


def check_masks(model: nn.Module) -> None:
    """Adds forward pre-hooks that raise an error for attention that context parallelism does not compute."""
    for name, module in model.named_modules():
        if name.endswith("self_attn") or (hasattr(module, "is_causal") and hasattr(module, "layer_idx")):
            hook: Callable[..., Any] = partial(_check_layer, name, config_of(module) or config_of(model))
            module.register_forward_pre_hook(hook, with_kwargs=True)
            module.register_forward_hook(_leave_layer)
            continue
        names = _names_of_inputs(module)
        if {"input_ids", "attention_mask"} <= set(names):
            hook = partial(_check_inputs, name or type(module).__name__, names, _counts_positions(module))
            module.register_forward_pre_hook(hook, with_kwargs=True)


def _names_of_inputs(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


def _counts_positions(module: nn.Module) -> bool:
    """Returns whether this is a model of transformers in which no model takes position_ids."""
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(module).__mro__):
        return False
    inputs = [set(_names_of_inputs(part)) for part in module.modules()]
    return not any(
        {"attention_mask", "position_ids"} <= names and names & {"input_ids", "inputs_embeds"}
        for names in inputs
    )


def config_of(module: nn.Module) -> Any:
    """Returns the config of the text model of a model of transformers, or None."""
    config: Any = getattr(module, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _refuse(name: str, problem: str, fix: str = FIX, reason: str = REASON) -> ConfigurationError:
    return ConfigurationError(f"{name} {problem}, and {reason}. {fix}.")


# Layers


def window_of(layer: nn.Module, config: Any) -> tuple[str, int] | None:
    """Returns the window of an attention layer, or None if it attends to whole sequences.

    The window is the field that it is read from, and the number of positions that the layer attends to.
    """
    index, kinds = getattr(layer, "layer_idx", None), getattr(config, "layer_types", None)
    if kinds and isinstance(index, int) and index < len(kinds):
        kind = kinds[index]
        if kind in COMPUTED:
            return None
        fields = next((fields for part, fields in WINDOWS.items() if part in kind), ())
        windows = _windows(layer, fields) or _windows(config, fields)
        return windows[0] if windows else (f"layer_types[{index}]={kind!r}", 0)
    if getattr(layer, "is_sliding", None) is False or _uses_no_window(config, index):
        return None
    for fields in WINDOWS.values():
        holder = layer if any(hasattr(layer, field) for field in fields) else config
        if windows := _windows(holder, fields):
            return windows[0]
    return None


def _windows(holder: object, fields: Iterable[str]) -> list[tuple[str, int]]:
    sizes = {field: getattr(holder, field, None) for field in fields}
    return [
        (f"{field}={size}", size)
        for field, size in sizes.items()
        if isinstance(size, int) and not isinstance(size, bool) and size > 0
    ]


def _uses_no_window(config: object, index: int | None) -> bool:
    used = getattr(config, "use_sliding_window", None)
    if used is None:
        return False
    return not used or (index is not None and index < (getattr(config, "max_window_layers", None) or 0))


def _check_layer(
    name: str, config: Any, layer: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """Raises an error for other attention, and otherwise replaces the mask, which is that of a shard."""
    sequences = services.of_process(ShardedSequences)
    length = sequences.length
    if length is None:
        return None
    sequences.layer = name, config
    window = window_of(layer, config)
    if window is not None and window[1] < length:
        kind = type(config).__name__ if config is not None else type(layer).__name__
        problem = f"attends to a part of sequences of {length} by {window[0]} of {kind}"
        raise _refuse(name, problem, f"{FIX}; a window that is no shorter than the sequence is fine")
    chosen = getattr(config, "_attn_implementation", None)
    if chosen not in (None, "sdpa"):
        problem = f"computes attention by {chosen!r}, which does not attend over all ranks"
        raise _refuse(name, problem, "Load the model with attn_implementation='sdpa'")
    if kwargs.get("is_causal") is False or getattr(layer, "is_causal", True) is False:
        raise _refuse(name, "attends to later positions, too (is_causal=False)")
    if "attention_mask" not in kwargs:
        return None
    mask = kwargs["attention_mask"]
    if isinstance(mask, Tensor) and _first_time(mask):
        if _is_square(mask) and bool(_is_allowed(mask).triu(1).any()):
            raise _refuse(
                name, "gets a mask that lets positions attend to later ones (a prefix, or all tokens)"
            )
        if mask.ndim > 2 and _is_biased(mask):
            source = f" by alibi=True of {type(config).__name__}" if getattr(config, "alibi", None) else ""
            raise _refuse(name, f"adds a bias to its scores{source}", "Use a model without such a bias")
    causal = {"is_causal": True} if name.endswith("self_attn") else {}
    return args, {**kwargs, "attention_mask": None, **causal}


def _leave_layer(layer: nn.Module, args: Any, output: Any) -> None:
    services.of_process(ShardedSequences).layer = None


def _first_time(*tensors: Tensor | None) -> bool:
    """Returns whether these tensors have not been checked yet inside this block."""
    sequences, key = services.of_process(ShardedSequences), tuple(map(id, tensors))
    if key in sequences.checked:
        return False
    sequences.checked[key] = tensors
    return True


def _is_allowed(mask: Tensor) -> Tensor:
    """Returns a tensor that is True where a mask lets a position attend to another one."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(torch.float16).min / 2


def _is_square(mask: Tensor) -> bool:
    return mask.ndim > 1 and mask.shape[-1] == mask.shape[-2]


def _is_biased(mask: Tensor) -> bool:
    """Returns whether a mask that is added to scores changes one that it allows."""
    return mask.is_floating_point() and bool((_is_allowed(mask) & (mask != 0)).any())


def is_causal_mask(mask: Tensor) -> bool:
    """Returns whether a mask of shape [..., queries, keys] is the one of causal attention."""
    if not _is_square(mask):
        return False
    allowed, size = _is_allowed(mask), mask.shape[-1]
    causal = torch.ones(size, size, dtype=torch.bool, device=mask.device).tril()
    return not _is_biased(mask) and bool((allowed == causal).all())


# Inputs


def _check_inputs(
    name: str,
    names: list[str],
    counts_positions: bool,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raises an error for left padding, packed sequences, other masks, and missing positions."""
    sequences = services.of_process(ShardedSequences)
    if sequences.length is None:
        return
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    config = config_of(module)
    if kinds := other_kinds(config):
        source = f"layer_types of {type(config).__name__}"
        raise _refuse(name, f"has layers of other kinds by {source} ({', '.join(kinds)})")
    masks, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    for mask in masks.values() if isinstance(masks, Mapping) else [masks]:
        if isinstance(mask, Tensor) and _first_time(mask):
            _check_mask(name, sequences.unsharded.get(id(mask), mask))
    _check_presence(name, names, counts_positions, positions)
    if positions is None:
        return
    mask = masks if isinstance(masks, Tensor) and masks.ndim == 2 else None
    if (
        isinstance(positions, Tensor)
        and id(positions) in sequences.unsharded
        and _first_time(positions, mask)
    ):
        real = None if mask is None else sequences.unsharded.get(id(mask), mask)
        _check_positions(name, sequences.unsharded[id(positions)], real)


def _check_presence(name: str, names: list[str], counts_positions: bool, positions: object) -> None:
    problem, fix = "takes no position_ids", "Use a model whose forward takes position_ids, or set cp_size=1"
    if not counts_positions:
        if positions is not None or "position_ids" not in names:
            return
        problem, fix = "gets no position_ids", "Pass position_ids, and make them one of the buffers"
    raise ConfigurationError(f"{name} {problem}, so each rank would count positions from 0. {fix}.")


def other_kinds(config: object) -> list[str]:
    """Returns the kinds of layers in a config that are not attention of a known kind."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return sorted(k for k in kinds if k not in COMPUTED and not any(part in k for part in WINDOWS))


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
    """Returns the arguments of a call of scaled_dot_product_attention that is causal and has no mask.

    Raises:
        ConfigurationError: The call computes another attention.
    """
    arguments = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    mask = arguments.pop("attn_mask", None)
    if mask is not None:
        if not is_causal_mask(mask):
            problem = f"gets an attn_mask of shape {list(mask.shape)} that is not causal"
            raise _refuse(_caller()[0], problem)
        arguments["is_causal"] = True
    if not arguments.get("is_causal"):
        raise _refuse(_caller()[0], "is called with is_causal=False")
    if rate := arguments.get("dropout_p"):
        raise _refuse_dropout(rate)
    return arguments


def _caller() -> tuple[str, Any]:
    """Returns the name and the config of the layer that calls torch's function, as far as they are known."""
    sequences = services.of_process(ShardedSequences)
    return sequences.layer or (sequences.model or "scaled_dot_product_attention", None)


def refuse_own_attention(how: str) -> ConfigurationError:
    """Returns the error for a layer that computes attention itself."""
    problem = f"computes attention over the shard of this rank by the {how}"
    fix = "Use scaled_dot_product_attention of torch, or set cp_size=1"
    return _refuse(_caller()[0], problem, fix, "context parallelism replaces that function only")


def _refuse_dropout(rate: float) -> ConfigurationError:
    """Returns the error for dropout, whose random state ring attention saves for its last step only."""
    name, config = _caller()
    fields = [field for field in getattr(config, "__dict__", {}) if "att" in field and "drop" in field]
    fields = [field for field in fields if getattr(config, field) == rate]
    source = f"{fields[0]}={rate} of {type(config).__name__}" if fields else f"dropout_p={rate}"
    reason = "context parallelism computes attention without dropout"
    return _refuse(name, f"drops attention weights by {source}", "Set it to 0, or set cp_size=1", reason)


def attend(attention: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Computes causal attention in shapes that the kernels of ring attention take.

    They take heads of one size. Zeros at the end of shorter heads change neither scores nor results.

    Args:
        attention: Function of torch inside `context_parallel`, which attends over all ranks.
        args: Arguments of `scaled_dot_product_attention`.

    Raises:
        ConfigurationError: The call computes another attention, or torch has no kernel for it.
    """
    arguments = causal_arguments(args, kwargs)
    query, key, value = heads = [arguments.pop(name) for name in _NAMES[:3]]
    if any(part.ndim != 4 for part in heads):
        reason = "context parallelism takes the dimensions [batch, heads, sequence, size]"
        fix = "Reshape query, key and value"
        raise _refuse(_caller()[0], f"attends with tensors of shapes {_shapes(heads)}", fix, reason)
    sizes = {part.shape[-1] for part in heads}
    if len(sizes) > 1 and arguments.get("scale") is None:
        arguments["scale"] = query.shape[-1] ** -0.5
    if key.shape[1] == value.shape[1] == 1 < query.shape[1]:
        arguments["enable_gqa"] = True  # kernels take one head for all queries under this name only
    try:
        return attention(*(_pad(part, max(sizes)) for part in heads), **arguments)[..., : value.shape[-1]]
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        problem = f"attends with tensors of {query.dtype} of shapes {_shapes(heads)}"
        problem += ", for which torch has no kernel here"
        fix = "Use another dtype or shape, allow all backends of sdpa_kernel, or set cp_size=1"
        reason = "context parallelism splits the work of such a kernel"
        raise _refuse(_caller()[0], problem, fix, reason) from error


def _shapes(heads: Iterable[Tensor]) -> str:
    return ", ".join(str(list(part.shape)) for part in heads)


def _pad(part: Tensor, size: int) -> Tensor:
    missing = size - part.shape[-1]
    padded = nn.functional.pad(part, (0, missing)) if missing else part
    return padded if padded.stride(-1) == 1 else padded.contiguous()
