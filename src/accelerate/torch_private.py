"""The private names of torch that the package uses, each with its reason and its fallback.

A name of a torch module is a row of `NAMES`, loaded when it is first used as an attribute of this module. The
functions below read private attributes of torch's objects. Where an attribute of such an object, or of torch
itself, has to be replaced, a function here does it. `tests/architecture/test_torch_private.py` checks this.
"""

from __future__ import annotations

import gc
import signal
import sys
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
    """One private name of a torch module."""

    path: str  # the module, a colon, and the name in it, dotted where it is nested; or a module alone
    reason: str
    fallback: Callable[[], Any] | None = None  # returns what is used where torch has no such name


def _split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


NAMES: dict[str, PrivateName] = {
    "default_store": PrivateName(
        "torch.distributed.distributed_c10d:_get_default_store",
        "The store of the default process group, for messages between ranks; torch returns it nowhere else.",
    ),
    "abort_process_group": PrivateName(
        "torch.distributed.distributed_c10d:_abort_process_group",
        "Closes a process group without waiting for its collectives, as destroy_process_group may do.",
        lambda: dist.destroy_process_group,
    ),
    "may_exchange_data": PrivateName(
        "torch:_has_compatible_shallow_copy_type",
        "Whether the data of a tensor may be replaced by that of another; not between devices of some kinds.",
    ),
    "dump_nccl_trace": PrivateName(
        "torch._C._distributed_c10d:_dump_nccl_trace",
        "The flight recorder of NCCL, for reports about hangs; builds without NCCL have none.",
        lambda: None,
    ),
    "dump_fr_trace": PrivateName(
        "torch._C._distributed_c10d:_dump_fr_trace",
        "The flight recorder of the other backends, for reports about hangs; some builds have none.",
        lambda: None,
    ),
    "autograd_engine": PrivateName(
        "torch.autograd:Variable._execution_engine",
        "Queues a callback for the end of a backward pass, before those that wait for other ranks.",
    ),
    "flatten_dense_tensors": PrivateName(
        "torch._C._nn:flatten_dense_tensors",
        "Joins tensors of any shapes in one call; the public way is a Python loop for each collective.",
        lambda: lambda tensors: torch.cat([tensor.contiguous().view(-1) for tensor in tensors]),
    ),
    "unflatten_dense_tensors": PrivateName(
        "torch._C._nn:unflatten_dense_tensors",
        "Splits a flat tensor into views in one call; the public way is a Python loop for each collective.",
        lambda: _split_like,
    ),
    "scaled_dot_product_attention": PrivateName(
        "torch._C._nn:scaled_dot_product_attention",
        "Attention as it is outside of context_parallel, which replaces the public name while it is open.",
        lambda: nn.functional.scaled_dot_product_attention,
    ),
    "set_rotate_method": PrivateName(
        "torch.distributed.tensor.experimental._attention:set_rotate_method",
        "How context parallelism exchanges keys and values; context_parallel has no argument for it.",
    ),
    "attention_handlers": PrivateName(
        "torch.distributed.tensor.experimental._context_parallel._attention:custom_ops",
        "Maps attention kernels to their context parallel form; it has none for the kernels of the CPU.",
        lambda: None,
    ),
    "ring_attention": PrivateName(
        "torch.distributed.tensor.experimental._context_parallel._attention:_templated_ring_attention",
        "Ring attention around any kernel, here that of the CPU.",
    ),
    "ring_attention_backward": PrivateName(
        "torch.distributed.tensor.experimental._context_parallel._attention:_templated_ring_attention_backward",
        "The backward pass of ring attention around any kernel, here that of the CPU.",
    ),
    "cpu_attention": PrivateName(
        "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "The CPU's attention kernel, which ring attention calls on each rank.",
    ),
    "cpu_attention_backward": PrivateName(
        "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
        "The backward pass of the CPU's attention kernel.",
    ),
    "hybrid_shard_zero2": PrivateName(
        "torch.distributed.fsdp:ShardingStrategy._HYBRID_SHARD_ZERO2",
        "A sharding strategy of FSDP 1 that its documentation names, under a private name.",
        lambda: None,
    ),
    "Policy": PrivateName(
        "torch.distributed.fsdp.wrap:_Policy",
        "The base class of FSDP 1's wrapping policies, such as the public ModuleWrapPolicy.",
        lambda: (),
    ),
    "IncompatibleKeys": PrivateName(
        "torch.nn.modules.module:_IncompatibleKeys",
        "The class of what load_state_dict returns, so that callers get the same one from sharded loads.",
        lambda: namedtuple("IncompatibleKeys", "missing_keys unexpected_keys"),
    ),
    "checkpoint_wrapper": PrivateName(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "Wrappers that recompute a module in backward; FSDP's documentation uses them under this name.",
    ),
    "StorageInfo": PrivateName(
        "torch.distributed.checkpoint.filesystem:_StorageInfo",
        "Where a shard is in its file, in the .metadata of torch.distributed.checkpoint.",
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
        "Pins all tensors in a batch as DataLoader does; without it the batch stays in pageable memory.",
        lambda: lambda batch, device=None: batch,
    ),
    "collate": PrivateName(
        "torch.utils.data._utils.collate",
        "The default collate function with another function for tensors; documented under this name.",
    ),
    "fake_tensors": PrivateName(
        "torch._subclasses.fake_tensor",
        "Fake tensors, and the errors of operations that they cannot run; documented under this name.",
    ),
    "MemTracker": PrivateName(
        "torch.distributed._tools.mem_tracker:MemTracker",
        "Counts the bytes of parameters, gradients, activations, ... while a step runs; no public tool does.",
    ),
    "TorchDispatchMode": PrivateName(
        "torch.utils._python_dispatch:TorchDispatchMode",
        "The base class of modes that see each operator; documented under this name.",
    ),
    "no_dispatch": PrivateName(
        "torch.utils._mode_utils:no_dispatch",
        "Runs operators on real tensors while a mode of fake tensors is active.",
    ),
    "default_to_foreach": PrivateName(
        "torch.optim.optimizer:_default_to_fused_or_foreach",
        "Whether an optimizer updates all parameters at once by default, for which it takes more memory.",
        lambda: lambda params, differentiable, use_fused: (False, False),
    ),
    "SingleProcessIterator": PrivateName(
        "torch.utils.data.dataloader:_SingleProcessDataLoaderIter",
        "The iterator of a DataLoader without workers, whose indices can be drawn in advance.",
        lambda: None,
    ),
}
"""Name in this module -> the private name of torch."""


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
    globals()[name] = value  # the next look-up finds it without coming here
    return value


# Modules and tensors

WAIT_FOR_BATCH, WORKER_LOOP = "_get_data", "_worker_loop"
"""Functions of a DataLoader as stacks show them: what waits for a batch, and what a worker runs."""
WRAPPED = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
"""Names under which wrappers of torch hold their module; they are in the names of its parameters."""
FLAT_PARAMETER = "_flat_param"
"""The name of FSDP 1's flat parameter in its module."""


def is_optimized_module(module: object) -> bool:
    """Return whether a module is what `torch.compile(module)` returns, by its type."""
    # No module is compiled before dynamo is imported, and importing it takes a second.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def uncompiled(module: Any) -> Any:
    """Return the module in torch.compile's wrapper, which has no public name for it, or the module."""
    return module._orig_mod if is_optimized_module(module) else module


def num_collectives(group: Any) -> int | None:
    """Return how many collectives this process has issued on a process group; no public counter has it.

    None where torch does not know it: for backends that are not its own.
    """
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError as error:
        if "sequence number" in str(error):
            return None
        raise


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called, which leaves only a private mark."""
    return getattr(module, "_compiled_call_impl", None) is not None


non_persistent_buffers: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""The names of a module's buffers that state dicts leave out, which torch does not list."""
recomputed_module: Callable[[Any], nn.Module] = attrgetter("_checkpoint_wrapped_module")
"""The module in a wrapper of `checkpoint_wrapper`, which has no public name for it."""
uses_original_parameters: Callable[[Any], bool] = attrgetter("_use_orig_params")
"""Whether a unit of FSDP 1 was built with use_orig_params, which is no public attribute."""
requested_samples: Callable[[Any], int | None] = attrgetter("_num_samples")
"""The num_samples that a RandomSampler was built with; its public attribute hides a None."""
memory_dump: Callable[[Any], Callable[[str], None]] = attrgetter("_dump_snapshot")
"""What writes the allocations that a device's memory module has recorded to a file."""
comm_hooks: Callable[[Any], Sequence[Any]] = attrgetter("_comm_hooks")
"""The communication hooks of a replica, which torch registers but does not list."""
ddp_statistics: Callable[[Any], Any] = methodcaller("_get_ddp_logging_data")
"""What the reducer of a replica logs; only there torch says in which order gradients were ready."""


def state_dict_hooks(module: nn.Module) -> list[Any]:
    """Return a module's hooks on saving and loading state dicts, which torch registers but does not list."""
    hooks = (module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks, module._state_dict_hooks)
    return [hook for registered in hooks for hook in registered.values()]


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether a hook runs when a gradient arrives; torch registers hooks but does not list them."""
    names = ("_post_accumulate_grad_hooks", "_backward_hooks")
    return any(getattr(parameter, name, None) for name in names)


def version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; -1 if torch does not count it."""
    return -1 if tensor.is_inference() else tensor._version


def flatten_mesh(mesh: Any, name: str) -> Any:
    """Register the dimensions of a mesh as one dimension of its root mesh, and return that mesh."""
    return mesh._flatten(name)


def run_policy(policy: Any, model: nn.Module) -> Any:
    """Return the modules that a wrapping policy of FSDP 1 chooses; publicly, only FSDP's constructor does."""
    return policy._run_policy(model, ignored_modules=set(), root_kwargs={})


def memory_recorder(memory: Any) -> Any:
    """Return what makes a device's memory module record allocations; documented under a private name."""
    return getattr(memory, "_record_memory_history", None)


def skip_frozen_gradients(tracker: Any, model: nn.Module) -> None:
    """Let a `MemTracker`, which is not entered, set no hooks on gradients of frozen parameters: torch refuses
    them."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            none = RemovableHandle(OrderedDict())  # its removal does nothing
            tracker._param_to_grad_hook_handles[parameter] = (none, none)


def record_moments(tracker: Any, record: Callable[[], None]) -> None:
    """Let a `MemTracker` call a function after each operator, in place of its records for each module."""
    tracker._update_peak_stats = lambda state: record()
    tracker.get_tracker_snapshot = lambda kind="current": {}


def tracked_bytes(tracker: Any) -> Mapping[torch.device, Mapping[str, int]]:
    """Return the bytes that a `MemTracker` counts now, by device and by kind of tensor."""
    return tracker._curr_mem_snap  # type: ignore[no-any-return]


def operator(name: str) -> Any:
    """Return an operator of torch, such as that of "_softmax.default"."""
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


def arguments_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of an operator by name, defaults included."""
    names = [argument.name for argument in func._schema.arguments]
    defaults = {each.name: each.default_value for each in func._schema.arguments if each.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def mutated_by(func: Any) -> list[str]:
    """Return the names of the arguments that an operator writes to."""
    schema = func._schema
    if not schema.is_mutable:
        return []
    return [
        each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write
    ]


def peak_on_cpu(work: Callable[[], Any]) -> tuple[Any, int] | None:
    """Return the result of a function, and the bytes that its operators have allocated at their peak.

    torch's profiler with the same records prints lines about itself.

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
    """Let `Module.to` convert parameters that are fake tensors: torch swaps them, which weak references to
    them prevent."""
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
    """Replace what gives a `SingleProcessIterator` its indices by `wrap` of it, and return the new one.

    Only so are the indices known before the samples are read.
    """
    iterator._sampler_iter = wrap(iterator._sampler_iter)
    return iterator._sampler_iter


def loader_workers(iterator: Any) -> Any:
    """Return the worker processes of a DataLoader's iterator, for reports about waits; empty without any."""
    return getattr(iterator, "_workers", ())


def loader_progress(iterator: Any) -> tuple[int, int]:
    """Return values that change with each batch and each pass of an iterator with workers."""
    # torchdata asks its workers for states before it has an order
    return getattr(iterator, "_rcvd_idx", 0), id(getattr(iterator, "_sampler_iter", None))


def count_yielded(loader: Any) -> int:
    """Return how many batches the open iterator of a loader has yielded, before a restored state too."""
    return getattr(getattr(loader, "_iterator", None), "_num_yielded", 0)


def dataset_state(state: Any) -> Any:
    """Return the state of an iterable dataset within that of torchdata's iterator without workers, None
    without one; a dataset that is its own iterator has it as that of the iterator."""
    own = state.get("dataset_state")
    return (state.get("fetcher_state") or {}).get("dataset_iter_state") if own is None else own


def loader_tasks(iterator: Any) -> list[Any]:
    """Return the batches that workers were asked for, in order: the worker's number, then what arrived."""
    return [task for _, task in sorted(getattr(iterator, "_task_info", {}).copy().items())]


def count_recompilations() -> int:
    """Return how often torch.compile has compiled a function again; 0 where dynamo is not loaded."""
    counts = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COMPILE_COUNTER", {})
    return sum(count - 1 for count in counts.copy().values())


# Processes


@contextmanager
def agent_hooks(
    start: Callable[[Any, Callable[[], None]], None], close: Callable[[int], None]
) -> Iterator[None]:
    """Let torch's elastic agent start and end the processes of this machine through functions of the caller.

    The agent waits for processes that do not answer, and has no public place for another way to end them.
    `start` gets its context and the function that starts its processes; `close` gets the number of the
    signal, and the agent then kills what is left.
    """
    from torch.distributed.elastic import multiprocessing

    original = multiprocessing.SubprocessContext

    class HookedContext(original):  # type: ignore[misc, valid-type]
        def _start(self) -> None:
            start(self, super()._start)

        def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
            # On Windows the agent means CTRL_C_EVENT, 0, which cannot be sent to a single process.
            close(int(death_sig or signal.SIGTERM))
            if sys.platform == "win32":
                super()._close(signal.SIGTERM, timeout)  # which ends a process at once there
            else:
                super()._close(signal.SIGKILL, timeout)

    multiprocessing.SubprocessContext = HookedContext  # type: ignore[misc]  # where the agent looks it up
    try:
        yield
    finally:
        multiprocessing.SubprocessContext = original  # type: ignore[misc]


def default_to_stores_without_libuv() -> None:
    """Let `TCPStore` use libuv only where it is asked for.

    Builds of torch for Windows have no libuv, and its elastic agent and `env://` leave out the argument.
    """
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    original = store.__init__

    def open_store(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{"use_libuv": False, **kwargs})

    store.__init__ = open_store


if sys.platform == "win32" and dist.is_available():
    default_to_stores_without_libuv()


def drop_group_references() -> None:
    """Remove what keeps the closed default process group alive, besides torch itself.

    gloo closes its connections, and so ends the waits of other ranks, with the last reference to the group.
    Replicas of DistributedDataParallel hold one, and an `Accelerator` may hold these. The group is a default
    of the functions of `torch.distributed.nn` where that was first imported after the group was opened.
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
    """Return whether a unit of FSDP 1 reduces gradients in the next backward pass; None for other modules."""
    return getattr(unit, "_sync_gradients", None)


def set_gradient_sync(unit: Any, enabled: bool) -> None:
    """Set it: FSDP 1 has `no_sync` to turn it off, and nothing to turn it on inside of that."""
    unit._sync_gradients = enabled


def skip_opening_messages(stage: Any) -> None:
    """Send nothing to open the connections of a stage of a pipeline: gloo opens them by itself.

    Before torch 2.11 a rank sends 8 bytes where the other awaits 4, at which gloo ends the process.
    """
    stage._get_init_p2p_neighbors_ops = list


@contextmanager
def unit_forwards_skipped(units: Iterable[FullyShardedDataParallel]) -> Iterator[None]:
    """Let units of FSDP 1 call their modules without gathering: inside summon_full_params all is gathered."""
    with ExitStack() as stack:
        for unit in units:
            vars(unit)["forward"] = unit.module
            stack.callback(vars(unit).pop, "forward")
        yield


class FlatUnit:
    """The flat parameter of a unit of FSDP 1, whose layout has no public access.

    `names` are those of the parameters in it, as seen from the unit; `originals` the parameters themselves,
    with use_orig_params.
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
        """The elements on this rank."""
        return getattr(self.flat, "_local_shard", self.flat).detach()

    @property
    def replicas(self) -> tuple[int, int]:
        """How many ranks have the same elements, and the number of this one among them."""
        return (1, 0) if self._replicas is None else (self._replicas.size(), self._replicas.rank())

    @property
    def tied(self) -> Iterator[tuple[str, str]]:
        """The first name of each tied parameter, with each of its further names, as seen from the unit."""
        for info in self.flat._shared_param_infos:
            yield f"{info.prim_module_name}.{info.prim_param_name}", f"{info.module_name}.{info.param_name}"

    def local_range(self, index: int) -> tuple[int, int, int]:
        """Return a parameter's first element on this rank, its offset in `shard`, and how many there are."""
        if not self.is_sharded:
            offsets = zip(self._handle._get_flat_param_offsets(), self.flat._is_padding_mask, strict=True)
            first, last = [span for span, is_padding in offsets if not is_padding][index]
            return 0, first, last - first + 1
        info = self.flat._shard_param_infos[index]
        if not info.in_shard:
            return 0, 0, 0
        return info.intra_param_start_idx, info.offset_in_shard, info.numel_in_shard

    def reshard(self) -> None:
        """Free whole parameters kept since a forward without a backward: a load would not change them."""
        has_run = hasattr(self.flat, "_full_param_padded")
        if has_run and self.is_sharded and not self._handle.needs_unshard():
            self._handle.reshard(True)
            self._handle.post_reshard()


def flat_units(root: nn.Module) -> Iterator[tuple[str, FlatUnit]]:
    """Yield the units of FSDP 1 in a module, or in the outermost unit, that have a flat parameter, each after
    its path.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    for path, unit in root.named_modules():
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            yield path, FlatUnit(unit)


# Attention


@contextmanager
def attention_checked(check: Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Call the public attention function with the arguments that `check` returns, inside the block.

    `context_parallel`, which is entered before, replaces that function, and shards a mask like a query.
    """
    attend = nn.functional.scaled_dot_product_attention

    def checked(*args: Any, **kwargs: Any) -> Tensor:
        given = check(args, kwargs)
        heads = [given.pop(name) for name in ("query", "key", "value")]
        return attend(*heads, **given)

    nn.functional.scaled_dot_product_attention = checked
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = attend


def _parameters_of_fsdp2(model: nn.Module) -> Iterator[Any]:
    """Yield what FSDP 2 has for each parameter: it keeps the whole gradient of passes without reduction."""
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
    """Return the gradients of FSDP 2 that were not reduced yet, to which no public attribute gives access."""
    parameters = list(_parameters_of_fsdp2(model))
    kept = [parameter.unsharded_accumulated_grad for parameter in parameters]
    kept += [
        parameter._unsharded_param.grad for parameter in parameters if hasattr(parameter, "_unsharded_param")
    ]
    return [gradient for gradient in kept if gradient is not None]


def drop_unreduced_gradients(model: nn.Module) -> None:
    """Drop the gradients that `unreduced_gradients` returns."""
    for parameter in _parameters_of_fsdp2(model):
        parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None


# Optimizers and schedulers


def forget_unscaled(scaler: torch.amp.GradScaler) -> None:
    """Let a GradScaler forget for which optimizers it has unscaled gradients: only `update` does so."""
    scaler._per_optimizer_states.clear()


@contextmanager
def step_replaced(optimizer: Any, step: Callable[..., Any], original: Callable[..., Any]) -> Iterator[None]:
    """Let an optimizer have another `step` inside the block, and `original` after it.

    A GradScaler steps the optimizer that it has unscaled, by identity, and does not return whether it did.
    """
    optimizer.step = step
    try:
        yield
    finally:
        optimizer.step = original


def allow_fp16_gradients(scaler: torch.amp.GradScaler) -> None:
    """Let a gradient scaler unscale float16 gradients, as that of FSDP 1 does; torch has no option for it."""
    scaler._unscale_grads_ = partial(_unscale_all, scaler._unscale_grads_)  # type: ignore[method-assign]


def _unscale_all(unscale: Callable[..., Any], optimizer: Any, *scales: Tensor, **_: Any) -> Any:
    return unscale(optimizer, *scales[:2], True)


def point_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let a scheduler of torch follow the steps of an optimizer that replaces its own.

    torch's schedulers warn unless the step of their optimizer sets the marks that they put on it.
    """
    if scheduler.optimizer is optimizer:
        return
    scheduler.optimizer = optimizer
    step = optimizer.step

    def noted_step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what torch's schedulers look for
        return step(*args, **kwargs)

    noted_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = noted_step  # type: ignore[method-assign]
