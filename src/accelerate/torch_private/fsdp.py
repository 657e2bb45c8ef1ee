"""Private attributes of the units of FSDP 1 and FSDP 2.

The FSDP strategies and their checkpoints use them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel


FLAT_PARAMETER = "_flat_param"
"""Name of the flat parameter of FSDP 1 in its module."""

uses_original_parameters: Callable[[Any], bool] = attrgetter("_use_orig_params")
"""Value of use_orig_params of a unit of FSDP 1, which is not a public attribute."""


def run_policy(policy: Any, model: nn.Module) -> Any:
    """Returns the modules that a wrapping policy of FSDP 1 selects, which torch computes only in FSDP."""
    return policy._run_policy(model, ignored_modules=set(), root_kwargs={})


def gradient_sync(unit: object) -> bool | None:
    """Returns whether a unit of FSDP 1 reduces gradients in the next backward, or None for other modules."""
    return getattr(unit, "_sync_gradients", None)


def set_gradient_sync(unit: Any, enabled: bool) -> None:
    """Sets whether a unit of FSDP 1 reduces gradients, also inside of `no_sync`.

    FSDP 1 has no public function to enable the reduction inside of `no_sync`.
    """
    unit._sync_gradients = enabled


@contextmanager
def unit_forwards_skipped(units: Iterable[FullyShardedDataParallel]) -> Iterator[None]:
    """Makes units of FSDP 1 call their modules without all-gather, for use inside summon_full_params."""
    with ExitStack() as stack:
        for unit in units:
            vars(unit)["forward"] = unit.module
            stack.callback(vars(unit).pop, "forward")
        yield


class FlatUnit:
    """Flat parameter of a unit of FSDP 1, whose layout is not public.

    Attributes:
        originals: The original parameters with use_orig_params, otherwise None.
        names: Names of the original parameters, relative to the unit.
        shapes: Shapes of the original parameters.
        are_contiguous: Whether each original parameter is contiguous.
        group: Process group of the unit.
    """

    def __init__(self, unit: FullyShardedDataParallel) -> None:
        handle: Any = unit._handle
        self._handle = handle
        self._replicas = (
            vars(unit).get("_inter_node_pg") if handle.uses_sharded_strategy else unit.process_group
        )
        self.flat: Any = handle.flat_param
        self.originals: Sequence[nn.Parameter] | None = self.flat._params if unit._use_orig_params else None
        self.names: Sequence[str] = self.flat._fqns
        self.shapes: Sequence[torch.Size] = self.flat._shapes
        self.are_contiguous: Sequence[bool] = self.flat._contiguities
        self.group = unit.process_group
        self.is_sharded: bool = handle.uses_sharded_strategy

    @property
    def shard(self) -> Any:
        """Elements of the flat parameter on this rank."""
        return getattr(self.flat, "_local_shard", self.flat).detach()

    @property
    def replicas(self) -> tuple[int, int]:
        """Number of ranks with the same elements, and the index of this rank among them."""
        return (1, 0) if self._replicas is None else (self._replicas.size(), self._replicas.rank())

    @property
    def tied(self) -> Iterator[tuple[str, str]]:
        """First name and each further name of tied parameters, relative to the unit."""
        for info in self.flat._shared_param_infos:
            yield f"{info.prim_module_name}.{info.prim_param_name}", f"{info.module_name}.{info.param_name}"

    def local_range(self, index: int) -> tuple[int, int, int]:
        """Returns the range of an original parameter on this rank.

        Returns:
            The index of its first element on this rank, the offset of that element in `shard`, and the number
            of elements.
        """
        if not self.is_sharded:
            first, last = self._spans[index]
            return 0, first, last - first + 1
        info = self.flat._shard_param_infos[index]
        if not info.in_shard:
            return 0, 0, 0
        return info.intra_param_start_idx, info.offset_in_shard, info.numel_in_shard

    @property
    def divided(self) -> Iterator[Tensor]:
        """Parameters of which several ranks have elements, the same on all ranks."""
        if self.originals is None:
            yield self.flat
            return
        size = self.shard.numel()
        for parameter, (first, last) in zip(self.originals, self._spans, strict=True):
            if self.is_sharded and first // size != last // size:
                yield parameter

    @property
    def _spans(self) -> list[tuple[int, int]]:
        """Index of the first and the last element of each original parameter in the gathered flat one."""
        offsets = zip(self._handle._get_flat_param_offsets(), self.flat._is_padding_mask, strict=True)
        return [span for span, is_padding in offsets if not is_padding]

    def restore_gradient(self, index: int, gradient: Tensor) -> None:
        """Sets a gradient of a gathered original parameter that is not reduced, as a view of the flat one."""
        size = self.flat._unpadded_unsharded_size
        if self.flat.grad is None or self.flat.grad.shape != size:
            _set_gradient(self.flat, gradient.new_zeros(size))
        offset = self.flat.grad.storage_offset() + self._spans[index][0]
        view = self.flat.grad.as_strided(gradient.shape, gradient.stride(), offset)
        assert self.originals is not None
        _set_gradient(self.originals[index], view.copy_(gradient))

    @property
    def is_summoned(self) -> bool:
        """True inside of `summon_full_params`."""
        return bool(self._handle._training_state.name == "SUMMON_FULL_PARAMS")

    def reshard(self) -> None:
        """Frees unsharded parameters left by a forward without a backward, which a load would not change."""
        has_run = hasattr(self.flat, "_full_param_padded")
        if has_run and self.is_sharded and not self._handle.needs_unshard():
            self._handle.reshard(True)
            self._handle.post_reshard()


def flat_units(root: nn.Module) -> Iterator[tuple[str, FlatUnit]]:
    """Yields the path and the flat parameter of each unit of FSDP 1 in a module.

    Units without parameters are skipped. The module may be the outermost unit.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    for path, unit in root.named_modules():
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            yield path, FlatUnit(unit)


class FrozenGradients:
    """Gradients of units of FSDP 1 that are frozen in a pass, in which torch would drop them.

    Args:
        root: Outermost unit.
    """

    def __init__(self, root: nn.Module) -> None:
        self._units = [unit for _, unit in flat_units(root)]
        self._hidden: list[tuple[Any, Tensor]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def hide(self, *args: object) -> None:
        """Removes the gradients of frozen units."""
        self.restore()
        for unit in self._units:
            originals = unit.originals or ()
            if unit.flat.grad is None or any(p.requires_grad for p in originals or (unit.flat,)):
                continue
            self._hidden += [(p, p.grad) for p in (unit.flat, *originals) if p.grad is not None]
            for parameter in (unit.flat, *originals):
                parameter.grad = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def restore(self, *args: object) -> None:
        """Sets the gradients again."""
        for parameter, gradient in self._hidden:
            if parameter.grad is None:
                _set_gradient(parameter, gradient)
        self._hidden = []


def restore_gradients(models: Iterable[nn.Module], pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Sets gradients that were removed from parameters, which may be those of gathered ones of FSDP 1.

    FSDP 1 keeps gradients of gathered parameters between micro-batches, while its parameters are shards.

    Args:
        models: Models of the run.
        pairs: Each parameter with its gradient.
    """
    waiting = {id(parameter): (parameter, gradient) for parameter, gradient in pairs}
    if any(gradient.shape != parameter.shape for parameter, gradient in waiting.values()):
        for unit in (unit for model in models for _, unit in flat_units(model)):
            own = {index: waiting[id(p)] for index, p in enumerate(unit.originals or ()) if id(p) in waiting}
            if any(gradient.shape != parameter.shape for parameter, gradient in own.values()):
                for index, (parameter, gradient) in own.items():
                    unit.restore_gradient(index, gradient)
                    del waiting[id(parameter)]
    for parameter, gradient in waiting.values():
        _set_gradient(parameter, gradient)


def _set_gradient(parameter: Any, gradient: Any) -> None:
    """Sets a gradient of any shape, which torch compares with that of the values."""
    if gradient.shape == parameter.shape:
        parameter.grad = gradient
        return
    values = parameter.data
    parameter.data = gradient
    parameter.grad = gradient
    parameter.data = values


def watch_freezing(root: nn.Module, refuse: Callable[[str], None]) -> None:
    """Calls a function for modules of which `requires_grad_` does not change flat parameters.

    Without `use_orig_params`, the modules of a unit have no parameters.

    Args:
        refuse: Called with the name of a module in its unit, if `requires_grad_` would change its parameters.
    """
    for path, unit in flat_units(root):
        if unit.originals is not None:
            continue
        inner: Any = root.get_submodule(path).module
        names = {module: name for name, module in inner.named_modules()}
        for owner in {info.module for info in unit.flat._param_infos}:
            name = names[owner]
            while name:
                part = inner.get_submodule(name)
                vars(part)["requires_grad_"] = partial(_change_requires_grad, part, name, unit.flat, refuse)
                name = name.rpartition(".")[0]


def _change_requires_grad(
    part: nn.Module, name: str, flat: Tensor, refuse: Callable[[str], None], requires_grad: bool = True
) -> nn.Module:
    if flat.requires_grad != requires_grad:
        refuse(name)
    return type(part).requires_grad_(part, requires_grad)


def _groups_of_unit(unit: object) -> list[Any]:
    """Returns the FSDP 2 object of each group of parameters of a unit, or none for other modules."""
    if not hasattr(unit, "_get_fsdp_state"):
        return []
    state = unit._get_fsdp_state()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


_UNITS_AROUND = "_units_around_layers"
"""Attribute of a model in a pipeline with the units of its stages, which are not among its modules."""


def set_units_around_layers(model: nn.Module, units: Sequence[nn.Module]) -> None:
    """Adds units of FSDP 2 that have layers of a model and parameters around them to those of the model."""
    vars(model)[_UNITS_AROUND] = tuple(units)


def _groups_of_fsdp2(model: nn.Module) -> Iterator[Any]:
    """Yields the FSDP 2 object of each group of parameters that are gathered together."""
    roots = (model, *vars(model).get(_UNITS_AROUND, ()))
    for module in dict.fromkeys(module for root in roots for module in root.modules()):
        yield from _groups_of_unit(module)


def _parameters_of_fsdp2(model: nn.Module) -> Iterator[Any]:
    """Yields the FSDP 2 object of each parameter, which has its accumulated unsharded gradient."""
    for group in _groups_of_fsdp2(model):
        yield from group.fsdp_params


def is_view_of_flat_parameter(tensor: Tensor) -> bool:
    """Returns whether a tensor is a parameter in a forward of FSDP 1, which is a view of gathered values."""
    return getattr(tensor._base, "_is_flat_param", False)


def parameters_and_shards(models: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Yields the parameters of models on this rank, and the shards of those that FSDP 2 has gathered now."""
    for model in models:
        # `parameters` of a pipeline also yields those of other ranks.
        yield from (parameter for _, parameter in model.named_parameters())
        yield from (parameter.sharded_param for parameter in _parameters_of_fsdp2(model))


def meshes_of_fsdp2(model: nn.Module) -> dict[Tensor, Any]:
    """Returns each parameter of FSDP 2 with the mesh over which FSDP 2 averages its gradient.

    `Module.to` may have replaced the parameters since `fully_shard`.
    """
    infos = (
        (parameter._module_info, group.mesh_info.mesh)
        for group in _groups_of_fsdp2(model)
        for parameter in group.fsdp_params
    )
    return {getattr(info.module, info.param_name): mesh for info, mesh in infos}


ACCUMULATED = "unsharded_accumulated_grad"
"""Attribute of parameters of FSDP 2 for a gradient in the dtype of the reduction.

Since torch 2.15 it is a property that returns the gradient of the gathered parameter.
"""

_PARTIAL = "_partial_reduce_output"
"""Attribute of groups of FSDP 2 with gradients that are reduced in a replica, and not over replicas."""


def is_freed_after_forward(unit: object) -> bool:
    """Returns whether a unit of FSDP 2 frees its gathered parameters after the forward."""
    return any(group.post_forward_mesh_info is not None for group in _groups_of_unit(unit))


def has_gathered(unit: object) -> bool:
    """Returns whether a unit of FSDP 2 has allocated its gathered parameters before."""
    return all(hasattr(p, "_unsharded_param") for group in _groups_of_unit(unit) for p in group.fsdp_params)


def is_unit_of_fsdp2(module: nn.Module) -> bool:
    """Returns whether FSDP 2 gathers parameters before the forward of a module."""
    return bool(_groups_of_unit(module))


@contextmanager
def kept_after_forward(unit: object) -> Iterator[None]:
    """Keeps the parameters of a unit of FSDP 2 gathered after its forwards in the block, for the backward."""
    groups = _groups_of_unit(unit)
    kept = [group.post_forward_mesh_info for group in groups]
    for group in groups:
        group.post_forward_mesh_info = None
    try:
        yield
    finally:
        for group, value in zip(groups, kept, strict=True):
            group.post_forward_mesh_info = value


def phases_of_fsdp2(models: Iterable[nn.Module]) -> dict[Tensor, tuple[bool, bool]]:
    """Returns for each parameter of FSDP 2 whether it is gathered, and whether a pass of its unit runs."""
    phases: dict[Tensor, tuple[bool, bool]] = {}
    for group in (group for model in models for group in _groups_of_fsdp2(model)):
        for parameter in group.fsdp_params:
            info = parameter._module_info
            is_gathered = parameter.sharded_state.name == "UNSHARDED"
            runs = group._training_state.name != "IDLE"
            phases[getattr(info.module, info.param_name)] = is_gathered, runs
    return phases


def unreduced_gradients(model: nn.Module) -> list[Tensor]:
    """Returns the gradients of FSDP 2 that are not reduced yet, and the sharded ones of gathered units.

    They are not public, and not gradients of the parameters that `Module.parameters` returns now.
    """
    parameters = list(_parameters_of_fsdp2(model))
    kept = [vars(parameter).get(ACCUMULATED) for parameter in parameters]
    kept += [
        parameter._unsharded_param.grad for parameter in parameters if hasattr(parameter, "_unsharded_param")
    ]
    kept += [parameter.sharded_param.grad for parameter in parameters]
    kept += [getattr(group, _PARTIAL) for group in _groups_of_fsdp2(model)]  # no all-reduce yet
    return [gradient for gradient in kept if gradient is not None]


@contextmanager
def unreduced_gradients_kept(model: nn.Module) -> Iterator[None]:
    """Hides the gradients of gathered parameters of FSDP 2 inside the block.

    Those that were added after `TakenGradients` had taken others are deleted.
    """
    gathered = [p for p in _parameters_of_fsdp2(model) if hasattr(p, "_unsharded_param")]
    gradients = [parameter._unsharded_param.grad for parameter in gathered]
    for parameter in gathered:
        parameter._unsharded_param.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(gathered, gradients, strict=True):
            if (taken := vars(parameter).get(_TAKEN)) is None or taken() is None:
                parameter._unsharded_param.grad = gradient
            elif vars(parameter).get(ACCUMULATED) is not None:
                setattr(parameter, ACCUMULATED, None)


_TAKEN = "_accelerate_taken"
"""Attribute of parameters of FSDP 2 with a weak reference to their `TakenGradients`."""


class TakenGradients:
    """Gradients that FSDP 2 has not reduced, removed from parameters until they are put back.

    Args:
        parameters: Sharded parameters.
    """

    def __init__(self, models: Iterable[nn.Module], parameters: Iterable[Tensor]) -> None:
        ids = set(map(id, parameters))
        self._slots: list[tuple[Any, Any, str]] = []  # a parameter of FSDP 2, and where it has a gradient
        self._shared: list[Any] = []  # groups with other parameters, too
        for group in (group for model in models for group in _groups_of_fsdp2(model)):
            own = [parameter for parameter in group.fsdp_params if id(parameter.sharded_param) in ids]
            for parameter in own:
                self._slots.append((parameter, parameter, ACCUMULATED))
                if hasattr(parameter, "_unsharded_param"):
                    self._slots.append((parameter, parameter._unsharded_param, "grad"))
                vars(parameter)[_TAKEN] = weakref.ref(self)
            if own and len(own) == len(group.fsdp_params):
                self._slots.append((own[0], group, _PARTIAL))
            elif own:
                self._shared.append(group)
        self._gradients = [_gradient_in(owner, name) for _, owner, name in self._slots]
        self._remove()

    def __bool__(self) -> bool:
        return any(gradient is not None for gradient in self._gradients)

    @property
    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Each sharded parameter with a gradient that was taken."""
        for (parameter, _, _), gradient in zip(self._slots, self._gradients, strict=True):
            if gradient is not None:
                yield parameter.sharded_param, gradient

    @property
    def has_later(self) -> bool:
        """True if the parameters have other gradients now that are not reduced."""
        return any(_gradient_in(owner, name) is not None for _, owner, name in self._slots)

    @property
    def is_mixed(self) -> bool:
        """True if gradients that wait for an all-reduce are in one tensor with those of other parameters."""
        return any(getattr(group, _PARTIAL) is not None for group in self._shared)

    def put_back(self, *, adds: bool) -> None:
        """Sets the gradients again, and deletes those that were added since then, or adds them."""
        if adds:
            later = [_gradient_in(owner, name) for _, owner, name in self._slots]
            self._gradients = [
                later if gradient is None else gradient if later is None else gradient + later
                for gradient, later in zip(self._gradients, later, strict=True)
            ]
        self._remove()
        for (_, owner, name), gradient in zip(self._slots, self._gradients, strict=True):
            if gradient is not None:
                setattr(owner, name, gradient)

    def _remove(self) -> None:
        for _, owner, name in self._slots:
            if _gradient_in(owner, name) is not None:
                setattr(owner, name, None)


def _gradient_in(owner: object, name: str) -> Any:
    # `unsharded_accumulated_grad` is an attribute of the object, or a property without a setter.
    return vars(owner).get(name) if name == ACCUMULATED else getattr(owner, name)


def zero_sharded_gradients(model: nn.Module, set_to_none: bool) -> None:
    """Removes the gradients of the shards of FSDP 2, or sets them to zero."""
    for parameter in _parameters_of_fsdp2(model):
        gradient = parameter.sharded_param.grad
        if gradient is not None and set_to_none:
            parameter.sharded_param.grad = None
        elif gradient is not None:
            gradient.detach_().zero_()


def drop_unreduced_gradients(model: nn.Module) -> None:
    """Deletes the gradients that `unreduced_gradients` returns."""
    for group in _groups_of_fsdp2(model):
        setattr(group, _PARTIAL, None)
    for parameter in _parameters_of_fsdp2(model):
        if vars(parameter).get(ACCUMULATED) is not None:
            setattr(parameter, ACCUMULATED, None)
        parameter.sharded_param.grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


def original_buffer_dtypes(root: Any) -> dict[str, torch.dtype]:
    """Returns the dtypes of the buffers of a unit of FSDP 1 before mixed precision has cast them, by name."""
    dtypes: dict[str, torch.dtype] = root._buffer_name_to_orig_dtype
    return dtypes
