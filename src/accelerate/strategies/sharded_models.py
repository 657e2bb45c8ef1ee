"""Models that are sharded before `prepare`, by `fully_shard`, by a tensor parallel plan or by a library.

Strategies keep the meshes and placements of such a model. They read from them which ranks work on the same
batch, and average the gradients that the backward pass does not average.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
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
from accelerate.ops import current_transport, local_tensor
from accelerate.strategies.fsdp import local_gradients, units_of

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


@dataclass
class Replicas:
    """Parameters of which the ranks of a process group have the same elements.

    Attributes:
        parameters: The parameters, in the same order on all ranks.
        sparse: Those of which gradients are sparse.
        group: Process group of the ranks with the same elements of these parameters.
        has_batches: Whether these ranks have different batches or parts of sequences. Otherwise their
            gradients are equal.
        averages: Whether gradients are averaged. Otherwise they are added, such as those of stages.
        bucket_bytes: Bytes of gradients that are sent in one call.
    """

    parameters: list[nn.Parameter]
    sparse: set[nn.Parameter]
    group: Any
    has_batches: bool
    averages: bool = True
    bucket_bytes: float = float("inf")

    @torch.no_grad()
    def average(self) -> None:
        """Averages or adds the gradients over the group, where a rank without a gradient counts as zeros.

        Called on all ranks of the group.
        """
        dense = [parameter for parameter in self.parameters if parameter not in self.sparse]
        for parameter in self.parameters:
            if parameter in self.sparse:
                self._average_sparse(parameter)
        divisor = dist.get_world_size(self.group) if self.averages else 1
        sum_gradients(dense, self._all_reduce, divisor, self.bucket_bytes)

    def _all_reduce(self, flat: Tensor) -> bool:
        dist.all_reduce(flat, group=self.group)
        return True

    def _average_sparse(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if gradient is None:
            values = parameter.new_empty(0, *parameter.shape[1:])
            indices = torch.empty(1, 0, dtype=torch.long, device=parameter.device)
            gradient = torch.sparse_coo_tensor(indices, values, parameter.shape)
        mean = (gradient / dist.get_world_size(self.group)).coalesce()
        dist.all_reduce(mean, group=self.group)
        if parameter.grad is not None or mean.values().numel():
            parameter.grad = mean


@torch.no_grad()
def sum_gradients(
    parameters: Sequence[nn.Parameter],
    all_reduce: Callable[[Tensor], bool],
    divisor: int = 1,
    bucket_bytes: float = float("inf"),
) -> None:
    """Adds up gradients over ranks, where a rank without a gradient counts as zeros.

    Called on all these ranks. A gradient that no rank has stays None, so that optimizers skip its parameter.

    Args:
        parameters: Parameters in the same order on all ranks, whose gradients are dense.
        all_reduce: Adds up a tensor over the ranks in place, and returns whether it succeeded. The gradients
            have no meaning otherwise.
        divisor: Divisor of the sums.
        bucket_bytes: Bytes from which gradients are sent in another call.
    """
    local_gradients(parameters)
    buckets: dict[tuple[torch.device, torch.dtype], list[list[nn.Parameter]]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], float] = {}
    for parameter in parameters:
        local = local_tensor(parameter)
        kind = local.device, local.dtype
        if sizes.get(kind, bucket_bytes) >= bucket_bytes:
            buckets.setdefault(kind, []).append([])
            sizes[kind] = 0
        buckets[kind][-1].append(parameter)
        sizes[kind] += local.nbytes
    for bucket in (bucket for several in buckets.values() for bucket in several):
        if not _sum_bucket(bucket, all_reduce, divisor):
            return


def _sum_bucket(
    parameters: Sequence[nn.Parameter], all_reduce: Callable[[Tensor], bool], divisor: int
) -> bool:
    shards = [local_tensor(p) if p.grad is None else local_tensor(p.grad) for p in parameters]
    exists = shards[0].new_tensor([p.grad is not None for p in parameters])
    parts = [
        (torch.zeros_like(shard) if p.grad is None else shard / divisor).reshape(-1)
        for p, shard in zip(parameters, shards, strict=True)
    ]
    flat = torch.cat([exists, *parts])
    if not all_reduce(flat):
        return False
    found, *sums = torch.split(flat, [len(parts), *(part.numel() for part in parts)])
    for parameter, shard, total, is_any in zip(parameters, shards, sums, found.tolist(), strict=True):
        if not is_any:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        local_tensor(parameter.grad).copy_(total.view_as(shard))
    return True


def is_sharded(model: nn.Module) -> bool:
    """Returns whether a model has units of FSDP 2, or parameters that are DTensors."""
    return bool(units_of(model)) or any(isinstance(parameter, DTensor) for parameter in model.parameters())


def place_unsharded(model: nn.Module, device: torch.device) -> None:
    """Moves parameters and buffers that are not sharded to a device, such as those of an adapter."""
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.device != device for tensor in tensors) and not any(
            isinstance(tensor, DTensor) for tensor in tensors
        ):
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]


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


def send_unsharded(parameters: Iterable[nn.Parameter], group: Any = None) -> None:
    """Sends trained parameters that are not sharded from the first rank of a process group.

    Called on all ranks of the group. None is the group of all ranks.
    """
    group = dist.group.WORLD if group is None else group
    for parameter in parameters:
        if parameter.requires_grad and not isinstance(parameter, DTensor) and not parameter.is_meta:
            values = parameter.data.contiguous()
            dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
            parameter.data.copy_(values)


def _by_mesh(model: nn.Module) -> dict[Any, list[nn.Parameter]]:
    """Returns the trained parameters of a model by their mesh, where that of unsharded ones is None."""
    found: dict[Any, list[nn.Parameter]] = {None: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            found.setdefault(mesh, []).append(parameter)
    return found


def sparse_weights(model: nn.Module) -> set[nn.Parameter]:
    """Returns the weights of embeddings with sparse gradients."""
    sparse = (module for module in model.modules() if getattr(module, "sparse", False))
    return {parameter for module in sparse for parameter in module.parameters(recurse=False)}


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
