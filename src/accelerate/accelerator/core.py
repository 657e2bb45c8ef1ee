"""`Accelerator`, the class that a training script uses.

It prepares objects, and delegates to objects with a state of their own: `Accumulation` (micro-batches and
windows), `RunCheckpoints`, `Trackers`. The parts of the run that do not change are in its `Runtime`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, overload

import torch
from torch import nn
from torch.profiler import profile as TorchProfile
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from accelerate import (
    accelerator,
    checkpointing,
    data_loader as loaders,
    devices,
    diagnostics,
    hooks,
    losses,
    ops,
    planning,
    plugins,
    precision,
    strategies,
    tracking,
    weights,
)
from accelerate.accelerator.accumulation import Accumulation
from accelerate.accelerator.arguments import _UNSET, build_request, check_steps
from accelerate.accelerator.gradients import (
    find_fused_optimizer,
    step_in_backward,
    unscale,
    unscale_parameters,
)
from accelerate.accelerator.persistence import RunCheckpoints
from accelerate.accelerator.runtime import build_runtime
from accelerate.accelerator.trackers import Trackers
from accelerate.accelerator.windows import Count, Windows
from accelerate.base import (
    DistributedType,
    DynamoBackend,
    DynamoName,
    FP8BackendType,
    LoggerType,
    PrecisionName,
    PrecisionType,
    PreparationError,
    RNGName,
    RNGType,
    StateError,
    check_os_kernel,
    environ,
    wrong_value,
)
from accelerate.logging import get_logger
from accelerate.monitoring import RunTimes
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import ParallelismConfig
from accelerate.scheduler import AcceleratedScheduler, StepPolicy
from accelerate.state import ProcessControl, step_clock

logger = get_logger(__name__)

Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Loader = TypeVar("Loader", bound=DataLoader[Any])
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
T = TypeVar("T")
Folder = str | os.PathLike[str]
Placement = Sequence[bool | None] | None


class Accelerator(ProcessControl):
    """Runs a training loop on one process or on many.

    A script creates it first, passes model, optimizer, loaders and scheduler to `prepare`, and calls
    `backward` instead of `loss.backward()`. Plugins that are not passed have the values of the launcher.
    Fields of plugins may be assigned later, and affect the next call of `prepare`.

    Args:
        device_placement: Whether `prepare` moves objects, and loaders move batches, to the device of this
            process.
        split_batches: Whether each process gets a slice of each batch instead of a whole batch. Prefer
            `dataloader_config`.
        mixed_precision: "no", "fp16", "bf16" or "fp8". The default is the value of the launcher, or "no".
        gradient_accumulation_steps: Number of micro-batches for each step of the optimizers.
        cpu: Use the CPU although there is an accelerator.
        dataloader_config: Configuration of prepared loaders.
        deepspeed_plugin: Configuration of DeepSpeed, or a dictionary of several by name.
        fsdp_plugin: Configuration of FSDP.
        torch_tp_plugin: Not supported. The size of tensor parallelism is in `parallelism_config`.
        megatron_lm_plugin: Configuration of Megatron-LM.
        rng_types: Random generators that are synchronized over the ranks at the start of each epoch. The
            default is the generator of the sampler.
        log_with: Trackers, by name or as objects. "all" is every installed tracker.
        project_dir: Folder of the project.
        project_config: Folders of the project, and names and number of its checkpoints.
        gradient_accumulation_plugin: Configuration of gradient accumulation, in place of
            `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: `True` steps prepared schedulers once for each data-parallel rank and
            update, "per_update" once for each update, `False` in each call. A call by epoch or with a metric
            is one step.
        kwargs_handlers: Arguments for DistributedDataParallel, the gradient scaler, autocast, the process
            group, the profiler and activation checkpointing, at most one of each class.
        dynamo_backend: Backend of `torch.compile`.
        dynamo_plugin: Configuration of `torch.compile`, in place of `dynamo_backend`.
        deepspeed_plugins: Alias of `deepspeed_plugin`.
        parallelism_config: Sizes of the mesh dimensions. The default is plain data parallelism.

    Raises:
        ConfigurationError: A value is wrong, or the process already runs with another one.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = _UNSET,
        mixed_precision: PrecisionType | PrecisionName | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: plugins.DataLoaderConfiguration | None = None,
        deepspeed_plugin: plugins.DeepSpeedPlugin | dict[str, plugins.DeepSpeedPlugin] | None = None,
        fsdp_plugin: plugins.FullyShardedDataParallelPlugin | None = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: plugins.MegatronLMPlugin | None = None,
        rng_types: Sequence[RNGName | RNGType] | None = None,
        log_with: str
        | LoggerType
        | tracking.GeneralTracker
        | list[str | LoggerType | tracking.GeneralTracker]
        | None = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: plugins.ProjectConfiguration | None = None,
        gradient_accumulation_plugin: plugins.GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: StepPolicy = True,
        kwargs_handlers: list[plugins.KwargsHandler] | None = None,
        dynamo_backend: DynamoBackend | DynamoName | None = None,
        dynamo_plugin: plugins.TorchDynamoPlugin | None = None,
        deepspeed_plugins: plugins.DeepSpeedPlugin | dict[str, plugins.DeepSpeedPlugin] | None = None,
        parallelism_config: ParallelismConfig | None = None,
    ) -> None:
        arguments = dict(locals())
        del arguments["self"]
        request = build_request(environ.current(), **arguments)
        self._runtime = runtime = build_runtime(request, self, _replaceable_functions)
        self._accumulation = Accumulation(
            runtime.strategy, runtime.gradient_state, runtime.prepared, runtime.groups
        )
        self._checkpoints = RunCheckpoints(runtime, self._accumulation)
        self._stop_requests = diagnostics.get_stop_requests(environ.current())
        self.state = runtime.state
        self.gradient_state = runtime.gradient_state
        self._cp_context: Callable[..., AbstractContextManager[Any]] = strategies.Layer().split_batch
        if any(layer.splits_buffers for layer in runtime.strategy.layers):
            self._cp_context = _refuse_to_split
        self.flag_tensor: torch.Tensor | None = None
        self.device_placement = request.device_placement
        self.step_scheduler_with_optimizer = request.step_scheduler_with_optimizer
        self.rng_types = [RNGType.GENERATOR] if request.rng_types is None else list(request.rng_types)
        self.dataloader_config = request.dataloader_config
        self.project_configuration = request.project
        self.ddp_handler = request.ddp
        self.scaler_handler = request.scaler
        self.autocast_handler = request.autocast
        self.init_handler = request.process_group
        self.profile_handler = request.profile
        self.native_amp = self.mixed_precision in ("fp16", "bf16")
        logging_dir = request.project.logging_dir
        self.log_with = [] if log_with is None else tracking.filter_trackers(log_with, logging_dir)
        prepared = runtime.prepared
        self._models, self._optimizers = prepared.models, prepared.optimizers
        self._schedulers, self._dataloaders = prepared.schedulers, prepared.loaders
        self._custom_objects = prepared.custom
        for note in request.notes:
            logger.warning(note)
        check_os_kernel()

    # Prepare

    @overload
    def prepare(
        self, a: A, /, *, device_placement: Placement = None, whole_matrices: bool | None = None
    ) -> A: ...
    @overload
    def prepare(
        self, a: A, b: B, /, *, device_placement: Placement = None, whole_matrices: bool | None = None
    ) -> tuple[A, B]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, /, *, device_placement: Placement = None, whole_matrices: bool | None = None
    ) -> tuple[A, B, C]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, /, *, device_placement: Placement = None
    ) -> tuple[A, B, C, D]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, e: E, /, *, device_placement: Placement = None
    ) -> tuple[A, B, C, D, E]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, e: E, f: F, /, *, device_placement: Placement = None
    ) -> tuple[A, B, C, D, E, F]: ...
    @overload
    def prepare(
        self,
        a: Any,
        b: Any,
        c: Any,
        d: Any,
        e: Any,
        f: Any,
        g: Any,
        /,
        *others: Any,
        device_placement: Placement = None,
        whole_matrices: bool | None = None,
    ) -> tuple[Any, ...]: ...
    @overload
    def prepare(
        self, *args: Any, device_placement: Placement = None, whole_matrices: bool | None = None
    ) -> Any: ...
    def prepare(
        self, *args: Any, device_placement: Placement = None, whole_matrices: bool | None = None
    ) -> Any:
        """Returns models, optimizers, schedulers and loaders prepared for this run.

        Called on all ranks.

        Args:
            *args: Objects in any order and number. Objects of other kinds, and prepared ones, are returned
                unchanged.
            device_placement: For each object whether it is moved to the device. None is the default of the
                run.
            whole_matrices: Whether the optimizers of this call need whole matrices, as Muon, SOAP and Shampoo
                do. Each rank then steps some of the parameters as a whole. None is True for
                `torch.optim.Muon` and for optimizers whose attribute `whole_matrices` is True.

        Returns:
            The prepared objects in the same order, or one object if one was passed. For type checkers each
            has its type, and wrappers forward its attributes.

        Raises:
            PreparationError: An object cannot be trained in this run.
        """
        if device_placement is not None and len(device_placement) != len(args):
            reason = f"it has {len(device_placement)} entries for {len(args)} objects"
            fix = "Give one entry for each object, or leave it out"
            raise wrong_value("device_placement", device_placement, reason, fix)
        strategy, bundle = self._runtime.strategy, strategies.Bundle(args, device_placement)
        kind = strategies.Kind
        if whole_matrices is not None and not bundle.new(kind.OPTIMIZER):
            reason = "none of the objects is an optimizer that is not prepared yet"
            raise wrong_value("whole_matrices", whole_matrices, reason, "Pass it with the optimizer")
        strategy.check(bundle)
        if any(layer.splits_buffers for layer in strategy.layers):
            self._prepare_cp(*bundle.objects)
        with strategy.preparing(bundle):
            bundle.replace(kind.LOADER, self.prepare_data_loader)
            bundle.replace(kind.MODEL, self.prepare_model)
            # Methods of clients in place of prepare_optimizer may not have the argument.
            requested: Any = {} if whole_matrices is None else {"whole_matrices": whole_matrices}
            bundle.replace(kind.OPTIMIZER, partial(self.prepare_optimizer, **requested))
            bundle.replace(kind.SCHEDULER, lambda scheduler, _: self.prepare_scheduler(scheduler))
        for layer in strategy.layers:
            layer.follow_parameters()
        if bundle.models:
            bundle.replace(kind.LOADER, lambda loader, _: strategy.transform_loader(loader, bundle.models[0]))
        self._runtime.observers.prepared()
        return bundle.result()

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """Prepares models for sharded sequences, in a method that clients replace to set `_cp_context`."""
        splitting = (layer for layer in self._runtime.strategy.layers if layer.splits_buffers)
        self._cp_context = next(splitting, strategies.Layer()).split_batch
        return args

    def _prepare_fsdp2(self, *args: Any) -> tuple[Any, ...]:
        """Returns models and optimizers as `prepare` does, and other objects unchanged.

        Clients call it for FSDP 2 in place of `prepare`.
        """
        positions = [i for i, obj in enumerate(args) if isinstance(obj, (nn.Module, torch.optim.Optimizer))]
        prepared = self.prepare(*(args[position] for position in positions)) if positions else ()
        results = list(args)
        for position, obj in zip(positions, prepared if len(positions) > 1 else (prepared,), strict=False):
            results[position] = obj
        return tuple(results)

    def prepare_model(
        self, model: Model, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Model:
        """Returns a model on its device, in the mixed precision and the wrapper of the run.

        Args:
            model: A module. On one process it is returned itself.
            device_placement: Whether to move it. None is the default of the run.
            evaluation_mode: Leave out wrappers that only training needs, such as DistributedDataParallel.
        """
        for known in self._models:
            if model is known or model is self.unwrap_model(known):
                return known  # type: ignore[return-value]
        self._runtime.strategy.check_model(model)
        moves = self.device_placement if device_placement is None else device_placement
        moves = moves and not getattr(model, "hf_device_map", None)
        if moves and any(parameter.is_meta for parameter in model.parameters()):
            moves = not hooks.is_any_offloaded(model)
        prepared = strategies.mark_prepared(
            self._runtime.strategy.wrap_model(model, to_device=moves, evaluation=evaluation_mode)
        )
        self._models.append(prepared)
        return prepared  # type: ignore[return-value]

    def prepare_data_loader(
        self,
        data_loader: Loader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Loader:
        """Returns a loader of the batches of this rank, on its device.

        Args:
            data_loader: A torch loader.
            device_placement: Whether batches are moved. None is the default of the run.
            slice_fn_for_dispatch: Slices a batch that rank 0 has read for another rank. The default slices
                tensors in dimension 0.
        """
        if strategies.is_prepared(data_loader):
            self._runtime.prepared.add_loader(data_loader)
            return data_loader
        adapted = self._runtime.strategy.adapt_loader(data_loader)
        config = self.dataloader_config
        moves = self.device_placement if device_placement is None else device_placement
        options = {
            "num_processes": self.num_processes,
            "process_index": self.process_index,
            "split_batches": config.split_batches,
            "put_on_device": moves,
            "rng_types": self.rng_types.copy(),
            "dispatch_batches": config.dispatch_batches,
            "even_batches": config.even_batches,
            "slice_fn_for_dispatch": slice_fn_for_dispatch,
            "use_seedable_sampler": config.use_seedable_sampler,
            "data_seed": config.data_seed,
            "non_blocking": config.non_blocking,
            "use_stateful_dataloader": config.use_stateful_dataloader,
            "torch_device_mesh": self._runtime.strategy.loader_mesh,
            "use_constant_memory_sampler": config.use_constant_memory_sampler,
            "already_sharded": config.already_sharded,
            "global_batch_size": self.gradient_state.global_batch_size,
        }
        loader: Any = strategies.mark_prepared(
            self._runtime.groups.prepare_loader(adapted, self._prepare_loader, options)
        )
        if (num_steps := getattr(loader, "num_micro_batches", None)) is not None:
            self.gradient_state.plugin_kwargs["num_steps"] = num_steps
        return loader  # type: ignore[no-any-return]

    def _prepare_loader(self, loader: Any, **options: Any) -> Any:
        # Looked up now, because clients replace it.
        return accelerator.prepare_data_loader(loader, self.device, **options)

    def prepare_optimizer(
        self,
        optimizer: Optimizer,
        device_placement: bool | None = None,
        *,
        whole_matrices: bool | None = None,
    ) -> Optimizer:
        """Returns an optimizer in a wrapper that steps when gradients are complete.

        Args:
            optimizer: An optimizer of the parameters of a prepared model.
            device_placement: Whether its state is moved. None is the default of the run.
            whole_matrices: Whether the optimizer needs whole matrices, as for `prepare`.
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            self._remember(self._optimizers, optimizer)
            if optimizer.steps_in_backward:
                self._remember(self._runtime.prepared.stepping_in_backward, optimizer)
            return optimizer
        moves = self.device_placement if device_placement is None else device_placement
        prepared = self._runtime.strategy.wrap_optimizer(optimizer, to_device=moves)
        strategies.divide_steps(self._runtime.strategy, prepared, whole_matrices)
        self._runtime.groups.prepare_optimizer(prepared)
        self._optimizers.append(prepared)
        if prepared.steps_in_backward:
            self._runtime.prepared.stepping_in_backward.append(prepared)
        self._runtime.strategy.precision.set_optimizers(self._optimizers)
        self._runtime.session.assign_optimizers()
        return prepared  # type: ignore[return-value]  # it forwards the attributes of `optimizer`

    def prepare_scheduler(self, scheduler: A) -> A:
        """Returns a scheduler in a wrapper that steps when its optimizer has stepped.

        Args:
            scheduler: A scheduler of a prepared optimizer.
        """
        if isinstance(scheduler, AcceleratedScheduler):
            self._remember(self._schedulers, scheduler)
            return scheduler
        prepared = self._runtime.strategy.wrap_scheduler(
            scheduler, self.step_scheduler_with_optimizer, self.split_batches
        )
        self._runtime.groups.prepare_scheduler(prepared)
        self._schedulers.append(prepared)
        return prepared  # type: ignore[return-value]  # it forwards the attributes of `scheduler`

    @staticmethod
    def _remember(objects: list[Any], obj: Any) -> None:
        if not any(obj is known for known in objects):
            objects.append(obj)

    def unwrap_model(
        self, model: Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Model:
        """Returns the module of the user in a prepared model, which is the model itself without a wrapper.

        Args:
            model: A prepared module.
            keep_fp32_wrapper: Keep the forward that runs under autocast and returns float32.
            keep_torch_compile: Keep the compiled module.
        """
        return self._runtime.strategy.unwrap(  # type: ignore[return-value]
            model, keep_fp32=keep_fp32_wrapper, keep_compiled=keep_torch_compile
        )

    # Data

    def deepspeed_ulysses_dl_adapter(self, dl: A, model: nn.Module) -> A:
        """Returns a loader of this rank's shard of each sequence under sequence parallelism by DeepSpeed.

        Loaders that are prepared in one call with their model are sharded already.

        Args:
            dl: A prepared loader of dictionaries with input_ids, position_ids and labels.
            model: The prepared model.
        """
        return self._runtime.strategy.transform_loader(dl, model)  # type: ignore[no-any-return]

    def skip_first_batches(self, dataloader: Loader, num_batches: int = 0) -> Loader:
        """Returns a loader that begins after `num_batches` batches, without reading them.

        Args:
            dataloader: A prepared loader.
            num_batches: Number of batches of this process to skip.
        """
        return loaders.skip_first_batches(dataloader, num_batches)

    # Gradients

    @property
    def step(self) -> int:
        """Number of micro-batches that `accumulate` has begun since the end of the last epoch."""
        return self._accumulation.step

    @step.setter
    def step(self, step: int) -> None:
        self._accumulation.step = step

    @property
    def sync_gradients(self) -> bool:
        """True if the current micro-batch synchronizes gradients, and optimizers step."""
        return self._runtime.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self._runtime.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-batches for each step of the optimizers."""
        return self._runtime.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        if self.gradient_state.global_batch_size is not None:
            name, reason = "gradient_accumulation_steps", "it follows from global_batch_size"
            raise wrong_value(name, gradient_accumulation_steps, reason, "Leave it out")
        check_steps(gradient_accumulation_steps)
        self._runtime.groups.check_use("gradient_accumulation_steps", gradient_accumulation_steps)
        self._runtime.gradient_state.plugin_kwargs["num_steps"] = gradient_accumulation_steps

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if an optimizer has skipped its last step because of infinite gradients."""
        return any(optimizer.step_was_skipped for optimizer in self._runtime.prepared.optimizers)

    @property
    def has_lomo_optimizer(self) -> bool:
        """True if a prepared optimizer updates parameters in the backward pass."""
        return bool(self._runtime.prepared.stepping_in_backward)

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Gradient scaler of fp16, or None.

        It may be replaced by one with the same interface.
        """
        return self._runtime.strategy.precision.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._runtime.strategy.precision.scaler = scaler

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Returns a context manager in which backward passes of a model do not synchronize gradients.

        Args:
            model: A prepared model. On one process the context has no effect.
        """
        return self._runtime.strategy.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[Any]:
        """Returns a context manager that synchronizes gradients in the backward pass of `no_sync` forwards.

        Args:
            model: A prepared model whose forwards are done.
        """
        return strategies.sync_in_backward(model)

    def accumulate(self, *models: nn.Module, num_items: Any = None) -> AbstractContextManager[Any]:
        """Returns the context manager of one micro-batch, of which every n-th one steps the optimizers.

        Gradients add up until then. The last batch of a loader always steps, so that no gradient remains. The
        body of the loop stays that of one micro-batch: `step` does nothing before the last micro-batch, and
        `zero_grad` keeps what the micro-batches before have contributed, in any order of the calls.
        Micro-batches are counted for each set of models.

        With `num_items`, losses are sums, and gradients are those of the mean over all items of the window,
        on all ranks, and do not depend on the distribution of items: they are equal to those of one big
        batch.

        Args:
            *models: Prepared models that are trained in this step.
            num_items: Number of items (tokens, pixels, samples) in the losses of this micro-batch on this
                rank, as a number or a tensor with one element. Before `maybe_context_parallel`, it is the
                number of items in whole sequences. It is passed in all micro-batches of a window or in none.
        """
        return self._accumulation.accumulate(models, num_items)

    def windows(self, loader: Any, *models: nn.Module, num_items: Count | None = None) -> Windows:
        """Returns the windows of a loader, each with the micro-batches of one optimizer step.

        `for window in accelerator.windows(loader, num_items=count): for batch in window: ...` does the work
        of `accumulate`, and counts the items of a window over all ranks before its first batch. Inside,
        `backward` takes losses that are sums over items, and gradients are those of the mean over all items
        of the window. Called on all ranks. It ends on all ranks when the first one has no batches left.

        Args:
            loader: A prepared loader.
            *models: Prepared models that are trained, or none for all of them.
            num_items: Returns the number of items of a batch on this rank. None counts each batch as one
                item, for losses that are means.

        Returns:
            An iterable of `Window`, each with `num_items` (of all ranks) and a length (of this rank).
        """
        self._runtime.groups.check_use("windows", "loader")
        return Windows(self._accumulation, loader, models, num_items)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Computes gradients of a loss, weighted by its part of the window and scaled for fp16.

        Args:
            loss: 0-d tensor with the mean over the batch of this rank, or with the sum over its items if
                items are counted (`num_items`).
            **kwargs: Arguments of `torch.Tensor.backward`. `learning_rate` is that of optimizers that step in
                the backward pass, instead of the one of their groups. `scale_wrt_gas=False` means that the
                loss is weighted already.

        Raises:
            ConfigurationError: The loss is not a tensor. Also an `AttributeError`.
        """
        runtime, accumulation = self._runtime, self._accumulation
        observers = runtime.observers
        try:
            observers.loss_computed(loss)
            if accumulation.trained:
                accumulation.begin_backward()
            if kwargs or runtime.prepared.stepping_in_backward:
                self._backward_with(loss, **kwargs)
                return
            loss = accumulation.scale(loss)
            observers.before_backward(loss, kwargs)
            runtime.strategy.backward(loss)
            observers.after_backward()
            if accumulation.trained:
                accumulation.end_backward()
        except (AttributeError, TypeError):
            if hasattr(loss, "backward"):
                raise
            reason, fix = "it is not a tensor", "Pass the loss itself, and not the result of loss.item()"
            raise wrong_value("loss", loss, reason, fix, AttributeError) from None

    def _backward_with(
        self,
        loss: torch.Tensor,
        learning_rate: float | None = None,
        scale_wrt_gas: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Runs a backward pass with options, or that of an optimizer that updates parameters in it."""
        runtime, accumulation = self._runtime, self._accumulation
        if scale_wrt_gas is not False:
            loss = accumulation.scale(loss)
        if runtime.prepared.stepping_in_backward:
            self._step_in_backward(loss, learning_rate, kwargs)
            return
        runtime.observers.before_backward(loss, kwargs)
        runtime.strategy.backward(loss, **kwargs)
        runtime.observers.after_backward()
        if accumulation.trained:
            accumulation.end_backward()

    def _step_in_backward(
        self, loss: torch.Tensor, learning_rate: float | None, kwargs: dict[str, Any]
    ) -> None:
        """Runs the backward pass of an optimizer that updates parameters in it."""
        if kwargs:
            reason = "an optimizer that updates parameters in the backward pass runs it without arguments"
            raise wrong_value(", ".join(kwargs), list(kwargs.values()), reason, "Leave them out")
        if learning_rate is None:  # schedulers write it to the group
            learning_rate = find_fused_optimizer(self._optimizers).param_groups[0]["lr"]
        self.lomo_backward(loss, learning_rate)

    def forward_backward(
        self, model: nn.Module, batch: Any, loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Computes the gradients of the loss of a batch, also for a model whose layers are on several ranks.

        It does the work of a forward and `backward`. With pipeline parallelism the batch is split into
        micro-batches, and their forward and backward passes overlap. Called on all ranks, in which all ranks
        of a pipeline have the same batch.

        Args:
            model: A prepared model.
            batch: Mapping of the arguments of the model by name, in which others are for the loss function
                only; or tuple of positional arguments and the target.
            loss_fn: Returns the loss as a 0-d tensor from the outputs and the target, which is the mapping
                or the last element of the tuple. The loss is the mean over samples, or with `num_items` the
                sum over items. None uses the loss that the model returns.

        Returns:
            The loss of the batch of this rank, as a 0-d float32 tensor that is detached.

        Raises:
            PreparationError: The model cannot be split into stages, or the loss of a batch is not the mean
                of the losses of its samples.
        """
        accumulation = self._accumulation
        accumulation.begin_backward()
        loss = self._runtime.strategy.forward_backward(
            model,
            batch,
            loss_fn,
            self.backward,
            accumulation.scale,
            is_sum=accumulation.weighting is not None and accumulation.weighting.counts_items,
        )
        accumulation.end_backward()
        self._runtime.observers.loss_computed(loss)
        return loss

    @overload
    def lm_loss(
        self,
        hidden: torch.Tensor,
        head: nn.Module | torch.Tensor,
        labels: torch.Tensor,
        *,
        shift: bool = False,
        reduction: losses.Reduction = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        scale: float = 1.0,
        soft_cap: float | None = None,
        slice_size: int | None = None,
        return_logps: Literal[False] = False,
    ) -> torch.Tensor: ...
    @overload
    def lm_loss(
        self,
        hidden: torch.Tensor,
        head: nn.Module | torch.Tensor,
        labels: torch.Tensor,
        *,
        shift: bool = False,
        reduction: losses.Reduction = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        scale: float = 1.0,
        soft_cap: float | None = None,
        slice_size: int | None = None,
        return_logps: Literal[True],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...
    def lm_loss(
        self,
        hidden: torch.Tensor,
        head: nn.Module | torch.Tensor,
        labels: torch.Tensor,
        *,
        shift: bool = False,
        reduction: losses.Reduction = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        scale: float = 1.0,
        soft_cap: float | None = None,
        slice_size: int | None = None,
        return_logps: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Returns the cross entropy of `head(hidden)` without a tensor of all logits.

        The logits of a slice of the vocabulary are computed, used and freed, and computed again in the
        backward pass. Value and gradients are those of torch's `cross_entropy`, in the mixed precision of the
        run, with logits in float32. It is called on all ranks, in the forward of a prepared model or with
        what its forward returns. A head that FSDP 2 shards is gathered once, and its gradient is reduced
        once. With a head that tensor parallelism shards ("colwise"), each rank computes its entries of the
        vocabulary.

        Args:
            hidden: Hidden states of shape (..., features).
            head: Linear layer that computes the logits, the embedding or weight of shape (vocabulary,
                features) that is tied to it, or a LoRA layer of peft around it.
            labels: Integers of shape (...), on the device of `hidden`.
            shift: Whether `labels` has the tokens at the positions of `hidden`, as models of transformers
                take them, so that the label of a position is the next one. By default, `labels` has the
                label of each position, as for torch's `cross_entropy`.
            reduction: "mean" is the mean over the labels of this rank, and of the ranks with the other parts
                of its sequences (`cp_size`, `sp_size`), weighted so that averaged gradients are those of
                whole sequences. "sum" is the sum over the labels of this rank, for `num_items`.
            ignore_index: Label of tokens without a loss.
            label_smoothing: Weight of the uniform distribution in the targets, from 0 to 1.
            z_loss: Factor of the squared logarithm of the sum of the exponentials of the logits, which is
                added to the loss of each token (PaLM, https://arxiv.org/abs/2204.02311).
            scale: Factor of the logits.
            soft_cap: Bound c of the logits, which become `c * tanh(logits / c)`, after `scale`.
            slice_size: Entries of the vocabulary whose logits exist at a time. None chooses about as many
                logits as elements of `hidden`, at least 16 million.
            return_logps: Whether to return the log-probabilities of the labels, too.

        Returns:
            The loss as a 0-d float32 tensor (float64 for float64 weights). With `return_logps`, the loss and
            a tensor of the shape of `labels`, with the log-probability of the label of each position, with
            gradients, and 0 for tokens without a label. The mean of no labels is NaN and has gradients of 0,
            and their sum is 0, as those of torch. On accelerators the loss is NaN if a label is not in the
            vocabulary.

        Raises:
            ConfigurationError: An option or a shape is wrong, a label is not in the vocabulary (on the CPU),
                or a mean is computed in a window whose items are counted.
            PreparationError: The weights of the head are not whole here, or it is on other stages.
        """
        sequences = accelerator.check_loss(self._runtime, self._accumulation, shift, reduction)
        with self.autocast():
            loss, logps = losses.lm_loss(
                hidden,
                head,
                labels,
                shift=shift,
                reduction=reduction,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                scale=scale,
                soft_cap=soft_cap,
                slice_size=slice_size,
                sequences=sequences,
                models=self._models,
            )
        return (loss, logps) if return_logps else loss

    def count_flops(self) -> AbstractContextManager[None]:
        """Returns the context manager of a training step, whose model FLOPs are counted once.

        It stays in the loop, around the forward and backward passes of a micro-batch or of all those of a
        step: `with accelerator.accumulate(model), accelerator.count_flops(): ...`. It counts the second
        optimizer step, or the first one in it after that, and does nothing in all others. `step_times`
        returns the result as `step_flops`, `flops_per_second` and `mfu`.

        Each rank counts the matrix multiplications, convolutions and attention that it executes, without
        recomputation. Operators of other packages count if they have a formula
        (`torch.utils.flop_counter.register_flop_formula`). Nothing is counted with compiled functions, in
        pipelines, with modules of TransformerEngine, and where an engine (DeepSpeed, Megatron-LM)
        holds the gradients.
        """
        return self._step_flops.micro_batch()

    @cached_property
    def _trackers(self) -> Trackers:
        return Trackers()

    @cached_property
    def _step_flops(self) -> accelerator.flops.StepFlops:
        return accelerator.flops.StepFlops(self._runtime)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Runs the backward pass of an optimizer that updates parameters while gradients are computed (LOMO).

        Args:
            loss: 0-d tensor.
            learning_rate: Learning rate of this update.

        Raises:
            ConfigurationError: There is no such prepared optimizer, or more than one.
        """
        step_in_backward(self._optimizers, loss, learning_rate)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscales gradients before they are read or changed.

        Without a gradient scaler it does nothing.

        Args:
            optimizer: A prepared optimizer or a list of them. None is all of them.
        """
        self._accumulation.finish_items()
        unscale(self._runtime.strategy.precision, self._optimizers if optimizer is None else optimizer)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Scales gradients so that their total norm is at most `max_norm`.

        Called on all ranks, before `step`. In a micro-batch without synchronization, gradients are not
        complete, and it returns the norm of those on this rank without clipping.

        Args:
            parameters: Tensors with gradients, of prepared models.
            max_norm: Largest norm. `float("inf")` returns the norm without clipping.
            norm_type: The p of the p-norm.

        Returns:
            The norm before clipping as a 0-d tensor. It is NaN if an engine (DeepSpeed, Megatron-LM) clips
            and has not taken a step yet.

        Raises:
            ConfigurationError: `max_norm` is negative or NaN.
        """
        if isinstance(max_norm, (int, float)) and not max_norm >= 0:
            fix = 'Give float("inf") for the norm without clipping'
            raise wrong_value("max_norm", max_norm, "gradients would change their sign or become NaN", fix)
        max_norm = max_norm if self.sync_gradients else math.inf
        parameters, scale = self._unscaled(parameters)
        norm = self._runtime.strategy.clip_grad_norm(parameters, max_norm * scale, norm_type)
        norm = norm if scale == 1 else norm / scale
        self._runtime.observers.norm_computed(norm)
        return norm

    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clamps each gradient element to the range from `-clip_value` to `clip_value`, before `step`.

        In a micro-batch without synchronization, gradients are not complete, and it does nothing.

        Args:
            parameters: Tensors with gradients, of prepared models.
            clip_value: Largest absolute value.
        """
        if not self.sync_gradients:
            return
        parameters, scale = self._unscaled(parameters)
        self._runtime.strategy.clip_grad_value(parameters, clip_value * scale)

    def _unscaled(self, parameters: torch.Tensor | Iterable[torch.Tensor]) -> tuple[Any, float]:
        precision = self._runtime.strategy.precision
        self._accumulation.finish_items()
        if precision.scaler is None:
            return parameters, 1
        return unscale_parameters(precision, self._optimizers, parameters, self.sync_gradients)

    def set_trigger(self) -> None:
        """Sets a flag on this rank, for which `check_trigger` returns True on all ranks."""
        self.flag_tensor = torch.tensor(1, device=self._runtime.state.device)

    def check_trigger(self) -> bool:
        """Returns whether any rank has set its flag since the last check.

        Called on all ranks.
        """
        flag = self.flag_tensor
        if flag is None:
            flag = torch.tensor(0, device=self._runtime.state.device)
        is_set = bool(self.reduce(flag, reduction="sum").item())
        if is_set:
            self.flag_tensor = None
        return is_set

    set_breakpoint = set_trigger
    check_breakpoint = check_trigger

    # Collectives

    def gather(self, tensor: T, *, uneven: bool = False) -> T:
        """Returns the tensors of all ranks, concatenated in dimension 0.

        Args:
            tensor: A tensor, or lists, tuples and dictionaries of tensors, with the same shapes on all ranks.
                0-d tensors count as tensors of length 1.
            uneven: Whether dimension 0 may differ between ranks, without padding.

        Returns:
            The same structure on each rank, in rank order.
        """
        return self._runtime.groups.run(lambda: ops.gather(tensor, uneven=uneven))

    @overload
    def gather_for_metrics(self, input_data: list[T], use_gather_object: bool = False) -> list[T]: ...
    @overload
    def gather_for_metrics(self, input_data: T, use_gather_object: Literal[False] = False) -> T: ...
    @overload
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool) -> Any: ...
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Returns the samples of all ranks without the duplicates that pad the last batch.

        Called with the outputs of a model for a batch of a prepared loader, inside the loop over the loader.

        Args:
            input_data: Tensors in any nesting whose dimension 0 is the batch, or a list with one object for
                each sample, also in tuples and dictionaries. Objects may have tensors of any shape. A value
                that is not one for each sample is gathered whole, see `weighted_mean`. If several loaders are
                being read, pass the labels as well, which identify the loader.
            use_gather_object: Gather the entries of a list or tuple, or the rows of a tensor, as objects.

        Returns:
            The same structure on each rank, which over a whole loader is exactly its dataset, in order if it
            is not shuffled. A value with as many rows as a full batch, such as a loss repeated for each
            sample, is cut to the samples of a shorter batch. On one process, other values are returned
            unchanged.

        Raises:
            StateError: The data is from batches of several loaders with different padding.
        """
        return self._runtime.groups.run(
            lambda: accelerator.metrics.gather_for_metrics(
                self._runtime.gradient_state, input_data, use_gather_object
            ),
            lambda: ops.gather_object(input_data) if use_gather_object else ops.gather(input_data),
        )

    def weighted_mean(self, value: T, weight: Any) -> T:
        """Returns the weighted mean over all ranks of values that are means themselves.

        `weighted_mean(loss, len(labels))` is the loss over all samples, also if ranks have different numbers
        of them. For a whole epoch, add up `loss * len(labels)` and `len(labels)` in the loop, and call this
        once after it with the quotient and the second sum. A padded batch has samples twice, and so has its
        mean: evaluate with `even_batches=False`, or gather values for each sample.

        Args:
            value: A tensor, or any nesting of tensors, with the same shapes on all ranks.
            weight: Weight of the value of this rank, which is its number of samples, as a number or a 0-d
                tensor; or a tensor that can be expanded to the shape of each value.

        Returns:
            The same structure on each rank: the sum of `value * weight` divided by the sum of `weight`,
            computed in float64 if the device has it, in the dtype of the value (the default dtype for
            integers). It is NaN if all weights are 0. On one process it is the value. The result has no
            gradient.

        Raises:
            ConfigurationError: The weight is not a number or a tensor, or does not fit the value.
        """
        return self._runtime.groups.run(lambda: accelerator.metrics.weighted_mean(value, weight))

    def reduce(self, tensor: T, reduction: ops.ReductionName = "sum", scale: float = 1.0) -> T:
        """Returns tensors reduced over all ranks, element by element.

        Args:
            tensor: A tensor, or any nesting of tensors, with the same shapes on all ranks.
            reduction: "sum", "mean", "max", "min" or "none".
            scale: Factor of the result.
        """
        return self._runtime.groups.run(lambda: ops.reduce(tensor, reduction, scale))

    def pad_across_processes(self, tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Returns tensors padded to the largest size of all ranks, so that they can be gathered.

        Args:
            tensor: A tensor, or any nesting of tensors.
            dim: Dimension whose size differs between ranks.
            pad_index: Value of the padding.
            pad_first: Whether the padding is before the data.
        """
        return self._runtime.groups.run(
            lambda: ops.pad_across_processes(tensor, dim=dim, pad_index=pad_index, pad_first=pad_first)
        )

    @property
    def should_save(self) -> bool:
        """True if a checkpoint should be saved now, once for each request.

        It is True in the same step on all ranks. Requests are SIGTERM, SIGUSR1, SIGUSR2, the end of
        `max_time` or of a SLURM allocation, `stop_file`, `save_file`, and a preemption that Ray Train
        announces. Read it before `should_stop`.
        """
        return self._runtime.groups.read_request("save", self._stop_requests.read_save())

    @property
    def should_stop(self) -> bool:
        """True if the training loop should end, from the same step on all ranks.

        Requests are SIGTERM, SIGUSR1, the end of `max_time` or of a SLURM allocation, and `stop_file`. The
        first read in a run sets the handlers of these signals. A second SIGTERM ends the process.
        """
        return self._runtime.groups.read_request("stop", self._stop_requests.read_stop())

    # Contexts

    def autocast(self, autocast_handler: plugins.AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Returns a context manager in which operations run in the mixed precision of the run.

        Forwards of prepared models do not need it.

        Args:
            autocast_handler: Arguments for this context. The default is the handler passed to `Accelerator`.
        """
        settings = autocast_handler or self._runtime.request.autocast or plugins.AutocastKwargs()
        return self._runtime.strategy.precision.autocast(settings.enabled, settings.cache_enabled)

    def profile(
        self, profile_handler: plugins.ProfileKwargs | None = None
    ) -> AbstractContextManager[TorchProfile]:
        """Returns a context manager that profiles its block, whose value is the `torch.profiler.profile`.

        Each rank writes its trace if the handler has a folder.

        Args:
            profile_handler: Settings of the profiler. The default is the handler passed to `Accelerator`.
        """
        settings = profile_handler or self._runtime.request.profile or plugins.ProfileKwargs()
        return accelerator.contexts.profile(self._runtime.state, settings)

    def peak_memory(
        self, snapshot_dir: str | Path | None = None
    ) -> AbstractContextManager[diagnostics.PeakMemory]:
        """Returns a context manager that measures the peak memory of its block on each rank.

        Entered and left on all ranks. Its value has the result after the block, and prints a line for each
        rank.

        Args:
            snapshot_dir: Folder to which a rank that runs out of memory in the block writes
                `memory_RANK.pickle`, with its allocations and their lines of code, which are recorded for
                that. None records none.
        """
        return accelerator.contexts.peak_memory(self._runtime.state, snapshot_dir)

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Returns a context manager in which ranks may have different numbers of batches.

        Ranks without batches take part in the collectives of the others.

        Args:
            joinables: Prepared models (and joinable optimizers) that are used in the block, on all ranks.
                Models that exchange nothing, such as frozen and unprepared ones, have no effect.
            even_batches: Replaces, inside the block, whether prepared map-style loaders are padded to the
                same number of batches. None keeps the setting.
        """
        return accelerator.contexts.join_uneven_inputs(
            self._accumulation, self._dataloaders, joinables, even_batches
        )

    @contextmanager
    def unsharded(self, *models: nn.Module) -> Iterator[None]:
        """Gathers all parameters of sharded models on each rank, in the block of a context manager.

        Entered on all ranks. Inside, each rank may run the models as often as it needs, for example to
        generate texts of different lengths. No gradients are computed. Whole models must fit the memory of
        each device.

        Args:
            *models: Prepared models, or none for all of them. Models that are not sharded are not changed.
        """
        with torch.no_grad(), self._runtime.strategy.unsharded(models or self._models):
            yield

    def maybe_context_parallel(
        self,
        buffers: list[Any] | None = None,
        buffer_seq_dims: list[int] | None = None,
        no_restore_buffers: set[Any] | None = None,
    ) -> AbstractContextManager[Any]:
        """Returns a context manager that shards `buffers` along their sequence under context parallelism.

        Args:
            buffers: Tensors that are equal on all ranks of the mesh dimension.
            buffer_seq_dims: Sequence dimension of each of them.
            no_restore_buffers: Buffers that are not restored at the end.

        Raises:
            StateError: No object has been prepared yet.
            ConfigurationError: The dimensions do not fit the buffers, or a sequence cannot be sharded.
        """
        block = self._cp_context(
            buffers=buffers, buffer_seq_dims=buffer_seq_dims, no_restore_buffers=no_restore_buffers
        )
        return self._accumulation.divided(block)

    def check_isolation(self, model: nn.Module, batch: Any, boundaries: Any = None) -> None:
        """Raises an error if the documents of packed sequences in a batch affect each other.

        Documents are isolated if the outputs of each have no gradient with respect to the input embeddings of
        the others. This is computed by two forward and backward passes, for any attention, convolution or
        recurrent layer. Weights, gradients, buffers and random generators do not change. Auxiliary losses and
        the capacity of experts couple documents, and are left out, because outputs alone are followed.
        `DataLoaderConfiguration(check_packing=True)`, the default, checks the first training batch if its
        `position_ids` restart.

        Called on all ranks, outside of `maybe_context_parallel`.

        Args:
            model: A prepared model.
            batch: Inputs of the model: a mapping of keyword arguments, a sequence of arguments, or a tensor.
                Its sequences have shape (rows, length).
            boundaries: Cumulative lengths of documents, of shape (documents + 1,), or the number of the
                document of each position, of shape (rows, length), with -1 for padding. None reads
                `cu_seqlens`, `seq_idx`, numbers in `attention_mask`, or `position_ids` that restart.

        Raises:
            PreparationError: Documents affect each other, or the model is divided among ranks.
            ConfigurationError: The batch has no boundaries, or they do not fit it.
        """
        strategies.check_isolation(self._runtime.strategy, model, batch, boundaries)

    def average(
        self,
        model: nn.Module,
        decay: float | Callable[[int], float] = 0.999,
        every: int = 1,
        start: int = 0,
        device: torch.device | str | None = None,
    ) -> accelerator.averaging.WeightAverage:
        """Returns an exponential moving average of the weights of a model, which each step updates.

        `average = decay * average + (1 - decay) * weight` follows the steps of prepared optimizers that
        updated the weights; it communicates nothing. Each rank has the averages of its shards, in float32
        or the higher precision of the weights. Frozen parameters and buffers, such as those of batch
        normalization, are not averaged: they are those of the model. `save_state` and `load_state` have the
        averages, and `save_model(average, folder)` exports them.

        Called on all ranks, after `prepare` of the model and of its optimizers. The average begins with a
        copy of the weights.

        Args:
            model: A prepared model. It may have several averages.
            decay: Part of the average that an update keeps, at least 0 and less than 1, or a function that
                returns it for the number of a step.
            every: Number of optimizer steps from one update to the next.
            start: Number of the first step that is averaged. Before it, the average is a copy of the
                weights. The first step of a run has the number 1, also in resumed runs.
            device: Device of the averages, such as "cpu". None is that of the weights.

        Returns:
            The average. `with average.applied(): ...` puts it into the model for an evaluation, and
            `average.remove()` ends it.

        Raises:
            ConfigurationError: The decay, `every`, `start` or the device is wrong, or the model is not
                prepared.
            PreparationError: No prepared optimizer steps a trainable parameter, or the strategy (DeepSpeed,
                Megatron-LM, XLA) keeps the weights itself.
        """
        average = accelerator.averaging.WeightAverage(self._runtime, model, decay, every, start, device)
        self._runtime.observers.prepared()
        return average

    def plan_memory(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        batch: Any,
        loss: planning.Loss | None = None,
        *,
        max_norm: float | None = 1.0,
    ) -> planning.MemoryPlan:
        """Returns the memory that each device needs at the peak of a training step, without a step.

        One step is traced with fake tensors, in the mixed precision of the run and with its gradient
        accumulation and activation checkpointing. No collective is called, and no memory of an accelerator
        is used. Workspaces inside of kernels are not counted. The model, the optimizer and the batch are not
        changed. The effect of sharding is computed from the trace. It needs no other rank.

        Args:
            model: A model that is not prepared, or whose strategy does not shard it. It may be on the meta
                device.
            optimizer: Optimizer of the model, or a list of several.
            batch: One batch of this rank, on any device. A mapping is passed to the model as keyword
                arguments, a tuple or list as positional arguments.
            loss: Computes the loss from the model and the batch. The default reads the loss from the output.
            max_norm: Whether gradients are clipped before the step. None does not clip them.

        Returns:
            A plan with `peak` and `parts` in bytes, `largest_batch_size("80GB")` and
            `fitting_layouts("8x80GB")`. `print(plan)` shows a table.

        Raises:
            ConfigurationError: The model needs values of large tensors, has no loss or lazy modules, or there
                is no plan for the optimizer, the mixed precision or the strategy.
            PreparationError: The model or an optimizer cannot be copied.
            StateError: The model is sharded already.
        """
        return accelerator.memory_plan.plan_memory(self._runtime, model, optimizer, batch, loss, max_norm)

    # Trackers

    @property
    def trackers(self) -> list[Any]:
        """Running trackers, after all logged values are sent.

        The list is empty before `init_trackers`.
        """
        return self._trackers.wait()

    @trackers.setter
    def trackers(self, trackers: list[Any]) -> None:
        self._trackers.running = trackers

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Starts the trackers of `log_with`.

        Called on all ranks.

        Args:
            project_name: Name of the experiment.
            config: Hyperparameters to store at the start.
            init_kwargs: Further arguments of single trackers, by tracker name.

        Raises:
            ConfigurationError: `init_kwargs` has another key than names of trackers.
        """
        self._trackers.start(self.log_with, project_name, self._runtime.request.project, config, init_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Returns a running tracker by name.

        Args:
            name: Name of the tracker, such as "tensorboard".
            unwrap: Return the object of the tracker's own library instead.

        Returns:
            The tracker. If no tracker is running, it is one whose methods have no effect.
        """
        return self._trackers.find(name, unwrap)

    def log(
        self,
        values: dict[str, Any],
        step: int | None = None,
        log_kwargs: dict[str, dict[str, Any]] | None = None,
    ) -> None:
        """Sends values to all trackers.

        Called on all ranks. A tracker that waits for a disk or a server (`blocks`) gets them in a thread, in
        order.

        Args:
            values: Values to log, by name: numbers, strings or nested dictionaries of them, and tensors with
                one element, whose value is read later, so that this call does not wait for the device.
            step: Training step of the values.
            log_kwargs: Further arguments of single trackers, by tracker name.

        Raises:
            Exception: The error of a tracker, for these values or, in a thread, for earlier ones.
        """
        self._trackers.log(values, step, log_kwargs)

    def end_training(self) -> None:
        """Waits for a save in the background, finishes all trackers, and closes the process group.

        Called last, on all ranks. It also resets the signal handlers. An error in one of these steps
        does not prevent the others.
        """
        with ExitStack() as ending:
            ending.callback(self._runtime.state.destroy_process_group)
            ending.callback(self._runtime.observers.ended)
            ending.callback(self._stop_requests.close)
            for sender in self._trackers.senders_of_running():
                ending.callback(sender.finish)
            self._checkpoints.wait()

    # Checkpoints

    def save_state(
        self,
        output_dir: Folder | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool | None = None,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Saves the state of the run as one checkpoint.

        Called on all ranks. It has the models, optimizers, schedulers, the gradient scaler, order and
        position of loaders, random generators of each rank, and the objects of `register_for_checkpointing`.
        The folder appears when all ranks have written all of it. Until then, and if a write fails, an older
        folder of that name is not changed.

        Args:
            output_dir: The folder. With `ProjectConfiguration(automatic_checkpoint_naming=True)` it is
                ignored, and the folder is a numbered one in the folder `checkpoints` of the project.
            safe_serialization: Whether models are written as safetensors instead of with `torch.save`.
            blocking: False returns when everything is copied, and writes in the background. None is the
                opposite of `ProjectConfiguration.async_save`. There is one save at a time, and its error is
                raised by the next call, `wait_for_checkpoint` or `end_training`.
            **save_model_func_kwargs: Accepted for compatibility. Plain and DDP models need none.

        Returns:
            The folder of the checkpoint.

        Raises:
            ConfigurationError: There is no folder to save to.
            CheckpointError: A file could not be written, on all ranks.
            StateError: A rank has timed out, on all other ranks.
        """
        return self._checkpoints.save_state(output_dir, safe_serialization, blocking)

    def wait_for_checkpoint(self) -> None:
        """Waits until a save in the background, if there is one, is committed.

        Called on all ranks.

        Raises:
            CheckpointError: The save has failed. It is raised once, on all ranks.
        """
        self._checkpoints.wait()

    def load_state(
        self,
        input_dir: Folder | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        *,
        world_size_policy: checkpointing.WorldSizePolicy = "reseed",
        **load_model_func_kwargs: Any,
    ) -> None:
        """Loads the state of a checkpoint into all prepared and registered objects.

        Called on all ranks. All files are compared with their checksums, and with the objects to load, before
        anything is changed. If an object still raises an error, the error names the objects that were
        changed.

        Args:
            input_dir: The checkpoint. None is the newest complete one of the project, and logs which ones
                were skipped and why.
            load_kwargs: Arguments of `torch.load`.
            world_size_policy: Action if another number of processes saved it: "strict" raises an error,
                "reseed" derives new random states for each rank, and "ignore" loads those that exist.
            **load_model_func_kwargs: Arguments of `load_state_dict` of the models, such as `strict`, and
                `map_location`, which is "cpu" or "on_device".

        Raises:
            ConfigurationError: The folder does not exist, or none is passed and checkpoints are not numbered.
            CheckpointError: There is no complete checkpoint, it is damaged, or it does not fit the run.
            StateError: A rank has timed out.
        """
        self._checkpoints.load_state(input_dir, load_kwargs, world_size_policy, load_model_func_kwargs)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Registers further objects that are saved and loaded with the run.

        Args:
            *objects: Objects with `state_dict` and `load_state_dict`.

        Raises:
            ConfigurationError: An object does not have these methods. No object is registered then.
        """
        self._checkpoints.register(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Registers a function that is called before each save.

        Args:
            hook: Called on all ranks with the list of models, the list of their weights, and the folder that
                is written. Weights that it removes from the list are not saved. Files that it writes to the
                folder become a part of the checkpoint.

        Returns:
            A handle whose `remove()` removes the hook.
        """
        return self._checkpoints.add_save_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Registers a function that is called before each load.

        Args:
            hook: Called on all ranks with the list of models and the folder. Models that it removes from the
                list are not loaded.

        Returns:
            A handle whose `remove()` removes the hook.
        """
        return self._checkpoints.add_load_hook(hook)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Returns the whole state dict of a prepared model.

        Called on all ranks.

        Args:
            model: A prepared module.
            unwrap: Whether names have no prefixes of wrappers.
        """
        return self._runtime.strategy.state.state_dict(model, unwrap=unwrap)

    def save_model(
        self,
        model: nn.Module | accelerator.averaging.WeightAverage,
        save_directory: Folder,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Saves the weights of a model in files that other libraries read.

        Called on all ranks.

        Args:
            model: A prepared module, or the result of `average`, which is saved with the names and dtypes of
                the weights.
            save_directory: Folder for `model.safetensors`, or for several files and their index.
            max_shard_size: Size of a file in bytes, also as a string such as "5GB".
            safe_serialization: Whether safetensors is written instead of `pytorch_model.bin`.

        Raises:
            ConfigurationError: The folder is a file, the size is not one, or a part of the model has no
                values.
        """
        self._checkpoints.save_model(model, save_directory, max_shard_size, safe_serialization)

    def stream_weights(
        self,
        model: nn.Module,
        bucket_size: int | str = "1GB",
        all_ranks: bool = False,
        merge_adapters: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterates over the whole weights of a prepared model, gathered one bucket at a time.

        The names, values, dtypes and tied weights are those of `save_model`, in the order of the model's
        state dict. Called on all ranks, which all run the loop. A rank that leaves the loop early takes part
        in the remaining gathering first, so that no other rank hangs.

        Args:
            model: A prepared module.
            bucket_size: Size of the weights that are gathered at once in bytes, also as a string such as
                "1GB". It is at least the size of the largest weight.
            all_ranks: Whether all ranks get the weights. By default only rank 0 gets them, and the loop has
                no iterations on other ranks.
            merge_adapters: Whether LoRA adapters of peft are merged into the weights, which then have the
                names of the model without adapters. The adapters of the model do not change.

        Returns:
            An iterator of names and detached tensors on the device of the model, or on the CPU for offloaded
            weights. A tensor may share memory with the model: do not change it, and copy what has to outlive
            the next item.

        Raises:
            ConfigurationError: A weight is larger than a bucket, a part of the model has no values or is not
                a dense tensor, the adapters cannot be merged, or the strategy cannot gather single weights.
        """
        return accelerator.weight_stream.stream(self._runtime, model, bucket_size, all_ranks, merge_adapters)

    def save(self, obj: Any, f: Folder, safe_serialization: bool = False) -> None:
        """Saves an object to one file on rank 0.

        Called on any ranks.

        Args:
            obj: An object that can be pickled, or a dictionary of tensors with `safe_serialization`.
            f: The file. An existing one is whole until it is replaced.
            safe_serialization: Write safetensors.
        """
        project = self._runtime.request.project
        weights.save(obj, f, project.save_on_each_node, safe_serialization)

    # The run

    @property
    def distributed_type(self) -> DistributedType | str:
        """Label of the strategy.

        An assignment to the attribute of the state changes nothing else.
        """
        return self._runtime.state.distributed_type

    @property
    def num_processes(self) -> int:
        """World size."""
        return self._runtime.state.num_processes

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self._runtime.state.process_index

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its node."""
        return self._runtime.state.local_process_index

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._runtime.state.device

    @property
    def use_distributed(self) -> bool:
        """True if the run has several processes."""
        return self._runtime.state.use_distributed

    @property
    def multi_device(self) -> bool:
        """True if the run has several processes, each with an accelerator device."""
        return self.use_distributed and not self._runtime.state.device_backend.is_host

    @property
    def mixed_precision(self) -> PrecisionType | PrecisionName:
        """Mixed precision of the run, which is "no", "fp16", "bf16" or "fp8"."""
        return self._runtime.state.mixed_precision

    @property
    def fp8_backend(self) -> FP8BackendType:
        """Library that runs FP8 layers, or `FP8BackendType.NO`."""
        return self._runtime.strategy.precision.fp8_backend

    @property
    def fp8_enabled(self) -> bool:
        """True if layers compute in FP8."""
        return self.fp8_recipe_handler is not None

    @property
    def has_fp8_handler(self) -> bool:
        """True if `kwargs_handlers` has a recipe of an FP8 library."""
        handlers = self._runtime.request.handlers
        return any(isinstance(handler, precision.RECIPES) for handler in handlers)

    @property
    def fp8_recipe_handler(self) -> Any:
        """Recipe of the FP8 library that the run uses, which is read when a model is prepared, or None."""
        return self._runtime.strategy.precision.recipe

    def _recipe_of(self, library: FP8BackendType) -> Any:
        return {self.fp8_backend: self.fp8_recipe_handler}.get(library)

    @property
    def ao_recipe_handler(self) -> plugins.AORecipeKwargs | None:
        """Recipe of torchao, or None if the run does not use it."""
        return self._recipe_of(FP8BackendType.AO)  # type: ignore[no-any-return]

    @property
    def te_recipe_handler(self) -> plugins.TERecipeKwargs | None:
        """Recipe of Transformer Engine, or None if the run does not use it."""
        return self._recipe_of(FP8BackendType.TE)  # type: ignore[no-any-return]

    @property
    def msamp_recipe_handler(self) -> plugins.MSAMPRecipeKwargs | None:
        """Recipe of MS-AMP, or None if the run does not use it."""
        return self._recipe_of(FP8BackendType.MSAMP)  # type: ignore[no-any-return]

    @property
    def delayed_fp8_autocast(self) -> bool:
        """True if the autocast of Transformer Engine surrounds the wrapper of a model.

        It surrounds the forward of the model itself, inside the wrapper, with every strategy.
        """
        return False

    @property
    def deepspeed_plugin(self) -> Any:
        """Selected DeepSpeed plugin, or None without DeepSpeed."""
        return self._runtime.state.deepspeed_plugin

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed configuration of the selected plugin.

        Raises:
            AttributeError: The run does not use DeepSpeed.
        """
        plugin = self._runtime.state.deepspeed_plugin
        if plugin is None:
            raise AttributeError("This run does not use DeepSpeed, so there is no deepspeed_config.")
        config: dict[str, Any] = plugin.deepspeed_config
        return config

    @property
    def deepspeed_engine_wrapped(self) -> Any:
        """DeepSpeed engine that was built last, in its wrapper, or None."""
        return self._runtime.strategy.engine_wrapped

    @property
    def is_fsdp2(self) -> bool:
        """True if parameters are sharded by FSDP 2."""
        return self._runtime.state.is_fsdp2

    @property
    def parallelism_config(self) -> Any:
        """Sizes of the mesh dimensions, or None for plain data parallelism."""
        return self._runtime.state.parallelism_config

    @property
    def torch_device_mesh(self) -> Any:
        """Device mesh, or None for plain data parallelism."""
        return self._runtime.state.device_mesh

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """True if mesh dimensions can be combined."""
        return self.is_fsdp2

    def _mesh_rank(self, dimension: str, without_mesh: int) -> int:
        mesh = self.torch_device_mesh
        if mesh is None or dimension not in (mesh.mesh_dim_names or ()):
            return without_mesh
        return int(mesh[dimension].get_local_rank())

    @property
    def tensor_parallel_rank(self) -> int:
        """Rank in the tensor-parallel mesh dimension, or 0 without one."""
        return self._mesh_rank("tp", 0)

    @property
    def pipeline_parallel_rank(self) -> int:
        """Rank in the pipeline mesh dimension, or 0 without one."""
        return self._mesh_rank("pp", 0)

    @property
    def context_parallel_rank(self) -> int:
        """Rank in the context-parallel mesh dimension, or 0 without one."""
        return self._mesh_rank("cp", 0)

    @property
    def data_parallel_rank(self) -> int:
        """Rank in the mesh dimension of replicas, or the rank of the process without a mesh."""
        return self._mesh_rank("dp_replicate", self.process_index)

    @property
    def data_parallel_shard_rank(self) -> int:
        """Rank in the mesh dimension of shards, or 0 without one."""
        return self._mesh_rank("dp_shard", 0)

    @property
    def should_save_model(self) -> bool:
        """True if this process writes the model, which is so on rank 0."""
        return self.process_index == 0

    def verify_device_map(self, model: nn.Module) -> bool:
        """Returns whether a device map has placed a model on several devices, for one process only.

        Args:
            model: A module, with or without `hf_device_map`.
        """
        try:
            for module in model.modules():
                strategies.refuse_split_model(module, "")
        except PreparationError:
            return True
        return False

    @property
    def split_batches(self) -> bool:
        """True if each process gets a slice of one batch instead of a whole batch."""
        return self._runtime.request.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """True if rank 0 reads for all ranks.

        None depends on the kind of dataset.
        """
        return self._runtime.request.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """True if all ranks get the same number of batches.

        An assignment affects the next `prepare`.
        """
        return self._runtime.request.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self._runtime.request.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """True if shuffling depends on the seed and the epoch only."""
        return self._runtime.request.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """True if batches are copied to the device asynchronously."""
        return self._runtime.request.dataloader_config.non_blocking

    @property
    def use_stateful_dataloader(self) -> bool:
        """True if loaders are instances of torchdata's `StatefulDataLoader`."""
        return self._runtime.request.dataloader_config.use_stateful_dataloader

    @property
    def project_dir(self) -> str | None:
        """Folder of the project, or None."""
        return self._runtime.request.project.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Folder of local logs, or None."""
        return self._runtime.request.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next checkpoint under automatic naming."""
        return self._runtime.request.project.iteration

    def step_times(self) -> RunTimes:
        """Returns the time of this rank by phase, since its first step and in its last window of steps.

        It may be called at any time, on any ranks, and waits for nothing.

        Returns:
            The number of optimizer `steps`, the `seconds`, the `seconds_by` phase ("data", "moving",
            "forward", "backward", "collectives", "optimizer", "saving", "rest"), which add up to them, the
            same as `shares` from 0 to 1, the `samples`, `steps_per_second` and `samples_per_second`; the
            `items` that `num_items` counts and `items_per_second`, over all ranks; the `flops_per_second` of
            this rank and their part of the peak as `mfu`, after `count_flops` has counted a step; and the
            same of the last second or more as `window`.
        """
        return step_clock.times()

    # End

    def free_memory(self, *objects: Any) -> list[Any]:
        """Removes all prepared objects, collects garbage and empties the cache of the device.

        Args:
            *objects: Further objects to release.

        Returns:
            A list with None for each of `objects`, as in `a, b = accelerator.free_memory(a, b)`.
        """
        self._runtime.session.clear()
        self._runtime.strategy.release()
        self._accumulation.reset()
        return devices.release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """Calls `free_memory`."""
        return self.free_memory(*objects)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        """Returns the object itself, because a process has one run."""
        return self


def _refuse_to_split(**kwargs: Any) -> NoReturn:
    """Raises an error in place of the context of context parallelism, until objects are prepared."""
    raise StateError("maybe_context_parallel() comes after prepare(): prepare the model first.")


def _replaceable_functions() -> Any:
    """Returns the module in which clients replace functions, such as `fsdp2_prepare_model`."""
    return accelerator
