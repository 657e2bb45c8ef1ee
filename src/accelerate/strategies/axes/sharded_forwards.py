"""Forwards on shards of sequences, in which attention exchanges heads for sequences.

While such a forward runs, and while its backward pass computes activations again, the attention functions of
transformers and torch are replaced by functions that exchange heads. At other times nothing is replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import ConfigurationError
from accelerate.state import services
from accelerate.strategies.axes.sequence_shards import SequenceShards

Attention = Callable[..., Tensor]


class ShardedForward:
    """Forward of a model on shards of sequences.

    Args:
        positions: The `position_ids` of whole sequences, or None if they are not known.
        sites: Places in the code that count positions by `torch.arange`.
        expected: Numbers of attention layers before each loss and before the end in an evaluation, or none.
    """

    def __init__(
        self,
        shards: SequenceShards,
        positions: Tensor | None = None,
        sites: frozenset[tuple[CodeType, object]] = frozenset(),
        expected: Sequence[int] = (),
    ) -> None:
        self.shards, self.positions, self.sites = shards, positions, sites
        self._expected, self.counts = expected, list[int]()
        self.num_attentions = 0
        self.num_counted = 0  # calls that have counted positions
        self.num_others = 0  # calls in the same places that have not

    def count_layers(self) -> None:
        """Raises an error if fewer attention layers than in the comparison come before a loss or the end.

        Ranks that drop different layers would exchange the heads of different layers, or wait for an exchange
        while others compute the loss.
        """
        expected = self._expected[len(self.counts) : len(self.counts) + 1]
        self.counts.append(self.num_attentions)
        if expected and self.num_attentions < expected[0]:
            ranks = self.shards.ranks
            raise ConfigurationError(
                f"The model computes {self.num_attentions} attention layers in this training step, and "
                f"{expected[0]} in its comparison. Ranks of {ranks.sizes} may drop different layers, because "
                "their random numbers differ, and would exchange the heads of different layers. Do not drop "
                f"layers (layerdrop=0 for models of transformers), or set {ranks.ones}."
            )


class Binding(NamedTuple):
    """Name of a module of Python by which the code of a model calls a function that is replaced."""

    namespace: dict[str, Any]
    name: str
    replace: Callable[..., Any]


class LatestSequences(NamedTuple):
    """Sequences of which outputs have been shards.

    Attributes:
        began_at: When the forward or block began, in nanoseconds of `time.perf_counter_ns`.
    """

    began_at: int
    shards: SequenceShards


class SequenceState:
    """Forwards on shards of sequences in this process."""

    forward: ShardedForward | None = None  # which runs, or whose activations are computed again
    depth: int = 0  # number of models whose forward runs, one inside of another
    block: SequenceShards | None = None  # of a block in which the loop has shards
    is_off: bool = False  # while each rank runs models on its own
    latest: LatestSequences | None = None
    ring: Callable[[], AbstractContextManager[Attention]] | None = None  # enables context parallelism
    ring_attention: Attention | None = None  # of torch, while it is enabled
    blocks_of: SequenceShards | None = None  # for the next call of attention, with heads of this rank
    replace_all: Callable[[ExitStack, list[Binding]], None]  # replaces the functions

    def __init__(self) -> None:
        self.bindings: dict[tuple[int, str], Binding] = {}
        self._replaced: ExitStack | None = None
        self._in_backward = False

    @property
    def current(self) -> ShardedForward | None:
        """The forward that runs or is computed again, or None, also after a backward pass with an error."""
        return self.forward if self.depth or torch_private.is_in_backward() else None

    def forget_errors(self) -> None:
        """Ends a backward pass that has ended with an error."""
        if self.depth == 0 and not torch_private.is_in_backward():
            self._in_backward = False
            self.set(None)

    def set(self, forward: ShardedForward | None) -> ShardedForward | None:
        """Makes a forward the current one, and returns the one before."""
        before, self.forward = self.forward, forward
        if forward is not None and self._replaced is None:
            self._replaced = ExitStack()
            self.replace_all(self._replaced, list(self.bindings.values()))
        elif forward is None and self._replaced is not None:
            self._replaced.close()
            self._replaced = None
        return before

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Lets attention be that of this rank inside the block, without a change of functions."""
        before, self.forward = self.forward, None
        try:
            yield
        finally:
            self.forward = before

    @contextmanager
    def over_blocks(self, shards: SequenceShards) -> Iterator[None]:
        """Lets the first call of attention inside the block be one over the blocks of a ring."""
        self.blocks_of = shards
        try:
            yield
        finally:
            self.blocks_of = None

    def resume(self, forward: ShardedForward) -> None:
        """Makes a forward the current one until its backward pass ends, because it may be computed again."""
        before = self.set(forward)
        if self._in_backward:
            return
        self._in_backward = True
        torch_private.call_after_backward(partial(self._end_backward, before))

    def _end_backward(self, before: ShardedForward | None) -> None:
        self._in_backward = False
        self.set(before)


def sequence_state() -> SequenceState:
    """Returns the state of this process."""
    return services.of_process(SequenceState)


class _Resume(torch.autograd.Function):
    """Identity whose backward pass, the first of a forward, makes this forward the current one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, forward: ShardedForward) -> Tensor:
        ctx.sharded_forward = forward
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise ConfigurationError(
                "Gradients are computed with create_graph=True, and with sp_size > 1 those of a rank are of "
                "its part of each sequence, so a loss of gradients would be another one. Set sp_size=1."
            )
        sequence_state().resume(ctx.sharded_forward)
        return gradients[0], None


def resumed_in_backward(tensor: Tensor, forward: ShardedForward) -> Tensor:
    """Returns an output whose backward pass makes its forward the current one."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    resume: Callable[..., Tensor] = _Resume.apply
    return resume(tensor, forward)


def resumed_in_part(tensor: Tensor) -> Tensor:
    """Returns a value of the forward that runs, with which a backward pass may begin."""
    forward = sequence_state().current
    return tensor if forward is None else resumed_in_backward(tensor, forward)


def bindings_of(model: nn.Module, replacements: Callable[[Any], Any]) -> Iterator[Binding]:
    """Yields the names by which the code of the classes of a model calls functions to replace.

    Args:
        replacements: Returns the replacement of a value, or None.
    """
    for namespace in _namespaces_of(model):
        for key, value in list(namespace.items()):
            if callable(value) and (replacement := replacements(value)) is not None:
                yield Binding(namespace, key, partial(replacement, value))


def _namespaces_of(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the global names of the methods of the classes of a model, without those of torch."""
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    own = (kind for kind in kinds if kind.__module__.partition(".")[0] not in ("torch", "builtins"))
    methods = (inspect.unwrap(each) for kind in own for each in vars(kind).values() if callable(each))
    found = (getattr(method, "__globals__", None) for method in methods)
    return list({id(names): names for names in found if names is not None}.values())


@contextmanager
def rebound(bindings: Iterable[Binding]) -> Iterator[None]:
    """Gives names of modules of Python their replacements inside the block."""
    kept = [(binding, binding.namespace[binding.name]) for binding in bindings]
    for binding, _ in kept:
        binding.namespace[binding.name] = binding.replace
    try:
        yield
    finally:
        for binding, value in kept:
            binding.namespace[binding.name] = value
