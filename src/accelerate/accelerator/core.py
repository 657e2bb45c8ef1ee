"""Accelerator: what a script talks to."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn, TypeVar, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import data_loader as loaders, devices, plugins, strategies, tracking
from accelerate.accelerator.arguments import _UNSET, build_request
from accelerate.accelerator.communication import Communication
from accelerate.accelerator.contexts import Contexts
from accelerate.accelerator.gradients import Gradients
from accelerate.accelerator.introspection import Introspection
from accelerate.accelerator.memory_plan import MemoryPlanning
from accelerate.accelerator.persistence import Persistence
from accelerate.accelerator.runtime import build_runtime
from accelerate.accelerator.tracking import Tracking
from accelerate.base import (
    DynamoBackend,
    DynamoName,
    LoggerType,
    PrecisionName,
    PrecisionType,
    RNGName,
    RNGType,
    StateError,
    check_os_kernel,
    environ,
    wrong_value,
)
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.parallelism_config import ParallelismConfig
from accelerate.scheduler import AcceleratedScheduler, StepPolicy
from accelerate.state import ProcessControl

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
Placement = Sequence[bool | None] | None


class Accelerator(
    Introspection,
    Gradients,
    Communication,
    Contexts,
    MemoryPlanning,
    Tracking,
    Persistence,
    ProcessControl,
):
    """Runs one training loop unchanged on one process or many.

    Build it first, pass model, optimizer, loaders and scheduler through `prepare`, and call `backward`
    instead of `loss.backward()`.

    Args:
        device_placement: whether `prepare` moves objects and loaders move batches to the device of this
            process.
        split_batches: whether each process gets a part of each batch instead of batches of its own; better
            set in `dataloader_config`.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; the default is what the launcher set, else "no".
        gradient_accumulation_steps: backward passes for each step of the optimizers.
        cpu: stay on the CPU although the machine has something faster.
        dataloader_config: how loaders are sharded; a live object, fields assigned later count at the next
            `prepare`.
        deepspeed_plugin: how DeepSpeed trains, one plugin or several by name; the default is what the
            launcher set, else training goes without it. A live object like the next one.
        fsdp_plugin: how parameters are sharded between processes; the default is what the launcher set,
            else they are whole on each. A live object, fields assigned later count at the next `prepare`.
        torch_tp_plugin: refused: `parallelism_config` says how many processes share layers.
        megatron_lm_plugin: how Megatron-LM trains; the default is what the launcher set, else training goes
            without it. A live object, fields assigned later count at the next `prepare`.
        rng_types: random generators that are made equal on all ranks at the start of each epoch; the default
            is the one of the sampler.
        log_with: trackers, by name or as objects; "all" takes every one that is installed.
        project_dir: folder of the project.
        project_config: folders, checkpoint names and limits.
        gradient_accumulation_plugin: accumulation with all its choices, instead of
            `gradient_accumulation_steps`.
        step_scheduler_with_optimizer: `True` steps prepared schedulers once per process and update,
            "per_update" once per update, `False` whenever they are called.
        kwargs_handlers: arguments for DistributedDataParallel, the gradient scaler, autocast, the process
            group and the profiler; one of each kind.
        dynamo_backend: compiler backend for `torch.compile`.
        dynamo_plugin: compilation with all its choices, instead of `dynamo_backend`.
        deepspeed_plugins: another name for `deepspeed_plugin`.
        parallelism_config: sizes of the axes of the device mesh; the default is what the launcher set, else
            one axis of all processes.

    Raises:
        ConfigurationError: for a value that cannot work, with the fix.
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
        self._runtime = build_runtime(request, self, _replaceable_functions)
        self.state = self._runtime.state
        self.gradient_state = self._runtime.gradient_state
        self.step = 0
        axis = self._runtime.strategy.axes.sequence
        self._cp_context: Callable[..., AbstractContextManager[Any]] = axis.split_batch
        if axis.splits_buffers:
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
        self.log_with = tracking.filter_trackers(log_with, request.project.logging_dir)
        prepared = self._runtime.prepared
        self._models = prepared.models
        self._optimizers = prepared.optimizers
        self._schedulers = prepared.schedulers
        self._dataloaders = prepared.loaders
        self._custom_objects = prepared.custom
        for note in request.notes:
            logger.warning(note)
        check_os_kernel()

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of float16 training; may be replaced by one of the same interface."""
        return self._runtime.strategy.precision.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self._runtime.strategy.precision.scaler = scaler

    # Prepare

    @overload
    def prepare(self, a: A, /, *, device_placement: Placement = None) -> A: ...
    @overload
    def prepare(self, a: A, b: B, /, *, device_placement: Placement = None) -> tuple[A, B]: ...
    @overload
    def prepare(self, a: A, b: B, c: C, /, *, device_placement: Placement = None) -> tuple[A, B, C]: ...
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
    ) -> tuple[Any, ...]: ...
    @overload
    def prepare(self, *args: Any, device_placement: Placement = None) -> Any: ...
    def prepare(self, *args: Any, device_placement: Placement = None) -> Any:
        """Return models, optimizers, schedulers and loaders made ready for this run; call it on all ranks.

        Args:
            *args: objects in any order and number; others and those already prepared are returned unchanged.
            device_placement: for each object whether it is moved to the device; `None` leaves it to the run.

        Returns:
            The objects in the order given; one object in, that object out. For type checkers each keeps its
            type; what wraps it passes on its attributes.

        Raises:
            PreparationError: if an object cannot be trained in this run.
        """
        if device_placement is not None and len(device_placement) != len(args):
            reason = f"it has {len(device_placement)} entries for {len(args)} objects"
            fix = "Give one entry for each object, or leave it out"
            raise wrong_value("device_placement", device_placement, reason, fix)
        strategy, bundle = self._runtime.strategy, strategies.Bundle(args, device_placement)
        axis, kind = strategy.axes.sequence, strategies.Kind
        strategy.check(bundle)
        if axis.splits_buffers:
            self._prepare_cp(*bundle.objects)
        with strategy.preparing(bundle):
            bundle.replace(kind.LOADER, self.prepare_data_loader)
            bundle.replace(kind.MODEL, self.prepare_model)
            bundle.replace(kind.OPTIMIZER, self.prepare_optimizer)
            bundle.replace(kind.SCHEDULER, lambda scheduler, _: self.prepare_scheduler(scheduler))
        if bundle.models:
            bundle.replace(kind.LOADER, lambda loader, _: axis.transform_loader(loader, bundle.models[0]))
        return bundle.result()

    def _prepare_cp(self, *args: Any) -> tuple[Any, ...]:
        """Prepares models for sharded sequences, in a method that clients replace to set `_cp_context`."""
        axis = self._runtime.strategy.axes.sequence
        for obj in args:
            if isinstance(obj, nn.Module) and not strategies.is_prepared(obj):
                axis.transform_model(obj)
        self._cp_context = axis.split_batch
        return args

    def prepare_model(
        self, model: Model, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Model:
        """Return `model` on its device, in the number format and wrapper of the run.

        Args:
            model: a module; on one process the object itself is returned.
            device_placement: whether to move it; `None` leaves it to the run.
            evaluation_mode: leave out what only training needs, such as DistributedDataParallel.
        """
        for known in self._models:
            if model is known or model is self.unwrap_model(known):
                return known  # type: ignore[return-value]
        self._runtime.strategy.check_model(model)
        moves = self.device_placement if device_placement is None else device_placement
        moves = moves and not getattr(model, "hf_device_map", None)
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
        """Return a loader that gives this process its share of the batches, on its device.

        Args:
            data_loader: a torch loader.
            device_placement: whether batches are moved; `None` leaves it to the run.
            slice_fn_for_dispatch: cuts one rank's part out of a batch that process 0 has read; the default
                cuts tensors along dimension 0.
        """
        if strategies.is_prepared(data_loader):
            self._remember(self._dataloaders, data_loader)
            return data_loader
        adapted = self._runtime.strategy.adapt_loader(data_loader)
        config = self.dataloader_config
        moves = self.device_placement if device_placement is None else device_placement
        loader: Any = strategies.mark_prepared(
            _replaceable_functions().prepare_data_loader(
                adapted,
                self.device,
                num_processes=self.num_processes,
                process_index=self.process_index,
                split_batches=config.split_batches,
                put_on_device=moves,
                rng_types=self.rng_types.copy(),
                dispatch_batches=config.dispatch_batches,
                even_batches=config.even_batches,
                slice_fn_for_dispatch=slice_fn_for_dispatch,
                use_seedable_sampler=config.use_seedable_sampler,
                data_seed=config.data_seed,
                non_blocking=config.non_blocking,
                use_stateful_dataloader=config.use_stateful_dataloader,
                torch_device_mesh=self._runtime.strategy.loader_mesh,
                use_constant_memory_sampler=config.use_constant_memory_sampler,
                already_sharded=config.already_sharded,
            )
        )
        self._dataloaders.append(loader)
        return loader  # type: ignore[no-any-return]

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """Return `optimizer` in a wrapper that steps when gradients are complete.

        Args:
            optimizer: built on the parameters of a prepared model.
            device_placement: whether its state is moved; `None` leaves it to the run.
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            self._remember(self._optimizers, optimizer)
            return optimizer
        moves = self.device_placement if device_placement is None else device_placement
        prepared = self._runtime.strategy.wrap_optimizer(optimizer, to_device=moves)
        self._optimizers.append(prepared)
        self._runtime.strategy.precision.set_optimizers(self._optimizers)
        return prepared  # type: ignore[return-value]  # it passes on what `optimizer` has

    def prepare_scheduler(self, scheduler: A) -> A:
        """Return `scheduler` in a wrapper that follows the steps of its optimizer.

        Args:
            scheduler: built on an optimizer that is prepared.
        """
        if isinstance(scheduler, AcceleratedScheduler):
            self._remember(self._schedulers, scheduler)
            return scheduler
        prepared = self._runtime.strategy.wrap_scheduler(
            scheduler, self.step_scheduler_with_optimizer, self.split_batches
        )
        self._schedulers.append(prepared)
        return prepared  # type: ignore[return-value]  # it passes on what `scheduler` has

    @staticmethod
    def _remember(objects: list[Any], obj: Any) -> None:
        if not any(obj is known for known in objects):
            objects.append(obj)

    def unwrap_model(
        self, model: Model, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Model:
        """Return the user's module out of a prepared one; the very object when nothing wraps it.

        Args:
            model: a prepared module.
            keep_fp32_wrapper: keep the forward that runs under autocast and returns float32.
            keep_torch_compile: keep the compiled module around it.
        """
        return self._runtime.strategy.unwrap(  # type: ignore[return-value]
            model, keep_fp32=keep_fp32_wrapper, keep_compiled=keep_torch_compile
        )

    # Data

    def deepspeed_ulysses_dl_adapter(self, dl: A, model: nn.Module) -> A:
        """Return a loader that gives each process its part of sequences; the very one where they are whole.

        Loaders that come with their model in one `prepare` call need no such call.

        Args:
            dl: a prepared loader of dictionaries with input_ids, position_ids and labels.
            model: the prepared model.
        """
        return self._runtime.strategy.axes.sequence.transform_loader(dl, model)  # type: ignore[no-any-return]

    def skip_first_batches(self, dataloader: Loader, num_batches: int = 0) -> Loader:
        """Return a loader like `dataloader` that begins after `num_batches` batches, without reading them.

        Args:
            dataloader: a prepared loader.
            num_batches: batches of this process to leave out.
        """
        return loaders.skip_first_batches(dataloader, num_batches)

    # End

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget all prepared objects, collect garbage and empty the device's cache.

        Args:
            *objects: further objects to release.

        Returns:
            One `None` for each of `objects`: `a, b = accelerator.free_memory(a, b)`.
        """
        self._runtime.session.clear()
        self._runtime.strategy.release()
        self._runtime.weights = None
        self.step = 0
        return devices.release_memory(*objects)

    def clear(self, *objects: Any) -> list[Any]:
        """Do what `free_memory` does."""
        return self.free_memory(*objects)

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        """Return this object: the state of a run exists once in a process."""
        return self


def _refuse_to_split(**kwargs: Any) -> NoReturn:
    """Raises an error in place of the context of context parallelism, until objects are prepared."""
    raise StateError("maybe_context_parallel() comes after prepare(): prepare the model first.")


def _replaceable_functions() -> Any:
    """Return the module in which clients replace `fsdp2_prepare_model` and others."""
    from accelerate import accelerator

    return accelerator
