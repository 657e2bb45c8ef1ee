"""What takes the memory of a device, in bytes: at moments of a traced step, and at its peak."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Parts:
    """Bytes of each part at one moment."""

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
        """Return whole bytes by name, "total" included."""
        sizes = {field.name: round(getattr(self, field.name)) for field in fields(self)}
        return {**sizes, "total": sum(sizes.values())}


@dataclass(frozen=True)
class Trace:
    """One traced training step on one device that holds everything.

    `work` are moments of the forward and backward passes, `step` those of clipping and the optimizer step.
    """

    batch_size: int
    work: tuple[Parts, ...]
    step: tuple[Parts, ...]
    trained_bytes: int  # of parameters that have gradients
    largest_block: int  # bytes of the parameters of the largest block
    outside_blocks: int  # bytes of the parameters that are in no block
    block_outputs: int = 0  # bytes of the outputs of all blocks
    masters: float = 1.0  # bytes of a weight that the optimizer steps, for each byte of a traced weight
    can_split_layers: bool = False  # whether the model has a plan for tensor parallelism

    @property
    def peak(self) -> Parts:
        """The moment with the most bytes."""
        return largest((*self.work, *self.step))

    def with_state(self, size: int) -> Trace:
        """Return the trace with further bytes of optimizer state, which are there at all moments."""

        def add(moments: Iterable[Parts]) -> tuple[Parts, ...]:
            return tuple(replace(moment, optimizer=moment.optimizer + size) for moment in moments)

        return replace(self, work=add(self.work), step=add(self.step))


def largest(moments: Iterable[Parts]) -> Parts:
    """Return the moment with the most bytes."""
    return max(moments, key=lambda moment: moment.total)
