"""What type checkers know of results: never run, read by mypy and pyright.

A `type: ignore` says that the line is an error; where it is none, mypy reports the comment itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import assert_type

from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    PartialState,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    find_executable_batch_size,
    load_checkpoint_and_dispatch,
    notebook_launcher,
    skip_first_batches,
    synchronize_rng_states,
)
from accelerate.data_loader import prepare_data_loader
from accelerate.hooks import ModelHook, UserCpuOffloadHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    PrecisionType,
    TorchDynamoPlugin,
    broadcast,
    broadcast_object_list,
    compile_regions,
    concatenate,
    convert_to_fp32,
    extract_model_from_parallel,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    send_to_device,
)

Loader = DataLoader[dict[str, Tensor]]


class Net(nn.Sequential):
    """A model of the user."""


def prepared(accelerator: Accelerator, m: Net, o: SGD, s: LRScheduler, d: Loader, plain: Optimizer) -> None:
    """Objects keep their types, whatever their number and order."""
    assert_type(accelerator.prepare(m), Net)
    assert_type(accelerator.prepare(m, o), tuple[Net, SGD])
    assert_type(accelerator.prepare(d, m, o), tuple[Loader, Net, SGD])
    assert_type(accelerator.prepare(m, o, s, d), tuple[Net, SGD, LRScheduler, Loader])
    assert_type(accelerator.prepare(m, o, s, d, d), tuple[Net, SGD, LRScheduler, Loader, Loader])
    six = accelerator.prepare(m, plain, s, d, None, 3, device_placement=[True] * 6)
    assert_type(six, tuple[Net, Optimizer, LRScheduler, Loader, None, int])
    assert_type(accelerator.prepare(m, o, s, d, d, d, d), tuple[Any, ...])
    assert_type(accelerator.prepare(m, o, s, d, d, d, d, d, d), tuple[Any, ...])
    objects: list[object] = [m, o]
    m, o = accelerator.prepare(*objects)
    assert_type(accelerator.prepare(*(m, o)), tuple[Net, SGD])
    m, o, s, d = (
        accelerator.prepare_model(m),
        accelerator.prepare_optimizer(o),
        accelerator.prepare_scheduler(s),
        d,
    )
    assert_type(accelerator.prepare_model(m, evaluation_mode=True), Net)
    assert_type(accelerator.prepare_data_loader(d), Loader)
    assert_type(accelerator.unwrap_model(m), Net)
    assert_type(accelerator.skip_first_batches(d, 2), Loader)
    assert_type(skip_first_batches(d, 2), Loader)
    assert_type(prepare_data_loader(d, put_on_device=True), Loader)
    m, o = accelerator.free_memory(m, o)


def gathered(
    accelerator: Accelerator, x: Tensor, pair: tuple[Tensor, Tensor], named: dict[str, Tensor]
) -> None:
    """Collectives keep the structure of their input."""
    assert_type(accelerator.gather(x), Tensor)
    assert_type(accelerator.gather(pair), tuple[Tensor, Tensor])
    assert_type(accelerator.gather_for_metrics(named), dict[str, Tensor])
    assert_type(accelerator.gather_for_metrics([x, x]), list[Tensor])
    assert_type(accelerator.gather_for_metrics(["a"], use_gather_object=True), list[str])
    assert_type(accelerator.gather_for_metrics(x, use_gather_object=True), Any)
    assert_type(accelerator.reduce(x, "mean"), Tensor)
    assert_type(accelerator.pad_across_processes(pair, dim=1), tuple[Tensor, Tensor])
    assert_type(accelerator.weighted_mean(x, 3), Tensor)
    assert_type(accelerator.clip_grad_norm_([x], 1.0), Tensor)
    assert_type(gather(named), dict[str, Tensor])
    assert_type(gather_object(["a"]), list[str])
    assert_type(gather_object("a"), Any)
    assert_type(broadcast(pair, from_process=0), tuple[Tensor, Tensor])
    assert_type(broadcast_object_list([1]), list[int])
    assert_type(reduce(x, reduction="sum"), Tensor)
    assert_type(pad_across_processes(x), Tensor)
    assert_type(send_to_device(named, "cpu"), dict[str, Tensor])
    assert_type(convert_to_fp32(pair), tuple[Tensor, Tensor])
    assert_type(concatenate([named, named]), dict[str, Tensor])
    with PartialState().split_between_processes(["a"], apply_padding=True) as mine:
        assert_type(mine, list[str])


def placed(m: Net) -> None:
    """A model that is placed, offloaded, compiled or unwrapped is the user's."""
    assert_type(dispatch_model(m, {"": 0}), Net)
    assert_type(cpu_offload(m), Net)
    assert_type(disk_offload(m, "folder"), Net)
    assert_type(cpu_offload_with_hook(m), tuple[Net, UserCpuOffloadHook])
    assert_type(load_checkpoint_and_dispatch(m, "folder", device_map="auto"), Net)
    assert_type(add_hook_to_module(m, ModelHook()), Net)
    assert_type(remove_hook_from_module(m), Net)
    assert_type(compile_regions(m), Net)
    assert_type(extract_model_from_parallel(m), Net)


def chosen(text: str) -> None:
    """Choices are checked: their names, or members of their enumerations."""
    Accelerator(mixed_precision="bf16", dynamo_backend="inductor", rng_types=["torch", "generator"])
    Accelerator(mixed_precision=PrecisionType.FP16, log_with=["tensorboard"])
    Accelerator(mixed_precision=Accelerator().mixed_precision)
    Accelerator(mixed_precision="fp32")  # type: ignore[arg-type]
    Accelerator(mixed_precision=text)  # type: ignore[arg-type]
    Accelerator(dynamo_backend="inductr")  # type: ignore[arg-type]
    Accelerator(rng_types=["tensor"])  # type: ignore[list-item]
    Accelerator().reduce(torch.ones(1), reduction="median")  # type: ignore[arg-type]
    reduce(torch.ones(1), "median")  # type: ignore[arg-type]
    synchronize_rng_states(["numpy"])  # type: ignore[list-item]
    TorchDynamoPlugin(backend="eager", mode="max-autotune")
    TorchDynamoPlugin(mode="fast")  # type: ignore[arg-type]
    DistributedDataParallelKwargs(comm_hook="power_sgd", comm_wrapper="fp16")
    DistributedDataParallelKwargs(comm_hook="zip")  # type: ignore[arg-type]
    DeepSpeedPlugin(offload_optimizer_device="disk")  # type: ignore[arg-type]
    notebook_launcher(print, mixed_precision="half")  # type: ignore[arg-type]


@find_executable_batch_size
def first(batch_size: int, name: str) -> float:
    """Decorated without brackets."""
    return 0.5


@find_executable_batch_size(starting_batch_size=64)
def second(batch_size: int, name: str) -> float:
    """Decorated with brackets."""
    return 0.5


@Accelerator().on_main_process
def third(name: str) -> None:
    """Decorated by a method."""


def decorated() -> None:
    """Decorators leave functions their types, without the batch size where it is filled in."""
    assert_type(first("a"), float)
    assert_type(second(name="a"), float)
    first(64, "a")  # type: ignore[call-arg,arg-type]
    third(3)  # type: ignore[arg-type]
    function: Callable[[str], None] = third
    function("a")


def compared(accelerator: Accelerator) -> bool:
    """A choice in force is compared with names and with members."""
    return accelerator.mixed_precision == "bf16" or accelerator.mixed_precision == PrecisionType.FP16


def sharded() -> str:
    """Fields take names and hold torch's objects."""
    FullyShardedDataParallelPlugin(sharding_strategy="zero")  # type: ignore[arg-type]
    FullyShardedDataParallelPlugin(fsdp_version=3)  # type: ignore[arg-type]
    FullyShardedDataParallelPlugin(state_dict_type="WHOLE")  # type: ignore[arg-type]
    FullyShardedDataParallelPlugin(auto_wrap_policy="by_size")  # type: ignore[arg-type]
    FullyShardedDataParallelPlugin(backward_prefetch="never")  # type: ignore[arg-type]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap"
    )
    FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD", state_dict_type=plugin.state_dict_type)
    return str(plugin.state_dict_type.name)
