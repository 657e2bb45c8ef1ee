"""Positions of whole sequences in models that compute them from the length of their inputs.

A call `torch.arange(length)` in the code of a model counts positions if its result has the length of the
sequences in a forward on whole sequences and in one on a shard, which differ. In later forwards this place in
the code gets the positions of its rank. The outputs of the two forwards are compared.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from accelerate import torch_private
from accelerate.strategies.axes.sharded_forwards import ShardedForward, sequence_state

Site = tuple[CodeType, object]
"""Code that calls a function, and the place of the call in it."""
_NO_MODELS = ("accelerate", "torch")
_NAMES = ("start", "end", "step")


class SitesOf(TorchFunctionMode):
    """Mode that notes which places in the code count from 0 to a length, and other lengths of attention.

    Attributes:
        others: Lengths of queries and keys that are not that of the sequences, such as a learned memory.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self.others: set[int] = set()
        self._found: set[Site] = set()
        self._others: set[Site] = set()

    @property
    def found(self) -> frozenset[Site]:
        """Places in which each call counts to the length."""
        return frozenset(self._found - self._others)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch_private.arange and (site := _caller()) is not None:
            is_found = _end_of(args, kwargs or {}) == self._length
            (self._found if is_found else self._others).add(site)
        if func is torch_private.scaled_dot_product_attention:
            heads = {**dict(zip(("query", "key"), args, strict=False)), **(kwargs or {})}
            self.others |= {heads["query"].shape[-2], heads["key"].shape[-2]} - {self._length}
        return func(*args, **(kwargs or {}))


def count(arange: Callable[..., Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Returns the positions of this rank where a model counts positions, and otherwise what `arange` does."""
    forward = sequence_state().current
    if forward is None or not forward.sites or _caller() not in forward.sites:
        return arange(*args, **kwargs)
    end, shards = _end_of(args, kwargs), forward.shards
    if end != shards.own:
        forward.num_others += 1
        return arange(*args, **kwargs)
    forward.num_counted += 1
    options = {name: value for name, value in kwargs.items() if name not in _NAMES}
    return shards.shard(arange(shards.length, **options), 0)


def _end_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | None:
    """Returns the end of a call of `arange` that counts from 0, or None for another call."""
    names = _NAMES[1:2] if len(args) == 1 else _NAMES
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    is_count = given.get("start", 0) == 0 and given.get("step", 1) == 1
    end = given.get("end")
    return end if is_count and isinstance(end, int) else None


def _caller() -> Site | None:
    """Returns the place in the code of a model or of a library that calls a function of torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _NO_MODELS:
            return frame.f_code, _place_of(frame.f_code, frame.f_lasti)
        frame = frame.f_back
    return None


@cache
def _place_of(code: CodeType, offset: int) -> object:
    """Returns the lines and columns of an instruction.

    Python 3.11 calls functions of C and of Python by two instructions of one place. Python 3.10 has no
    columns, and one instruction.
    """
    positions: Any = getattr(code, "co_positions", None)
    return offset if positions is None else next(islice(positions(), offset // 2, None))


# Rotary embeddings whose frequencies depend on the length


def scales_by_length(module: nn.Module) -> bool:
    """Returns whether a module of transformers computes frequencies from the largest position."""
    kinds: Any = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any(isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in kinds)


def scale_by_whole_length(module: nn.Module, whole: Callable[[Tensor, ShardedForward], Tensor]) -> None:
    """Adds hooks that give such a module the positions of whole sequences.

    Args:
        module: A module whose outputs have the positions in dimension 1.
        whole: Returns the positions of whole sequences from those of this rank.
    """

    def begin(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        forward = sequence_state().current
        if forward is None:
            return None

        def positions_of(value: Any) -> Any:
            is_own = isinstance(value, Tensor) and not value.is_floating_point()
            return whole(value, forward) if is_own and value.shape[-1] == forward.shards.own else value

        return tuple(map(positions_of, args)), {name: positions_of(each) for name, each in kwargs.items()}

    def end(module: nn.Module, args: Any, outputs: Any) -> Any:
        forward = sequence_state().current
        if forward is None:
            return None
        shards = forward.shards
        return tuple(shards.shard(each, 1) if each.shape[1] == shards.length else each for each in outputs)

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end)
