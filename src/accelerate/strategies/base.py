"""The interface of a strategy; the base class is one plain process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelerate.base import ConfigurationError, DistributedType, PreparationError, wrong_value
from accelerate.checkpointing import ModuleShards, OptimizerShards, Part, Payload, ShardedState
from accelerate.hooks import get_state_dict_offloaded_model, is_any_offloaded
from accelerate.logging import get_logger
from accelerate.ops import is_dtensor
from accelerate.optimizer import AcceleratedOptimizer, steps_in_backward
from accelerate.planning import Layout
from accelerate.precision import RECIPES, Precision, PrecisionRequest, resolve_precision
from accelerate.state import Topology
from accelerate.strategies.axes import resolve_sequence_axis
from accelerate.strategies.fsdp import named_parameters, names_by_group
from accelerate.strategies.session import (
    Bundle,
    Context,
    Kind,
    as_list,
    find_unrelated_optimizers,
    find_unstepped_models,
    parameter_ids,
    placeholder_kind,
)
from accelerate.weights import move_module
from accelerate.wrappers import compiler_for, extract_model_from_parallel

logger = get_logger(__name__)

Parameters = Iterable[Tensor]
Fill = Callable[[nn.Module, Mapping[str, Any]], None]
"""Loads whole weights, tensors by name, into a module."""


class Strategy:
    """One plain process: the null case of every strategy.

    All ranks build the same strategy and call its methods in the same order: `check` and `prepare` for each
    `prepare` call, then `no_sync`, `backward` and `clip_grad_norm` in each step, `unwrap` to get a model
    back, `release` once.
    """

    distributed_type: ClassVar[DistributedType | None] = None  # the label users see; None: the hardware's
    saves_shards: bool = False  # whether each process saves its own part of models and optimizers
    holds_whole_models: bool = True  # whether each process holds all parameters of a prepared model
    replicas: int = 1  # number of processes whose gradients the backward pass averages
    holds_gradients: bool = True  # whether gradients are in parameters between steps, and may be changed
    gathers_shards: bool = False  # whether shards are gathered for each forward, maybe in another dtype
    make_scaler: Callable[..., torch.amp.GradScaler] | None = None  # for float16; None: the hardware's

    def __init__(self, context: Context) -> None:
        self.context = context
        self.session = context.session
        self.sequences = resolve_sequence_axis(context.request.parallelism, context.mesh)
        self.precision = self.choose_precision()
        # computes gradients of a loss already divided by the accumulation steps; called on all ranks
        self.backward: Callable[..., None] = self.precision.backward

    def choose_precision(self) -> Precision:
        """Return the number format; engines that own theirs answer with the null format."""
        return self.format_named(self.context.mixed_precision)

    def format_named(self, name: str) -> Precision:
        """Return a number format with what the user says of it."""
        context, request = self.context, self.context.request
        return resolve_precision(
            PrecisionRequest(
                name,
                context.backend,
                request.autocast,
                request.scaler,
                self.make_scaler,
                [handler for handler in request.handlers if isinstance(handler, RECIPES)],
                request.fp8_library,
                self.gathers_shards,
                lambda *given: self.session.functions().convert_model_to_fp8_ao(*given),
            )
        )

    @property
    def engine_wrapped(self) -> Any:
        """The engine that holds model and optimizer; None without one."""
        return None

    def memory_layout(self) -> Layout:
        """Return how the memory of a training step is shared between devices, for a plan."""
        if self.context.topology.size > 1:
            raise ConfigurationError(
                f"plan_memory: {type(self).__name__} shares the memory of a step in a way that no plan "
                "computes. Plan on one process, or with DistributedDataParallel, FSDP, tensor parallelism or "
                "DeepSpeed."
            )
        return Layout()

    @property
    def loader_mesh(self) -> Any:
        """The mesh over which loaders shard batches; `None` shards them over all processes."""
        return self.context.mesh

    def check(self, bundle: Bundle) -> None:
        """Refuse what cannot work and warn about what looks like a mistake, before anything is changed."""
        if placeholders := [type(obj) for obj in bundle.objects if placeholder_kind(obj) is not None]:
            builder, plugin = placeholders[0].built_by
            raise PreparationError(
                f"{', '.join(kind.__name__ for kind in placeholders)} is a placeholder for what {builder} "
                f"builds from its configuration, and this run does not use {builder}. Pass {plugin} to "
                "Accelerator, or prepare an optimizer and a scheduler of torch."
            )
        new_models, new_optimizers = bundle.new(Kind.MODEL), bundle.new(Kind.OPTIMIZER)
        prepared = self.session.prepared
        self.session.remap(new_optimizers)
        for model in new_models:
            self.check_model(model)
        for optimizer in new_optimizers:
            self.check_optimizer(optimizer)
        if not new_optimizers:
            return
        for message in find_unstepped_models(new_models, [*prepared.optimizers, *bundle.optimizers]):
            logger.warning(message)
        models = [*prepared.models, *bundle.models]
        is_single = self.context.topology.size == 1
        stepped = parameter_ids([*prepared.optimizers, *bundle.optimizers]) if is_single else None
        for message in find_unrelated_optimizers(new_optimizers, models, stepped) if models else []:
            logger.warning(message)

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that this method cannot train."""

    def check_optimizer(self, optimizer: Any) -> None:
        """Refuse an optimizer that this method cannot step, and say what it will not do."""
        if not steps_in_backward(optimizer):
            return
        name = type(optimizer).__name__
        if self.replicas > 1:
            raise PreparationError(
                f"{name} updates parameters in the backward pass, before gradients are averaged: the models "
                f"of {self.replicas} processes would drift apart. Use one process, or another optimizer."
            )
        steps = self.context.gradients.num_steps
        if steps > 1:
            logger.warning(
                f"{name} updates parameters in each backward pass, so gradient_accumulation_steps={steps} "
                f"does not make its batches larger: it only divides losses by {steps}."
            )

    def prepare(self, bundle: Bundle) -> Bundle:
        """Prepare all objects of `bundle` in place: loaders and models, then optimizers, then schedulers."""
        preparer = self.session.preparer
        models, optimizers = bundle.new(Kind.MODEL), bundle.new(Kind.OPTIMIZER)
        old = [*models, *optimizers]
        models, optimizers = self.precision.initialize(models, optimizers)
        changed = {id(before): after for before, after in zip(old, [*models, *optimizers], strict=True)}
        bundle.objects = [changed.get(id(obj), obj) for obj in bundle.objects]
        bundle.replace(Kind.LOADER, preparer.prepare_data_loader)
        with self.session.following([*self.session.prepared.optimizers, *bundle.optimizers]):
            bundle.replace(Kind.MODEL, preparer.prepare_model)
        bundle.replace(Kind.OPTIMIZER, preparer.prepare_optimizer)
        bundle.replace(Kind.SCHEDULER, lambda scheduler, _: preparer.prepare_scheduler(scheduler))
        return bundle

    def adapt_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a loader with batches as this method takes them, before it is sharded."""
        return loader

    def prepare_model(self, model: nn.Module, *, to_device: bool, evaluation: bool) -> nn.Module:
        """Return `model` placed, converted, wrapped and compiled; for evaluation not wrapped."""
        if to_device:
            self.place(model)
        model = self.convert(model)
        return self.compile(model) if evaluation else self.wrap(model)

    def place(self, model: nn.Module) -> None:
        """Move `model` to the device of this process; optimizers step parameters replaced there."""
        before = dict(model.named_parameters())
        move_module(model, self.context.device)
        after = dict(model.named_parameters())
        if all(after.get(name) is old for name, old in before.items()):
            return
        self.session.replace((old, model.get_parameter(name)) for name, old in before.items())
        self.session.remap([*self.session.waiting, *self.session.prepared.optimizers])

    def convert(self, model: nn.Module) -> nn.Module:
        """Return `model` in the number format; optimizers step the parameters that new layers have."""
        before = dict(model.named_parameters())
        converted = self.precision.convert(model)
        self.session.replace(
            (before[name], new) for name, new in converted.named_parameters() if name in before
        )
        self.session.remap(self.session.waiting)
        return converted

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return `model`, which is placed, in the wrapper of this method, and compiled."""
        return self.compile(model)

    def compile(self, model: nn.Module) -> nn.Module:
        """Return `model` compiled as the run asks; the very object when it does not."""
        return compiler_for(self.context.request.dynamo)(model)

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, *, to_device: bool) -> AcceleratedOptimizer:
        """Return `optimizer` in our wrapper, with the scaler of the number format."""
        self.session.remap([optimizer])
        if self.context.gradients.plugin_kwargs.get("skip_nonfinite_updates") and not self.holds_gradients:
            raise wrong_value(
                "skip_nonfinite_updates", True, "the engine of this run holds the gradients", "Leave it out"
            )
        return AcceleratedOptimizer(optimizer, device_placement=to_device, scaler=self.precision.scaler)

    def unwrap(self, model: nn.Module, *, keep_fp32: bool = True, keep_compiled: bool = True) -> nn.Module:
        """Return the user's module out of `model`; `keep_fp32` keeps its forward under autocast."""
        return extract_model_from_parallel(model, keep_fp32, keep_compiled)

    def unsharded(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Return a context in which each rank has whole parameters, and forwards need no other rank."""
        return nullcontext()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which the backward pass of `model` exchanges no gradients."""
        return nullcontext()

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context in which ranks may run out of batches at different times."""
        return nullcontext()

    def clip_grad_norm(self, parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their joint norm is at most `max_norm`; return the norm they had."""
        parameters = as_list(parameters)
        if not _any_distributed(parameters):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        from accelerate.strategies.fsdp import gradient_norm, scale_down

        norm = gradient_norm(parameters, norm_type, self.context.device)
        scale_down(parameters, norm, max_norm)
        return norm

    def clip_grad_value(self, parameters: Parameters, clip_value: float) -> None:
        """Cut each gradient element to the range from `-clip_value` to `clip_value`."""
        parameters = as_list(parameters)
        if not _any_distributed(parameters):
            torch.nn.utils.clip_grad_value_(parameters, clip_value)
            return
        from accelerate.strategies.fsdp import clip_values

        clip_values(parameters, clip_value)

    def engine_part(self, index: int, model: nn.Module, folder: Path | None = None) -> Part | None:
        """Return what saves (to a folder) and loads a model, number `index` of those in engines, with
        its optimizer and scheduler; None where each is saved by itself."""
        return None

    def gradient_order(self, model: nn.Module) -> list[int]:
        """Return what the rounding of summed gradients depends on: an order of the parameters, or nothing."""
        return []

    def adopt_gradient_order(self, model: nn.Module, order: Sequence[int]) -> None:
        """Round summed gradients as a run did that was interrupted; called on all ranks."""

    def optimizer_owners(self, optimizers: Sequence[Any], *, gather: bool) -> list[Any]:
        """Return what saves each optimizer as one process would, if gathered, and loads it; on all ranks."""
        return list(optimizers)

    def model_shards(self, model: nn.Module) -> ShardedState:
        """Return what saves and loads this process's part of a model; no other process takes part."""
        return ModuleShards(self.unwrap(model, keep_compiled=False))

    def live_weights(self, model: nn.Module) -> Mapping[str, Any]:
        """Return what whole weights of a prepared model must fit: by name what has `shape` and `dtype`."""
        state: Mapping[str, Any] = self.unwrap(model, keep_compiled=False).state_dict(keep_vars=True)
        return state

    def optimizer_shards(self, optimizer: Any, models: Sequence[nn.Module]) -> ShardedState:
        """Return what saves and loads this process's part of an optimizer's state."""
        return OptimizerShards(optimizer, self.parameter_names(optimizer, models))

    def parameter_names(self, optimizer: Any, models: Sequence[nn.Module]) -> list[list[list[str]]]:
        """Return for each group of an optimizer, for each parameter, the names that it has in some models."""
        inner = [self.unwrap(model, keep_compiled=False) for model in models]
        return names_by_group(optimizer, [named_parameters(model) for model in inner])

    def load_weights(self, model: nn.Module, state: Mapping[str, Any], fill: Fill) -> None:
        """Load whole weights into a prepared model; called on all ranks, each of which has them."""
        fill(self.unwrap(model, keep_compiled=False), state)

    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        """Return the whole state of `model` on every rank that asks."""
        inner = self.unwrap(model, keep_compiled=False) if unwrap else model
        if is_any_offloaded(inner):
            return get_state_dict_offloaded_model(inner)
        state: dict[str, Any] = inner.state_dict()
        return state

    def release(self) -> None:
        """Release what the method holds beyond the prepared objects."""


def payloads_of_engine(names: Iterable[str], topology: Topology) -> list[Payload]:
    """Return those of the files written by an engine that this process of the machine seals."""
    own = sorted(names)[topology.local_rank :: topology.local_size]
    return [Payload(name, None, keep_file) for name in own]


def keep_file(content: Any, path: Path) -> None:
    """Write nothing: the file exists already."""


def _any_distributed(parameters: Sequence[Tensor]) -> bool:
    """Whether some parameters or gradients are DTensors, which torch does not clip with others."""
    return any(is_dtensor(tensor) for parameter in parameters for tensor in (parameter, parameter.grad))


def refuse_sharded_model(model: nn.Module, fix: str) -> None:
    """Raise for a model that something else has sharded, naming the first of its modules that is."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        parameters = list(module.parameters(recurse=False))
        if "FullyShardedDataParallel" in kinds:
            how = "wrapped by FullyShardedDataParallel"
        elif "FSDPModule" in kinds:
            how = "sharded by fully_shard"
        elif any(map(is_dtensor, parameters)):
            how = "distributed over a device mesh: its parameters are DTensors"
        else:
            continue
        where = f"{type(model).__name__}.{name}" if name else type(model).__name__
        raise PreparationError(
            f"{where} is already {how}, and `prepare` shards or replicates whole models only. {fix}"
        )


def refuse_split_model(model: nn.Module, reason: str) -> None:
    """Raise for a model that a device map has put on several devices."""
    device_map = getattr(model, "hf_device_map", None) or {}
    devices = {str(device) for device in device_map.values()}
    if len(devices) > 1:
        raise PreparationError(
            f"{type(model).__name__} is on several devices ({', '.join(sorted(devices))}) by its device "
            f"map, {reason}. Load it without device_map='auto' (or with a map of one device for each "
            "process), or launch one process."
        )
