"""Interface of a strategy, that is, how objects are wrapped and how gradients are exchanged in a run.

`resolve_strategy` chooses the class, and `Accelerator` calls the methods. The base class implements the
strategy of one process. Everything about checkpoints is in `strategy.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelerate import torch_private
from accelerate.base import ConfigurationError, DistributedType, PreparationError, wrong_value
from accelerate.checkpointing import Payload
from accelerate.data_loader import data_groups
from accelerate.logging import get_logger
from accelerate.ops import current_transport, is_dtensor
from accelerate.optimizer import AcceleratedOptimizer, steps_in_backward
from accelerate.planning import Layout
from accelerate.precision import RECIPES, Precision, PrecisionRequest, resolve_precision
from accelerate.scheduler import AcceleratedScheduler, StepPolicy
from accelerate.state import Topology
from accelerate.strategies.bundle import Bundle, Kind, as_list, parameter_ids, placeholder_kind
from accelerate.strategies.composition import resolve_axes
from accelerate.strategies.dtensors import (
    clip_values,
    gradient_norm,
    gradient_sync,
    is_sharded,
    keep_gathered,
    named_parameters,
    place_unsharded,
    reduction_in_replicas,
    scale_down,
    units_of,
)
from accelerate.strategies.mistakes import find_held_loaders, find_unrelated_optimizers, find_unstepped_models
from accelerate.strategies.request import Context, RunRequest
from accelerate.strategies.state import StrategyState
from accelerate.weights import move_module
from accelerate.wrappers import compiler_for, extract_model_from_parallel

if TYPE_CHECKING:
    from accelerate.strategies.sharded_models import ShardedModel

logger = get_logger(__name__)

Parameters = Iterable[Tensor]


class Strategy:
    """Base class of all strategies, which implements that of one process.

    All ranks create the same strategy, and `Accelerator` calls its methods in the same order on all ranks:

    1. In each call of `prepare`: `check`, and inside of `preparing` `adapt_loader`, `wrap_model`,
       `wrap_optimizer` and `wrap_scheduler` for each object.
    2. In each step: `no_sync`, `backward`, `clip_grad_norm`.
    3. At the end: `release`.

    A strategy does not call the `Accelerator`.
    """

    distributed_type: ClassVar[DistributedType | None] = None  # public label; None is that of the hardware
    state_class: ClassVar[type[StrategyState]] = StrategyState
    holds_whole_models: bool = True  # whether each rank has all parameters of a prepared model
    replicas: int = 1  # number of ranks whose gradients the backward pass averages
    holds_gradients: bool = True  # whether gradients are in `grad` between steps, and may be changed
    has_plain_weights: bool = True  # whether parameters are the weights that optimizers step, in their dtype
    flattens_parameters: bool = False  # whether optimizers step parts of flat parameters (FSDP 1)
    gathers_shards: bool = False  # whether forwards all-gather parameters, maybe in another dtype
    make_scaler: Callable[..., torch.amp.GradScaler] | None = None  # for fp16; None uses that of the hardware

    def __init__(self, context: Context) -> None:
        self.context = context
        self.session = context.session
        self.axes = resolve_axes(
            context.request.parallelism, context.mesh, context.device, context.mixed_precision
        )
        self.precision = self.choose_precision()
        self.sharded: dict[nn.Module, ShardedModel] = {}
        """Models that were sharded before they were prepared."""

    # Settings

    @property
    def state(self) -> StrategyState:
        """State of the prepared models and optimizers, a new object that has no values of its own."""
        if self.axes.pipeline is None:
            return self.state_class(self)
        from accelerate.strategies.pipeline import PipelineState

        return PipelineState(self)

    def choose_precision(self) -> Precision:
        """Returns the mixed precision of the run, which has no effect where an engine casts by itself."""
        return self.resolve_precision(self.context.mixed_precision)

    def resolve_precision(self, name: str) -> Precision:
        """Returns the mixed precision of a name, with the handlers of the user."""
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
                self._convert_layers,
            )
        )

    def _convert_layers(self, *args: Any) -> None:
        self.context.functions().convert_model_to_fp8_ao(*args)

    @property
    def engine_wrapped(self) -> Any:
        """Engine that holds model and optimizer, or None."""
        return None

    @property
    def loader_mesh(self) -> Any:
        """Mesh over which loaders shard batches, or None to shard them over all ranks."""
        return self._mesh_for(self.sharded.values())

    def _mesh_for(self, sharded: Iterable[ShardedModel]) -> Any:
        """Returns the mesh of the run, or else that of the model with the most ranks for each batch."""
        meshes = [each.loader_mesh for each in sharded] if self.context.mesh is None else []
        return max(meshes, key=lambda mesh: int(mesh.size(1)), default=self.context.mesh)

    def memory_layout(self) -> Layout:
        """Returns how the memory of a training step is sharded over the ranks, for `plan_memory`."""
        if self.context.topology.size > 1:
            raise ConfigurationError(
                f"plan_memory: {type(self).__name__} shards the memory of a step in a way that no plan "
                "computes. Plan on one process, or with DistributedDataParallel, FSDP, tensor parallelism or "
                "DeepSpeed."
            )
        return Layout()

    # Checks

    def check(self, bundle: Bundle) -> None:
        """Raises errors and logs warnings about the objects of a call, before anything is changed."""
        if placeholders := [type(obj) for obj in bundle.objects if placeholder_kind(obj) is not None]:
            builder, plugin = placeholders[0].built_by
            raise PreparationError(
                f"{', '.join(kind.__name__ for kind in placeholders)} is a placeholder for an object that "
                f"{builder} builds from its configuration, and this run does not use {builder}. Pass "
                f"{plugin} to Accelerator, or prepare an optimizer and a scheduler of torch."
            )
        new_models, new_optimizers = bundle.new(Kind.MODEL), bundle.new(Kind.OPTIMIZER)
        prepared = self.session.prepared
        for model in filter(self.keeps_sharding, [*new_models, *(prepared.models if new_optimizers else ())]):
            self._free(model)
        self.session.remap(new_optimizers)
        for model in new_models:
            self.check_model(model)
            self.axes.expert.check_model(model)
            if self.axes.pipeline is not None:
                self.axes.pipeline.check_model(model)
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

    def check_others(self, objects: Sequence[Any]) -> None:
        """Logs a warning if objects that are not prepared have loaders, and several ranks read them."""
        if not objects or self.context.request.dataloader_config.already_sharded:
            return
        topology = self.context.topology
        if data_groups(self.loader_mesh, topology.size, topology.rank)[0] > 1:
            for message in find_held_loaders(objects):
                logger.warning(message)

    def _free(self, model: nn.Module) -> None:
        """Frees units that a forward has left gathered, and records the shards of their parameters."""
        gathered = named_parameters(model)
        for unit in units_of(model):
            unit.reshard()
        self.session.replace((gathered[name], shard) for name, shard in named_parameters(model).items())

    def check_model(self, model: nn.Module) -> None:
        """Raises an error for a model that this strategy cannot train."""

    def keeps_sharding(self, model: nn.Module) -> bool:
        """Returns whether the meshes and placements of a model are kept, which is sharded already."""
        return False

    def is_in_stages(self, model: nn.Module) -> bool:
        """Returns whether the layers of a model are on different ranks of a pipeline."""
        return self.axes.pipeline is not None and model in self.axes.pipeline.pipelines

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises an error for an optimizer that cannot work, and logs a warning for one that steps early."""
        name = type(optimizer).__name__
        is_split = self.context.topology.size > 1 and not self.holds_whole_models
        if is_split and any("LBFGS" in kind.__name__ for kind in type(optimizer).__mro__):
            raise PreparationError(
                f"{name} joins all parameters into one vector, and each rank has a part of them. Use "
                "DistributedDataParallel, which replicates the model, or another optimizer."
            )
        if not steps_in_backward(optimizer):
            return
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

    # Prepare

    @contextmanager
    def preparing(self, bundle: Bundle) -> Iterator[None]:
        """Surrounds the replacement of all objects of one `prepare` call, as a context manager.

        Inside, optimizers follow the parameters that are replaced.
        """
        known = {id(model) for model in self.session.prepared.models}
        with self.session.following([*self.session.prepared.optimizers, *bundle.optimizers]):
            for model in bundle.new(Kind.MODEL):
                if self.axes.pipeline is not None and self.axes.pipeline.splits(model):
                    self.axes.pipeline.keep_structure(model, self.precision)
                self.shard_experts(model)
                self._split_into_stages(model)
            for model in bundle.models:  # loaders, which are prepared before models, need their meshes
                if id(model) not in known and self.keeps_sharding(model):
                    self.adopt(model)
            yield
        self._name_parameters(bundle)

    def _name_parameters(self, bundle: Bundle) -> None:
        """Gathers the names of the parameters of optimizers, of which each rank of a pipeline steps some."""
        if self.axes.pipeline is None:
            return
        prepared = self.session.prepared
        models = list(dict.fromkeys([*prepared.models, *bundle.models]))
        state: Any = self.state
        for optimizer in dict.fromkeys([*prepared.optimizers, *bundle.optimizers]):
            state.gather_names(optimizer, models)

    def _split_into_stages(self, model: nn.Module) -> None:
        """Removes the layers of other ranks from a model, if the run has a pipeline and trains the model.

        Called on all ranks.
        """
        pipeline = self.axes.pipeline
        if pipeline is None or not pipeline.splits(model):
            return
        before = dict(model.named_parameters())
        self.axes.tensor.transform_model(model)
        self.session.replace((old, model.get_parameter(name)) for name, old in before.items())
        whole = list(model.parameters())
        pipeline.transform_model(model)
        own = set(model.parameters())
        whole += [parameter for child in model.children() for parameter in child.parameters()]  # absent ones
        self.session.drop(parameter for parameter in whole if parameter not in own)
        self.session.remap([*self.session.waiting, *self.session.prepared.optimizers])

    def shard_experts(self, model: nn.Module) -> None:
        """Shards the experts of a model in place if nothing else of it is sharded."""

    def adapt_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Returns the loader to shard, with batches of the size that the strategy needs."""
        return loader

    def wrap_model(self, model: nn.Module, *, to_device: bool, evaluation: bool) -> nn.Module:
        """Returns the model on its device, in the mixed precision of the run, wrapped and compiled.

        Args:
            model: A model that is not prepared.
            to_device: Whether to move it.
            evaluation: Whether to leave out the wrapper, which only training needs.
        """
        if not evaluation:
            self.shard_experts(model)
        if self.keeps_sharding(model):
            return self._wrap_sharded(model, to_device=to_device, evaluation=evaluation)
        if to_device:
            self.place(model)
        model = self.convert(model)
        return self.compile(model) if evaluation else self.parallelize(model)

    def adopt(self, model: nn.Module) -> ShardedModel:
        """Returns the meshes of a model that is sharded already, which define the batches of ranks.

        Called on all ranks.
        """
        from accelerate.strategies.sharded_models import ShardedModel

        if model in self.sharded:
            return self.sharded[model]
        self._free(model)
        device_type = self.context.device.type
        if self.axes.pipeline is not None and self.is_in_stages(model):
            stages = self.axes.pipeline.pipelines[model].stages.values()
            adopted = ShardedModel(model, device_type, self.context.mesh, stages)
        else:
            adopted = ShardedModel(model, device_type)
        together = [*self.sharded.values(), adopted]
        mesh = self._mesh_for(self.sharded.values() if self.session.prepared.loaders else together)
        size = self.context.topology.size
        groups, _ = data_groups(mesh, size, self.context.topology.rank)
        if not all(each.fits(mesh, size) for each in together):
            raise PreparationError(
                f"The ranks of {type(model).__name__} work on {adopted.loader_mesh.size(0)} batches at a "
                f"time by its meshes, and loaders of this run are for {groups}. Prepare the model before its "
                "loaders or in the same call, or pass parallelism_config with the sizes of its meshes. Use "
                "one layout of ranks in a run."
            )
        for scheduler in self.session.prepared.schedulers:
            scheduler.num_processes = groups
        adopted.divide_by_batches()
        self.sharded[model] = adopted
        self.holds_whole_models = False
        return adopted

    def _wrap_sharded(self, model: nn.Module, *, to_device: bool, evaluation: bool) -> nn.Module:
        """Returns a model that is sharded already, without a wrapper."""
        adopted = self.adopt(model)
        if to_device:
            place_unsharded(model, self.context.device)
        layers = set(model.modules())
        converted = self.convert(model)
        if set(converted.modules()) - layers:
            raise PreparationError(
                f"mixed_precision={self.context.mixed_precision!r} replaces layers of "
                f"{type(model).__name__}, which is sharded already, and the new layers are not. Pass the "
                "model before it is sharded, or convert its layers before that and leave it out."
            )
        if evaluation:
            adopted.replicas.clear()
        adopted.send_unsharded()
        return self.compile(converted)

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, *, to_device: bool) -> AcceleratedOptimizer:
        """Returns the optimizer in a wrapper that steps when gradients are complete."""
        self.session.remap([optimizer])
        if self.context.gradients.plugin_kwargs.get("skip_nonfinite_updates") and not self.holds_gradients:
            raise wrong_value(
                "skip_nonfinite_updates", True, "the engine of this run holds the gradients", "Leave it out"
            )
        scaler = self.precision.scaler
        if (
            scaler is not None
            and any(
                is_dtensor(parameter) for group in optimizer.param_groups for parameter in group["params"]
            )
            or scaler is not None
            and self.axes.pipeline is not None
        ):
            torch_private.unscale_shards(scaler)
        prepared = AcceleratedOptimizer(optimizer, device_placement=to_device, scaler=scaler)
        if self.replicas > 1:
            prepared.mean_loss = partial(_mean_loss, ref(self))
        return prepared

    def wrap_scheduler(
        self, scheduler: Any, step_with_optimizer: StepPolicy, split_batches: bool
    ) -> AcceleratedScheduler:
        """Returns the scheduler in a wrapper that steps when its optimizers do."""
        wrapped = AcceleratedScheduler(
            scheduler,
            self._optimizers_of(scheduler) or list(self.session.prepared.optimizers),
            step_with_optimizer=step_with_optimizer,
            split_batches=split_batches,
        )
        topology = self.context.topology
        wrapped.num_processes, _ = data_groups(self.loader_mesh, topology.size, topology.rank)
        return wrapped

    def assign_optimizers(self) -> None:
        """Sets the optimizers of schedulers that were prepared before their optimizers."""
        for scheduler in self.session.prepared.schedulers:
            own = self._optimizers_of(scheduler.scheduler)
            if own and own != scheduler.optimizers and not scheduler.belongs_to_engine:
                scheduler.optimizers = own
                scheduler.record_call()

    def _optimizers_of(self, scheduler: Any) -> list[AcceleratedOptimizer]:
        inner = getattr(scheduler, "optimizer", None)
        return [each for each in self.session.prepared.optimizers if _is_or_wraps(each, inner)]

    def place(self, model: nn.Module) -> None:
        """Moves a model to the device of this process.

        Optimizers step parameters that were replaced.
        """
        before = dict(model.named_parameters())
        move_module(model, self.context.device)
        after = dict(model.named_parameters())
        if all(after.get(name) is old for name, old in before.items()):
            return
        self.session.replace((old, model.get_parameter(name)) for name, old in before.items())
        self.session.remap([*self.session.waiting, *self.session.prepared.optimizers])

    def convert(self, model: nn.Module) -> nn.Module:
        """Returns a model in the mixed precision of the run.

        Optimizers step the parameters of new layers.
        """
        before = dict(model.named_parameters())
        converted = self.precision.convert(model)
        self.session.replace(
            (before[name], new) for name, new in converted.named_parameters() if name in before
        )
        self.session.remap(self.session.waiting)
        return converted

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Returns a placed model in the wrapper of the strategy, compiled if the run compiles."""
        return self.compile(model)

    def compile(self, model: nn.Module) -> nn.Module:
        """Returns a model compiled as the run requests, or the model itself."""
        return compiler_for(self.context.request.dynamo)(model)

    def unwrap(self, model: nn.Module, *, keep_fp32: bool = True, keep_compiled: bool = True) -> nn.Module:
        """Returns the module of the user in a prepared model.

        Args:
            model: A prepared model.
            keep_fp32: Whether to keep the forward under autocast.
            keep_compiled: Whether to keep the compiled module.
        """
        return extract_model_from_parallel(model, keep_fp32, keep_compiled)

    # Averages

    def check_averages(self, model: nn.Module) -> None:
        """Raises an error for a prepared model whose weights cannot be averaged."""
        if not self.has_plain_weights:
            raise PreparationError(
                f"{type(self).__name__} keeps the weights of models itself, and accelerator.average() cannot "
                "follow them. Train with DistributedDataParallel, FSDP or parallelism_config."
            )

    def stepped_weights(self, optimizer: AcceleratedOptimizer, model: nn.Module) -> list[Tensor]:
        """Returns the weights of a model on this rank that a prepared optimizer steps."""
        own = set(map(id, model.parameters()))
        return [parameter for parameter in optimizer.parameters() if id(parameter) in own]

    # Steps

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Computes the gradients of a loss, which is scaled for gradient accumulation already."""
        self.precision.backward(loss, **kwargs)
        if self.context.gradients.sync_gradients:
            for adopted in self.sharded.values():
                adopted.average_gradients()

    def mean_loss(self, loss: Any) -> Any:
        """Returns the mean over all ranks of the loss of a closure, and other values unchanged.

        Called on all ranks.
        """
        return mean_over_ranks(loss)

    def forward_backward(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Any,
        backward: Callable[[Tensor], None],
        scale: Callable[[Tensor], Tensor],
        *,
        is_sum: bool,
    ) -> Tensor:
        """Computes the gradients of a batch, and returns its loss.

        Args:
            model: A prepared model.
            batch: The batch, as for `Accelerator.forward_backward`.
            loss_fn: Returns the loss of outputs and target, or None if the model computes it.
            backward: Computes the gradients of a loss, for a model that is not in a pipeline.
            scale: Returns a loss times its weight in the window, for a model in a pipeline.
            is_sum: Whether losses are sums over items.
        """
        from accelerate.strategies.pipeline import arguments_of, loss_of

        inner = self.unwrap(model, keep_compiled=False)
        pipeline = self.axes.pipeline.pipelines.get(inner) if self.axes.pipeline is not None else None
        if pipeline is None:
            args, kwargs, target = arguments_of(inner, batch, loss_fn is not None)
            loss = loss_of(model(*args, **kwargs), target, loss_fn)
            backward(loss)
            return loss.detach().float()
        scaler = self.precision.scaler
        to_backward = (lambda loss: scaler.scale(scale(loss))) if scaler is not None else scale
        if scaler is not None:  # a rank without the last stage scales no loss
            scaler.scale(torch.zeros((), device=self.context.device))
        gradients = self.context.gradients
        reduces = gradients.sync_gradients or gradients.plugin_kwargs.get("sync_each_batch", False)
        total: Tensor = pipeline.train(batch, loss_fn, to_backward, is_sum=is_sum, reduces_gradients=reduces)
        if gradients.sync_gradients:
            pipeline.sum_shared_gradients()
            for adopted in self.sharded.values():
                adopted.average_gradients()
        return total

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Returns a context manager in which the backward pass of a model exchanges no gradients."""
        return gradient_sync(model, enabled=False) if self.sharded else nullcontext()

    def early_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Returns a context manager for a micro-batch before the last one whose gradients are reduced early.

        Replicas of shards are averaged in the last micro-batch only.
        """
        return reduction_in_replicas(model) if self.sharded else nullcontext()

    def unsharded(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Returns a context manager in which each rank has whole parameters, also in forwards."""
        units = (unit for model in models for unit in units_of(model)) if self.sharded else ()
        gathered = keep_gathered((unit, torch_private.is_freed_after_forward(unit)) for unit in units)
        return self.with_experts(gathered, models)

    def with_experts(
        self, gathered: AbstractContextManager[Any], models: Sequence[nn.Module]
    ) -> AbstractContextManager[Any]:
        """Returns a context manager that gathers the experts of models inside of another one."""
        return _with_experts(gathered, models) if self.axes.expert.size > 1 else gathered

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Returns a context manager in which ranks may have different numbers of batches."""
        return nullcontext()

    def clip_grad_norm(self, parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales gradients so that their total norm is at most `max_norm`, and returns the norm before."""
        parameters = as_list(parameters)
        if not _any_distributed(parameters) and self.axes.pipeline is None:
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        norm = self.gradient_norm(parameters, norm_type)
        scale_down(parameters, norm, max_norm)
        return norm

    def gradient_norm(self, parameters: Sequence[Tensor], norm_type: float, **options: Any) -> Tensor:
        """Returns the norm of all gradients over all ranks, of which each is counted once.

        Called on all ranks.
        """
        pipeline = self.axes.pipeline
        if pipeline is None:
            return gradient_norm(parameters, norm_type, self.context.device, **options)
        repeated = pipeline.repeated_parameters()
        own = [parameter for parameter in parameters if id(parameter) not in repeated]
        norm: Tensor = gradient_norm(own, norm_type, self.context.device, **options)
        combined: Tensor = pipeline.combine_norms(norm, norm_type)
        return combined

    def clip_grad_value(self, parameters: Parameters, clip_value: float) -> None:
        """Clamps each gradient element to the range from `-clip_value` to `clip_value`."""
        parameters = as_list(parameters)
        if not _any_distributed(parameters):
            torch.nn.utils.clip_grad_value_(parameters, clip_value)
            return
        clip_values(parameters, clip_value)

    # End

    def release(self) -> None:
        """Releases everything that the strategy holds in addition to the prepared objects."""
        for adopted in self.sharded.values():
            adopted.remove_hooks()
        self.sharded.clear()
        self.holds_whole_models = type(self).holds_whole_models
        if self.axes.pipeline is not None:
            self.axes.pipeline.pipelines.clear()


@contextmanager
def _with_experts(gathered: AbstractContextManager[Any], models: Sequence[nn.Module]) -> Iterator[None]:
    from accelerate.strategies.axes import whole_experts

    with gathered, whole_experts(models):
        yield


def payloads_of_engine(names: Iterable[str], topology: Topology) -> list[Payload]:
    """Returns the files written by an engine whose checksums this rank computes."""
    own = sorted(names)[topology.local_rank :: topology.local_size]
    return [Payload(name, None, keep_file) for name in own]


def keep_file(content: Any, path: Path) -> None:
    """Writes nothing, because the file exists already."""


def _is_or_wraps(optimizer: Any, inner: Any) -> bool:
    """Returns whether an optimizer is another one, or wraps it, in any number of wrappers."""
    while optimizer is not None and optimizer is not inner:
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer is not None


def _any_distributed(parameters: Sequence[Tensor]) -> bool:
    """Returns whether a parameter or gradient is a DTensor, which torch does not clip with plain tensors."""
    return any(is_dtensor(parameter) or is_dtensor(parameter.grad) for parameter in parameters)


def refuse_sharded_model(model: nn.Module, fix: str) -> None:
    """Raises an error for a model that is sharded already, with the name of the first sharded module."""
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
        raise PreparationError(f"{where} is already {how}, which this run does not keep. {fix}")


def refuse_join() -> NoReturn:
    """Raises an error for `join_uneven_inputs`, which models that are sharded do not support."""
    raise ConfigurationError(
        "join_uneven_inputs does not work with FSDP or tensor parallelism: a rank without batches does not "
        "take part in the all-gathers of the others. Leave even_batches on, or use windows()."
    )


def require_plugin(model: nn.Module, request: RunRequest) -> None:
    """Raises an error for a trained model that no plugin shards over the dimension "dp_shard" of the mesh."""
    mesh = request.parallelism
    if mesh is None or request.fsdp is not None or not mesh.dp_shard_enabled:
        return
    if is_sharded(model) or not any(p.requires_grad for p in model.parameters()):
        return
    fix = "Pass fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)"
    raise wrong_value(
        "dp_shard_size",
        mesh.dp_shard_size,
        f"no plugin configures how the parameters of {type(model).__name__} are sharded",
        f"{fix}, launch with --use_fsdp --fsdp_version 2, or shard the model before `prepare`",
    )


def refuse_split_model(model: nn.Module, reason: str) -> None:
    """Raises an error for a model that a device map has placed on several devices."""
    device_map = getattr(model, "hf_device_map", None) or {}
    devices = {str(device) for device in device_map.values()}
    if len(devices) > 1:
        raise PreparationError(
            f"{type(model).__name__} is on several devices ({', '.join(sorted(devices))}) by its device "
            f"map, {reason}. Load it without device_map='auto' (or with a map of one device for each "
            "process), or launch one process."
        )


def mean_over_ranks(loss: Any) -> Any:
    """Returns the mean over all ranks of a number or tensor that is not distributed, and others unchanged."""
    if isinstance(loss, Tensor) and not is_dtensor(loss):
        return current_transport().reduce(loss.detach(), "mean")
    if isinstance(loss, (int, float)):
        return float(current_transport().reduce(torch.tensor(loss, dtype=torch.float64), "mean"))
    return loss


def _mean_loss(strategy: ref[Strategy], loss: Any) -> Any:
    """Returns the mean loss of a closure, also after the `Accelerator` and its strategy were deleted."""
    owner = strategy()  # it has the optimizers, which have this function
    return mean_over_ranks(loss) if owner is None else owner.mean_loss(loss)
