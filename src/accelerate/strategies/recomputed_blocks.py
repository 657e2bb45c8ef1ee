"""Blocks of a model that run again in the backward pass instead of keeping their activations.

The forward of a block is replaced, so that modules and the names of parameters do not change.

Source: https://docs.pytorch.org/docs/stable/checkpoint.html
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import CellType, FunctionType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, noop_context_fn, set_checkpoint_early_stop

from accelerate import planning, torch_private
from accelerate.base import wrong_value
from accelerate.devices import DeviceBackend, of_device
from accelerate.nested import iterate_tensors
from accelerate.plugins import ActivationCheckpointing
from accelerate.strategies.module_state import (
    MAX_COPIED,
    ModuleState,
    attributes_of,
    has_replaced_parameters,
)
from accelerate.strategies.recomputed_values import check_of, compared
from accelerate.strategies.request import Context
from accelerate.strategies.tolerances import must_compare
from accelerate.wrappers import FunctionMode

if TYPE_CHECKING:
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.strategies.activation_offload import ActivationOffload

PRODUCTS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "linear",
    "convolution",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "topk",  # so that a router chooses experts once
)
"""Operators that `save_operators="matmul"` selects."""
ROUTING = (torch.ops.aten.topk.default,)
"""Operators that choose the experts of tokens, which ranks that exchange tokens must not choose again."""
LIBRARIES = {*sys.stdlib_module_names, "torch", "accelerate", "deepspeed", "megatron", "torch_xla"}
"""Packages whose objects a recomputation leaves as they are, such as locks and the states of shards."""


class RecomputedForward:
    """Callable that runs the forward of a module again in backward instead of keeping its activations.

    It is the instance attribute `forward` of the module. Hooks of the module run once. Unlike a closure it
    can be pickled and copied with the module. In calls 1, 2, 4, 8 and so on with gradients, values of the
    recomputation are compared with those of the forward.

    Args:
        compares_outputs: Whether these recomputations run to the end, which needs memory for the outputs.
    """

    def __init__(
        self,
        module: nn.Module,
        save_operators: Any = None,
        offload: ActivationOffload | None = None,
        compares_outputs: bool = True,
    ) -> None:
        self.module = module
        self.inner: Callable[..., Any] | None = module.__dict__.get("forward")
        self.offload = offload
        self.generators: list[torch.Generator] | None = None  # besides those of modules, after a forward
        self._num_calls = 0  # with gradients, that are not compiled
        self._compares_outputs = compares_outputs
        self.options: dict[str, Any] = {"use_reentrant": False}
        if save_operators is not None:
            self.options["context_fn"] = partial(_contexts, save_operators)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the attributes without generators, which a copy finds in its first forward."""
        return {**vars(self), "generators": None}

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """Forward that keeps its activations, for `inspect.signature`."""
        return self.inner or type(self.module).forward.__get__(self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        if torch.compiler.is_compiling() and self.offload is None:
            # A graph has no code before and after a recomputation, which only buffers need in it.
            is_plain = next(self.module.buffers(), None) is None
            options = self.options if is_plain else self._options_with_state([])
            return checkpoint(self.run, *args, **options, **kwargs)
        self._num_calls += 1
        name, check = type(self.module).__name__, None
        if must_compare(self._num_calls) and not any(map(_is_traced, iterate_tensors((args, kwargs)))):
            check = check_of(name)
        if check is None or not self._compares_outputs:
            return self._checkpoint(self.run, args, kwargs, check)
        with set_checkpoint_early_stop(False):
            return self._checkpoint(compared(self.run, name), args, kwargs, check)

    def _checkpoint(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], check: str | None
    ) -> Any:
        options = partial(self._options_with_state, check=check)
        if self.offload is not None:
            return self.offload.checkpoint(run, args, kwargs, options)
        again, leaves = torch_private.flat_call(run, args, kwargs)
        return checkpoint(again, *leaves, **options(leaves))

    def _options_with_state(self, inputs: Sequence[object], check: str | None = None) -> dict[str, Any]:
        versions = _versions_of(inputs) if inputs else []
        context_fn = self.options.get("context_fn", noop_context_fn)
        compiles = torch.compiler.is_compiling()
        is_first = self.generators is None and not compiles
        if is_first:
            self.generators = _generators_near(self.module)
        generators = [] if self.generators is None else self.generators  # to which a first forward adds
        objects = [] if compiles else _objects_of(self.module, inputs)
        contexts = partial(
            _contexts_with_state, self.module, context_fn, versions, generators, objects, is_first
        )
        checks = {} if check is None else {"determinism_check": check}
        return {**self.options, **checks, "context_fn": contexts}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward and keeps its activations."""
        if self.inner is None:  # not `__wrapped__`, as torch before 2.13 does not trace `__get__`
            return type(self.module).forward(self.module, *args, **kwargs)
        return self.inner(*args, **kwargs)

    def restore(self, module: nn.Module) -> None:
        if self.inner is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = self.inner


def _versions_of(inputs: Sequence[object]) -> list[tuple[Tensor, int]]:
    """Returns the tensors among the inputs of a block, each with the number of its changes in place."""
    tensors = [leaf for leaf in inputs if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)]
    return list(zip(tensors, torch_private.in_place_versions(tensors), strict=True))


def _objects_of(block: nn.Module, inputs: Sequence[object]) -> list[object]:
    """Returns the objects of the program that a block refers to, whose attributes its forward may change."""
    values = [value for part in block.modules() for value in attributes_of(part).values()]
    values += [item for value in values if type(value) in (list, tuple) for item in value]
    values += [item for value in values if type(value) is dict for item in value.values()]
    return list({id(value): value for value in (*values, *inputs) if _is_of_program(value)}.values())


def _generators_near(block: nn.Module) -> list[torch.Generator]:
    """Returns the generators of the classes of a block and of the Python modules that define them.

    A forward may draw from one of them only later.
    """
    classes = {kind for part in block.modules() for kind in type(part).__mro__ if not _is_known(kind)}
    modules = filter(None, map(sys.modules.get, {kind.__module__ for kind in classes}))
    values = [value for space in (*classes, *modules) for value in vars(space).values()]
    functions = [value for value in values if isinstance(value, FunctionType)]
    cells = [cell for function in functions for cell in function.__closure__ or () if cell != CellType()]
    values += [cell.cell_contents for cell in cells]
    return list({id(value): value for value in values if isinstance(value, torch.Generator)}.values())


def _is_known(kind: type) -> bool:
    """Returns whether a class is one of Python, torch or an engine."""
    return kind.__module__.partition(".")[0] in LIBRARIES


def _is_of_program(value: object) -> bool:
    """Returns whether a value has attributes and is of a class that is not one of Python or an engine."""
    if isinstance(value, SimpleNamespace):
        return True
    is_known = isinstance(value, (nn.Module, Tensor, type)) or _is_known(type(value))
    return hasattr(value, "__dict__") and not is_known


def _call_and_note(
    before: ModuleState, generators: list[torch.Generator], func: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Calls a function of torch, and notes a generator from which it draws, besides those of modules.

    Args:
        before: State from before the forward, to which the states of these generators are added.
        generators: List to which they are added.
    """
    generator = kwargs.get("generator")
    is_own = generator is not torch.default_generator  # whose state torch restores
    if isinstance(generator, torch.Generator) and is_own and before.add_generator(generator):
        generators.append(generator)
    return func(*args, **kwargs)


def _contexts_with_state(
    block: nn.Module,
    context_fn: Callable[[], tuple[Any, Any]],
    versions: Sequence[tuple[Tensor, int]],
    generators: list[torch.Generator],
    objects: Sequence[object],
    is_first: bool,
) -> tuple[Any, Any]:
    """Returns the contexts of `context_fn`, with which a block changes its attributes and buffers once."""
    if any(map(has_replaced_parameters, block.modules())):
        reason = "its parameters are replaced during this call, and a recomputation would use its own"
        fix = "Leave it out where torch.func.functional_call is used"
        raise wrong_value("activation checkpointing", type(block).__name__, reason, fix)
    before = ModuleState(block, generators, objects)
    forward, recomputation = context_fn()
    if context_fn is not noop_context_fn and not torch.compiler.is_compiling():
        forward, recomputation = _Uncached(forward), _Uncached(recomputation)
    draws = FunctionMode(partial(_call_and_note, before, generators)) if is_first else nullcontext()
    checked = _checked_forward(block, before, forward, versions, draws)
    return checked, RestoredState(block, before, recomputation, versions, generators)


class _Uncached:
    """Context that casts weights in each use under autocast, around another one.

    torch finds kept outputs by the number of a call. A block that runs several times would cast its weights
    in its first forward only, and in each recomputation.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __enter__(self) -> None:
        self._was_cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.set_autocast_cache_enabled(self._was_cached)
        self._inner.__exit__(*error)


@contextmanager
def _checked_forward(
    block: nn.Module,
    before: ModuleState,
    context: Any,
    versions: Sequence[tuple[Tensor, int]],
    draws: AbstractContextManager[object],
) -> Iterator[None]:
    """Raises an error after a forward that has changed values that are not known any more."""
    with draws, context:
        yield
    _check_versions(block, versions)
    if lost := before.lost_buffer:
        name = type(block).__name__
        fix = (
            f"Assign a new tensor to a buffer of more than {MAX_COPIED} elements, or leave {name} out of the "
            "blocks that are recomputed"
        )
        reason = f"its forward changes its buffer {lost!r} in place"
        raise wrong_value("activation checkpointing", name, reason, fix)


def _check_versions(block: nn.Module, versions: Sequence[tuple[Tensor, int]]) -> None:
    """Raises an error if an input of a block has been changed in place since its forward began."""
    if any(torch_private.in_place_version(tensor) != version for tensor, version in versions):
        name = type(block).__name__
        reason = "an input of its forward has been changed in place, and a recomputation needs it"
        fix = f"Change a copy of the tensor, or leave {name} out of the blocks that are recomputed"
        raise wrong_value("activation checkpointing", name, reason, fix)


class RestoredState:
    """Context of recomputations, which begin with the attributes and buffers that the forward began with.

    They end with those from before the recomputation. Buffers are copied outside of the inner context, which
    may count the operators inside it.

    Args:
        before: State from before its forward.
        versions: Inputs of the forward, each with the number of its changes in place until then.
        generators: Random generators besides those of modules.
    """

    def __init__(
        self,
        block: nn.Module,
        before: ModuleState,
        inner: Any,
        versions: Sequence[tuple[Tensor, int]],
        generators: Sequence[torch.Generator],
    ) -> None:
        self._block, self._before, self._inner, self._versions = block, before, inner, versions
        self._current, self._generators = before, generators
        self._device = _device_to_seed([tensor for tensor, _ in versions])
        self._generator = torch.empty(0) if self._device is None else self._device.rng_state()
        self._current_generator = self._generator

    def __enter__(self) -> None:
        _check_versions(self._block, self._versions)
        self._current = ModuleState(self._block, self._generators, self._before.objects)
        self._before.restore_copies()
        if self._device is not None:
            self._current_generator = self._device.rng_state()
            self._device.set_rng_state(self._generator)
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        if self._device is not None:
            self._device.set_rng_state(self._current_generator)
        self._current.restore_objects()


def _is_traced(tensor: Tensor) -> bool:
    return tensor.is_meta or torch_private.is_fake(tensor)


def _device_to_seed(tensors: Iterable[Tensor]) -> DeviceBackend | None:
    """Returns the device of tensors if torch does not repeat its random numbers in a recomputation."""
    for tensor in tensors:
        if _is_traced(tensor):
            continue
        device = of_device(tensor.device)
        if not (device.is_host or torch_private.repeats_random_numbers(device.torch_module())):
            return device
    return None


def _contexts(save_operators: Any) -> tuple[Any, Any]:
    """Returns the contexts of the forward and of its recomputation, which keep the outputs of operators."""
    policy = SavingPolicy(overloads_of(save_operators))
    contexts: tuple[Any, Any] = torch_private.selective_checkpoint_contexts(policy, policy.keep)
    return contexts


class SavingPolicy:
    """Policy of the operators of one forward, which keeps the outputs of some."""

    def __init__(self, operators: Collection[Any]) -> None:
        self._operators = operators
        self._kept: dict[int, Any] = {}  # id of a storage that is kept -> operator

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if not context.is_recompute and (changed := torch_private.mutated_by(operator)):
            self._check(operator, changed, args, kwargs)
        # In backward random numbers are those of the forward only if all of them are drawn again.
        if operator not in self._operators or torch_private.draws_random_numbers(operator, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.keep(operator, getattr(context, "op_output", None))
        return CheckpointPolicy.MUST_SAVE

    def keep(self, operator: Any, outputs: Any) -> None:
        """Notes the outputs of an operator if they are kept."""
        if operator in self._operators:
            for tensor in iterate_tensors(outputs):
                self._kept[torch_private.storage_id(tensor)] = operator

    def _check(self, operator: Any, changed: Sequence[str], args: Any, kwargs: Any) -> None:
        """Raises an error for an operator that changes an output that is kept, also through a view.

        torch compares versions of tensors, and the views that it makes of outputs have their own.
        """
        arguments = torch_private.arguments_of(operator, args, kwargs)
        for tensor in iterate_tensors([arguments[name] for name in changed]):
            if kept := self._kept.get(torch_private.storage_id(tensor)):
                raise wrong_value(
                    "save_operators",
                    str(kept),
                    f"{operator} changes an output of it in place, and the backward pass needs the output",
                    "Compute `h = h + b` in place of `h += b`, or leave the operator out of save_operators",
                )


def overloads_of(operators: Any) -> Collection[Any]:
    """Returns the overloads of operators that `save_operators` of `ActivationCheckpointing` selects."""
    return _overloads_of_products() if operators == "matmul" else operators


@cache
def _overloads_of_products() -> frozenset[Any]:
    packets = [getattr(torch.ops.aten, name) for name in PRODUCTS if hasattr(torch.ops.aten, name)]
    return frozenset(getattr(packet, name) for packet in packets for name in packet.overloads())


def recompute(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    offload: ActivationOffload | None = None,
    save_operators: Any = None,
    parallelism: ParallelismConfig | None = None,
    compares_outputs: bool = True,
) -> None:
    """Applies activation checkpointing to modules inside a model, in place.

    With expert parallelism the choice of experts is saved.

    Args:
        model: The model.
        blocks: Modules that are recomputed.
        offload: Offloads the inputs of the blocks.
        save_operators: Operators whose outputs are kept.
        parallelism: Parallelism of the run.
        compares_outputs: As for `RecomputedForward`.
    """
    if parallelism is not None and parallelism.ep_enabled and save_operators != "matmul":
        save_operators = (*(save_operators or ()), *ROUTING)
    # A block that runs again would append to the key-value cache of a model of transformers a second time.
    planning.disable_caches(model)
    for block in map(torch_private.uncompiled, blocks):
        if not isinstance(block.__dict__.get("forward"), RecomputedForward):
            block.__dict__["forward"] = RecomputedForward(block, save_operators, offload, compares_outputs)


def recompute_in_trace(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    offloads: bool = False,
    save_operators: Any = None,
    parallelism: ParallelismConfig | None = None,
) -> None:
    """Applies activation checkpointing to modules inside a model that is traced, in place."""
    offload = None
    if offloads:
        from accelerate.strategies.activation_offload import ActivationOffload, TracedTransfer

        offload = ActivationOffload(TracedTransfer)
    recompute(model, blocks, offload, save_operators, parallelism)


def keep_activations(model: nn.Module) -> nn.Module:
    """Removes the activation checkpointing of `recompute` from a model, in place, and returns it."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, RecomputedForward):
            forward.restore(module)
    return model


def find_blocks(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """Returns the outermost modules with certain class names, or without names the blocks of a plan."""
    if names is None:
        return planning.blocks_of(model)
    chosen = [module for module in model.modules() if type(module).__name__ in names]
    inner = {child for block in chosen for child in block.modules() if child is not block}
    blocks = [block for block in chosen if block not in inner]
    if not blocks:
        found = {type(block).__name__ for block in planning.blocks_of(model)}
        fix = (
            f"its lists of modules have {', '.join(sorted(found))}" if found else "it has no lists of modules"
        )
        raise wrong_value(
            "blocks", list(names), f"{type(model).__name__} has no module of these classes", fix
        )
    return blocks


def apply_policy(
    policy: ActivationCheckpointing,
    model: nn.Module,
    blocks: Sequence[nn.Module],
    context: Context,
    compares_outputs: bool = True,
) -> None:
    """Applies a policy without a budget to the blocks of a model, in place."""
    offload = None
    if policy.offload:
        from accelerate.strategies.activation_offload import offload_to_host

        offload = offload_to_host(model, context.device)
    parallelism = context.request.parallelism
    chosen = blocks[:: policy.every]
    recompute(model, chosen, offload, policy.save_operators, parallelism, compares_outputs)
