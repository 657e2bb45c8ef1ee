"""Lists of blocks that repeat in a model, and the model with fewer of them."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from accelerate.planning.tracing import Step, lists_of_blocks

SIMPLE = (bool, int, float, str, type(None))
TWICE = 2
"""Repetitions in the smallest model: the first and the last block may differ from those between them."""


@dataclass(frozen=True)
class Repeat:
    """A list of blocks whose kinds repeat with a period, after those at its beginning.

    Attributes:
        blocks: the list.
        count: blocks in the list.
        fewest: blocks of the smallest model.
        period: blocks after which their kinds repeat.
        verified: periods that are added to verify an extrapolation.
    """

    blocks: nn.Module
    count: int
    fewest: int
    period: int
    verified: int = 2

    @property
    def times(self) -> int:
        """How many periods the list has more than the smallest model."""
        return (self.count - self.fewest) // self.period


def repeats_of(model: nn.Module, *, by_attributes: bool = True) -> list[Repeat]:
    """Return the lists of blocks for which tracing a few blocks takes less time than tracing all.

    Args:
        model: on any device.
        by_attributes: whether blocks of one kind have the same attributes, such as a sliding window, or the
            same classes and parameters only. In the latter case verified steps have blocks with all
            attributes.
    """
    found = [_repeat(each, True) for each in lists_of_blocks(model)]
    exact = [each for each in found if each is not None]
    if by_attributes:
        return [each for each in exact if _saves_time(each)]
    shorter = ((each, _repeat(each.blocks, False) or each) for each in exact)
    return [
        replace(short, verified=max(2, (each.fewest + each.period - short.fewest) // short.period))
        for each, short in shorter
        if _saves_time(short)
    ]


def _saves_time(repeat: Repeat) -> bool:
    return 2 * repeat.fewest + repeat.period < repeat.count


def _repeat(blocks: nn.Module, by_attributes: bool) -> Repeat | None:
    kinds = [_kind(block, by_attributes) for block in blocks.children()]
    count = len(kinds)
    candidates = []
    for period in range(1, count // (TWICE + 1) + 1):
        first = count - period
        while first and _are_equal(kinds[first - 1], kinds[first - 1 + period], first - 1, period):
            first -= 1
        fewest = first + TWICE * period
        fewest += (count - fewest) % period
        if fewest + period <= count:
            candidates.append((2 * fewest + period, fewest, period))
    if not candidates:
        return None
    _, fewest, period = min(candidates)
    return Repeat(blocks, count, fewest, period)


def _kind(block: nn.Module, by_attributes: bool) -> list[Any]:
    """Return what the memory of a block depends on: classes, sizes of tensors, and simple attributes.

    Of a float, such as a rate of dropout, it is whether it is zero.
    """
    kind: list[Any] = []
    for name, module in block.named_modules():
        kind += [name, type(module)]
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        kind += [(key, each.shape, each.dtype, each.requires_grad) for key, each in tensors]
        for key, value in sorted(vars(module).items()) if by_attributes else ():
            if isinstance(value, SIMPLE):
                kind += [key, bool(value) if isinstance(value, float) else value]
    return kind


def _are_equal(one: list[Any], other: list[Any], index: int, period: int) -> bool:
    """Return whether two blocks are of one kind; attributes may be their positions in the list."""
    return len(one) == len(other) and all(
        a == b or (isinstance(a, int) and isinstance(b, int) and (a, b) == (index, index + period))
        for a, b in zip(one, other, strict=True)
    )


@contextmanager
def shortened_to(step: Step, counts: Sequence[tuple[nn.Module, int]]) -> Iterator[None]:
    """Let lists of blocks have their first blocks only, and optimizers the parameters of these."""
    everything = {id(each) for each in step.model.parameters()}
    lists: list[tuple[Any, Any]] = [(blocks, blocks._modules) for blocks, _ in counts]
    groups = [(group, group["params"]) for each in step.optimizers for group in each.param_groups]
    states = [(each, each.state) for each in step.optimizers]
    try:
        for (blocks, modules), (_, count) in zip(lists, counts, strict=True):
            blocks._modules = dict(itertools.islice(modules.items(), count))
        removed = everything - {id(each) for each in step.model.parameters()}
        for group, parameters in groups:
            group["params"] = [each for each in parameters if id(each) not in removed]
        for optimizer, state in states:
            kept = {key: value for key, value in state.items() if id(key) not in removed}
            optimizer.state = defaultdict(dict, kept)
        yield
    finally:
        for blocks, modules in lists:
            blocks._modules = modules
        for group, parameters in groups:
            group["params"] = parameters
        for optimizer, state in states:
            optimizer.state = state
