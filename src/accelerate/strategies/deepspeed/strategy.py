"""Strategy for training with DeepSpeed engines.

An engine holds a model and its optimizer, averages and clips gradients, and steps. `prepare` builds one
engine for each model that is trained; `building` completes the configuration and calls DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import ConfigurationError, DistributedType, PrecisionType, PreparationError, StateError
from accelerate.checkpointing import Part
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.planning import ZERO_STAGES, Layout
from accelerate.plugins import restore_auto
from accelerate.precision import Precision
from accelerate.scheduler import AcceleratedScheduler, StepPolicy
from accelerate.state import AcceleratorState
from accelerate.strategies.base import (
    Parameters,
    Strategy,
    as_list,
    keep_none,
    precision_of,
    refuse_split_model,
)
from accelerate.strategies.deepspeed import building
from accelerate.strategies.deepspeed.building import MICRO, STEPS, EngineInputs, batch_sizes_of
from accelerate.strategies.deepspeed.checks import problems_of
from accelerate.strategies.deepspeed.engine import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
    DummyOptim,
    DummyScheduler,
    EnginePart,
    full_state_dict,
    gathered_parameters,
    whole_weights,
)
from accelerate.strategies.request import Context
from accelerate.strategies.session import Bundle, Kind, is_prepared
from accelerate.strategies.state import Fill, StrategyState, WholeWeights


def leaves_of(loss: Tensor) -> Iterator[Tensor]:
    """Yields the leaves of the autograd graph of a loss, beginning near the loss."""
    if loss.grad_fn is None:
        yield loss
        return
    pending: list[Any] = [loss.grad_fn]
    visited: set[Any] = set()
    while pending:
        node = pending.pop()
        if node in visited:
            continue
        visited.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        pending += [following for following, _ in node.next_functions if following is not None]


class DeepSpeedState(StrategyState):
    """State of engines, which save and load their models and optimizers."""

    has_engines = True

    def engine_part(self, index: int, model: nn.Module, folder: Path | None = None) -> Part | None:
        if not self.strategy.has_engine(model):
            return None
        return EnginePart(index, model, self.context.topology, folder)

    def load_weights(self, model: nn.Module, state: Mapping[str, Any], fill: Fill) -> None:
        if not self.strategy.has_engine(model):
            super().load_weights(model, state, fill)
            return
        raise ConfigurationError(
            "The weights of a DeepSpeed engine are loaded with the engine: pass a checkpoint of "
            "`save_state`, or load weights into the model before `prepare`."
        )

    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        """Returns the full state dict on the CPU, with shards gathered on rank 0 only."""
        inner = self._inner(model)
        if inner is model:
            return super().state_dict(model, unwrap=unwrap)
        return full_state_dict(model)

    def whole_weights(self, model: nn.Module) -> WholeWeights:
        return super().whole_weights(model) if self._inner(model) is model else whole_weights(model)

    def check_averages(self, model: nn.Module) -> None:
        """Raises an error for an engine of ZeRO stage 3, which keeps no whole weights."""
        if not self.strategy.has_engine(model) or model.zero_optimization_partition_weights():  # type: ignore[operator]
            raise PreparationError(
                "accelerator.average() follows whole weights, which DeepSpeed does not keep in ZeRO stage 3. "
                "Use stage 2, or FSDP."
            )

    def stepped_weights(self, optimizer: AcceleratedOptimizer, model: nn.Module) -> list[Tensor]:
        """Returns the weights of an engine, of whose copies or parts its optimizer steps some."""
        is_own = getattr(model, "optimizer", None) is optimizer.optimizer
        return list(model.module.parameters()) if is_own else []  # type: ignore[union-attr]


@dataclass
class PrepareCall:
    """Objects of the current `prepare` call, and the parts of the engine that is built from them."""

    bundle: Bundle = field(default_factory=lambda: Bundle(()))
    optimizer: Any = None  # an optimizer of torch, or a `DummyOptim`
    scheduler: DummyScheduler | None = None
    engine_optimizer: Any = None
    engine_scheduler: Any = None
    wrappers: list[DeepSpeedOptimizerWrapper] = field(default_factory=list)  # of `engine_optimizer`

    def batch_sizes(self) -> list[int]:
        """Returns the batch sizes of the loaders that are prepared already."""
        return batch_sizes_of(loader for loader in self.bundle.of(Kind.LOADER) if is_prepared(loader))


class DeepSpeed(Strategy):
    """Training with DeepSpeed engines, which are built with the selected plugin."""

    distributed_type: ClassVar[DistributedType | None] = DistributedType.DEEPSPEED
    state_class: ClassVar[type[StrategyState]] = DeepSpeedState
    holds_gradients = False
    holds_whole_models = False
    has_plain_weights = False
    keeps_sharding = staticmethod(keep_none)
    loader_mesh: Any = None  # DeepSpeed's adapter shards the samples of ranks with the same sequences

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.engines: list[DeepSpeedEngineWrapper] = []
        mesh = context.request.parallelism
        self.replicas = context.topology.size // (1 if mesh is None else mesh.sp_size or 1)
        self.known_sizes: list[int] = []  # batch sizes of loaders in earlier calls
        self.call = PrepareCall()
        building.begin(context)

    def choose_precision(self) -> Precision:
        """Returns a mixed precision without effect, because the engine casts, except for FP8 layers."""
        if self.context.request.mixed_precision != PrecisionType.FP8:
            return Precision(self.context.mixed_precision)
        return precision_of(self, PrecisionType.FP8)

    @property
    def plugin(self) -> Any:
        """The plugin that is currently selected."""
        return AcceleratorState().deepspeed_plugin

    @property
    def engine_wrapped(self) -> DeepSpeedEngineWrapper | None:
        """The engine that was built last, or None if none was built."""
        return self.engines[-1] if self.engines else None

    def memory_layout(self) -> Layout:
        plugin = self.plugin
        offload = {"all": plugin.offload_param_device, "optimizer": plugin.offload_optimizer_device}
        kinds = [kind for kind, device in offload.items() if device not in (None, "none")]
        return Layout(ZERO_STAGES[plugin.zero_stage], self.replicas, offload=next(iter(kinds), "none"))

    def check(self, bundle: Bundle) -> None:
        """Raises one error with all reasons why no engine can be built."""
        models, optimizers, schedulers = map(bundle.new, (Kind.MODEL, Kind.OPTIMIZER, Kind.SCHEDULER))
        problems = problems_of(models, optimizers, schedulers, self.plugin.deepspeed_config)
        if problems:
            lines = "".join(f"\n- {line}" for line in problems)
            raise PreparationError(f"DeepSpeed cannot train the objects passed to `prepare`:{lines}")
        for model in models:
            self.check_model(model)

    def check_model(self, model: nn.Module) -> None:
        refuse_split_model(model, "and an engine needs a model on one device")

    @contextmanager
    def preparing(self, bundle: Bundle) -> Iterator[None]:
        """Returns a context in which the engine is built from model, optimizer and scheduler."""
        optimizer = next(iter(bundle.new(Kind.OPTIMIZER)), None)
        if isinstance(optimizer, torch.optim.Optimizer):
            building.drop_empty_groups(optimizer, bundle.new(Kind.SCHEDULER))
        schedulers = (obj for obj in bundle.of(Kind.SCHEDULER) if isinstance(obj, DummyScheduler))
        self.call = PrepareCall(bundle, optimizer, next(schedulers, None))
        try:
            yield
        finally:
            self.known_sizes += self.call.batch_sizes()
            self.call = PrepareCall()

    def wrap_model(self, model: nn.Module, *, to_device: bool, evaluation: bool) -> nn.Module:
        """Returns an engine for a model with an optimizer or with ZeRO stage 3.

        Other models are not trained: they are only moved and cast as an engine would do.
        """
        if evaluation:
            return super().wrap_model(model, to_device=to_device, evaluation=True)
        self.admit(self, model)
        plugin = self.plugin
        if self.call.optimizer is None and not plugin.hf_ds_config.is_zero3():
            device = self.context.device if to_device else None
            return self.compile(building.cast_without_engine(model, device, plugin.deepspeed_config))
        # The configuration may set the accumulation steps; clients may fill it in late.
        restore_auto(plugin.deepspeed_config, plugin.filled)
        steps, gradients = str(plugin.get_value(STEPS)), self.context.gradients
        if gradients.num_steps == 1 and steps.isdecimal():
            gradients.plugin_kwargs["num_steps"] = int(steps)
        request = self.context.request
        by_process = (
            request.step_scheduler_with_optimizer is True and not request.dataloader_config.split_batches
        )
        inputs = EngineInputs(
            model,
            self.call.optimizer,
            self.call.scheduler,
            self.call.batch_sizes(),
            known_sizes=self.known_sizes,
            smallest=plugin.is_train_batch_min,
            accumulation=gradients.num_steps,
            replicas=self.replicas,
            scheduler_steps=self.context.topology.size if by_process else 1,
        )
        return self._build(model, building.complete(plugin, inputs))

    def _build(self, model: nn.Module, config: dict[str, Any]) -> nn.Module:
        call, optimizer = self.call, self.call.optimizer
        is_of_torch = isinstance(optimizer, torch.optim.Optimizer)
        with self.session.following([optimizer] if is_of_torch else []):
            model = self.session.change(model, self.precision.convert)
        self.plugin.set_moe_leaf_modules(model)
        if is_of_torch:
            optimizer = building.choose_optimizer(optimizer, config)
        for layer in self.layers:
            model = layer.transform_model(model, config.get(MICRO, 1))
        groups = next((layer.groups for layer in self.layers if layer.groups is not None), None)
        engine, (call.engine_optimizer, call.engine_scheduler) = building.build_engine(
            model, optimizer, call.scheduler, deepcopy(config), groups
        )
        building.compile_engine(engine, self.context.request.dynamo)
        if optimizer is not None:
            wrapped = DeepSpeedEngineWrapper(engine)
            engine.register_forward_pre_hook(lambda *_: wrapped.finish_step())
            self.engines.append(wrapped)
        return engine  # type: ignore[no-any-return]

    def wrap_optimizer(
        self, optimizer: torch.optim.Optimizer | DummyOptim, *, to_device: bool
    ) -> AcceleratedOptimizer:
        """Returns the wrapped optimizer of the engine that was built from `optimizer`."""
        if self.call.engine_optimizer is None:
            raise PreparationError(
                f"{type(optimizer).__name__} was prepared without its model, and an engine is built from "
                "both. Call prepare(model, optimizer, ...) with all of them."
            )
        wrapper = DeepSpeedOptimizerWrapper(self.call.engine_optimizer)
        wrapper.run_step = self.engines[-1].finish_step
        self.call.wrappers = [wrapper]
        return wrapper

    def wrap_scheduler(
        self,
        scheduler: torch.optim.lr_scheduler.LRScheduler | DummyScheduler,
        step_with_optimizer: StepPolicy,
        split_batches: bool,
    ) -> AcceleratedScheduler:
        """Returns the scheduler of the engine, or one that sets the learning rates of the engine."""
        if isinstance(scheduler, DummyScheduler):
            return DeepSpeedSchedulerWrapper(self.call.engine_scheduler, self.call.wrappers)
        inner = building.torch_optimizer_of(self.call.engine_optimizer)
        if inner is not None and getattr(scheduler, "optimizer", None) is self.call.optimizer:
            torch_private.set_scheduler_optimizer(scheduler, inner)
        return super().wrap_scheduler(scheduler, step_with_optimizer, split_batches)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Computes gradients of a loss, which is already divided by the accumulation steps."""
        engine = self.engines[0] if len(self.engines) == 1 else self._engine_of(loss)
        engine.compute_gradients(loss, self.context.gradients.sync_gradients, scale_wrt_gas=False, **kwargs)

    def _engine_of(self, loss: Tensor) -> DeepSpeedEngineWrapper:
        if not self.engines:
            raise StateError("backward() comes after prepare(model, optimizer, ...): no engine is built yet.")
        owners = {id(p): engine for engine in self.engines for p in engine.engine.module.parameters()}
        engine = next((owners[id(leaf)] for leaf in leaves_of(loss) if id(leaf) in owners), None)
        if engine is None:
            raise StateError(
                "The loss depends on no parameter of a prepared model. Compute it with the models that "
                "`prepare` returned."
            )
        return engine

    def clip_grad_norm(self, parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Runs the pending step with clipped gradients, and returns their norm before clipping."""
        if len(self.engines) == 1:
            return self.engines[0].clip(max_norm, norm_type)
        clipped = set(map(id, as_list(parameters)))
        for engine in self.engines:
            if any(id(p) in clipped for p in engine.engine.module.parameters()):
                return engine.clip(max_norm, norm_type)
        return super().clip_grad_norm((), max_norm, norm_type)

    def clip_grad_value(self, parameters: Parameters, clip_value: float) -> None:
        raise ConfigurationError(
            "clip_grad_value_ does not work with DeepSpeed, whose engine holds the gradients. Call "
            "clip_grad_norm_, or set gradient_clipping in its configuration."
        )

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        raise ConfigurationError(
            "join_uneven_inputs does not work with DeepSpeed: its engine steps on all ranks together. "
            "Leave even_batches on, or use windows()."
        )

    @contextmanager
    def unsharded(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Gathers all parameters inside the block."""
        with ExitStack() as stack:
            for model in models:
                stack.enter_context(gathered_parameters(model))
            yield

    def has_engine(self, model: nn.Module) -> bool:
        """Returns whether a model is an engine with an optimizer."""
        return any(model is wrapper.engine for wrapper in self.engines)

    def release(self) -> None:
        self.engines.clear()
        self.known_sizes.clear()
