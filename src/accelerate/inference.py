"""Pipeline-parallel inference, with one stage of the model on each rank."""

from __future__ import annotations

import functools
import math
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from accelerate import torch_private
from accelerate.base import (
    ConfigurationError,
    convert_bytes as convert_bytes,
    is_pippy_available as is_pippy_available,
    is_torch_version,
    wrong_value,
)
from accelerate.big_modeling import (
    Memory,
    fill,
    get_max_memory,
    infer_auto_device_map as infer_auto_device_map,
    smallest_limit,
    split_into_units,
    total,
)
from accelerate.devices import of_device
from accelerate.nested import (
    concatenate,
    get_data_structure,
    ignorant_find_batch_size,
    is_tensor_information,
    iterate_tensors,
    recursively_apply,
    send_to_device,
    slice_tensors,
)
from accelerate.ops import broadcast_object_list, copy_tensor_to_devices, pad_input_tensors
from accelerate.state import PartialState
from accelerate.weights import calculate_maximum_sizes as calculate_maximum_sizes, has_forward

Model = TypeVar("Model", bound=nn.Module)

AUTO = "auto"


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: str | Collection[str] | None = None,
    max_memory: Memory | None = None,
) -> OrderedDict[str, int]:
    """Returns the rank of each module, such that the stages are as even as possible.

    Args:
        model: the module; it may be on the meta device.
        num_processes: number of stages, each with at least one module.
        no_split_module_classes: names of classes that are not split. None: `_no_split_modules` of the model.
        max_memory: bytes, or strings such as "10GB", by rank. None sets no limit.

    Returns:
        Rank of each module, in the order of the model.

    Raises:
        ConfigurationError: the model has fewer modules than there are processes, or does not fit the limits.
    """
    # each stage has a copy of a tied parameter
    units = split_into_units(model, no_split_module_classes, join_tied=False)
    if len(units) < num_processes:
        reason = f"{type(model).__name__} has {len(units)} parts that are not split, and each stage needs one"
        fix = "start fewer processes, or name smaller modules in no_split_module_classes"
        raise wrong_value("num_processes", num_processes, reason, fix)
    memory = None if max_memory is None else get_max_memory(max_memory)
    ranks = range(num_processes)
    limits = [total(units) if memory is None else memory.get(rank, 0) for rank in ranks]
    limit_per_stage = smallest_limit(units, limits)
    filled = fill(units, [min(limit, limit_per_stage) for limit in limits])
    if filled[-1] < len(units):
        reason = f"{units[filled[-1]].names[0]} fits no process"
        raise wrong_value("max_memory", max_memory, reason, "raise the limits")
    ends = [min(end, len(units) - num_processes + rank + 1) for rank, end in enumerate(filled)]
    return OrderedDict(
        (unit.names[0], next(rank for rank, end in enumerate(ends) if index < end))
        for index, unit in enumerate(units)
    )


def find_pippy_batch_size(args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None) -> int | None:
    """Returns the batch size of the first argument that has one, or None.

    Args:
        args: positional arguments of a forward.
        kwargs: keyword arguments of a forward.
    """
    sizes = (ignorant_find_batch_size(value) for value in (*(args or ()), *(kwargs or {}).values()))
    return next((size for size in sizes if size is not None), None)


def build_pipeline(
    model: nn.Module,
    split_points: Sequence[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    num_chunks: int,
) -> Any:
    """Splits a model into stages, and returns that of this rank.

    Called on all ranks.

    Args:
        model: the module.
        split_points: names of the first modules of all stages but the first.
        args: example of positional arguments, with a batch size that is divisible by `num_chunks`.

        kwargs: example of keyword arguments.
        num_chunks: number of micro-batches.

    Returns:
        A `torch.distributed.pipelining.PipelineStage`.

    Raises:
        ConfigurationError: a module has no such name, or torch cannot trace the model.
    """
    from torch.distributed.pipelining import SplitPoint, pipeline

    state = PartialState()
    names = {name for name, _ in model.named_modules()}
    unknown = [point for point in split_points if point not in names]
    if unknown:
        raise wrong_value("split_points", split_points, f"there is no module {unknown[0]}", "name modules")
    part = slice(0, (find_pippy_batch_size(args, kwargs) or num_chunks) // num_chunks)
    example = slice_tensors((args, dict(kwargs or {})), part)
    spec = {f"model.{point}": SplitPoint.BEGINNING for point in split_points}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            for call in ("`isinstance.treespec, LeafSpec.`", "`torch.export.export_for_training`"):
                # torch calls functions that it deprecates
                warnings.filterwarnings("ignore", call, FutureWarning)
            pipe = pipeline(_Entry(model, example), tuple(iterate_tensors(example)), split_spec=spec)
    except (RuntimeError, ValueError, AssertionError) as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigurationError(
            f"{type(model).__name__} cannot be cut into stages, as torch.export cannot trace it: {first}. "
            "See what it says of control flow that depends on data; dispatch_model() needs no tracing."
        ) from error
    if pipe.num_stages != state.num_processes:
        reason = f"they make {pipe.num_stages} stages for {state.num_processes} processes"
        fix = "name one module less than there are processes, each of which the forward calls"
        raise wrong_value("split_points", list(split_points), reason, fix)
    last = state.num_processes - 1
    _make_sendable(pipe.get_stage_module(state.process_index), state.process_index, last)
    stage = pipe.build_stage(state.process_index, device=state.device)
    if of_device(state.device).is_host and is_torch_version("<", "2.11"):
        torch_private.skip_connection_messages(stage)
    return stage


def _make_sendable(stage: Any, index: int, last: int) -> None:
    """Makes tensors between traced stages contiguous, because expanded tensors cannot be sent."""
    from torch.fx.node import map_arg

    boundary_nodes: list[Any] = []
    if index:
        placeholders = [node for node in stage.graph.nodes if node.op == "placeholder"]
        strides = [torch.empty_like(node.meta["val"]).stride() for node in placeholders]
        boundary_nodes += placeholders
        stage.register_forward_pre_hook(lambda _, inputs: tuple(map(_with_strides, inputs, strides)))
    if index < last:
        (output,) = [node for node in stage.graph.nodes if node.op == "output"]
        map_arg(output.args, boundary_nodes.append)
        stage.register_forward_hook(lambda *call: recursively_apply(torch.Tensor.contiguous, call[-1]))
    for node in boundary_nodes:  # torch allocates receive buffers like these
        node.meta["val"] = node.meta["val"].contiguous()


def _with_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Returns a tensor with the strides of the trace, because later operations may be traced as views."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class _Entry(nn.Module):
    """Model that accepts its tensors one by one, all of them in its first stage.

    Other stages only receive outputs of stages, so the first stage clones the inputs and sends the clones.
    """

    def __init__(self, model: nn.Module, example: object) -> None:
        super().__init__()
        self.model = model
        self._structure = get_data_structure(example)

    def forward(self, *tensors: torch.Tensor) -> Any:
        clones = iter([tensor.clone() for tensor in tensors])
        data = recursively_apply(lambda _: next(clones), self._structure, test_type=is_tensor_information)
        return self.model(*data[0], **data[1])


class Schedule:
    """Pipeline schedule for batches of the size of the example."""

    def __init__(self, stage: Any, num_chunks: int, example: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        from torch.distributed.pipelining import ScheduleGPipe

        self.batch_size = find_pippy_batch_size(*example)
        self._signature = self._signature_of(example)
        self._steps = ScheduleGPipe(stage, num_chunks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a batch with arguments on the first rank, and outputs on the last rank, each on its device."""
        tensors = send_to_device(list(iterate_tensors((args, kwargs))), PartialState().device)
        return self._steps.step(*tensors)

    def find_mismatch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Returns the reason why a batch does not fit the stages, or "" if it fits."""
        sizes = {tensor.shape[:1] for tensor in iterate_tensors((args, kwargs))}
        if len(sizes) > 1:
            shapes = sorted(map(tuple, sizes))
            return f"all tensors need the batch as their first dimension, and have {shapes}"
        signature = self._signature_of((args, kwargs))
        if signature == self._signature:
            return ""
        return f"it is {signature}, and the example was {self._signature}"

    @staticmethod
    def _signature_of(data: object) -> str:
        return str(recursively_apply(lambda value: f"{value.dtype}{list(value.shape[1:])}", data))


def pippy_forward(
    forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any
) -> Any:
    """Runs a batch of any size through the stages.

    Called on all ranks.

    Args:
        forward: runs one batch. A `Schedule` also has the batch size, and checks batches.
        num_chunks: number of micro-batches. Batches are padded to a multiple, and outputs truncated.

        gather_output: whether to send the output to all ranks.
        *args: positional arguments of the model, used from rank 0.
        **kwargs: keyword arguments of the model, used from rank 0.

    Returns:
        The output on the last rank, or on all; None on other ranks.

    Raises:
        ConfigurationError: on all ranks, if the arguments of rank 0 have no batch size, or differ from the
            example.
    """
    state = PartialState()
    if state.num_processes == 1:
        return forward(*args, **kwargs)
    mismatch = forward.find_mismatch(args, kwargs) if isinstance(forward, Schedule) else ""
    facts: list[Any] = [find_pippy_batch_size(args, kwargs), mismatch]
    size, mismatch = broadcast_object_list(facts, from_process=0)
    if size is None or mismatch:
        reason = mismatch or "no argument of rank 0 is a tensor with a batch"
        raise ConfigurationError(f"This batch cannot go through the stages of a pipeline: {reason}.")
    step = getattr(forward, "batch_size", None) or math.ceil(size / num_chunks) * num_chunks
    outputs = []
    for start in range(0, size, step):
        if state.is_main_process:
            chunk = slice_tensors((args, kwargs), slice(start, start + step))
            chunk_args, chunk_kwargs = pad_input_tensors(chunk, min(step, size - start), step)
            outputs.append(forward(*chunk_args, **chunk_kwargs))
        else:
            outputs.append(forward())
    output = slice_tensors(concatenate(outputs), slice(0, size)) if state.is_last_process else None
    return copy_tensor_to_devices(output) if gather_output else output


def prepare_pippy(
    model: Model,
    split_points: str | Sequence[str] = AUTO,
    no_split_module_classes: str | Collection[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
) -> Model:
    """Splits a model into stages for inference, one for each rank.

    Called on all ranks. The model is then called as before on all ranks, with the arguments of rank 0.
    Batches may have any size. In all other dimensions they must match the example.

    Args:
        model: the module, the same on all ranks.
        split_points: names of the first modules of all stages but the first. "auto" makes even stages.
        no_split_module_classes: names of classes that are not split. None: `_no_split_modules` of the model.
        example_args: example of positional arguments.
        example_kwargs: example of keyword arguments.
        num_chunks: number of micro-batches. None: the number of ranks.
        gather_output: whether to send the output to all ranks, and not only to the last one.

    Returns:
        The model, with the names as its `hf_split_points`.

    Raises:
        ConfigurationError: arguments are invalid, or torch cannot trace the model.
    """
    state = PartialState()
    points = _find_split_points(model, split_points, no_split_module_classes, state.num_processes)
    model.hf_split_points = points  # type: ignore[assignment]
    chunks = state.num_processes if num_chunks is None else num_chunks
    if chunks < 1:
        raise wrong_value("num_chunks", chunks, "it is too small", "Give 1 or more, or leave it out")
    if state.num_processes == 1:
        return model
    size = find_pippy_batch_size(example_args, example_kwargs)
    if size is None:
        raise ConfigurationError(
            "prepare_pippy() needs an example with a batch: pass example_args or example_kwargs with tensors."
        )
    example = send_to_device((example_args, dict(example_kwargs or {})), "cpu")
    args, kwargs = pad_input_tensors(example, size, chunks)
    stage = build_pipeline(model.to("cpu"), points, args, kwargs, chunks)
    schedule = Schedule(stage, chunks, (args, kwargs))
    plain = model.forward
    forward = functools.partial(pippy_forward, schedule, chunks, gather_output)
    model.pippy_stage = stage
    model.forward = functools.update_wrapper(forward, plain)
    return model


def _find_split_points(
    model: nn.Module, points: str | Sequence[str], whole: str | Collection[str] | None, processes: int
) -> list[str]:
    if not isinstance(points, str):
        return list(points)
    if points != AUTO:
        reason, fix = "it is not a list of names", 'pass one, or "auto"'
        raise wrong_value("split_points", points, reason, fix, AttributeError)
    if processes == 1:
        return []
    device_map = generate_device_map(model, processes, whole)
    called = {name for name, module in model.named_modules() if has_forward(module)}
    firsts = {rank: name for name, rank in reversed(device_map.items()) if name in called}
    return [firsts[rank] for rank in range(1, processes) if rank in firsts]
