"""Models that are sharded before `prepare`, by `fully_shard`, by a tensor parallel plan or by a library.

The layer keeps the meshes and placements of such a model. It reads from them which ranks work on the same
batch, and averages the gradients that the backward pass does not average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from accelerate import torch_private
from accelerate.base import PreparationError, StateError
from accelerate.data_loader import SHARED_AXES, data_groups
from accelerate.ops import current_transport
from accelerate.parallelism_config import Data, MeshAxis, axes_with
from accelerate.strategies.axes import WholeGradients, compare_groups
from accelerate.strategies.dtensor_state import DistributedTensorState
from accelerate.strategies.dtensors import (
    NO_SECOND_DERIVATIVES,
    ONE_BACKWARD,
    Replicas,
    gradient_sync,
    keep_gathered,
    named_parameters,
    place_unsharded,
    reduction_in_replicas,
    refuse_second_derivatives,
    send_unsharded,
    sparse_weights,
    units_of,
)
from accelerate.strategies.layer import Layer, WeakStrategy
from accelerate.strategies.session import Bundle, Kind
from accelerate.strategies.state import StrategyState
from accelerate.strategies.tolerances import CHECK_REPLICAS

PIPELINE = MeshAxis.PP.value
EXPERTS = (MeshAxis.EP.value, "expert", "experts")
"""Names of dimensions along which experts are sharded, and ranks may have different batches."""
SEQUENCES = frozenset(axes_with(Data.SEQUENCES))
"""Names of dimensions along which ranks have parts of the same sequences, whose gradients differ."""
Ranks = tuple[int, ...]


class RankLayout(NamedTuple):
    """Position of one rank in the meshes of a model.

    Attributes:
        same_batch: Groups of ranks that work on the same batch as this rank, and include it.
        same_tokens: Groups of ranks that work on the same part of a batch as this rank, and include it.
        stage: Index of the rank in the pipeline.
        coordinates: Index of the rank in the mesh of each kind of parameter, without dimensions.
    """

    same_batch: tuple[Ranks, ...]
    same_tokens: tuple[Ranks, ...]
    stage: int
    coordinates: tuple[Ranks, ...]


class ShardedModel:
    """Meshes of a model that is sharded before `prepare`.

    Created on all ranks, which exchange their positions once.

    Args:
        mesh: Mesh of a run whose model has stages on different ranks, or None.

    Attributes:
        loader_mesh: Mesh of all ranks, in which ranks along "tp" work on the same batch.
        replicas: Parameters that several ranks have, and that DTensors and FSDP do not keep equal.
        same_tokens: Groups of ranks that work on the same part of a batch, or none for stages.
        comparison: Comparison of these ranks, or None.
    """

    comparison: WholeGradients | None = None

    def __init__(
        self,
        model: nn.Module,
        device_type: str,
        mesh: DeviceMesh | None = None,
        stages: Iterable[nn.Module] = (),
    ) -> None:
        parameters: Mapping[Any, Sequence[nn.Parameter]] = _by_mesh(model)
        managed: dict[Tensor, Any] = {}
        for module in (model, *stages):
            managed.update(torch_private.meshes_of_fsdp2(module))
        layouts = _gather_layouts(model, list(parameters), managed, mesh)
        batches = _disjoint_groups(model, [layout.same_batch for layout in layouts])
        parts = _disjoint_groups(model, [layout.same_tokens for layout in layouts])
        _refuse_replicated(model, managed, batches)
        self.same_tokens = [] if any(layout.stage for layout in layouts) else parts
        self.loader_mesh = DeviceMesh(
            device_type, torch.tensor(batches), mesh_dim_names=("dp_replicate", "tp")
        )
        self.replicas = list(_find_replicas(parameters, layouts, parts, sparse_weights(model)))
        self._num_batches = {
            # The gradients of experts are sums over the batches of the ranks that exchange tokens.
            parameter: prod(_count_parts(ranks, batches) for ranks in _expert_groups(parameter))
            for members in parameters.values()
            for parameter in members
            if parameter not in managed
        }
        self._hooks: list[RemovableHandle] = []
        self._frozen_experts: list[Tensor] = []

    def fits(self, mesh: DeviceMesh | None, num_ranks: int) -> bool:
        """Returns whether loaders give one batch to ranks that work on the same batch.

        Args:
            mesh: Mesh of the loaders, or None for loaders with a batch for each rank.
        """
        ranks = torch.arange(num_ranks) if mesh is None else mesh.mesh
        first = ranks  # with the same batch
        for dim, name in enumerate(() if mesh is None else mesh.mesh_dim_names or ()):
            if name in SHARED_AXES:
                first = first.narrow(dim, 0, 1)
        batch_of = dict(zip(ranks.flatten().tolist(), first.expand_as(ranks).flatten().tolist(), strict=True))
        groups = self.loader_mesh.mesh.tolist()
        return all(len({batch_of[rank] for rank in group}) == 1 for group in groups)

    def divide_by_batches(self) -> None:
        """Makes backward passes divide gradients of experts by the number of batches in their sums."""
        for parameter, count in self._num_batches.items():
            if count > 1 and parameter.requires_grad:
                hook = partial(torch.mul, other=1 / count)
                self._hooks.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]
            elif count > 1:
                self._frozen_experts.append(parameter)

    def remove_hooks(self) -> None:
        """Makes backward passes leave gradients as they are, without comparisons."""
        for hook in self._hooks:
            hook.remove()
        if self.comparison is not None:
            self.comparison.end()

    def average_gradients(self) -> None:
        """Averages the gradients that the backward pass did not average.

        Called on all ranks.

        Raises:
            StateError: Experts are trained that were frozen when the model was prepared.
        """
        if any(parameter.requires_grad for parameter in self._frozen_experts):
            raise StateError(
                "Experts are trained that were frozen when the model was prepared, and their gradients are "
                "sums over batches. Freeze experts after `prepare`, so that they can be trained again."
            )
        for group in self.replicas:
            if group.has_batches:
                group.average()

    def send_unsharded(self) -> None:
        """Sends trained parameters that are not sharded from the first rank of their groups.

        Called on all ranks.
        """
        for group in self.replicas:
            send_unsharded(group.parameters, group.group)


class KeptShardsState(DistributedTensorState):
    """State of models that were sharded before they were prepared, and of others, saved in shards."""

    saves_shards = True

    def __init__(self, state: StrategyState) -> None:
        super().__init__(state.strategy)
        self._state = state

    def gradient_order(self, model: nn.Module) -> list[int]:
        return self._state.gradient_order(model)

    def adopt_gradient_order(self, model: nn.Module, order: Sequence[int]) -> None:
        self._state.adopt_gradient_order(model, order)


class ShardedModels(Layer):
    """Models that are sharded before they are wrapped, and models in the stages of a pipeline."""

    def __init__(self, strategy: Any) -> None:
        self._strategy = WeakStrategy(strategy)
        self.context, self.session = strategy.context, strategy.session
        self._holds_whole_models = strategy.holds_whole_models
        self.models: dict[nn.Module, ShardedModel] = {}

    def check(self, bundle: Bundle) -> None:
        """Frees units that a forward has left gathered, so that optimizers step their shards."""
        prepared = self.session.prepared.models if bundle.new(Kind.OPTIMIZER) else ()
        for model in filter(self._is_kept, [*bundle.new(Kind.MODEL), *prepared]):
            self._free(model)

    @contextmanager
    def preparing(self, bundle: Bundle) -> Iterator[None]:
        known = set(map(id, self.session.prepared.models))
        for model in bundle.models:  # loaders, which are prepared before models, need their meshes
            if id(model) not in known and self._is_kept(model):
                self.adopt(model)
        yield

    def keep_model(
        self,
        model: nn.Module,
        convert: Callable[[nn.Module], nn.Module],
        *,
        to_device: bool,
        evaluation: bool,
    ) -> nn.Module | None:
        if not self._is_kept(model):
            return None
        adopted = self.adopt(model)
        if to_device:
            place_unsharded(model, self.context.device)
        layers = set(model.modules())
        converted = convert(model)
        if set(converted.modules()) - layers:
            raise PreparationError(
                f"mixed_precision={self.context.mixed_precision!r} replaces layers of "
                f"{type(model).__name__}, which is sharded already, and the new layers are not. Pass the "
                "model before it is sharded, or convert its layers before that and leave it out."
            )
        if evaluation:
            adopted.replicas.clear()
        elif self._stages_of(model) is None:
            message = ONE_BACKWARD if units_of(model) else NO_SECOND_DERIVATIVES
            converted.register_forward_hook(partial(refuse_second_derivatives, message))
            is_checked = self.context.gradients.plugin_kwargs.get(CHECK_REPLICAS, True)
            if is_checked and self.context.mesh is None and adopted.comparison is None:
                adopted.comparison = compare_groups(adopted.same_tokens, self.context.device)
        adopted.send_unsharded()
        return converted

    def model_sharded(self, model: nn.Module) -> None:
        """Averages gradients of parameters that the strategy has not sharded."""
        is_whole = any(p.requires_grad and not isinstance(p, DTensor) for p in model.parameters())
        if is_whole or self._stages_of(model) is not None:
            self.adopt(model).send_unsharded()

    def loader_mesh(self, mesh: DeviceMesh | None) -> Any:
        return self._mesh_for(self.models.values())

    def _mesh_for(self, models: Iterable[ShardedModel]) -> Any:
        """Returns the mesh of the run, or else that of the model with the most ranks for each batch."""
        meshes = [each.loader_mesh for each in models] if self.context.mesh is None else []
        return max(meshes, key=lambda mesh: int(mesh.size(1)), default=self.context.mesh)

    def drop_gradients(self, model: nn.Module) -> None:
        torch_private.drop_unreduced_gradients(model)

    def backward_done(self) -> None:
        for model, adopted in self.models.items():
            if adopted.comparison is not None:
                adopted.comparison.compare([model])
            adopted.average_gradients()

    def no_sync(self, model: nn.Module, *, early: bool) -> AbstractContextManager[Any]:
        return reduction_in_replicas(model) if early else gradient_sync(model, enabled=False)

    def unsharded(self, models: Sequence[nn.Module]) -> AbstractContextManager[Any]:
        units = (unit for model in models for unit in units_of(model))
        return keep_gathered((unit, torch_private.is_freed_after_forward(unit)) for unit in units)

    def state_of(self, state: StrategyState) -> StrategyState:
        return KeptShardsState(state) if self.models and not state.takes_dtensors else state

    def ranks_of_parameters(self) -> Mapping[int, Ranks | None]:
        found: dict[int, Ranks | None] = {}
        for model, adopted in self.models.items():
            found.update((id(parameter), None) for parameter in model.parameters())
            for each in adopted.replicas:
                ranks = tuple(dist.get_process_group_ranks(each.group)) if each.has_batches else None
                found.update((id(parameter), ranks) for parameter in each.parameters)
        return found

    def release(self) -> None:
        for adopted in self.models.values():
            adopted.remove_hooks()
        self.models.clear()
        self._strategy().holds_whole_models = self._holds_whole_models

    def adopt(self, model: nn.Module) -> ShardedModel:
        """Returns the meshes of a model, which define the batches of ranks.

        Called on all ranks.
        """
        if model in self.models:
            return self.models[model]
        self._free(model)
        stages, device_type = self._stages_of(model), self.context.device.type
        adopted = ShardedModel(
            model, device_type, None if stages is None else self.context.mesh, stages or ()
        )
        together = [*self.models.values(), adopted]
        mesh = self._mesh_for(self.models.values() if self.session.prepared.loaders else together)
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
        self.models[model] = adopted
        self._strategy().holds_whole_models = False
        return adopted

    def _is_kept(self, model: nn.Module) -> bool:
        """Returns whether a model is sharded already, or in stages that the strategy does not shard."""
        if self._strategy().keeps_sharding(model):
            return True
        return not self._strategy().shards_models and self._stages_of(model) is not None

    def _stages_of(self, model: nn.Module) -> list[nn.Module] | None:
        parts = (layer.parts_of(model) for layer in self._strategy().layers)
        return next((part for part in parts if part is not None), None)

    def _free(self, model: nn.Module) -> None:
        """Frees units that a forward has left gathered, and records the shards of their parameters."""
        gathered = named_parameters(model)
        for unit in units_of(model):
            unit.reshard()
        self.session.replace((gathered[name], shard) for name, shard in named_parameters(model).items())


def _by_mesh(model: nn.Module) -> dict[Any, list[nn.Parameter]]:
    """Returns the parameters of a model by their mesh, where that of unsharded ones is None.

    Frozen ones may be trained later.
    """
    found: dict[Any, list[nn.Parameter]] = {None: []}
    for _, parameter in model.named_parameters():  # those of this rank, also in a pipeline
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        found.setdefault(mesh, []).append(parameter)
    return found


def _gather_layouts(
    model: nn.Module, meshes: Sequence[Any], managed: Mapping[Tensor, Any], mesh: DeviceMesh | None
) -> list[RankLayout]:
    """Returns the layouts of all ranks, or raises an error on all of them if a mesh is without a rank."""
    used = [*_meshes_of(model), *managed.values()]
    is_in = all(each.get_coordinate() is not None for each in used)
    layouts = current_transport().gather_object(_layout(model, meshes, managed, mesh) if is_in else None)
    if absent := [str(rank) for rank, layout in enumerate(layouts) if layout is None]:
        raise PreparationError(
            f"{type(model).__name__} is sharded over a mesh without rank {', '.join(absent)}, and all "
            f"{len(layouts)} ranks of this run train it. Use meshes that have all ranks, or launch fewer."
        )
    return layouts


def _layout(
    model: nn.Module, meshes: Sequence[Any], managed: Mapping[Tensor, Any], mesh: DeviceMesh | None
) -> RankLayout:
    known = [*_meshes_of(model), *managed.values(), *([] if mesh is None else [mesh])]
    roots = {torch_private.root_mesh(each) for each in known}
    sharded = {
        ranks
        for parameter in model.parameters()
        if isinstance(parameter, DTensor)
        for ranks in _sharded_groups(parameter, managed.get(parameter))
    }
    same_batch = {*sharded, *_named_groups(roots, SHARED_AXES)}
    same_tokens = {*sharded, *_named_groups(roots, SHARED_AXES - SEQUENCES)}
    stages = [root.get_local_rank(PIPELINE) for root in roots if PIPELINE in (root.mesh_dim_names or ())]
    coordinates = tuple(() if mesh is None else tuple(mesh.get_coordinate()) for mesh in meshes)
    groups = tuple(sorted(same_batch)), tuple(sorted(same_tokens))
    return RankLayout(*groups, next(iter(stages), 0), coordinates)


def _meshes_of(model: nn.Module) -> Iterator[DeviceMesh]:
    """Yields the meshes of parameters, and those that libraries keep on their models."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            yield parameter.device_mesh
    for module in model.modules():
        if isinstance(mesh := vars(module).get("_device_mesh"), DeviceMesh):
            yield mesh


def _named_groups(roots: Iterable[DeviceMesh], names: Set[str]) -> Iterator[Ranks]:
    """Yields the ranks along dimensions with certain names."""
    for root in roots:
        for name in names & set(root.mesh_dim_names or ()):
            yield _ranks(root, name)


def _sharded_groups(parameter: DTensor, fsdp_mesh: DeviceMesh | None) -> Iterator[Ranks]:
    """Yields the ranks along dimensions that shard a parameter, but not for data or expert parallelism."""
    mesh = parameter.device_mesh
    names = mesh.mesh_dim_names or [None] * mesh.ndim
    of_data = (None,) if fsdp_mesh is None else (fsdp_mesh.mesh_dim_names or (None,))
    for dim, (name, placement) in enumerate(zip(names, parameter.placements, strict=True)):
        is_data = fsdp_mesh is not None and name in of_data
        if not (is_data or name in EXPERTS or placement.is_replicate()):
            yield _ranks(mesh, dim)


def _expert_groups(parameter: Tensor) -> Iterator[Ranks]:
    """Yields the ranks along dimensions that shard a parameter of experts."""
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for name, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=False):
            if name in EXPERTS and not placement.is_replicate():
                yield _ranks(mesh, name)


def _ranks(mesh: DeviceMesh, dim: int | str) -> Ranks:
    return tuple(dist.get_process_group_ranks(mesh.get_group(dim)))


def _disjoint_groups(model: nn.Module, found: Sequence[Iterable[Ranks]]) -> list[Ranks]:
    """Returns the groups of ranks that have groups of any rank in common, each rank in one group."""
    group_of = {rank: {rank} for rank in range(len(found))}
    for ranks in (ranks for groups in found for ranks in groups):
        joined = set().union(*(group_of[rank] for rank in ranks))
        group_of.update(dict.fromkeys(joined, joined))
    groups = sorted({tuple(sorted(group)) for group in group_of.values()})
    if len({len(group) for group in groups}) > 1:
        raise PreparationError(
            f"{type(model).__name__} is sharded over groups of different sizes: by its meshes, the ranks "
            f"{', '.join(map(str, map(list, groups)))} work on the same batch each. Use meshes that divide "
            f"all {len(found)} ranks into groups of one size."
        )
    return groups


def _refuse_replicated(model: nn.Module, managed: Mapping[Tensor, Any], batches: Sequence[Ranks]) -> None:
    """Raises an error for a parameter that is replicated along a mesh over ranks with different batches.

    DTensor adds up its gradients or leaves them as they are, by the placements of the inputs, and whether
    the sum has to be divided depends on the loss.
    """
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad and isinstance(parameter, DTensor)) or parameter in managed:
            continue
        mesh = parameter.device_mesh
        names = mesh.mesh_dim_names or (None,) * mesh.ndim
        for dim, (axis, placement) in enumerate(zip(names, parameter.placements, strict=True)):
            ranks = _ranks(mesh, dim)
            if placement.is_replicate() and axis not in EXPERTS and _count_parts(ranks, batches) > 1:
                raise PreparationError(
                    f"{type(model).__name__}: {name} is replicated as a DTensor over ranks {list(ranks)}, "
                    "which have different batches, and DTensor does not average its gradients. Leave out "
                    "distribute_module, so that DistributedDataParallel averages them, or use fully_shard."
                )


def _count_parts(ranks: Iterable[int], parts: Sequence[Ranks]) -> int:
    """Returns the number of groups that some ranks are in."""
    ranks = set(ranks)
    return sum(not ranks.isdisjoint(group) for group in parts)


def _find_replicas(
    parameters: Mapping[Any, Sequence[nn.Parameter]],
    layouts: Sequence[RankLayout],
    parts: Sequence[Ranks],
    sparse: set[nn.Parameter],
) -> Iterator[Replicas]:
    """Yields the parameters that several ranks have, with their process group."""
    own = list(parameters.values())
    for index in range(max(len(layout.coordinates) for layout in layouts)):
        replicas: dict[Any, list[int]] = {}
        for other, layout in enumerate(layouts):
            if index < len(layout.coordinates):
                replicas.setdefault((layout.stage, layout.coordinates[index]), []).append(other)
        has_batches = any(_count_parts(ranks, parts) > 1 for ranks in replicas.values())
        is_equal = index > 0 and not has_batches  # the first kind of parameters is not sharded
        if is_equal or all(len(ranks) == 1 for ranks in replicas.values()):
            continue
        members = own[index] if index < len(own) else []
        group = dist.group.WORLD
        if len(replicas) > 1:
            enumerate_groups: Any = dist.new_subgroups_by_enumeration
            group, _ = enumerate_groups(list(replicas.values()))
        if members:
            yield Replicas(list(members), sparse & set(members), group, has_batches)
