"""Lists of equal blocks in a model, which `planning.variants` shortens to trace the model in less time."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from accelerate.planning.tracing import Step, lists_of_blocks

SIMPLE_TYPES = (bool, int, float, str, type(None))
MIN_REPETITIONS = 2
"""Repetitions in the smallest model, because the first and the last block may differ from the others."""


@dataclass(frozen=True)
class Repeat:
    """List of blocks whose kinds repeat with a period, after some blocks at its beginning.

    Attributes:
        fewest: Number of blocks in the smallest model.
        period: Number of blocks after which their kinds repeat.
        verified: Number of periods that are added to verify an extrapolation.
    """

    blocks: nn.Module
    count: int
    fewest: int
    period: int
    verified: int = 2

    @property
    def times(self) -> int:
        """Number of periods that the list has in addition to those of the smallest model."""
        return (self.count - self.fewest) // self.period


def repeats_of(model: nn.Module, *, by_attributes: bool = True) -> list[Repeat]:
    """Returns the lists of blocks for which a trace of a few blocks takes less time than one of all blocks.

    Args:
        model: Model on any device.
        by_attributes: Whether blocks of one kind have the same attributes, such as a sliding window, or only
            the same classes and parameters. In the latter case, the steps that verify the extrapolation have
            blocks with all attributes.
    """
    repeats = [_repeat(blocks, True) for blocks in lists_of_blocks(model)]
    exact = [repeat for repeat in repeats if repeat is not None]
    if by_attributes:
        return [repeat for repeat in exact if _saves_time(repeat)]
    shorter = ((repeat, _repeat(repeat.blocks, False) or repeat) for repeat in exact)
    return [
        replace(short, verified=max(2, (repeat.fewest + repeat.period - short.fewest) // short.period))
        for repeat, short in shorter
        if _saves_time(short)
    ]


def _saves_time(repeat: Repeat) -> bool:
    return 2 * repeat.fewest + repeat.period < repeat.count


def _repeat(blocks: nn.Module, by_attributes: bool) -> Repeat | None:
    kinds = [_kind(block, by_attributes) for block in blocks.children()]
    count = len(kinds)
    candidates = []
    for period in range(1, count // (MIN_REPETITIONS + 1) + 1):
        first = count - period
        while first and _are_equal(kinds[first - 1], kinds[first - 1 + period], first - 1, period):
            first -= 1
        fewest = first + MIN_REPETITIONS * period
        fewest += (count - fewest) % period
        if fewest + period <= count:
            candidates.append((2 * fewest + period, fewest, period))
    if not candidates:
        return None
    _, fewest, period = min(candidates)
    return Repeat(blocks, count, fewest, period)


def _kind(block: nn.Module, by_attributes: bool) -> list[Any]:
    """Returns the properties that the memory of a block depends on.

    They are the classes of its modules, the shapes and dtypes of its tensors, and simple attributes. For a
    float, such as a dropout probability, it only matters whether it is zero.
    """
    kind: list[Any] = []
    for name, module in block.named_modules():
        kind += [name, type(module)]
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        kind += [(key, tensor.shape, tensor.dtype, tensor.requires_grad) for key, tensor in tensors]
        for key, value in sorted(vars(module).items()) if by_attributes else ():
            if isinstance(value, SIMPLE_TYPES):
                kind += [key, bool(value) if isinstance(value, float) else value]
    return kind


def _are_equal(one: list[Any], other: list[Any], index: int, period: int) -> bool:
    """Returns whether two blocks are of one kind, where attributes may be their indices in the list."""
    return len(one) == len(other) and all(
        a == b or (isinstance(a, int) and isinstance(b, int) and (a, b) == (index, index + period))
        for a, b in zip(one, other, strict=True)
    )


@contextmanager
def shortened_to(step: Step, counts: Sequence[tuple[nn.Module, int]]) -> Iterator[None]:
    """Removes all but the first blocks of lists from a step until the context ends.

    Parameters of removed blocks are removed from the optimizers, too.
    """
    all_ids = {id(parameter) for parameter in step.model.parameters()}
    lists: list[tuple[Any, Any]] = [(blocks, blocks._modules) for blocks, _ in counts]
    groups = [(group, group["params"]) for optimizer in step.optimizers for group in optimizer.param_groups]
    states = [(optimizer, optimizer.state) for optimizer in step.optimizers]
    try:
        for (blocks, modules), (_, count) in zip(lists, counts, strict=True):
            blocks._modules = dict(itertools.islice(modules.items(), count))
        removed = all_ids - {id(parameter) for parameter in step.model.parameters()}
        for group, parameters in groups:
            group["params"] = [parameter for parameter in parameters if id(parameter) not in removed]
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
