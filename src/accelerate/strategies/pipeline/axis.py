"""Pipeline parallelism, in which ranks of an axis have different layers of a model.

Source: https://docs.pytorch.org/docs/stable/distributed.pipelining.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import PreparationError, StateError, listed
from accelerate.ops import is_dtensor
from accelerate.parallelism_config import MeshAxis
from accelerate.planning import Layout
from accelerate.strategies.dtensors import combine_powers, named_parameters
from accelerate.strategies.gradient_scales import GradientScales
from accelerate.strategies.layer import Layer, Norm, WeakStrategy
from accelerate.strategies.pipeline.runner import Pipeline
from accelerate.strategies.pipeline.stages import is_split
from accelerate.strategies.pipeline.state import PipelineState
from accelerate.strategies.pipeline.verification import Verification
from accelerate.strategies.session import Bundle, Kind
from accelerate.strategies.state import StrategyState
from accelerate.strategies.trial_steps import needs_all_parameters

AXIS = MeshAxis.PP.value


class KeptStructures(Layer):
    """Structures of models before any layer changes them, with which their pipelines are compared."""

    def __init__(self, strategy: object) -> None:
        self._strategy = WeakStrategy(strategy)
        self.verifications: dict[nn.Module, Verification] = {}

    @contextmanager
    def preparing(self, bundle: Bundle) -> Iterator[None]:
        precision = self._strategy().precision
        for model in filter(is_trained, bundle.new(Kind.MODEL)):
            self.verifications[model] = Verification(model, precision.autocast, precision.name)
        try:
            yield
        finally:
            self.verifications.clear()


class PipelineAxis(Layer):
    """Axis along which ranks have different layers.

    Attributes:
        pipelines: Pipelines of the models that are prepared for training.
        optimizer_names: Names of the parameters of prepared optimizers, see `PipelineState`.
        first_rank: First rank of the run with the stages of this rank.
    """

    divides_models = True
    divided_by = "pp_size"

    def __init__(self, strategy: Any) -> None:
        self._strategy, context = WeakStrategy(strategy), strategy.context
        self._config, self._device, mesh = (
            context.request.parallelism.pp_handler,
            context.device,
            context.mesh,
        )
        self.size = mesh[AXIS].size()
        self.group = mesh.get_group(AXIS)
        self.pipelines: dict[nn.Module, Pipeline] = {}
        self._end_watch: Callable[[], None] | None = None
        self.optimizer_names: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._scales: WeakKeyDictionary[Any, GradientScales] = WeakKeyDictionary()
        dim = mesh.mesh_dim_names.index(AXIS)
        row = mesh.mesh.movedim(dim, 0)[dist.get_rank(self.group)]
        self.first_rank = int(row.min())
        self._columns = mesh.mesh.movedim(dim, 0).reshape(self.size, -1).T.tolist()

    def check(self, bundle: Bundle) -> None:
        """Raises an error for an optimizer that computes with parameters of all stages."""
        for optimizer in filter(needs_all_parameters, bundle.new(Kind.OPTIMIZER)):
            raise PreparationError(
                f"{type(optimizer).__name__} updates a parameter depending on the others, such as on the "
                "norm of all gradients, and a rank of a pipeline has those of its own stages. Use an "
                "optimizer that updates each parameter by itself, such as AdamW, and "
                "accelerator.clip_grad_norm_ for the norm of all gradients."
            )

    def check_model(self, model: nn.Module) -> None:
        """Raises an error for a trained model that cannot be split."""
        if is_trained(model):
            check_model(model)

    @contextmanager
    def preparing(self, bundle: Bundle) -> Iterator[None]:
        """Splits trained models, and gathers the names of the parameters that each rank steps."""
        for model in filter(is_trained, bundle.new(Kind.MODEL)):
            self._keep_own_layers(model)
        yield
        prepared, state = self._strategy().session.prepared, self._strategy().state
        models = list(dict.fromkeys([*prepared.models, *bundle.models]))
        for optimizer in dict.fromkeys([*prepared.optimizers, *bundle.optimizers]):
            state.gather_names(optimizer, models)
            if self not in optimizer.observers:
                optimizer.observers = (*optimizer.observers, self)
            if self._config.verify and optimizer not in self._scales:
                self._scales[optimizer] = GradientScales(self.group, self._device)
                optimizer.observers = (*optimizer.observers, self._scales[optimizer])

    def group_added(self, optimizer: Any) -> None:
        """Leaves parameters of other ranks out of a group that was added to a prepared optimizer.

        Called on all ranks of the pipeline.
        """
        session, state = self._strategy().session, self._strategy().state
        session.remap([optimizer])
        state.gather_names(optimizer, session.prepared.models)

    def _keep_own_layers(self, model: nn.Module) -> None:
        """Removes the layers of other ranks from a model, and their parameters from optimizers."""
        session, whole = self._strategy().session, list(model.parameters())
        self._split(model)
        own = set(named_parameters(model).values())
        whole += model.parameters()  # with absent ones
        session.drop(parameter for parameter in whole if parameter not in own)
        session.remap([*session.waiting, *session.prepared.optimizers])

    def _split(self, model: nn.Module) -> None:
        pipeline = Pipeline(model, self._config, self.group, self._device)
        structures = (layer for layer in self._strategy().layers if isinstance(layer, KeptStructures))
        pipeline.verification = next((each.verifications.pop(model, None) for each in structures), None)
        self.pipelines[model] = pipeline
        if self._end_watch is None:
            self._end_watch = torch_private.watch_clipping(self._refuse_clipping)
        own = named_parameters(model)
        by_ranks: dict[tuple[int, ...], list[str]] = {}
        for name, ranks in pipeline.holders.items():
            if name in pipeline.parameter_names:
                by_ranks.setdefault(tuple(sorted(ranks)), []).append(name)
        for holders, names in sorted(by_ranks.items()):
            if len(holders) > 1:
                enumerate_groups: Any = dist.new_subgroups_by_enumeration
                group, _ = enumerate_groups([[column[rank] for rank in holders] for column in self._columns])
                if dist.get_rank(self.group) in holders:
                    pipeline.shared.append(([name for name in names if name in own], group))

    def parts_of(self, model: nn.Module) -> list[nn.Module] | None:
        """Returns the modules of this rank's stages."""
        pipeline = self.pipelines.get(model)
        return None if pipeline is None else list(pipeline.stages.values())

    def parts_to_shard(self, model: nn.Module) -> list[nn.Module] | None:
        """Returns the modules of this rank's stages, which FSDP shards.

        Raises:
            PreparationError: A parameter is on the meta device.
        """
        pipeline = self.pipelines.get(model)
        if pipeline is None:
            return None
        parameters = named_parameters(model)
        tied = {
            parameters[name]
            for name, stages in pipeline.model.holders.items()
            if len(stages) > 1 and name in parameters
        }
        for stage in pipeline.stages.values():
            stage.whole_on_ranks |= tied.intersection(stage.parameters())
        if on_meta := [name for name, p in parameters.items() if p.is_meta]:
            raise PreparationError(
                f"{listed(on_meta)} of {type(model).__name__} have no values yet, and a pipeline does not "
                "load them from rank 0. Load the model on each rank before `prepare`."
            )
        return list(pipeline.stages.values())

    def train_batch(
        self,
        model: nn.Module,
        batch: object,
        loss_fn: Any,
        scale: Callable[[Tensor], Tensor],
        *,
        is_sum: bool,
    ) -> Tensor | None:
        pipeline = self.pipelines.get(model)
        if pipeline is None:
            return None
        scaler, gradients = self._strategy().precision.scaler, self._strategy().context.gradients
        to_backward = (lambda loss: scaler.scale(scale(loss))) if scaler is not None else scale
        # A rank without the last stage scales no loss, but the scaler and the gradients of a window need it.
        to_backward(torch.zeros((), device=self._device))
        reduces = gradients.sync_gradients or gradients.plugin_kwargs.get("sync_each_batch", False)
        total: Tensor = pipeline.train(batch, loss_fn, to_backward, is_sum=is_sum, reduces_gradients=reduces)
        if gradients.sync_gradients:
            pipeline.sum_shared_gradients()
            pipeline.drop_unused_gradients()
            for optimizer, scales in self._scales.items():
                scales.after_batch(optimizer.parameters())
        return total

    def gradient_norm(self, norm: Norm, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Returns the norm of the gradients of all stages, of which tied parameters count once."""
        repeated = self._repeated_parameters()
        own = norm([parameter for parameter in parameters if id(parameter) not in repeated], norm_type)
        is_max, own = norm_type == float("inf"), own.float()  # stages may have other dtypes
        power = own if is_max else own**norm_type
        combine_powers(power, is_max, self.group)
        return power if is_max else power ** (1.0 / norm_type)

    def state_of(self, state: StrategyState) -> StrategyState:
        return PipelineState(state.strategy, self)

    def memory_layout(self, layout: Layout) -> Layout:
        microbatches = self._config.microbatches
        return replace(layout, shards=layout.shards // self.size, stages=self.size, microbatches=microbatches)

    def release(self) -> None:
        self.pipelines.clear()
        if self._end_watch is not None:
            self._end_watch()
            self._end_watch = None

    def _refuse_clipping(self, parameters: Iterable[Tensor]) -> None:
        """Raises an error for the norm of torch, which is that of the stages of this rank."""
        own = {id(parameter) for model in self.pipelines for parameter in model.parameters()}
        if any(id(parameter) in own for parameter in parameters):
            raise StateError(
                "torch.nn.utils.clip_grad_norm_ computes the norm of the gradients of the stages of this "
                "rank only. Call accelerator.clip_grad_norm_(model.parameters(), max_norm) instead."
            )

    def _repeated_parameters(self) -> set[int]:
        """Returns the ids of parameters of this rank that an earlier rank of the pipeline has too."""
        rank = dist.get_rank(self.group)
        return {
            id(pipeline.model.model.get_parameter(name))
            for pipeline in self.pipelines.values()
            for names, _ in pipeline.shared
            for name in names
            if min(pipeline.holders[name]) < rank
        }


def is_trained(model: nn.Module) -> bool:
    """Returns whether a run trains a model, which is split into stages then."""
    return any(parameter.requires_grad for parameter in model.parameters())


def check_model(model: nn.Module) -> None:
    """Raises an error for a model whose layers cannot be on different ranks."""
    name = type(model).__name__
    if is_split(model):
        raise PreparationError(
            f"{name} was split into stages by an earlier `prepare`, so this rank has only some of its "
            "layers. Pass a model that was not prepared."
        )
    if sharded := [key for key, parameter in model.named_parameters() if is_dtensor(parameter)]:
        raise PreparationError(
            f"{listed(sharded)} of {name} are sharded before `prepare`, and a pipeline splits whole models. "
            "Pass a model that is not sharded, and set tp_size, dp_shard_size or ep_size in "
            "parallelism_config."
        )
    compiled = [
        key or name
        for key, module in model.named_modules()
        if torch_private.is_optimized_module(module)
        or torch_private.is_compiled_in_place(module)
        or torch_private.has_compiled_forward(module)
    ]
    if compiled:
        raise PreparationError(
            f"{listed(compiled)} of {name} are compiled, and a pipeline traces the code of a model. Pass a "
            "model that is not compiled, or set pp_size=1."
        )
    extra = [
        key or name
        for key, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
    if extra:
        raise PreparationError(
            f"{listed(extra)} of {name} have an extra state (get_extra_state), and a pipeline saves and "
            "gathers parameters and buffers only. Keep the state in buffers, or set pp_size=1."
        )
    config = getattr(model, "config", None)
    fields = ("output_hidden_states", "output_attentions", "output_router_logits")
    wrong = [field for field in fields if getattr(config, field, False)]
    if wrong:
        raise PreparationError(
            f"{type(config).__name__}.{wrong[0]}=True collects outputs of all layers, and each stage of a "
            f"pipeline has only its own. Set {wrong[0]}=False."
        )
