"""Private functions for memory plans and memory profiles.

They adapt torch's memory tracker, and read operators and recorded allocations.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from torch.utils.hooks import RemovableHandle

memory_dump: Callable[[Any], Callable[[str], None]] = attrgetter("_dump_snapshot")
"""Function of the memory module of a device that writes its recorded allocations to a file."""


def memory_recorder(memory: object) -> Any:
    """Returns the function that starts the recording of allocations, or None if the device has none.

    The documentation uses its private name.
    """
    return getattr(memory, "_record_memory_history", None)


def flat_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """Returns a function of the leaves of arguments in its place, and the leaves for this call.

    `torch.utils.checkpoint` restores generators of the devices of positional tensors only. The first call
    gets the lists and dicts among the arguments, to which the function may add values for its caller. Later
    ones get new ones with the leaves of now, as those of the caller change meanwhile.
    """
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    waiting: list[Any] = [(args, kwargs)]

    def call(*leaves: Any) -> Any:
        args, kwargs = waiting.pop() if waiting else pytree.tree_unflatten(list(leaves), structure)
        return function(*args, **kwargs)

    return call, leaves


def repeats_random_numbers(module: object) -> bool:
    """Returns whether `torch.utils.checkpoint` restores the generators of a device, by its torch module.

    It does so for modules with this name, which torch.mps and documented extensions lack.
    """
    return bool(getattr(module, "_initialized", False))


@contextmanager
def log_silenced(name: str) -> Iterator[None]:
    """Keeps a logger of torch from logging errors that this package handles or raises.

    Args:
        name: Name of the logger, which is that of a private module.
    """
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def is_fake(tensor: Tensor) -> bool:
    """Returns whether a tensor is that of a trace, which has no values."""
    return "FakeTensor" in (kind.__name__ for kind in type(tensor).__mro__)  # without an import of the class


def skip_frozen_gradients(tracker: Any, model: nn.Module) -> None:
    """Makes a `MemTracker` set no gradient hooks on frozen parameters, for which torch raises an error.

    Called before the tracker is entered.
    """
    for parameter in model.parameters():
        if not parameter.requires_grad:
            none = RemovableHandle(OrderedDict())  # its removal does nothing
            tracker._param_to_grad_hook_handles[parameter] = (none, none)


def replace_module_hooks(tracker: Any, model: nn.Module) -> None:
    """Replaces the hooks that a `MemTracker` runs around each module by hooks that only find recomputation.

    Those of torch support neither `autograd.grad` nor `PackedSequence`. The hooks on gradients that they
    register are registered here, until the next exit of the tracker.
    """
    modules = tracker._mod_tracker

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        if modules.is_bw and tracker._ac_mod is None:
            tracker._ac_mod, tracker._in_ac = weakref.ref(module), True

    def leave(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if tracker._ac_mod is not None and tracker._ac_mod() is module:
            tracker._ac_mod, tracker._in_ac = None, False

    modules._fw_pre_hook, modules._fw_post_hook = enter, leave
    tracker._track_module_params_and_buffers(model)


def find_recomputation(tracker: Any) -> None:
    """Makes a `MemTracker` count the next tensors as activations if they are recomputed in backward.

    Gradients are only enabled there while a forward runs again.
    """
    tracker._in_ac = tracker._ac_mod is not None or torch.is_grad_enabled()


def record_moments(tracker: Any, record: Callable[[], None]) -> None:
    """Makes a `MemTracker` call a function after each operator, instead of recording each module."""
    tracker._update_peak_stats = lambda state: record()
    tracker.get_tracker_snapshot = lambda kind="current": {}


def tracked_bytes(tracker: Any) -> Mapping[torch.device, Mapping[str, int]]:
    """Returns the current bytes of a `MemTracker`, by device and by kind of tensor."""
    return tracker._curr_mem_snap  # type: ignore[no-any-return]


def operator(name: str) -> Any:
    """Returns an operator of torch by name, such as "_softmax.default"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def is_operator(value: object) -> bool:
    """Returns whether a value is an overload of an operator, whose class has no public name."""
    return isinstance(value, torch._ops.OpOverload)


def packet_of(func: Callable[..., Any]) -> Any:
    """Returns the operator of an overload, or a higher-order operator itself."""
    return getattr(func, "_overloadpacket", func)


def draws_random_numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call of an operator changes the state of a random number generator.

    Attention does so only with dropout.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return bool(arguments_of(func, args, kwargs).get("dropout_p", 1))


def arguments_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an operator call by name, including defaults."""
    parameters = func._schema.arguments
    names = [parameter.name for parameter in parameters]
    defaults = {
        parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()
    }
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def call_with(func: Any, arguments: Mapping[str, Any]) -> Any:
    """Returns the outputs of an operator for all of its arguments by name."""
    parameters = func._schema.arguments
    return func(
        *(arguments[each.name] for each in parameters if not each.kwarg_only),
        **{each.name: arguments[each.name] for each in parameters if each.kwarg_only},
    )


def storage_id(tensor: Tensor) -> int:
    """Returns a number that the tensors of one storage share, as long as it exists."""
    return int(tensor.untyped_storage()._cdata)


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """Returns a weak reference to the storage of a tensor, whose `storage_id` is not reused before it."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class _Outputs(TorchDispatchMode):
    """Context that passes the outputs of operators to a function."""

    def __init__(self, keep: Callable[[Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keep = keep

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self._keep(func, outputs)
        return outputs


@contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


# Units of FSDP inside a region record other names in the recomputation.
SAC_IGNORED_OPS.update(
    (
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops.profiler._record_function_exit._RecordFunction,
    )
)


def selective_checkpoint_contexts(
    policy: Callable[..., Any], keep: Callable[[Any, Any], None]
) -> tuple[Any, Any]:
    """Returns the contexts of a forward and of its recomputation, which save outputs of operators.

    Args:
        policy: Policy of `create_selective_checkpoint_contexts`.
        keep: Function of an operator and its outputs, for versions of torch whose policy does not get them.
    """
    create: Callable[[Any], tuple[Any, Any]] = create_selective_checkpoint_contexts
    forward, recomputation = create(policy)
    # Torch since 2.14 warns if outputs are not offloaded to the CPU where inputs are, unless this is set.
    forward.respect_saved_tensors_hooks = False
    if "op_output" in inspect.signature(SelectiveCheckpointContext).parameters:  # since torch 2.13
        return forward, recomputation
    return _both(forward, _Outputs(keep)), recomputation


def mutated_by(func: Callable[..., Any]) -> list[str]:
    """Returns the names of the arguments that an operator modifies."""
    schema = getattr(func, "_schema", None)  # which operators of a higher order lack
    if schema is None or not schema.is_mutable:
        return []
    return [
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def peak_on_cpu(work: Callable[[], Any]) -> tuple[Any, int] | None:
    """Returns the result of a function, and the peak of the bytes that its operators have allocated.

    The public profiler records the same allocations, but prints messages.

    Returns:
        None if this thread is being profiled already, or torch has no such profiler.
    """
    module: Any = torch.autograd
    if not hasattr(module, "_enable_profiler_legacy") or module._profiler_enabled():
        return None
    options = module.ProfilerConfig(
        module.ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
    )
    module._enable_profiler_legacy(options)
    try:
        result = work()
    finally:
        threads = module._disable_profiler_legacy()
    allocated = peak = 0
    for event in (event for thread in threads for event in thread if event.kind() == "memory_alloc"):
        allocated += event.cpu_memory_usage()
        peak = max(peak, allocated)
    return result, peak


@contextmanager
def fake_parameters_converted() -> Iterator[None]:
    """Replaces `Module._apply` inside the block, so that `Module.to` converts fake parameters.

    The original swaps the tensors, which fails if there are weak references to them.
    """
    original = nn.Module._apply

    def convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            convert(child, function)
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                with torch.no_grad():
                    converted = function(tensor)
                if converted is not tensor:
                    tensor.data = converted
        return module

    nn.Module._apply = convert  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]
