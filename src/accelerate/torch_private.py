"""Private names of torch that the package uses, each with a reason and a fallback.

A name of a torch module is a row of `NAMES`, which is loaded when it is first used as an attribute of this
module. The functions below read private attributes of torch objects, or replace attributes of these objects
or of torch itself. All other files call them: `tests/architecture/test_torch_private.py` checks that no other
file uses private names of torch.
"""

from __future__ import annotations

import gc
import signal
import sys
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from operator import attrgetter, methodcaller
from pkgutil import resolve_name
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from accelerate.base import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel


class PrivateName(NamedTuple):
    """Private name of a torch module."""

    path: str  # "module:name" or "module:name.attribute", or a module alone
    reason: str
    fallback: Callable[[], Any] | None = None  # returns the replacement if torch has no such name


def _split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


NAMES: dict[str, PrivateName] = {
    "default_store": PrivateName(
        "torch.distributed.distributed_c10d:_get_default_store",
        "The store of the default process group, for messages between ranks; it has no public name.",
    ),
    "abort_process_group": PrivateName(
        "torch.distributed.distributed_c10d:_abort_process_group",
        "Closes a process group without waiting for its collectives, as destroy_process_group may do.",
        lambda: dist.destroy_process_group,
    ),
    "may_exchange_data": PrivateName(
        "torch:_has_compatible_shallow_copy_type",
        "Whether the data of a tensor may be replaced by that of another; some device types do not allow it.",
    ),
    "dump_nccl_trace": PrivateName(
        "torch._C._distributed_c10d:_dump_nccl_trace",
        "The flight recorder of NCCL, for hang reports; builds without NCCL have none.",
        lambda: None,
    ),
    "dump_fr_trace": PrivateName(
        "torch._C._distributed_c10d:_dump_fr_trace",
        "The flight recorder of the other backends, for hang reports; some builds have none.",
        lambda: None,
    ),
    "autograd_engine": PrivateName(
        "torch.autograd:Variable._execution_engine",
        "Queues a callback for the end of a backward pass, before callbacks that wait for other ranks.",
    ),
    "flatten_dense_tensors": PrivateName(
        "torch._C._nn:flatten_dense_tensors",
        "Flattens tensors of any shapes in one call; the public way is a Python loop for each collective.",
        lambda: lambda tensors: torch.cat([tensor.contiguous().view(-1) for tensor in tensors]),
    ),
    "unflatten_dense_tensors": PrivateName(
        "torch._C._nn:unflatten_dense_tensors",
        "Splits a flat tensor into views in one call; the public way is a Python loop for each collective.",
        lambda: _split_like,
    ),
    "scaled_dot_product_attention": PrivateName(
        "torch._C._nn:scaled_dot_product_attention",
        "The original attention function; context_parallel replaces the public name inside its block.",
        lambda: nn.functional.scaled_dot_product_attention,
    ),
    "set_rotate_method": PrivateName(
        "torch.distributed.tensor.experimental._attention:set_rotate_method",
        "Sets how context parallelism exchanges keys and values; context_parallel has no argument for it.",
    ),
    "attention_handlers": PrivateName(
        "torch.distributed.tensor.experimental._context_parallel._attention:custom_ops",
        "Maps attention kernels to their context parallel versions; it has none for the CPU kernels.",
        lambda: None,
    ),
    "ring_attention": PrivateName(
        "torch.distributed.tensor.experimental._context_parallel._attention:_templated_ring_attention",
        "Ring attention with any kernel, here the CPU kernel.",
    ),
    "ring_attention_backward": PrivateName(
        "torch.distributed.tensor.experimental._context_parallel._attention:_templated_ring_attention_backward",
        "The backward pass of ring attention with any kernel, here the CPU kernel.",
    ),
    "cpu_attention": PrivateName(
        "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "The CPU attention kernel, which ring attention calls on each rank.",
    ),
    "cpu_attention_backward": PrivateName(
        "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "The backward pass of the CPU attention kernel.",
    ),
    "hybrid_shard_zero2": PrivateName(
        "torch.distributed.fsdp:ShardingStrategy._HYBRID_SHARD_ZERO2",
        "A sharding strategy that the documentation of FSDP 1 mentions, with a private name.",
        lambda: None,
    ),
    "Policy": PrivateName(
        "torch.distributed.fsdp.wrap:_Policy",
        "The base class of the wrapping policies of FSDP 1, such as the public ModuleWrapPolicy.",
        lambda: (),
    ),
    "IncompatibleKeys": PrivateName(
        "torch.nn.modules.module:_IncompatibleKeys",
        "The class of the result of load_state_dict, so that sharded loads return the same class.",
        lambda: namedtuple("IncompatibleKeys", "missing_keys unexpected_keys"),
    ),
    "checkpoint_wrapper": PrivateName(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "Wrappers that recompute a module in backward; the documentation of FSDP uses this name.",
    ),
    "StorageInfo": PrivateName(
        "torch.distributed.checkpoint.filesystem:_StorageInfo",
        "Position of a shard in its file, in the .metadata of torch.distributed.checkpoint.",
    ),
    "MemoryFormat": PrivateName(
        "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
        "Memory formats in the .metadata of torch.distributed.checkpoint.",
    ),
    "OldMemoryFormat": PrivateName(
        "torch.distributed._shard.sharded_tensor.metadata:MEM_FORMAT_ENCODING",
        "Memory formats in the .metadata that older versions of torch wrote.",
        lambda: resolve_name("torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING"),
    ),
    "OldTensorProperties": PrivateName(
        "torch.distributed._shard.sharded_tensor.metadata:TensorProperties",
        "Properties of tensors in the .metadata that older versions of torch wrote.",
        lambda: resolve_name("torch.distributed.checkpoint.metadata:TensorProperties"),
    ),
    "pin_memory": PrivateName(
        "torch.utils.data._utils.pin_memory:pin_memory",
        "Pins all tensors in a batch, as DataLoader does; without it the batch stays in pageable memory.",
        lambda: lambda batch, device=None: batch,
    ),
    "collate": PrivateName(
        "torch.utils.data._utils.collate",
        "The default collate function with another function for tensors; the documentation uses this name.",
    ),
    "fake_tensors": PrivateName(
        "torch._subclasses.fake_tensor",
        "Fake tensors, and the errors of operators that they cannot run; the documentation uses this name.",
    ),
    "MemTracker": PrivateName(
        "torch.distributed._tools.mem_tracker:MemTracker",
        "Counts the bytes of parameters, gradients and activations during a step; no public tool does.",
    ),
    "TorchDispatchMode": PrivateName(
        "torch.utils._python_dispatch:TorchDispatchMode",
        "The base class of modes that intercept each operator; the documentation uses this name.",
    ),
    "no_dispatch": PrivateName(
        "torch.utils._mode_utils:no_dispatch",
        "Runs operators on real tensors while a mode of fake tensors is active.",
    ),
    "default_to_foreach": PrivateName(
        "torch.optim.optimizer:_default_to_fused_or_foreach",
        "Whether an optimizer uses foreach kernels by default, which need more memory.",
        lambda: lambda params, differentiable, use_fused: (False, False),
    ),
    "SingleProcessIterator": PrivateName(
        "torch.utils.data.dataloader:_SingleProcessDataLoaderIter",
        "The iterator of a DataLoader without workers, from which indices can be read in advance.",
        lambda: None,
    ),
}
"""Name in this module -> private name of torch."""


def __getattr__(name: str) -> Any:
    row = NAMES.get(name)
    if row is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = resolve_name(row.path)
    except (ImportError, AttributeError) as error:
        if row.fallback is None:
            raise ConfigurationError(
                f"torch {torch.__version__} has no {row.path}, which is needed here "
                f"({row.reason}) Install a version of torch that this package is tested with."
            ) from error
        value = row.fallback()
    globals()[name] = value  # later lookups do not call this function
    return value


# Modules and tensors

WAIT_FOR_BATCH, WORKER_LOOP = "_get_data", "_worker_loop"
"""Names in stacks of the function of a DataLoader that waits for a batch, and the loop of a worker."""
WRAPPED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Attributes of wrappers of torch for their module, which are prefixes in the names of parameters."""
FLAT_PARAMETER = "_flat_param"
"""Name of the flat parameter of FSDP 1 in its module."""


def is_optimized_module(module: object) -> bool:
    """Returns whether a module is the result of `torch.compile(module)`, by its type."""
    # No module is compiled before dynamo is imported, and the import takes a second.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def uncompiled(module: Any) -> Any:
    """Returns the module inside the wrapper of torch.compile, or the module if it is not compiled."""
    return module._orig_mod if is_optimized_module(module) else module


def num_collectives(group: Any) -> int | None:
    """Returns the number of collectives that this process has issued on a process group.

    Returns None for backends that are not part of torch, for which torch does not count them.
    """
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError as error:
        if "sequence number" in str(error):
            return None
        raise


def is_compiled_in_place(module: nn.Module) -> bool:
    """Returns whether `module.compile()` was called, which sets only a private attribute."""
    return getattr(module, "_compiled_call_impl", None) is not None


non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""Names of the buffers of a module that are not in its state dict, which torch does not list."""
recomputed_module: Callable[[Any], nn.Module] = attrgetter("_checkpoint_wrapped_module")
"""Module inside a wrapper of `checkpoint_wrapper`, which has no public name for it."""
uses_original_parameters: Callable[[Any], bool] = attrgetter("_use_orig_params")
"""Value of use_orig_params of a unit of FSDP 1, which is not a public attribute."""
requested_samples: Callable[[Any], int | None] = attrgetter("_num_samples")
"""Argument num_samples of a RandomSampler, whose public attribute is never None."""
memory_dump: Callable[[Any], Callable[[str], None]] = attrgetter("_dump_snapshot")
"""Function of the memory module of a device that writes its recorded allocations to a file."""
comm_hooks: Callable[[Any], Sequence[Any]] = attrgetter("_comm_hooks")
"""Communication hooks of a DistributedDataParallel module, which torch registers but does not list."""
ddp_statistics: Callable[[Any], Any] = methodcaller("_get_ddp_logging_data")
"""Log of the reducer of DistributedDataParallel, which is the only source of the order of gradients."""


def state_dict_hooks(module: nn.Module) -> list[Any]:
    """Returns the state dict hooks of a module, which torch registers but does not list."""
    hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks, module._state_dict_hooks)
    return [hook for registered in hooks for hook in registered.values()]


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Returns whether a parameter has gradient hooks, which torch registers but does not list."""
    names = ("_post_accumulate_grad_hooks", "_backward_hooks")
    return any(getattr(parameter, name, None) for name in names)


def has_load_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer has hooks that change or follow `load_state_dict`."""
    names = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
    return any(getattr(optimizer, name, None) for name in names)


def flatten_mesh(mesh: Any, name: str) -> Any:
    """Returns a mesh with all dimensions flattened, which is registered in the root mesh with a name."""
    return mesh._flatten(name)


def run_policy(policy: Any, model: nn.Module) -> Any:
    """Returns the modules that a wrapping policy of FSDP 1 selects, which torch computes only in FSDP."""
    return policy._run_policy(model, ignored_modules=set(), root_kwargs={})


def memory_recorder(memory: Any) -> Any:
    """Returns the function that starts the recording of allocations, or None if the device has none.

    The documentation uses its private name.
    """
    return getattr(memory, "_record_memory_history", None)


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

    def enter(module: nn.Module, args: Any) -> None:
        if modules.is_bw and tracker._ac_mod is None:
            tracker._ac_mod, tracker._in_ac = weakref.ref(module), True

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if tracker._ac_mod is not None and tracker._ac_mod() is module:
            tracker._ac_mod, tracker._in_ac = None, False

    modules._fw_pre_hook, modules._fw_post_hook = enter, leave
    tracker._track_module_params_and_buffers(model)


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


def arguments_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of an operator call by name, including defaults."""
    parameters = func._schema.arguments
    names = [parameter.name for parameter in parameters]
    defaults = {
        parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()
    }
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def mutated_by(func: Any) -> list[str]:
    """Returns the names of the arguments that an operator modifies."""
    schema = func._schema
    if not schema.is_mutable:
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


# Loaders and samplers


def wrap_indices(iterator: Any, wrap: Callable[[Any], Any]) -> Any:
    """Replaces the sampler iterator of a `SingleProcessIterator` by `wrap` of it, and returns the new one.

    There is no other way to get the indices before the samples are read.
    """
    iterator._sampler_iter = wrap(iterator._sampler_iter)
    return iterator._sampler_iter


def loader_workers(iterator: Any) -> Any:
    """Returns the worker processes of an iterator of a DataLoader, for hang reports."""
    return getattr(iterator, "_workers", ())


def loader_progress(iterator: Any) -> tuple[int, int]:
    """Returns values that change with each batch and each epoch of an iterator with workers."""
    # torchdata requests the states of its workers before these attributes exist
    return getattr(iterator, "_rcvd_idx", 0), id(getattr(iterator, "_sampler_iter", None))


def count_yielded(loader: Any) -> int:
    """Returns the number of batches that the current iterator of a loader has yielded.

    Batches before a restored state are included.
    """
    return getattr(getattr(loader, "_iterator", None), "_num_yielded", 0)


def dataset_state(state: Any) -> Any:
    """Returns the state of an iterable dataset in the state of an iterator of torchdata without workers.

    A dataset that is its own iterator has its state as the one of the iterator. The result is None for a
    dataset without a state.
    """
    found = state.get("dataset_state")
    return (state.get("fetcher_state") or {}).get("dataset_iter_state") if found is None else found


def has_dataset_state(state: Any) -> bool:
    """Returns whether the state of torchdata's iterator includes that of an iterable dataset, in each worker.

    Without it torchdata reads and drops what was read before, and counts twice what it drops: a second resume
    within an epoch would skip samples.
    """
    snapshots = state.get("_snapshot", {}).get("_worker_snapshots", {"": state})
    return all(dataset_state(each) is not None for each in snapshots.values())


def loader_tasks(iterator: Any) -> list[Any]:
    """Returns the requested batches in order, as tuples of the worker ID and the data if it has arrived."""
    return [task for _, task in sorted(getattr(iterator, "_task_info", {}).copy().items())]


def count_recompilations() -> int:
    """Returns the number of recompilations of torch.compile, or 0 if dynamo is not loaded."""
    counts = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COMPILE_COUNTER", {})
    return sum(count - 1 for count in counts.copy().values())


# Processes


@contextmanager
def agent_hooks(
    start: Callable[[Any, Callable[[], None]], None], close: Callable[[int], None]
) -> Iterator[None]:
    """Makes the elastic agent of torch start and end the processes of this node with functions of the caller.

    The agent waits for processes that do not respond, and has no public interface to end them otherwise.

    Args:
        start: Called with the context of the agent and the function that starts its processes.
        close: Called with the number of the signal. The agent then kills the remaining processes.
    """
    from torch.distributed.elastic import multiprocessing

    original = multiprocessing.SubprocessContext

    class HookedContext(original):  # type: ignore[misc, valid-type]
        def _start(self) -> None:
            start(self, super()._start)

        def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
            # On Windows the agent uses CTRL_C_EVENT, 0, which cannot be sent to a single process.
            close(int(death_sig or signal.SIGTERM))
            if sys.platform == "win32":
                super()._close(signal.SIGTERM, timeout)  # ends a process immediately on Windows
            else:
                super()._close(signal.SIGKILL, timeout)

    multiprocessing.SubprocessContext = HookedContext  # type: ignore[misc]  # where the agent reads it
    try:
        yield
    finally:
        multiprocessing.SubprocessContext = original  # type: ignore[misc]


def default_to_stores_without_libuv() -> None:
    """Sets the default of `use_libuv` of `TCPStore` to False.

    Builds of torch for Windows have no libuv, and their elastic agent and `env://` do not pass the argument.
    """
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    original = store.__init__

    def open_store(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{"use_libuv": False, **kwargs})

    store.__init__ = open_store


if sys.platform == "win32" and dist.is_available():
    default_to_stores_without_libuv()


def drop_group_references() -> None:
    """Removes references to the closed default process group, except those of torch itself.

    gloo closes its connections when the last reference to the group is deleted, which ends collectives on
    other ranks that wait for this one. DistributedDataParallel modules have a reference, and an `Accelerator`
    may keep them alive. The group is also a default argument of the functions of `torch.distributed.nn` if
    that was first imported after the group was created.
    """
    from torch.nn.parallel import DistributedDataParallel

    for obj in gc.get_objects():
        if issubclass(type(obj), DistributedDataParallel):
            for name in ("reducer", "logger", "process_group"):
                vars(obj).pop(name, None)
    for function in vars(sys.modules.get("torch.distributed.nn.functional", object)).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            function.__defaults__ = tuple(
                None if isinstance(default, dist.ProcessGroup) else default
                for default in function.__defaults__
            )
    gc.collect()


# FSDP 1


def gradient_sync(unit: Any) -> bool | None:
    """Returns whether a unit of FSDP 1 reduces gradients in the next backward, or None for other modules."""
    return getattr(unit, "_sync_gradients", None)


def set_gradient_sync(unit: Any, enabled: bool) -> None:
    """Sets whether a unit of FSDP 1 reduces gradients, also inside of `no_sync`.

    FSDP 1 has no public function to enable the reduction inside of `no_sync`.
    """
    unit._sync_gradients = enabled


def skip_connection_messages(stage: Any) -> None:
    """Disables the messages that open the connections of a pipeline stage, which gloo opens by itself.

    Before torch 2.11 a rank sends 8 bytes and the other one expects 4, so gloo ends the process.
    """
    stage._get_init_p2p_neighbors_ops = list


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
        flat: The flat parameter.
        originals: The original parameters with use_orig_params, otherwise None.
        names: Names of the original parameters, relative to the unit.
        shapes: Shapes of the original parameters.
        are_contiguous: Whether each original parameter is contiguous.
        group: Process group of the unit.
        is_sharded: Whether the flat parameter is sharded.
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
            offsets = zip(self._handle._get_flat_param_offsets(), self.flat._is_padding_mask, strict=True)
            first, last = [span for span, is_padding in offsets if not is_padding][index]
            return 0, first, last - first + 1
        info = self.flat._shard_param_infos[index]
        if not info.in_shard:
            return 0, 0, 0
        return info.intra_param_start_idx, info.offset_in_shard, info.numel_in_shard

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


# Attention


@contextmanager
def attention_replaced(compute: Callable[[Any, tuple[Any, ...], dict[str, Any]], Tensor]) -> Iterator[None]:
    """Makes the public attention function return what `compute` does with its arguments, inside the block.

    The first argument of `compute` is the function that it replaces.

    It is entered after `context_parallel`, which replaces that function and shards a mask like a query.
    """
    attend = nn.functional.scaled_dot_product_attention

    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        return compute(attend, args, kwargs)

    nn.functional.scaled_dot_product_attention = replaced
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = attend


def _parameters_of_fsdp2(model: nn.Module) -> Iterator[Any]:
    """Yields the FSDP 2 object of each parameter, which has its accumulated unsharded gradient."""
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        unit: Any = module
        state = unit._get_fsdp_state()
        groups = (
            state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
        )
        for group in filter(None, groups):
            yield from group.fsdp_params


def unreduced_gradients(model: nn.Module) -> list[Tensor]:
    """Returns the unsharded gradients of FSDP 2 that are not reduced yet, which are not public."""
    parameters = list(_parameters_of_fsdp2(model))
    kept = [parameter.unsharded_accumulated_grad for parameter in parameters]
    kept += [
        parameter._unsharded_param.grad for parameter in parameters if hasattr(parameter, "_unsharded_param")
    ]
    return [gradient for gradient in kept if gradient is not None]


def drop_unreduced_gradients(model: nn.Module) -> None:
    """Deletes the gradients that `unreduced_gradients` returns."""
    for parameter in _parameters_of_fsdp2(model):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


# Optimizers and schedulers


def reset_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Resets for which optimizers a GradScaler has unscaled gradients, without a call of `update`."""
    scaler._per_optimizer_states.clear()


@contextmanager
def step_replaced(optimizer: Any, step: Callable[..., Any], original: Callable[..., Any]) -> Iterator[None]:
    """Replaces the `step` of an optimizer inside the block, and sets it to `original` after the block.

    A GradScaler requires the same optimizer object as in `unscale_`, and does not return whether it called
    `step`.
    """
    optimizer.step = step
    try:
        yield
    finally:
        optimizer.step = original


def allow_fp16_gradients(scaler: torch.amp.GradScaler) -> None:
    """Allows a gradient scaler to unscale float16 gradients, for which torch has no option."""
    scaler._unscale_grads_ = partial(_unscale_all, scaler._unscale_grads_)  # type: ignore[method-assign]


def _unscale_all(unscale: Callable[..., Any], optimizer: Any, *scales: Tensor, **_: Any) -> Any:
    return unscale(optimizer, *scales[:2], True)


def set_scheduler_optimizer(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Sets the optimizer of a scheduler of torch.

    Schedulers of torch warn unless the step of their optimizer sets the attributes that they check.
    """
    if scheduler.optimizer is optimizer:
        return
    scheduler.optimizer = optimizer
    step = optimizer.step

    def marked_step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # attribute that schedulers of torch check
        return step(*args, **kwargs)

    marked_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked_step  # type: ignore[method-assign]
