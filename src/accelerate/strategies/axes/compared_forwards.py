"""Forwards of a model that are computed for a comparison, after which the model is restored."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from accelerate import rng, torch_private
from accelerate.base import ConfigurationError
from accelerate.nested import iterate_tensors
from accelerate.strategies.dtensors import units_of
from accelerate.strategies.fixed_draws import Draw, FixedDraws
from accelerate.strategies.module_state import ModuleState
from accelerate.strategies.object_state import SavedParameter, captured, saved_parameters
from accelerate.strategies.tolerances import relative_difference


class Computed(NamedTuple):
    """Results of a forward.

    Attributes:
        outputs: Tensors in its outputs.
        buffers: Copies of the buffers and parameters that it changes, by name.
        draws: Random numbers that it draws.
        attributes: Tensors that it assigns to attributes of modules, by name.
        unknown: Type of an object in its outputs whose tensors are not known, or "".
    """

    outputs: list[Tensor]
    buffers: dict[str, Tensor]
    draws: Set[Draw] = frozenset()
    attributes: Mapping[str, Tensor] = MappingProxyType({})
    unknown: str = ""


@contextmanager
def comparable(model: nn.Module) -> Iterator[Callable[..., Computed]]:
    """Yields a function that computes a forward of a model, and restores the model at the end.

    Each forward starts with the same attributes, buffers and parameters unless the one before keeps those
    that it changes. Random operators return fixed values. The modes of modules are those of the program,
    because a model may compute something else in training.
    """
    state, generators = ModuleState(model), rng.capture()
    restore_objects = captured(state.values)
    parameters = [] if units_of(model) else saved_parameters(model)
    num_hooks = sum(map(torch_private.num_forward_hooks, model.modules()))
    names = {id(module): name for name, module in model.named_modules()}

    def name_of(module: nn.Module, name: str) -> str:
        return f"{names[id(module)]}.{name}".lstrip(".")

    def compute(args: Any, kwargs: Any, *, keeps: bool = False, others: Collection[Draw] = ()) -> Computed:
        rng.set_seed(0)  # so that also numbers of Python and numpy are equal on all ranks
        try:
            with FixedDraws(others) as draws:
                given = model.forward(*args, **kwargs)
            changed = {
                name_of(saved.module, saved.name): saved.current.clone()
                for saved in state.changed_buffers()
                if saved.current is not None
            }
            for saved in parameters:
                if saved.has_changed:
                    _refuse_large(saved, type(model).__name__)
                    changed[saved.name] = saved.parameter.detach().clone()
            attributes = {name_of(module, name): value for module, name, value in state.new_tensors()}
            outputs = list(iterate_tensors(given))
            return Computed(outputs, changed, draws.draws, attributes, unknown_in(given))
        finally:
            if not keeps:
                restore()

    def restore() -> None:
        flags = state.new_flags()
        state.restore_values()
        restore_objects()
        with torch.no_grad():
            for saved in parameters:
                if not saved.is_large and saved.has_changed:
                    saved.restore()
        if num_hooks != sum(map(torch_private.num_forward_hooks, model.modules())):
            for module, name in flags:  # by which models of transformers note that their hooks are added
                setattr(module, name, True)

    try:
        # Modes of the program, such as a count of FLOPs, do not include the comparison.
        with torch_private.dispatch_modes_disabled(), torch_private.without_reentrant_checkpoints():
            yield compute
    finally:
        restore()
        rng.restore(generators)
        torch.clear_autocast_cache()


def unknown_in(outputs: object) -> str:
    """Returns the type of an object in outputs whose tensors are not known, or ""."""
    waiting = [outputs]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value
        elif not isinstance(value, Tensor):
            held = getattr(value, "__dict__", {}).values()
            if any(isinstance(each, Tensor) for each in held):
                return type(value).__name__
    return ""


def _refuse_large(saved: SavedParameter, name: str) -> None:
    if saved.is_large:
        raise ConfigurationError(
            f"The forward of {name} changes the parameter {saved.name} of {saved.parameter.numel():,} "
            "numbers. They are not copied, so a comparison with whole sequences would change them, too. "
            "Change them outside of the forward."
        )


def different_buffer(own: Computed, right: Computed, tolerance: float) -> str:
    """Returns the name of a buffer or parameter to which two forwards give other values, or ""."""
    for name in [*right.buffers, *own.buffers]:
        first, second = own.buffers.get(name), right.buffers.get(name)
        if first is None or second is None or first.shape != second.shape:
            return name
        is_exact = not (second.is_floating_point() or second.is_complex())
        if not torch.equal(first, second) if is_exact else relative_difference(first, second, tolerance):
            return name
    return ""


def draw_of_whole(
    compute: Callable[..., Computed],
    inputs: tuple[Any, Any],
    right: Computed,
    own: Computed,
    tolerance: float,
) -> str:
    """Returns a draw on which outputs for whole sequences depend, and which each rank computes again, or "".

    A draw without positions has the same shape on shards. Ranks draw the same numbers only if their
    generators have the same state.
    """
    draws = right.draws & own.draws
    if not draws:
        return ""
    other = compute(*inputs, others=draws)
    pairs = zip(right.outputs, other.outputs, strict=False)
    is_equal = len(right.outputs) == len(other.outputs) and not any(
        relative_difference(changed, outputs, tolerance) for outputs, changed in pairs
    )
    name, shape = min(draws)
    return "" if is_equal else f"{name} of shape {list(shape)}"


def state_of_generators() -> int:
    """Returns a number that is equal on ranks whose generators of torch have the same state."""
    states = iterate_tensors(list(rng.capture().values()))
    return zlib.crc32(b"".join(state.numpy().tobytes() for state in states))


def explain_draw(name: str, draw: str, sizes: str) -> str:
    """Returns the message for ranks that draw different numbers for the same sequences."""
    return (
        f"{name} draws numbers for whole sequences ({draw}), and the random generators of the ranks of "
        f"{sizes} have different states, so each rank would compute its positions with other numbers. They "
        "differ after set_seed with device_specific=True, and if ranks draw numbers for parts of different "
        "lengths. Draw these numbers outside of the model, or with a torch.Generator of the model."
    )
