"""Models that are sharded before `prepare`, by `fully_shard`, by a tensor parallel plan or by a library.

Strategies keep the meshes and placements of such a model. They read from them which ranks work on the same
batch, and average the gradients that the backward pass does not average.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
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
from accelerate.base import PreparationError
from accelerate.data_loader import SHARED_AXES
from accelerate.ops import current_transport
from accelerate.strategies.dtensors import Replicas, send_unsharded, sparse_weights

PIPELINE = "pp"
EXPERTS = ("ep", "expert", "experts")
"""Names of dimensions along which experts are sharded, and ranks may have different batches."""
SEQUENCES = {"cp", "sp"}
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
        model: The model.
        device_type: Type of the devices of the meshes.
        mesh: Mesh of a run whose model has stages on different ranks, or None.
        stages: Modules of the stages of this rank.

    Attributes:
        loader_mesh: Mesh of all ranks, in which ranks along "tp" work on the same batch.
        replicas: Parameters that several ranks have, and that DTensors and FSDP do not keep equal.
    """

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

    def fits(self, mesh: Any, num_ranks: int) -> bool:
        """Returns whether loaders give one batch to ranks that work on the same batch.

        Args:
            mesh: Mesh of the loaders, or None for loaders with a batch for each rank.
            num_ranks: Number of ranks.
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
            if count > 1:
                hook = partial(torch.mul, other=1 / count)
                self._hooks.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def remove_hooks(self) -> None:
        """Makes backward passes leave gradients as they are."""
        for hook in self._hooks:
            hook.remove()

    def average_gradients(self) -> None:
        """Averages the gradients that the backward pass did not average.

        Called on all ranks.
        """
        for group in self.replicas:
            if group.has_batches:
                group.average()

    def send_unsharded(self) -> None:
        """Sends trained parameters that are not sharded from the first rank of their groups.

        Called on all ranks.
        """
        for group in self.replicas:
            send_unsharded(group.parameters, group.group)


def _by_mesh(model: nn.Module) -> dict[Any, list[nn.Parameter]]:
    """Returns the trained parameters of a model by their mesh, where that of unsharded ones is None."""
    found: dict[Any, list[nn.Parameter]] = {None: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
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
