"""The variants of a step that a plan traces: other batch sizes, recomputation, parameters that are cast."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from accelerate.planning.parts import Trace
from accelerate.planning.plan import Variant
from accelerate.planning.recording import Recording, extrapolate, is_close
from accelerate.planning.repeats import Repeat, repeats_of, shortened_to
from accelerate.planning.tracing import Step, blocks_of, record_step, trace_of, trace_step
from accelerate.precision import MixedPrecision, Precision

logger = logging.getLogger(__name__)

Recompute = Callable[[nn.Module, Sequence[nn.Module]], None]
TOLERANCE = 1e-4
"""Difference between a step with more blocks and its extrapolation, as a fraction of its bytes."""


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
    tracer = _Tracer(step.model)

    def trace(variant: Variant) -> Trace:
        low = autocast if variant.is_sharded else None

        def convert(model: nn.Module) -> nn.Module:
            if variant.checkpointing:
                _disable_caches(model)
                recompute(model, blocks_of(model))
            return (low or precision).convert(model)

        return tracer.trace(
            replace(
                step,
                convert=convert,
                accumulates=variant.accumulates,
                parameter_dtype=low.dtype if low else None,
                batch_size=variant.batch_size,
            )
        )

    return trace


def _disable_caches(model: nn.Module) -> None:
    """Let models of transformers keep no keys and values: blocks that recompute would add theirs again."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


class _Tracer:
    """Traces a step with few of the blocks that repeat, and extrapolates to all of them.

    The first step is also traced with more blocks. Where that is not what the extrapolation says, as of
    blocks that use outputs of all others, the kinds of blocks include their attributes, and at last all steps
    are traced with all blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        found = [repeats_of(model, by_attributes=False), repeats_of(model)]
        self.ways = [each for each in found if each]
        self.is_verified = False

    def trace(self, step: Step) -> Trace:
        """Return the trace of a step."""
        while self.ways:
            recording = self._extrapolate(step, self.ways[0])
            if recording is not None:
                return trace_of(recording, step)
            del self.ways[0]
            self.is_verified = False
        return trace_step(step)

    def _extrapolate(self, step: Step, repeats: Sequence[Repeat]) -> Recording | None:
        """Return the recording of a step; None if its blocks do not repeat, or cannot be removed."""
        try:
            base = _record(step, repeats, [0] * len(repeats))
            grown = [_record(step, repeats, [int(other is each) for other in repeats]) for each in repeats]
            if not self.is_verified:
                more = [min(each.verified, each.times) for each in repeats]
                expected = extrapolate(base, grown, more)
                if expected is None or not is_close(expected, _record(step, repeats, more), TOLERANCE):
                    return None
                self.is_verified = True
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
            # The model may fail without some of its blocks; a trace with all blocks shows whether it does.
            logger.debug("The step does not run with fewer blocks; all are traced.", exc_info=True)
            return None
        return extrapolate(base, grown, [each.times for each in repeats])


def _record(step: Step, repeats: Sequence[Repeat], more: Sequence[int]) -> Recording:
    """Record a step with few blocks, and further periods of each list."""
    counts = [
        (each.blocks, each.fewest + times * each.period) for each, times in zip(repeats, more, strict=True)
    ]
    with shortened_to(step, counts):
        return record_step(step)
