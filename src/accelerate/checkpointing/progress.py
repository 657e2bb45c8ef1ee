"""How far the run was that saved a checkpoint: what it counted, and how it summed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.base.errors import CheckpointError
from accelerate.checkpointing.loading import Source
from accelerate.checkpointing.manifest import NAME
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

    Raises:
        CheckpointError: it tells something else.
    """
    if source.manifest is None:
        return _of_other_software(options)
    run = source.manifest.run
    if not isinstance(run, Mapping):
        raise CheckpointError(f"{NAME} says nothing of the run: it has a {type(run).__name__} in its place")
    found = Progress(
        source.manifest.step,
        run.get("sync_gradients", True),
        run.get("updates", []),
        run.get("gradient_order", []),
    )
    fits = {
        "step": _is_count(found.step),
        "sync_gradients": isinstance(found.sync_gradients, bool),
        "updates": _are_counts(found.updates),
        "gradient_order": isinstance(found.gradient_order, list)
        and all(map(_are_counts, found.gradient_order)),
    }
    if wrong := [name for name, is_good in fits.items() if not is_good]:
        raise CheckpointError(f"{NAME} has another kind of value than expected for {', '.join(wrong)}")
    return found


def _of_other_software(options: Load) -> Progress:
    name = GeneratorsPart(0).name
    states = options.read(name) if options.has(name) else {}
    step = states.get("step") if isinstance(states, Mapping) else None
    return Progress(step if _is_count(step) else None)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(map(_is_count, values))
