"""Strategy for FSDP 1, whose units are wrappers with one flat parameter each.

Source: https://docs.pytorch.org/docs/stable/fsdp.html
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils.weak import WeakIdKeyDictionary

from accelerate import torch_private
from accelerate.base import ConfigurationError, PreparationError, StateError, listed
from accelerate.checkpointing import ShardedState
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.nested import recursively_apply
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.strategies.base import refuse_sharded_model
from accelerate.strategies.dtensors import (
    ONE_BACKWARD,
    Groups,
    UnitsFreedBeforeSteps,
    clean_name,
    has_no_backward,
    named_parameters,
    names_by_group,
    refuse_second_derivatives,
    send_from_main,
)
from accelerate.strategies.fsdp import flat_states, flat_weights
from accelerate.strategies.fsdp.gathered import GatheredWeights, UnitParameter
from accelerate.strategies.fsdp.gradient_hooks import (
    hooked_parameters,
    refuse_hooks,
    refuse_lost_hooks,
)
from accelerate.strategies.fsdp.parameters import ensure_weights_retied, get_parameters_from_modules
from accelerate.strategies.fsdp.sharding import parameters_by_unit, plan_units
from accelerate.strategies.fsdp.strategies import FsdpState, Sharded
from accelerate.strategies.gradient_scales import GradientScales
from accelerate.strategies.recomputed_blocks import recompute
from accelerate.strategies.replicas import ADDED, ALL_RANKS, ReplicaCheck, watch_replicas
from accelerate.strategies.request import Context
from accelerate.strategies.session import parameter_ids
from accelerate.strategies.state import Fill, WholeWeights
from accelerate.strategies.tolerances import must_compare
from accelerate.strategies.trial_steps import needs_whole_parameters
from accelerate.strategies.views import return_no_views

logger = get_logger(__name__)

HYBRID = (ShardingStrategy.HYBRID_SHARD, torch_private.hybrid_shard_zero2)


class FlatState(FsdpState):
    """State of models and optimizers with flat parameters."""

    def optimizer_owners(self, optimizers: Sequence[Any], *, gather: bool) -> list[Any]:
        return [self._owner(optimizer, gather) for optimizer in optimizers]

    def _owner(self, optimizer: torch.optim.Optimizer, gather: bool) -> Any:
        stepped = self._find_root(optimizer)
        if stepped is None:
            return optimizer
        of, keep = (*stepped, self._offloads), self.keeps_whole_states
        state = flat_states.gather_flat_state(optimizer, *of, keep) if gather else None
        return flat_states.WholeFlatOptimizer(optimizer, state, *of)

    def _find_root(self, optimizer: Any) -> tuple[FSDP, flat_states.Names] | None:
        """Returns the model of an optimizer and the names of its parameters, or None without units."""
        stepped = parameter_ids([optimizer])
        roots = [root for root in self.strategy.roots if any(id(p) in stepped for p in root.parameters())]
        if not roots:
            return None
        if len(roots) > 1:
            raise ConfigurationError(
                f"{type(optimizer.optimizer).__name__} steps the parameters of {len(roots)} models, and "
                "states of such optimizers cannot be saved or loaded with FSDP 1. Give each model an "
                "optimizer of its own, or set fsdp_version=2."
            )
        return roots[0], self.strategy.names.get(optimizer.optimizer) or _names_of(optimizer, roots[0])

    @property
    def _offloads(self) -> bool:
        return bool(not of_device(self.context.device).is_host)

    def model_shards(self, model: nn.Module) -> ShardedState:
        root = root_of(model)
        return super().model_shards(model) if root is None else flat_states.FlatModuleShards(root)

    def live_weights(self, model: nn.Module) -> Mapping[str, Any]:
        root = root_of(model)
        return super().live_weights(model) if root is None else flat_states.whole_shapes(root)

    def optimizer_shards(self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]) -> ShardedState:
        stepped = self._find_root(optimizer)
        if stepped is None:
            return super().optimizer_shards(optimizer, models)
        return flat_states.FlatOptimizerShards(optimizer, *stepped)

    def parameter_names(
        self, optimizer: torch.optim.Optimizer, models: Sequence[nn.Module]
    ) -> list[list[list[str]]]:
        """Returns the names of the parameters before they were flattened, in their order."""
        stepped = self._find_root(optimizer)
        if stepped is None:
            return super().parameter_names(optimizer, models)
        return [[[name] for name in group] for group in stepped[1]]

    def load_weights(self, model: nn.Module, state: Mapping[str, Any], fill: Fill) -> None:
        root = root_of(model)
        if root is None:
            super().load_weights(model, state, fill)
            return
        with flat_states.full_state_dicts(root, self._offloads):
            fill(root, state)

    def whole_weights(self, model: nn.Module) -> WholeWeights:
        root = root_of(model)
        if root is None:
            return super().whole_weights(model)
        if not _is_contiguous(root):
            raise ConfigurationError(
                f"{type(root.module).__name__} has parameters that are not contiguous (channels_last?), and "
                "FSDP 1 gathers all of them together. Set fsdp_version=2, or call get_state_dict."
            )
        return flat_weights.whole_weights(root, self.context.device)

    def gatherable_weights(self, model: nn.Module) -> tuple[dict[str, Any], Callable[[Any], Tensor]] | None:
        root = root_of(model)
        if root is None or not _is_contiguous(root):
            return None
        weights, whole = self.whole_weights(model)
        return weights, lambda weight: self.keep(whole(weight))

    def state_dict(self, model: nn.Module, *, unwrap: bool) -> dict[str, Any]:
        """Returns the full state dict on the CPU of the first rank of each node, without wrapper prefixes."""
        root = root_of(model)
        if root is None:
            return super().state_dict(model, unwrap=unwrap)
        topology = self.context.topology
        with flat_states.full_state_dicts(
            root, self._offloads, first_only=topology.size == topology.local_size
        ):
            state = root.state_dict()
            return state if self.keeps_whole_states else {}


class AddedParameters(ReplicaCheck):
    """Comparison of parameters that were not there when models were prepared, and are not sharded."""

    def excluded(self) -> set[int]:
        return set(map(id, self.strategy.known))

    def cause(self, parameter: Tensor) -> str | None:
        return ADDED


class Fsdp1(Sharded):
    """Sharding with FSDP 1."""

    state_class = FlatState
    flattens_parameters = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.known = WeakIdKeyDictionary()  # parameters of models, with the groups that shard them
        self._originals = WeakIdKeyDictionary()
        self._num_backwards = 0
        self.roots: WeakSet[FSDP] = WeakSet()
        self._frozen: WeakKeyDictionary[nn.Module, torch_private.FrozenGradients] = WeakKeyDictionary()
        self._scales: WeakKeyDictionary[Any, GradientScales] = WeakKeyDictionary()

    @property
    def frees_after_forward(self) -> bool:
        return self.plugin.sharding_strategy.name in ("FULL_SHARD", "HYBRID_SHARD")

    @property
    def keeps_whole_weights(self) -> bool:
        """True if each rank keeps whole weights, and ranks only average gradients."""
        return str(self.plugin.sharding_strategy.name) == "NO_SHARD"

    def make_scaler(self, **arguments: Any) -> ShardedGradScaler:
        """Returns a gradient scaler that skips a step on all ranks if any rank has non-finite gradients."""
        return ShardedGradScaler(device=self.context.device.type, **arguments)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Checks an optimizer, and warns if its update is not that of parts of flat parameters."""
        super().check_optimizer(optimizer)
        is_whole = self.context.topology.size == 1 or self.keeps_whole_weights
        keeps_shapes = self.plugin.use_orig_params and is_whole
        if keeps_shapes or hasattr(optimizer, "whole_matrices") or not needs_whole_parameters(optimizer):
            return
        logger.warning(
            f"{type(optimizer).__name__} computes the update of a value from others of its parameter. "
            "FSDP 1 gives each rank parts of flat parameters: training differs from that in one process. Set "
            "fsdp_version=2 and prepare(optimizer, whole_matrices=True), or use an element-wise optimizer "
            "such as AdamW. Set the attribute whole_matrices = False of the optimizer to accept it."
        )

    def wrap_optimizer(self, optimizer: torch.optim.Optimizer, *, to_device: bool) -> AcceleratedOptimizer:
        wrapped = super().wrap_optimizer(optimizer, to_device=to_device)
        group = dist.group.WORLD
        freed = UnitsFreedBeforeSteps(self.session.prepared.models, _units_of, _free_unit)
        wrapped.observers = (*wrapped.observers, freed)
        if group is not None and not self.keeps_whole_weights:
            self._scales[wrapped] = GradientScales(group, self.context.device, self._divided_parameters)
            wrapped.observers = (*wrapped.observers, self._scales[wrapped])
        watch_replicas(wrapped, AddedParameters(self, ALL_RANKS))
        return wrapped

    def _divided_parameters(self) -> Iterator[Tensor]:
        """Yields the parameters of which several ranks have elements, in the same order on all ranks."""
        for root in self.session.prepared.models:
            for _, unit in torch_private.flat_units(root):
                yield from unit.divided

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        frozen = list(self._frozen.values())
        for gradients in frozen:
            gradients.hide()
        try:
            super().backward(loss, **kwargs)
        finally:
            for gradients in frozen:
                gradients.restore()
        for optimizer, scales in list(self._scales.items()):
            scales.after_batch(optimizer.parameters())
        self._num_backwards += 1
        if must_compare(self._num_backwards):
            refuse_hooks(list(self._originals), torch_private.GRADIENT_HOOKS)

    def split(self, model: nn.Module) -> nn.Module:
        """Returns the wrapped model, in which each unit has its own wrapper."""
        refuse_sharded_model(
            model, "Pass it before it is sharded; fsdp_plugin configures how this run shards it."
        )
        plugin = self.plugin
        ignored, chosen, exact = plan_units(
            plugin, model, self.context.mixed_precision, None, self.context.request.scaler
        )
        names = [name for name, p in model.named_parameters() if p.requires_grad and p in ignored]
        if names:
            logger.warning(
                f"{len(names)} parameters of {type(model).__name__} train and are in ignored_modules, so "
                f"their gradients are not averaged over ranks: {listed(names)}. Freeze them, or do not "
                "ignore them."
            )
        repeated = _repeated_modules(model)
        chosen = [unit for unit in chosen if unit not in repeated]
        for module in exact:
            module.register_forward_hook(partial(_cast_output, plugin.mixed_precision_policy.param_dtype))
        units = [*exact, *chosen]
        hooked = hooked_parameters(model)
        for part, held in zip([*units, model], parameters_by_unit(model, units, ignored), strict=True):
            self._check_unit(model, held)
            refuse_lost_hooks(hooked, [(each.parameter, None) for each in held])
            if not self.keeps_whole_weights:
                GatheredWeights(held).register(part)
        if not self.keeps_whole_weights:
            model.register_forward_hook(partial(refuse_second_derivatives, ONE_BACKWARD))
        sharded = self.follow(model, partial(self._shard, model, units, exact), joined_parameters)
        for parameter in sharded.parameters():
            self.known[parameter] = ()
        for _, unit in torch_private.flat_units(sharded):
            if unit.group is not None and unit.is_sharded:
                stepped = [unit.flat] if unit.originals is None else unit.originals
                self.known.update(dict.fromkeys(stepped, (unit.group,)))
                self._originals.update(dict.fromkeys(unit.originals or ()))
        self.roots.add(sharded)  # type: ignore[arg-type]
        self._frozen[sharded] = frozen = torch_private.FrozenGradients(sharded)
        sharded.register_forward_pre_hook(frozen.hide)
        sharded.register_forward_hook(frozen.restore)
        torch_private.watch_freezing(sharded, partial(_refuse_freezing, type(model).__name__))
        sharded.register_forward_pre_hook(_initialize)
        sharded.register_forward_hook(_free_without_backward)
        if plugin.activation_checkpointing:
            recompute(sharded, chosen)
        return sharded

    def _check_unit(self, model: nn.Module, held: list[UnitParameter]) -> None:
        """Raises an error for parameters that torch cannot flatten into one parameter."""
        dtypes = {str(h.parameter.dtype).removeprefix("torch.") for h in held}
        if len(dtypes) > 1:
            raise PreparationError(
                f"{type(model).__name__} has parameters of several dtypes ({', '.join(sorted(dtypes))}) in "
                f"one unit, which FSDP 1 flattens into one: {listed([h.name for h in held])}. Set "
                "fsdp_version=2, or cast the model to one dtype."
            )
        frozen = [h.name for h in held if not h.parameter.requires_grad]
        if frozen and len(frozen) < len(held) and not self.plugin.use_orig_params:
            raise PreparationError(
                f"{type(model).__name__} has frozen and trainable parameters in one unit, which FSDP 1 "
                f"flattens: {listed(frozen)} are frozen. Set use_orig_params=True, or fsdp_version=2."
            )

    def _shard(self, model: nn.Module, units: list[nn.Module], exact: list[nn.Module]) -> nn.Module:
        plugin, device = self.plugin, self.context.device
        on_host = of_device(device).is_host
        chosen: dict[int, Any] = dict.fromkeys(map(id, units), True)
        for module in exact:  # their inputs come from units with another dtype
            in_float32 = {
                "param_dtype": torch.float32,
                "buffer_dtype": torch.float32,
                "cast_forward_inputs": True,
            }
            policy = dataclasses.replace(plugin.mixed_precision_policy, **in_float32)
            chosen[id(module)] = {"mixed_precision": policy}
        initialize, sends = plugin.param_init_fn, plugin.sync_module_states
        if on_host and sends:
            send_from_main(model, device)  # torch broadcasts on accelerators only
        elif sends and any(p.is_meta for p in model.parameters()):
            initialize = initialize or (lambda m: m.to_empty(device=device, recurse=False))
            initialize = ensure_weights_retied(initialize, model, device)
        ignored = get_parameters_from_modules(plugin.ignored_modules, model, device)
        for unit in dict.fromkeys([*units, model]):
            return_no_views(unit)
        return FSDP(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: chosen.get(id(module), False)) if units else None,
            mixed_precision=plugin.mixed_precision_policy,
            cpu_offload=None if on_host else plugin.cpu_offload,
            ignored_states=list(ignored) or None,
            device_id=device if device.index is not None else torch.device(device.type),
            device_mesh=self._mesh(plugin.sharding_strategy),
            sharding_strategy=plugin.sharding_strategy,
            backward_prefetch=plugin.backward_prefetch,
            param_init_fn=initialize,
            sync_module_states=sends and not on_host,
            forward_prefetch=plugin.forward_prefetch,
            limit_all_gathers=plugin.limit_all_gathers,
            use_orig_params=plugin.use_orig_params,
        )

    def _mesh(self, strategy: ShardingStrategy) -> DeviceMesh | None:
        """Returns the mesh of hybrid strategies, with one replica per node by default."""
        if strategy not in HYBRID:
            return None
        if self.context.mesh is not None:
            return self.context.mesh["dp_replicate", "dp_shard"]  # type: ignore[no-any-return]
        topology = self.context.topology
        shape = (topology.size // topology.local_size, topology.local_size)
        return init_device_mesh(self.context.device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))

    @contextmanager
    def unsharded(self, models: Sequence[nn.Module]) -> Iterator[None]:
        """Gathers all units inside the block, where their wrappers are skipped."""
        roots = [root for model in models if (root := root_of(model)) is not None]
        units = [unit for root in roots for unit in FSDP.fsdp_modules(root)]
        with ExitStack() as stack:
            for root in roots:
                stack.enter_context(FSDP.summon_full_params(root, writeback=False))
            stack.enter_context(torch_private.unit_forwards_skipped(units))
            yield

    def no_sync(self, model: nn.Module, *, early: bool = False) -> AbstractContextManager[Any]:
        root = None if early else root_of(model)
        return nullcontext() if root is None else root.no_sync()

    def groups_of(self, parameter: Tensor) -> Groups:
        groups: Groups = self.known.get(parameter, ())  # type: ignore[no-untyped-call]
        return groups


def _repeated_modules(model: nn.Module) -> set[nn.Module]:
    """Returns modules with several names, of which torch wraps one and leaves the others without weights."""
    children = Counter(child for module in model.modules() for child in module._modules.values())
    return {child for child, count in children.items() if child is not None and count > 1}


def root_of(model: nn.Module) -> FSDP | None:
    """Returns the outermost unit of a model, which may be compiled, or None without units."""
    inner = torch_private.uncompiled(model)
    return inner if isinstance(inner, FSDP) else None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _initialize(root: nn.Module, args: object) -> None:
    """Lets the first forward allocate tensors that can be trained, also in inference mode."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(mode=False):
            torch_private.initialize_fsdp1(root, root)


def _free_without_backward(root: nn.Module, args: object, outputs: object) -> None:
    """Frees gathered parameters after a forward without a backward, so that the next one gathers changes.

    Torch keeps those of the outermost unit, and with SHARD_GRAD_OP of all units, for a backward pass.
    """
    if has_no_backward(outputs):
        _free(root)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _free(root: nn.Module) -> None:
    for _, unit in torch_private.flat_units(root):
        _free_unit(unit)


def _free_unit(unit: torch_private.FlatUnit) -> None:
    if not unit.is_summoned:
        unit.reshard()


def _units_of(model: nn.Module) -> list[torch_private.FlatUnit]:
    root = root_of(model)
    return [] if root is None else [unit for _, unit in torch_private.flat_units(root)]


def _refuse_freezing(kind: str, name: str) -> NoReturn:
    raise StateError(
        f"requires_grad_() of {name} in a unit of {kind} has no effect: FSDP 1 has joined its parameters "
        "with others into one flat parameter. Set use_orig_params=True, or fsdp_version=2."
    )


def _is_contiguous(root: FSDP) -> bool:
    return all(all(unit.are_contiguous) for _, unit in torch_private.flat_units(root))


def joined_parameters(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """Returns the parameters of a sharded model by their names before sharding.

    Without `use_orig_params`, the names of a unit have the flat parameter as their value.
    """
    parameters = {
        name: p
        for name, p in named_parameters(model).items()
        if not name.endswith(torch_private.FLAT_PARAMETER)
    }
    for prefix, unit in torch_private.flat_units(model):
        if unit.originals is None:
            parameters.update({clean_name(f"{prefix}.{name}").lstrip("."): unit.flat for name in unit.names})
    return parameters


def _names_of(optimizer: torch.optim.Optimizer, root: FSDP) -> flat_states.Names:
    """Returns the names of the parameters of an optimizer that was built after sharding."""
    # A tied parameter has one name, and a flat parameter one for each parameter in it.
    count = 1 if torch_private.uses_original_parameters(root) else None
    groups = names_by_group(optimizer, [joined_parameters(root)])
    return [[name for names in group for name in names[:count]] for group in groups]


def _cast_output(dtype: torch.dtype, module: nn.Module, inputs: object, output: object) -> Any:
    """Casts the output of a float32 module to the dtype of the next module."""
    return recursively_apply(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, output)
