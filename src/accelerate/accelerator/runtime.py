"""Parts of a run that do not change while it trains, built by `Accelerator.__init__`.

`build_runtime` opens the process group, creates the state and chooses the strategy. No choice is made after
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from accelerate import accelerator, checkpointing, diagnostics, plugins, recovery, strategies, torch_private
from accelerate.accelerator import recording
from accelerate.accelerator.accumulation import GradientExchanges, StepValues
from accelerate.base import environ, wrong_value
from accelerate.launch import FOLDER_VARIABLE, CheckpointReports
from accelerate.logging import get_logger
from accelerate.recovery import ReplicaGroups
from accelerate.state import (
    ONE_STATE,
    AcceleratorState,
    GradientState,
    GradientStates,
    Observers,
    PartialState,
    WeakReference,
    connect_nodes,
    is_initialized,
    run_observers,
    services,
    step_clock,
)

logger = get_logger(__name__)

DEFAULT_TIMEOUT = 1800.0  # seconds, the default of torch for collectives


@dataclass(frozen=True, eq=False)
class Runtime:
    """Parts of one run.

    The objects of `Accelerator` that change while it trains are built on them.
    """

    request: strategies.RunRequest
    state: AcceleratorState
    gradient_state: GradientState
    strategy: strategies.Strategy
    session: strategies.PrepareSession
    prepared: strategies.Prepared
    observers: Observers
    checkpoints: checkpointing.Checkpoints
    groups: ReplicaGroups
    num_compilations: int  # by torch.compile in this process, before the run

    def find_prepared(self, model: nn.Module) -> nn.Module:
        """Returns the prepared model that is or wraps a model, or raises an error for another one."""
        unwrap = self.strategy.unwrap
        for prepared in self.prepared.models:
            if model in (prepared, unwrap(prepared), unwrap(prepared, keep_compiled=False)):
                return prepared
        reason, fix = "it is not prepared", "Pass the model that prepare() returned"
        raise wrong_value("model", type(model).__name__, reason, fix)


def build_runtime(request: strategies.RunRequest, accelerator: Any, functions: Callable[[], Any]) -> Runtime:
    """Returns the parts of the run of this process.

    Args:
        accelerator: Argument of the functions that clients replace.
        functions: Returns the module in which clients replace functions.

    Raises:
        ConfigurationError: The process already runs with other arguments.
    """
    is_first = not is_initialized()
    if is_first:
        step_clock.reset()
    strategies.prepare_devices(request)
    state = _open_state(request, is_first)
    try:
        if not state.device_backend.own_runtime:
            request = _with_plugins_of_state(request, state)
        runtime = _assemble(request, state, accelerator, functions)
        if is_first:
            step_clock.follow_device(state.device_backend.timed_events(state.device))
        if state.topology.local_size < state.topology.size:
            connect_nodes(state.topology)
        diagnostics.watching.start(PartialState(), environ.current())
        recording.start(runtime, environ.current())
        return runtime
    except Exception:
        if is_first:  # a refused run must not determine the state of the next one
            AcceleratorState._reset_state()
        raise


def _open_state(request: strategies.RunRequest, is_first: bool) -> AcceleratorState:
    """Returns the state, which the first `Accelerator` of a process creates."""
    group_arguments = request.process_group.to_kwargs() if request.process_group else {}
    fsdp, deepspeed = request.fsdp, None
    if is_first:
        deepspeed = _select_first(request)
        partial_state = PartialState(request.cpu, **group_arguments)
        if partial_state.num_processes == 1 or partial_state.device_backend.own_runtime:
            fsdp = None  # clients read the attribute as that of a run that shards over ranks
    state = AcceleratorState(
        mixed_precision=request.mixed_precision,
        cpu=request.cpu,
        dynamo_plugin=request.dynamo,
        deepspeed_plugin=deepspeed,
        fsdp_plugin=fsdp,
        megatron_lm_plugin=request.megatron,
        parallelism_config=request.parallelism,
        _from_accelerator=True,
        **group_arguments,
    )
    if request.deepspeed is not None and state.deepspeed_plugins is None:
        _refuse_second("deepspeed_plugin", request.deepspeed, "DeepSpeed")
    return state


def _assemble(
    request: strategies.RunRequest, state: AcceleratorState, accelerator: Any, functions: Callable[[], Any]
) -> Runtime:
    session, backend = strategies.PrepareSession(), state.device_backend
    gradients_of_process = services.of_process(GradientStates)
    for earlier in gradients_of_process:
        earlier.keep_kwargs()
    gradients = GradientState(gradient_accumulation_plugin=request.accumulation)
    gradients_of_process.add(gradients)
    context = strategies.Context(
        topology=state.topology,
        backend=backend,
        # The wrappers of torch raise an error for an index of a device that has none.
        device=state.device if backend.largest_index is None else backend.device(),
        request=request,
        mixed_precision=state.mixed_precision,
        gradients=gradients,
        session=session,
        accelerator=WeakReference(accelerator),
        functions=functions,
        mesh=state.device_mesh,
    )
    strategy = strategies.compose(strategies.resolve_strategy(request, state.topology, backend.name)(context))
    timeout = diagnostics.watching.read_limits(environ.current()).timeout or DEFAULT_TIMEOUT
    return Runtime(
        request=request,
        state=state,
        gradient_state=gradients,
        strategy=strategy,
        session=session,
        prepared=session.prepared,
        observers=_observe(strategy, gradients, state),
        checkpoints=checkpointing.Checkpoints(timeout),
        groups=_open_groups(strategy, gradients, session.prepared),
        num_compilations=torch_private.count_compilations(),
    )


def _observe(strategy: strategies.Strategy, gradients: GradientState, state: AcceleratorState) -> Observers:
    """Returns the observers of the run, with those that record its steps."""
    observers = run_observers()
    observers.put(StepValues())
    if state.num_processes > 1 and strategy.holds_gradients:
        observers.put(GradientExchanges(gradients))
    if folder := environ.current().get(FOLDER_VARIABLE):
        observers.put(CheckpointReports(Path(folder)))
    return observers


def _open_groups(
    strategy: strategies.Strategy, gradients: GradientState, prepared: strategies.Prepared
) -> ReplicaGroups:
    """Returns the replica groups of the run, which is one if it was launched without them."""
    if environ.REPLICA not in environ.current():
        return ReplicaGroups(prepared)
    items = partial(accelerator.state_items.list_items, strategy)
    return recovery.open_recovery(environ.current(), strategy, gradients, prepared, items)


def _with_plugins_of_state(request: strategies.RunRequest, state: AcceleratorState) -> strategies.RunRequest:
    """Returns the request with the plugins of the state, because a process has one strategy."""
    fsdp = getattr(state, "fsdp_plugin", None)
    megatron = getattr(state, "megatron_lm_plugin", None)
    if request.megatron is not None and megatron is None:
        _refuse_second("megatron_lm_plugin", request.megatron, "Megatron-LM")
    first, second = state.parallelism_config, request.parallelism
    if second is not None and second != first and (first is not None or second.total_size > 1):
        reason = f"this process already runs with parallelism_config={first}"
        raise wrong_value("parallelism_config", second, reason, ONE_STATE)
    if request.fsdp is not None and fsdp is None:
        if state.num_processes > 1:
            _refuse_second("fsdp_plugin", request.fsdp, "FSDP")
        logger.warning(
            "FSDP shards a model between processes, and there is one: the model is trained whole. Launch "
            "more processes with --num_processes."
        )
    return replace(
        request,
        fsdp=fsdp,
        megatron=megatron,
        deepspeed=state.deepspeed_plugins,
        parallelism=state.parallelism_config,
        accumulation=_resolve_accumulation(request.accumulation, state.deepspeed_plugin),
    )


def _refuse_second(name: str, plugin: object, library: str) -> None:
    raise wrong_value(name, plugin, f"this process already runs without {library}", ONE_STATE)


def _select_first(
    request: strategies.RunRequest,
) -> plugins.DeepSpeedPlugin | dict[str, plugins.DeepSpeedPlugin] | None:
    """Sets the mixed precision of the DeepSpeed plugins, selects the first one, and returns them."""
    if request.deepspeed is None:
        return None
    several = request.deepspeed
    listed = list(several.values()) if isinstance(several, dict) else [several]
    for plugin in listed:
        plugin.set_mixed_precision(request.mixed_precision or "no")
        plugin._unselect()
    listed[0].select(_from_accelerator_state=True)
    return several


def _resolve_accumulation(
    accumulation: plugins.GradientAccumulationPlugin, plugin: plugins.DeepSpeedPlugin | None
) -> plugins.GradientAccumulationPlugin:
    """Returns the accumulation of the user, or that of the DeepSpeed configuration if the user sets none."""
    steps = None if plugin is None else plugin.get_value("gradient_accumulation_steps")
    if accumulation.num_steps != 1 or not str(steps).isdecimal():
        return accumulation
    return replace(accumulation, num_steps=int(str(steps)))


# A library may create a `PartialState` before an `Accelerator`, and absent ranks are reported then, too.
services.while_opening.append(lambda topology, opened: diagnostics.watch_arrivals(topology, opened))
