"""How far the run was that saved a checkpoint: what it counted, and how it summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from accelerate.checkpointing.loading import Source
from accelerate.checkpointing.part import Load
from accelerate.checkpointing.parts import GeneratorsPart


@dataclass(frozen=True)
class Progress:
    """What a run takes over that goes on from a checkpoint.

    Attributes:
        step: `Accelerator.step`; None where nothing tells.
        sync_gradients: whether the last round was one that steps; None where nothing tells.
        updates: of each optimizer.
        gradient_order: of each model, as its strategy gave it.
    """

    step: int | None = None
    sync_gradients: bool | None = None
    updates: list[int] = field(default_factory=list)
    gradient_order: list[list[int]] = field(default_factory=list)


def read_progress(source: Source, options: Load) -> Progress:
    """Read how far a run was; nothing is changed.

    Args:
        source: the checkpoint.
        options: how it is read.
    """
    if source.manifest is None:
        return _of_other_software(options)
    run = source.manifest.run
    return Progress(
        source.manifest.step,
        run.get("sync_gradients", True),
        run.get("updates", []),
        run.get("gradient_order", []),
    )


def _of_other_software(options: Load) -> Progress:
    name = GeneratorsPart(0).name
    states = options.read(name) if options.has(name) else {}
    step = states.get("step") if isinstance(states, Mapping) else None
    return Progress(step if type(step) is int else None)
