"""The variants of a step that a plan traces: other batch sizes, recomputation, parameters that are cast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from accelerate.planning.parts import Trace
from accelerate.planning.plan import Variant
from accelerate.planning.tracing import Step, blocks_of, trace_step
from accelerate.precision import MixedPrecision, Precision

Recompute = Callable[[nn.Module, Sequence[nn.Module]], None]


def tracer_of(
    step: Step, precision: Precision, autocast: MixedPrecision | None, recompute: Recompute
) -> Callable[[Variant], Trace]:
    """Return what traces the variants of a step.

    Args:
        step: the step as the user gave it.
        precision: the number format of layouts that keep parameters whole.
        autocast: that of layouts that cast parameters once; None in full precision.
        recompute: lets blocks of a model recompute their activations in backward, in place.
    """

    def trace(variant: Variant) -> Trace:
        low = autocast if variant.is_sharded else None

        def convert(model: nn.Module) -> nn.Module:
            if variant.checkpointing:
                recompute(model, blocks_of(model))
            return (low or precision).convert(model)

        return trace_step(
            replace(
                step,
                convert=convert,
                accumulates=variant.accumulates,
                parameter_dtype=low.dtype if low else None,
                batch_size=variant.batch_size,
            )
        )

    return trace
