"""Runtime: the parts a run is made of, built once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from accelerate import checkpointing, diagnostics, ops, plugins, strategies, tracking
from accelerate.accelerator import recording
from accelerate.accelerator.measured import MeasuredBackward
from accelerate.accelerator.windows import CountedWeights, Window
from accelerate.base import environ, wrong_value
from accelerate.logging import get_logger
from accelerate.state import (
    ONE_STATE,
    AcceleratorState,
    GradientState,
    PartialState,
    is_initialized,
    services,
    step_clock,
)

logger = get_logger(__name__)

SECONDS_WITHOUT_LIMIT = 1800.0  # what torch takes for its own operations


class Runtime:
    """The parts of one run; the facets of `Accelerator` call them and hold nothing of their own."""

    def __init__(
        self,
        request: strategies.RunRequest,
        state: AcceleratorState,
        accelerator: Any,
        functions: Callable[[], Any],
    ) -> None:
        self.request, self.state = request, state
        self.session = session = strategies.PrepareSession()
        self.gradient_state = GradientState(gradient_accumulation_plugin=request.accumulation)
        backend = state.device_backend
        context = strategies.Context(
            topology=state.topology,
            backend=backend,
            # Torch's wrappers refuse a number that means nothing.
            device=state.device if backend.largest_index is None else backend.device(),
            request=request,
            mixed_precision=state.mixed_precision,
            gradients=self.gradient_state,
            session=session,
            accelerator=accelerator,
            functions=functions,
            mesh=state.device_mesh,
        )
        self.strategy = strategies.resolve_strategy(request, state.topology, backend.name)(context)
        self.backward = MeasuredBackward(self.strategy, self.gradient_state, state.num_processes)
        self.prepared = session.prepared
        self.trackers: list[Any] = []
        self.senders = tracking.Senders()
        self.agreement = diagnostics.get_stop_requests(environ.current())
        self.checkpoints = checkpointing.Checkpoints(
            diagnostics.watching.read_limits(environ.current()).timeout or SECONDS_WITHOUT_LIMIT
        )
        self.joins = False  # ranks may run out of batches at different times now
        self.counted_weights = CountedWeights(self.strategy.replicas)
        # What a loss weighs in a window whose items are counted; outside, all rounds weigh the same.
        self.weights: CountedWeights | Window | None = None


def build_runtime(request: strategies.RunRequest, accelerator: Any, functions: Callable[[], Any]) -> Runtime:
    """Find out who this process is, open its process group and choose the strategy.

    No choice is made after this call.
    """
    group_arguments = request.process_group.to_kwargs() if request.process_group else {}
    fresh = not is_initialized()
    if fresh:
        step_clock.reset()
    strategies.prepare_devices(request)
    alone = False
    if fresh:  # FSDP is a kind of run between processes; XLA devices have their own, also in one process
        partial_state = PartialState(request.cpu, **group_arguments)
        alone = partial_state.num_processes == 1 or partial_state.device_backend.own_runtime
    state = AcceleratorState(
        mixed_precision=request.mixed_precision,
        cpu=request.cpu,
        dynamo_plugin=request.dynamo,
        deepspeed_plugin=_select_first(request) if fresh else None,
        fsdp_plugin=None if alone else request.fsdp,  # clients take the attribute for a sharded run
        megatron_lm_plugin=request.megatron,
        parallelism_config=request.parallelism,
        _from_accelerator=True,
        **group_arguments,
    )
    try:
        runtime = Runtime(_merge_with_state(request, state), state, accelerator, functions)
        if fresh:
            step_clock.follow_device(state.device_backend.timed_events(state.device))
        diagnostics.watching.start(PartialState(), environ.current())
        recording.start(runtime, environ.current())
        return runtime
    except Exception:
        if fresh:  # a refused run must not decide for the next one
            AcceleratorState._reset_state()
        raise


def _merge_with_state(request: strategies.RunRequest, state: AcceleratorState) -> strategies.RunRequest:
    """Return a request with the strategy that this process has begun with: there is one in a run."""
    begun = getattr(state, "fsdp_plugin", None)
    megatron = getattr(state, "megatron_lm_plugin", None)
    rows: list[tuple[str, Any, Any, str]] = [
        ("deepspeed_plugin", request.deepspeed, state.deepspeed_plugins, "DeepSpeed")
    ]
    if not state.device_backend.own_runtime:
        rows.append(("megatron_lm_plugin", request.megatron, megatron, "Megatron-LM"))
        if state.num_processes > 1:
            rows.append(("fsdp_plugin", request.fsdp, begun, "FSDP"))
    for name, plugin, used, library in rows:
        if plugin is not None and used is None:
            raise wrong_value(name, plugin, f"this process already runs without {library}", ONE_STATE)
    if state.device_backend.own_runtime:
        return replace(request, parallelism=state.parallelism_config)
    if request.fsdp is not None and begun is None:
        logger.warning(
            "FSDP shards a model between processes, and there is one: the model is trained whole. Launch "
            "more processes with --num_processes."
        )
    return replace(
        request,
        fsdp=begun,
        megatron=megatron,
        deepspeed=state.deepspeed_plugins,
        parallelism=state.parallelism_config,
        accumulation=_accumulation_of(request.accumulation, state.deepspeed_plugin),
    )


def _select_first(
    request: strategies.RunRequest,
) -> plugins.DeepSpeedPlugin | dict[str, plugins.DeepSpeedPlugin] | None:
    """Set the number format of DeepSpeed's plugins, and use the first of several; return them."""
    given = request.deepspeed
    if given is None:
        return None
    several = list(given.values()) if isinstance(given, dict) else [given]
    for plugin in several:
        plugin.set_mixed_precision(request.mixed_precision or "no")
        plugin._unselect()
    several[0].select(_from_accelerator_state=True)
    return given


def _accumulation_of(
    accumulation: plugins.GradientAccumulationPlugin, plugin: plugins.DeepSpeedPlugin | None
) -> plugins.GradientAccumulationPlugin:
    """Return how gradients accumulate: as DeepSpeed's configuration says where the user does not."""
    steps = None if plugin is None else plugin.get_value("gradient_accumulation_steps")
    if accumulation.num_steps != 1 or not str(steps).isdecimal():
        return accumulation
    return replace(accumulation, num_steps=int(str(steps)))


# A library may build a `PartialState` first: its waits are recorded, and absent ranks reported, too.
services.while_opening.append(lambda topology, opened: diagnostics.watch_arrivals(topology, opened))
services.barrier = lambda: ops.wait_for_everyone()
