"""Expert parallelism, in which the experts of a layer are sharded over the ranks of an axis.

The ranks of the axis have different batches. Each layer sends its tokens to the ranks of the chosen experts,
and the outputs back, by all-to-alls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple
from weakref import WeakSet

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from accelerate.base import PreparationError, listed, wrong_value
from accelerate.logging import get_logger
from accelerate.parallelism_config import MeshAxis, ParallelismConfig
from accelerate.planning import Layout
from accelerate.strategies.axes.expert_dispatch import BalancedForward, DispatchedForward
from accelerate.strategies.axes.tensor import matches
from accelerate.strategies.dtensors import ParameterRemapper, is_sharded, named_parameters, send_from_main
from accelerate.strategies.layer import Layer
from accelerate.strategies.session import Bundle, Kind

logger = get_logger(__name__)

AXIS = MeshAxis.EP.value
DISPATCHED = "ep_dispatch_experts"
"""Style in the `ep_plan` of a model of modules whose experts are sharded."""
FSDP_DIMENSIONS = ("dp_replicate", "dp_shard_cp")
"""Dimensions of the meshes of FSDP, which replicate and shard parameters."""
Names = Mapping[str, tuple[str, ...]]


class ExpertMeshes(NamedTuple):
    """Views of the mesh of a run, in which FSDP shards the two kinds of parameters.

    Attributes:
        others: Mesh of the parameters outside of experts, which are sharded along "ep" as well.
        experts: Mesh of the parameters of experts. The ranks along "tp" have the same experts and different
            tokens.
    """

    others: DeviceMesh
    experts: DeviceMesh

    @property
    def copies(self) -> DeviceMesh | None:
        """Mesh of the ranks with the same batch as this rank, or None without tensor parallelism."""
        return self.others["tp"] if self.others["tp"].size() > 1 else None

    @property
    def scale(self) -> float:
        """Factor of the gradients of experts, which are sums over the batches of the ranks along "ep".

        FSDP averages gradients over the ranks with the same experts. With the factor they are divided by the
        number of batches.
        """
        return self.others["tp"].size() / self.experts[AXIS].size()


def build_meshes(mesh: DeviceMesh, shards: tuple[str, ...] = ("dp_shard", "cp", "sp")) -> ExpertMeshes:
    """Returns the meshes of FSDP for a mesh with expert parallelism.

    Called on all ranks.

    Args:
        shards: Dimensions along which FSDP shards parameters besides "ep". If it is empty, FSDP replicates
            them.
    """
    replicas = tuple(name for name in ("dp_replicate", "dp_shard", "cp", "sp") if name not in shards)
    others: dict[str, tuple[str, ...]] = {
        "pp": ("pp",),
        "dp_replicate": replicas if shards else (AXIS, *replicas),
        "dp_shard_cp": (AXIS, *shards) if shards else (),
        "tp": ("tp",),
    }
    experts = {"pp": ("pp",), "dp_replicate": (*replicas, "tp"), "dp_shard_cp": shards, AXIS: (AXIS,)}
    return ExpertMeshes(_view(mesh, others), _view(mesh, experts))


def _view(mesh: DeviceMesh, dimensions: Names) -> DeviceMesh:
    """Returns a mesh of the same ranks, each of whose dimensions joins dimensions of another mesh."""
    sizes: dict[str, int] = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True))
    order = [name for names in dimensions.values() for name in names if name in sizes]
    ranks = mesh.mesh.permute([list(sizes).index(name) for name in order])
    shape = [prod(sizes.get(name, 1) for name in names) for names in dimensions.values()]
    return DeviceMesh(mesh.device_type, ranks.reshape(shape), mesh_dim_names=tuple(dimensions))


def mesh_of_fsdp(mesh: DeviceMesh) -> DeviceMesh:
    """Returns the dimensions of one of the meshes of `ExpertMeshes` for `fully_shard`."""
    return mesh[FSDP_DIMENSIONS if mesh["dp_replicate"].size() > 1 else FSDP_DIMENSIONS[1:]]


def meshes_of(parallelism: ParallelismConfig) -> ExpertMeshes:
    """Returns the meshes of FSDP for a run with expert parallelism, which the first call builds.

    Called on all ranks.
    """
    if parallelism.expert_meshes is None:
        parallelism.expert_meshes = build_meshes(parallelism.get_device_mesh())  # type: ignore[arg-type]
    return parallelism.expert_meshes  # type: ignore[no-any-return]


class ExpertAxis(Layer):
    """Axis along which the experts of layers are sharded, and ranks have different batches."""

    def __init__(self, strategy: Any) -> None:
        self._context, self._is_alone = strategy.context, not strategy.shards_models
        parallelism = strategy.context.request.parallelism
        self._size = int(parallelism.ep_size)
        self._is_experts = parallelism.ep_handler.is_experts if parallelism.ep_handler else None
        self._transformed: WeakSet[nn.Module] = WeakSet()

    def check_model(self, model: nn.Module) -> None:
        """Raises an error for a trained model without experts, and for experts that cannot be sharded."""
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return
        experts = find_experts(model, self._is_experts)
        if not experts and any(parameter.requires_grad for parameter in model.parameters()):
            raise wrong_value("ep_size", self._size, *_reason_without_experts(model, self._is_experts))
        for name, module in experts.items():
            _check_experts(name, module, self._size)
        _refuse_tied(model, experts.values())

    @contextmanager
    def preparing(self, bundle: Bundle) -> Iterator[None]:
        for model in bundle.new(Kind.MODEL):  # loaders need the meshes of its parameters
            self.transform_model(model)
        yield

    def transform_model(self, model: nn.Module, micro_batch_size: int = 1) -> nn.Module:
        """Shards the experts of a model in place, unless the strategy shards them with other parameters.

        They start with the weights of rank 0. Ranks receive one module at a time, and keep their own experts.
        Tensors on the meta device are allocated. Gradients are sums over the batches of the axis.
        """
        if model in self._transformed:  # a stage of a pipeline may have no experts that are sharded
            return model
        experts = [] if not self._is_alone or is_sharded(model) else list_experts(model, self._is_experts)
        self._transformed.add(model)
        if not experts:
            return model
        if self._context.request.ddp is not None:
            logger.warning_once(
                "DistributedDataParallelKwargs have no effect with ep_size: gradients are averaged after the "
                "backward pass, without DistributedDataParallel. Leave them out."
            )
        session, device = self._context.session, self._context.device
        remapper = ParameterRemapper(model, session.waiting or session.prepared.optimizers)
        for module in experts:
            send_from_main(module, device)
            shard_experts(module, self._context.mesh)
        send_from_main(model, device)
        parameters = named_parameters(model)
        remapper.rejoin(parameters)
        session.replace(remapper.replaced(parameters))
        return model

    def unsharded(self, models: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Gathers the experts of models, in whose forwards no tokens are exchanged."""
        return whole_experts(models)

    def memory_layout(self, layout: Layout) -> Layout:
        return replace(layout, shards=layout.shards // self._size, expert_parallel=self._size)


# Modules of experts


def find_experts(
    model: nn.Module, is_experts: Callable[[nn.Module], bool] | None = None
) -> dict[str, nn.Module]:
    """Returns the outermost modules of a model that hold experts, by name.

    Args:
        is_experts: Selects the modules. None reads the plans of the model and of models inside it.
    """
    modules = dict(model.named_modules())
    if is_experts is not None:
        found = [name for name, module in modules.items() if is_experts(module)]
    else:
        found = [name for owner, module in modules.items() for name in _planned(owner, module, modules)]
    outermost = [name for name in found if not any(name.startswith(f"{outer}.") for outer in found)]
    return {name: modules[name] for name in outermost}


def list_experts(model: nn.Module, is_experts: Callable[[nn.Module], bool] | None = None) -> list[nn.Module]:
    """Returns the modules of `find_experts` without their names."""
    return list(find_experts(model, is_experts).values())


def _planned(owner: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yields the names of the modules that the plan of a module selects."""
    plan = vars(module).get("ep_plan") or vars(module).get("_ep_plan")
    patterns = [pattern for pattern, style in (plan or {}).items() if style == DISPATCHED]
    prefix = f"{owner}." if owner else ""
    for name in modules if patterns else ():
        inner = name.removeprefix(prefix)
        if name.startswith(prefix) and any(matches(inner, pattern) for pattern in patterns):
            yield name


def _reason_without_experts(model: nn.Module, is_experts: object) -> tuple[str, str]:
    kind = type(model).__name__
    if is_experts is not None:
        return (
            f"is_experts selects no module of {kind}",
            "Select its modules of experts, or leave ep_size at 1",
        )
    fix = (
        "Pass ep_handler=ExpertParallelConfig(is_experts=...), which selects its modules of experts, or "
        "leave ep_size at 1. Models of transformers have a plan from transformers 5.23 on"
    )
    return f"{kind} has no ep_plan with a module of style {DISPATCHED!r}", fix


def count_experts(module: nn.Module) -> int:
    """Returns the number of experts of a module that is not sharded."""
    return next(module.parameters()).shape[0]


def _check_experts(name: str, module: nn.Module, size: int) -> None:
    """Raises an error for a module whose experts cannot be sharded over a number of ranks."""
    parameters = dict(module.named_parameters())
    lengths = {parameter.shape[0] if parameter.ndim else 0 for parameter in parameters.values()}
    declared = getattr(module, "num_experts", None)
    how = f"{name or 'The model'} ({type(module).__name__})"
    if len(lengths) != 1 or declared not in (None, *lengths):
        shapes = listed([f"{key} {tuple(value.shape)}" for key, value in parameters.items()])
        raise PreparationError(
            f"{how} is selected as a module of experts, and its parameters do not have one entry for each "
            f"of {'the' if declared is None else declared} experts in their first dimension: "
            f"{shapes or 'it has none'}. Stack the weights of all experts in one parameter, or select "
            "another module."
        )
    if not _takes_tokens(module):
        raise PreparationError(
            f"The forward of {how} takes {inspect.signature(module.forward)}, and that of a module of "
            "experts takes hidden states, indices of experts and weights. Change its forward, or select "
            "another module."
        )
    count = lengths.pop()
    buffers = [key for key, value in module.named_buffers() if value.ndim and value.shape[0] == count]
    if buffers:
        raise PreparationError(
            f"{how} has one entry for each expert in {listed(buffers)}, and expert parallelism shards "
            "parameters only. Make it a parameter with requires_grad=False."
        )
    if count % size:
        divisors = [str(number) for number in range(1, count + 1) if count % number == 0]
        raise wrong_value(
            "ep_size",
            size,
            f"{name} has {count} experts, which {size} ranks cannot share equally",
            f"Use one of {', '.join(divisors)}",
        )


def _refuse_tied(model: nn.Module, experts: Iterable[nn.Module]) -> None:
    """Raises an error for a parameter of experts that is in several modules."""
    names: dict[int, list[str]] = {id(p): [] for module in experts for p in module.parameters()}
    for owner, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            names.get(id(parameter), []).append(f"{owner}.{name}".lstrip("."))
    for tied in names.values():
        if len(tied) > 1:
            raise PreparationError(
                f"{listed(tied)} are one parameter, and expert parallelism would shard it separately in "
                "each module. Use one module of experts in both places, or leave ep_size at 1."
            )


def _takes_tokens(module: nn.Module) -> bool:
    """Returns whether the forward of a module takes three arguments, besides optional ones."""
    arguments = list(inspect.signature(module.forward).parameters.values())
    named = [each for each in arguments if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    more = named[3:] + [each for each in arguments if each.kind == each.KEYWORD_ONLY]
    return len(named) >= 3 and all(each.default is not each.empty for each in more)


# Sharding and dispatch


def shard_experts(module: nn.Module, mesh: Any, copies: Any = None, scale: float = 1.0) -> None:
    """Shards the parameters of a module of experts in place, and makes its forward exchange tokens.

    Args:
        module: Module of experts, whose tensors may be on the meta device.
        mesh: Mesh with the dimension "ep".
        copies: Mesh of the ranks with the same tokens as this rank, each of which sends a part of them, or
            None.
        scale: Factor of the gradients of the parameters.
    """
    experts = mesh[AXIS]
    number = count_experts(module)
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            local = parameter.detach().chunk(experts.size())[experts.get_local_rank()].clone()
            sharded = DTensor.from_local(local, experts, [Shard(0)], run_check=False)
            owner.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))
    if hasattr(module, "num_experts"):
        module.num_experts = number // experts.size()
    module.__dict__["forward"] = DispatchedForward(module, number, experts, copies, scale)


@contextmanager
def whole_experts(models: Iterable[nn.Module]) -> Iterator[None]:
    """Gathers the experts of models inside the block, in which their forwards exchange no tokens.

    Called on all ranks.
    """
    with ExitStack() as stack:
        for module in (module for model in models for module in model.modules()):
            forward = module.__dict__.get("forward")
            if isinstance(forward, DispatchedForward):
                stack.enter_context(forward.whole())
        yield


def trace_share(module: Any, size: int) -> None:
    """Reduces a module of experts in a trace to the experts of one rank, in place.

    Args:
        module: Module of experts, with fake parameters.
        size: Number of ranks that share the experts.
    """
    number = count_experts(module)
    _check_experts(type(module).__name__, module, size)
    for parameter in module.parameters():
        parameter.data = parameter.data[: number // size].clone()
    if hasattr(module, "num_experts"):
        module.num_experts = number // size
    module.__dict__["forward"] = BalancedForward(module, number // size)
