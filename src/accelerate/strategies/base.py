"""Interface of a strategy, that is, how objects are wrapped and how gradients are exchanged in a run.

`resolve_strategy` chooses the class, and `Accelerator` calls the methods. The base class implements the
strategy of one process. What does not depend on the class is in layers (`layer.py`), whose hooks a strategy
calls. Everything about checkpoints is in `strategy.state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from accelerate import torch_private
from accelerate.base import ConfigurationError, DistributedType, PreparationError, wrong_value
from accelerate.checkpointing import Payload
from accelerate.data_loader import data_groups
from accelerate.hooks import is_unloaded
from accelerate.logging import get_logger
from accelerate.ops import current_transport, is_dtensor
from accelerate.optimizer import AcceleratedOptimizer, steps_in_backward
from accelerate.planning import Layout
from accelerate.precision import RECIPES, Precision, PrecisionRequest, resolve_precision
from accelerate.scheduler import AcceleratedScheduler, StepPolicy
from accelerate.state import Topology
from accelerate.strategies.batches import arguments_of, loss_of
from accelerate.strategies.dtensors import (
    PLAIN_KINDS,
    clip_values,
    gradient_norm,
    groups_of,
    has_dtensors,
    is_sharded,
    local_gradients,
    scale_down,
)
from accelerate.strategies.layer import Layer, entered
from accelerate.strategies.request import Context
from accelerate.strategies.session import (
    Bundle,
    Kind,
    placeholder_kind,
    warn_of_held_loaders,
    warn_of_mistakes,
)
from accelerate.strategies.state import StrategyState
from accelerate.weights import move_module
from accelerate.wrappers import extract_model_from_parallel

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

    Attributes:
        layers: Layers of the run in their order, which `compose` sets.
        admit: Adds the layers that a model or optimizer needs, which `compose` sets.
    """

    distributed_type: ClassVar[DistributedType | None] = None  # public label; None is that of the hardware
    state_class: ClassVar[type[StrategyState]] = StrategyState
    shards_models: ClassVar[bool] = False  # whether `parallelize` shards the parameters of models
    holds_whole_models: bool = True  # whether each rank has all parameters of a prepared model
    replicas: int = 1  # number of ranks whose gradients the backward pass averages
    holds_gradients: bool = True  # whether gradients are in `grad` between steps, and may be changed
    has_plain_weights: bool = True  # whether parameters are the weights that optimizers step, in their dtype
    flattens_parameters: bool = False  # whether optimizers step parts of flat parameters (FSDP 1)
    gathers_shards: bool = False  # whether forwards all-gather parameters, maybe in another dtype
    make_scaler: Callable[..., torch.amp.GradScaler] | None = None  # for fp16; None uses that of the hardware
    engine_wrapped: Any = None  # engine that holds model and optimizer
    groups_of: Callable[[Tensor], tuple[Any, ...]] = staticmethod(groups_of)  # that shard a parameter
    keeps_sharding: Callable[[nn.Module], bool] = staticmethod(is_sharded)
    """Returns whether the meshes and placements of a model are kept, which is sharded already."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.session = context.session
        self.layers: tuple[Layer, ...] = ()
        self.admit: Callable[[Strategy, Any], None] = _add_none
        self.precision = self.choose_precision()

    # Settings

    @property
    def state(self) -> StrategyState:
        """State of the prepared models and optimizers, a new object that has no values of its own."""
        state = self.state_class(self)
        for layer in self.layers:
            state = layer.state_of(state)
        return state

    def choose_precision(self) -> Precision:
        """Returns the mixed precision of the run, which has no effect where an engine casts by itself."""
        return precision_of(self, self.context.mixed_precision)

    @property
    def loader_mesh(self) -> Any:
        """Mesh over which loaders shard batches, or None to shard them over all ranks."""
        mesh = self.context.mesh
        for layer in self.layers:
            mesh = layer.loader_mesh(mesh)
        return mesh

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
        refuse_placeholders(bundle)
        new_models, new_optimizers = bundle.new(Kind.MODEL), bundle.new(Kind.OPTIMIZER)
        for model in new_models:
            self.admit(self, model)
        for layer in self.layers:
            layer.check(bundle)
        self.session.remap(new_optimizers)
        for model in new_models:
            self.check_model(model)
            for layer in self.layers:
                layer.check_model(model)
        for optimizer in new_optimizers:
            self.check_optimizer(optimizer)
        prepared, topology = self.session.prepared, self.context.topology
        warn_of_mistakes(bundle, prepared.models, prepared.optimizers, is_alone=topology.size == 1)
        if others := bundle.of(Kind.OTHER):
            warn_of_held_loaders(
                others,
                already_sharded=bool(self.context.request.dataloader_config.already_sharded),
                num_groups=data_groups(self.loader_mesh, topology.size, topology.rank)[0],
            )

    def check_model(self, model: nn.Module) -> None:
        """Raises an error for a model that this strategy cannot train."""

    def check_optimizer(self, optimizer: Any) -> None:
        """Raises an error for an optimizer that cannot work, and logs a warning for one that steps early."""
        name = type(optimizer).__name__
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        offloaded = [parameter for parameter in parameters if parameter.is_meta and is_unloaded(parameter)]
        num_trainable = sum(parameter.requires_grad for parameter in offloaded)
        if num_trainable:
            raise PreparationError(
                f"{num_trainable} trainable parameters of {name} are offloaded. Their values are loaded for "
                "each forward, so an update would be lost. Pass the optimizer other parameters only, such as "
                "those of an adapter, or train the model without offload."
            )
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
                f"of {self.replicas} processes would diverge. Use one process, or another optimizer."
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
        with ExitStack() as stack:
            optimizers = [*self.session.prepared.optimizers, *bundle.optimizers]
            stack.enter_context(self.session.following(optimizers))
            for layer in self.layers:
                stack.enter_context(layer.preparing(bundle))
            yield

    def adapt_loader(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Returns the loader to shard, with batches of the size that the strategy needs."""
        return loader

    def wrap_model(self, model: nn.Module, *, to_device: bool, evaluation: bool) -> nn.Module:
        """Returns the model on its device, in the mixed precision of the run, wrapped and compiled.

        Args:
            to_device: Whether to move it.
            evaluation: Whether to leave out the wrapper, which only training needs.
        """
        self.admit(self, model)
        convert = partial(self.session.change, change=self.precision.convert)
        if not evaluation:
            for layer in self.layers:
                layer.transform_model(model)
        moves = {"to_device": to_device, "evaluation": evaluation}
        kept = (layer.keep_model(model, convert, **moves) for layer in self.layers)
        wrapped = next((self.compile(each) for each in kept if each is not None), None)
        if wrapped is None:
            if to_device and (evaluation or not self.shards_models):
                self.session.change(model, partial(move_module, device=self.context.device))
            converted = convert(model)
            wrapped = self.compile(converted) if evaluation else self.parallelize(converted)
        if not evaluation:
            for layer in self.layers:
                layer.finish_model(model, wrapped)
        return wrapped

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, *, to_device: bool) -> AcceleratedOptimizer:
        """Returns the optimizer in a wrapper that steps when gradients are complete."""
        self.session.remap([optimizer])
        gradients = self.context.gradients
        skips_nonfinite = bool(gradients.plugin_kwargs.get("skip_nonfinite_updates"))
        if skips_nonfinite and not self.holds_gradients:
            raise wrong_value(
                "skip_nonfinite_updates", True, "the engine of this run holds the gradients", "Leave it out"
            )
        scaler = self.precision.scaler
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if scaler is not None and (_divides_models(self) or _any_distributed(parameters)):
            torch_private.unscale_shards(scaler)
        prepared = AcceleratedOptimizer(optimizer, device_placement=to_device, scaler=scaler)
        prepared.gradient_state, prepared.skips_nonfinite = gradients, skips_nonfinite
        if self.replicas > 1:
            prepared.mean_loss = mean_over_ranks
        return prepared

    def wrap_scheduler(
        self, scheduler: Any, step_with_optimizer: StepPolicy, split_batches: bool
    ) -> AcceleratedScheduler:
        """Returns the scheduler in a wrapper that steps when its optimizers do."""
        wrapped = AcceleratedScheduler(
            scheduler,
            self.session.optimizers_of(scheduler) or list(self.session.prepared.optimizers),
            step_with_optimizer=step_with_optimizer,
            split_batches=split_batches,
        )
        topology = self.context.topology
        wrapped.num_processes, _ = data_groups(self.loader_mesh, topology.size, topology.rank)
        return wrapped

    def transform_loader(self, loader: Any, model: nn.Module) -> Any:
        """Returns a loader of this rank's part of each batch, from a prepared loader and a prepared model."""
        for layer in self.layers:
            loader = layer.transform_loader(loader, model)
        return loader

    def parallelize(self, model: nn.Module) -> nn.Module:
        """Returns a placed model in the wrapper of the strategy, compiled if the run compiles."""
        return self.compile(model)

    def compile(self, model: nn.Module) -> nn.Module:
        """Returns a model compiled as the run requests, or the model itself."""
        for layer in self.layers:
            model = layer.compile(model)
        return model

    def unwrap(self, model: nn.Module, *, keep_fp32: bool = True, keep_compiled: bool = True) -> nn.Module:
        """Returns the module of the user in a prepared model.

        Args:
            keep_fp32: Whether to keep the forward under autocast.
        """
        return extract_model_from_parallel(model, keep_fp32, keep_compiled)

    # Steps

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Computes the gradients of a loss, which is scaled for gradient accumulation already."""
        if self.precision.scale_loss is not None:
            loss = self.precision.scale_loss(loss)
        loss.backward(**kwargs)  # type: ignore[no-untyped-call]
        if self.layers and self.context.gradients.sync_gradients:
            for layer in self.layers:
                layer.backward_done()

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
            batch: The batch, as for `Accelerator.forward_backward`.
            loss_fn: Returns the loss of outputs and target, or None if the model computes it.
            backward: Computes the gradients of a loss, for a model that is called as usual.
            scale: Returns a loss times its weight in the window, for a model that a layer runs.
            is_sum: Whether losses are sums over items.
        """
        inner = self.unwrap(model, keep_compiled=False)
        for layer in self.layers:
            total = layer.train_batch(inner, batch, loss_fn, scale, is_sum=is_sum)
            if total is None:
                continue
            if self.context.gradients.sync_gradients:
                for other in self.layers:
                    other.backward_done()
            return total
        args, kwargs, target = arguments_of(inner, batch, loss_fn is not None)
        loss = loss_of(model(*args, **kwargs), target, loss_fn)
        backward(loss)
        return loss.detach().float()

    def no_sync(self, model: nn.Module, *, early: bool = False) -> AbstractContextManager[Any]:
        """Returns a context manager in which the backward pass of a model exchanges no gradients.

        Args:
            early: Whether gradients are reduced to shards in each micro-batch, and replicas of shards are
                averaged in the last one.
        """
        return entered(layer.no_sync(model, early=early) for layer in self.layers)

    def unsharded(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        """Returns a context manager in which each rank has whole parameters, also in forwards."""
        return entered(layer.unsharded(models) for layer in reversed(self.layers))

    def join(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Returns a context manager in which ranks may have different numbers of batches."""
        return nullcontext()

    def clip_grad_norm(self, parameters: Parameters, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scales gradients so that their total norm is at most `max_norm`, and returns the norm before."""
        parameters = as_list(parameters)
        if not (self.shards_models or _divides_models(self) or _any_distributed(parameters)):
            if max_norm == math.inf:  # torch would multiply by 1, which others see as a change
                return torch.nn.utils.get_total_norm(local_gradients(parameters), norm_type)
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        norm = partial(gradient_norm, device=self.context.device, find_groups=self.groups_of)
        for layer in self.layers:
            norm = partial(layer.gradient_norm, norm)
        total = norm(parameters, norm_type)
        if max_norm != math.inf:
            scale_down(parameters, total, max_norm)
        return total

    def clip_grad_value(self, parameters: Parameters, clip_value: float) -> None:
        """Clamps each gradient element to the range from `-clip_value` to `clip_value`."""
        parameters = as_list(parameters)
        is_distributed = self.shards_models or _any_distributed(parameters)
        clip = clip_values if is_distributed else torch.nn.utils.clip_grad_value_
        clip(parameters, clip_value)

    # End

    def release(self) -> None:
        """Releases everything that the strategy holds in addition to the prepared objects."""
        for layer in self.layers:
            layer.release()


def as_list(parameters: Tensor | Iterable[Tensor]) -> list[Tensor]:
    """Returns one parameter or an iterable of parameters as a list."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _add_none(strategy: Strategy, obj: object) -> None:
    """Adds no layer to a strategy that is not composed."""


def keep_none(model: nn.Module) -> bool:
    """Returns that a strategy keeps no sharding."""
    return False


def precision_of(strategy: Strategy, name: str) -> Precision:
    """Returns the mixed precision of a name for a strategy, with the handlers of the user."""
    context, request = strategy.context, strategy.context.request
    return resolve_precision(
        PrecisionRequest(
            name,
            context.backend,
            request.autocast,
            request.scaler,
            strategy.make_scaler,
            [handler for handler in request.handlers if isinstance(handler, RECIPES)],
            request.fp8_library,
            strategy.gathers_shards,
            lambda *args: context.functions().convert_model_to_fp8_ao(*args),
        )
    )


def refuse_placeholders(bundle: Bundle) -> None:
    """Raises an error for placeholders of objects that an engine builds, in a run without it."""
    placeholders = [type(obj) for obj in bundle.objects if placeholder_kind(obj) is not None]
    if placeholders:
        builder, plugin = placeholders[0].built_by
        raise PreparationError(
            f"{', '.join(kind.__name__ for kind in placeholders)} is a placeholder for an object that "
            f"{builder} builds from its configuration, and this run does not use {builder}. Pass "
            f"{plugin} to Accelerator, or prepare an optimizer and a scheduler of torch."
        )


def payloads_of_engine(names: Iterable[str], topology: Topology) -> list[Payload]:
    """Returns the files written by an engine whose checksums this rank computes."""
    own = sorted(names)[topology.local_rank :: topology.local_size]
    return [Payload(name, None, keep_file) for name in own]


def keep_file(content: object, path: Path) -> None:
    """Writes nothing, because the file exists already."""


def _divides_models(strategy: Strategy) -> bool:
    """Returns whether ranks have the gradients of different parameters of a model."""
    return any(layer.divides_models for layer in strategy.layers)


_gradient_of = attrgetter("grad")  # `map` with it runs no bytecode for each parameter


def _any_distributed(parameters: Sequence[Tensor]) -> bool:
    """Returns whether a parameter or gradient is a DTensor, which torch does not clip with plain tensors."""
    tensors = [*parameters, *map(_gradient_of, parameters)]
    return not PLAIN_KINDS.issuperset(map(type, tensors)) and has_dtensors(tensors)


def refuse_sharded_model(model: nn.Module, fix: str) -> None:
    """Raises an error for a model that is sharded already, with the name of the first sharded module."""
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "FullyShardedDataParallel" in kinds:
            how = "wrapped by FullyShardedDataParallel"
        elif "FSDPModule" in kinds:
            how = "sharded by fully_shard"
        elif has_dtensors(module.parameters(recurse=False)):
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
