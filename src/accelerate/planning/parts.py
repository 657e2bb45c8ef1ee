"""Bytes of parameters, gradients, activations and so on at moments of a traced training step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Parts:
    """Bytes of each part of the memory of a device at one moment of a training step."""

    parameters: float = 0
    buffers: float = 0
    gradients: float = 0
    optimizer: float = 0
    activations: float = 0
    temporary: float = 0
    inputs: float = 0
    communication: float = 0

    @property
    def total(self) -> float:
        return sum(self.values())

    def values(self) -> list[float]:
        return [getattr(self, field.name) for field in fields(self)]

    def as_dict(self) -> dict[str, int]:
        """Returns the bytes by name as integers, with their sum as "total"."""
        sizes = {field.name: round(getattr(self, field.name)) for field in fields(self)}
        return {**sizes, "total": sum(sizes.values())}


@dataclass(frozen=True)
class Trace:
    """Memory of a training step that was traced on one device, without sharding.

    `forward_backward` has moments of the forward and backward passes, `step` those of gradient clipping and
    the optimizer step.
    """

    batch_size: int
    forward_backward: tuple[Parts, ...]
    step: tuple[Parts, ...]
    trained_bytes: int  # bytes of the parameters that require gradients
    largest_block: int  # bytes of the parameters of the largest block
    outside_blocks: int  # bytes of the parameters outside of all blocks
    block_outputs: int = 0  # bytes of the outputs of all blocks
    master_ratio: float = 1.0  # bytes of the master weights of the optimizer / bytes of the traced weights
    can_split_layers: bool = False  # whether the model has a plan for tensor parallelism
    num_experts: int = 0  # largest number of ranks that can share the experts of each layer, or 0 without
    experts: int = 0  # bytes of the parameters of experts
    trained_experts: int = 0  # bytes of those that require gradients
    experts_in_block: int = 0  # bytes of the parameters of experts in a block
    offloaded: int = 0  # largest bytes of activations in host memory
    dispatched: int = 0  # bytes of the hidden states of all layers, once for each chosen expert

    @property
    def peak(self) -> Parts:
        """The moment with the most bytes."""
        return largest((*self.forward_backward, *self.step))

    def with_state(self, size: int) -> Trace:
        """Returns the trace with `size` more bytes of optimizer state at all moments."""

        def add(moments: Iterable[Parts]) -> tuple[Parts, ...]:
            return tuple(replace(moment, optimizer=moment.optimizer + size) for moment in moments)

        return replace(self, forward_backward=add(self.forward_backward), step=add(self.step))


def largest(moments: Iterable[Parts]) -> Parts:
    """Returns the moment with the most bytes."""
    return max(moments, key=lambda moment: moment.total)
