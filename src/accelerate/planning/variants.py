"""Traces of a training step with other batch sizes, activation checkpointing or cast parameters.

`tracer_of` returns the function with which a `Planner` traces the variants of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from accelerate.base import AccelerateError, shortened, wrong_value
from accelerate.planning.checks import check_step
from accelerate.planning.libraries import disable_caches
from accelerate.planning.parts import Trace
from accelerate.planning.plan import Variant
from accelerate.planning.recording import Recording, extrapolate, is_close
from accelerate.planning.repeats import Repeat, repeats_of, shortened_to
from accelerate.planning.tracing import Step, blocks_of, record_step, trace_of, trace_step
from accelerate.precision import MixedPrecision, Precision

logger = logging.getLogger(__name__)

Recompute = Callable[[nn.Module, Sequence[nn.Module], bool], None]
Share = Callable[[nn.Module, int], None]
TOLERANCE = 1e-4
"""Allowed difference between a step with more blocks and its extrapolation, relative to its bytes."""


def tracer_of(
    step: Step,
    precision: Precision,
    autocast: MixedPrecision | None,
    recompute: Recompute,
    *,
    share_experts: Share | None = None,
    extrapolates: bool = True,
) -> Callable[[Variant], Trace]:
    """Returns a function that traces the variants of a step.

    Args:
        step: Step as the user passed it.
        precision: Mixed precision of layouts without sharding.
        autocast: Mixed precision of layouts that cast parameters once. None in full precision.
        recompute: Function that applies activation checkpointing to blocks of a model, in place. The last
            argument is whether their inputs are offloaded.
        share_experts: Function that reduces a module of experts to those of one of a number of ranks, in
            place. None if no variant has expert parallelism.
        extrapolates: Whether few of the repeated blocks are traced. False if `recompute` does not treat all
            blocks equally.
    """
    check_step(step.model, step.optimizers, step.batch)
    tracer = _Tracer(step.model, extrapolates)

    def trace(variant: Variant) -> Trace:
        if variant.expert_parallel > 1 and not step.find_experts(step.model):
            reason = f"{type(step.model).__name__} has no modules of experts"
            raise wrong_value("ep_size", variant.expert_parallel, reason, "Plan with 1")
        low = autocast if variant.is_sharded else None

        def convert(model: nn.Module) -> nn.Module:
            model = step.convert(model)
            for module in step.find_experts(model) if variant.expert_parallel > 1 else ():
                assert share_experts is not None
                share_experts(module, variant.expert_parallel)
            if variant.checkpointing:
                disable_caches(model)
                recompute(model, blocks_of(model), variant.offloads_activations)
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


class _Tracer:
    """Traces a step with a few of the repeated blocks, and extrapolates to all blocks.

    The first step is also traced with more blocks to verify the extrapolation. If they differ, for example
    because blocks use the outputs of all others, the attributes of blocks are compared as well. If they still
    differ, all steps are traced with all blocks.
    """

    def __init__(self, model: nn.Module, extrapolates: bool) -> None:
        candidates = [repeats_of(model, by_attributes=False), repeats_of(model)] if extrapolates else []
        self.candidates = [repeats for repeats in candidates if repeats]
        self.is_verified = False

    def trace(self, step: Step) -> Trace:
        while self.candidates:
            recording = self._extrapolate(step, self.candidates[0])
            if recording is not None:
                return trace_of(recording, step)
            del self.candidates[0]
            self.is_verified = False
        try:
            return trace_step(step)
        except AccelerateError:
            raise
        except Exception as error:
            reason = f"its training step fails: {type(error).__name__}: {shortened(str(error))}"
            fix = (
                "If the step also fails without a plan, the model and the batch do not match. Otherwise "
                "plan a version of the model without the operation that cannot be traced"
            )
            raise wrong_value("model", type(step.model).__name__, reason, fix) from error

    def _extrapolate(self, step: Step, repeats: Sequence[Repeat]) -> Recording | None:
        """Returns the recording of a step, or None if its blocks do not repeat or cannot be removed."""
        try:
            base = _record(step, repeats, [0] * len(repeats))
            grown = [
                _record(step, repeats, [int(other is repeat) for other in repeats]) for repeat in repeats
            ]
            if not self.is_verified:
                more = [min(repeat.verified, repeat.times) for repeat in repeats]
                expected = extrapolate(base, grown, more)
                if expected is None or not is_close(expected, _record(step, repeats, more), TOLERANCE):
                    return None
                self.is_verified = True
        except Exception:
            # The model may fail without some blocks. The trace with all blocks raises its other errors.
            logger.debug(
                "The step does not run with fewer blocks, so it is traced with all blocks.", exc_info=True
            )
            return None
        return extrapolate(base, grown, [repeat.times for repeat in repeats])


def _record(step: Step, repeats: Sequence[Repeat], more: Sequence[int]) -> Recording:
    """Returns the recording of a step with few blocks and `more` periods of each list."""
    counts = [
        (repeat.blocks, repeat.fewest + times * repeat.period)
        for repeat, times in zip(repeats, more, strict=True)
    ]
    with shortened_to(step, counts):
        return record_step(step)
