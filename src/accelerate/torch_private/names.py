"""Private names of torch modules, each with a reason and a fallback.

A name is resolved when it is first used as an attribute of `accelerate.torch_private`.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from accelerate.base import ConfigurationError, wrong_value


class PrivateName(NamedTuple):
    """Private name of a torch module."""

    path: str  # "module:name" or "module:name.attribute", or a module alone
    reason: str
    fallback: Callable[[], Any] | None = None  # returns the replacement if torch has no such name


def _split_like(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def _store_of_group() -> Any:
    group: Any = dist.group.WORLD
    return group.get_group_store()  # another prefix of the same store


def _keep_rotation(method: str) -> None:
    if method != "allgather":  # the default of torch
        reason = f"torch {torch.__version__} has no function that sets it"
        raise wrong_value("cp_comm_strategy", method, reason, 'Set it to "allgather"')


NAMES: dict[str, PrivateName] = {
    "default_store": PrivateName(
        "torch.distributed.distributed_c10d:_get_default_store",
        "The store of the default process group, for messages between ranks; it has no public name.",
        lambda: _store_of_group,
    ),
    "abort_process_group": PrivateName(
        "torch.distributed.distributed_c10d:_abort_process_group",
        "Closes a process group without waiting for its collectives, as destroy_process_group may do.",
        lambda: dist.destroy_process_group,
    ),
    "set_group_timeout": PrivateName(
        "torch.distributed.distributed_c10d:_set_pg_timeout",
        "Sets the timeout of a process group that is open; there is no public way.",
        lambda: None,
    ),
    "may_exchange_data": PrivateName(
        "torch:_has_compatible_shallow_copy_type",
        "Whether the data of a tensor may be replaced by that of another; some device types do not allow it.",
        lambda: lambda old, new: False,
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
        lambda: SimpleNamespace(queue_callback=lambda callback: None),  # the time of the wait is not measured
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
        lambda: _keep_rotation,
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
    "pytree": PrivateName(
        "torch.utils._pytree",
        "Flattens nested values, also those of libraries; the documentation uses this name.",
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
    "initialize_fsdp1": PrivateName(
        "torch.distributed.fsdp._runtime_utils:_lazy_init",
        "Initializes units of FSDP 1, which their first forward does, outside of inference mode.",
        lambda: lambda *units: None,
    ),
    "dispatch_modes_disabled": PrivateName(
        "torch.utils._python_dispatch:_disable_current_modes",
        "Hides a comparison from modes that count operators, such as those of FLOPs and collectives.",
        lambda: nullcontext,
    ),
    "no_dispatch": PrivateName(
        "torch.utils._mode_utils:no_dispatch",
        "Runs operators on real tensors while a mode of fake tensors is active.",
        lambda: resolve_name("torch._C:_DisableTorchDispatch"),
    ),
    "determinism_checks": PrivateName(
        "torch.utils.checkpoint:_allowed_determinism_checks_to_fns",
        "Functions that compare tensors with recomputed ones; `determinism_check` takes their names only.",
        lambda: None,
    ),
    "without_torch_functions": PrivateName(
        "torch._C:DisableTorchFunction",
        "Reads shapes of tensors inside a TorchFunctionMode without a call of the mode.",
        lambda: nullcontext,
    ),
    "is_torch_function_enabled": PrivateName(
        "torch._C:_is_torch_function_enabled",
        "False where a kernel of torch reads an attribute of a tensor subclass.",
        lambda: lambda: True,
    ),
    "default_to_foreach": PrivateName(
        "torch.optim.optimizer:_default_to_fused_or_foreach",
        "Whether an optimizer uses foreach kernels by default, which need more memory.",
        lambda: lambda params, differentiable, use_fused: (False, False),
    ),
    "LoaderIterator": PrivateName(
        "torch.utils.data.dataloader:_BaseDataLoaderIter",
        "The iterator of a DataLoader, which `prepare` recognizes in objects that it does not prepare.",
        lambda: type(None),
    ),
    "SingleProcessIterator": PrivateName(
        "torch.utils.data.dataloader:_SingleProcessDataLoaderIter",
        "The iterator of a DataLoader without workers, from which indices can be read in advance.",
        lambda: None,
    ),
}
"""Attribute of `accelerate.torch_private` -> private name of torch."""


def resolve_private_name(name: str) -> Any:
    """Returns the private name of torch in a row of `NAMES`, or its fallback if torch does not have it."""
    row = NAMES.get(name)
    if row is None:
        raise AttributeError(f"module 'accelerate.torch_private' has no attribute {name!r}")
    try:
        return resolve_name(row.path)
    except (ImportError, AttributeError) as error:
        if row.fallback is None:
            raise ConfigurationError(
                f"torch {torch.__version__} has no {row.path}, which is needed here "
                f"({row.reason}) Install a version of torch that this package is tested with."
            ) from error
        return row.fallback()
