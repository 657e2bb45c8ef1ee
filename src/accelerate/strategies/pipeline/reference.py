"""The whole model on one rank, with which a pipeline is compared, and its state."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import rng
from accelerate.base import listed
from accelerate.devices import of_device
from accelerate.logging import get_logger
from accelerate.ops import gather_in_group
from accelerate.strategies.axes import whole_experts
from accelerate.strategies.dtensors import fsdp2_canonicalize_names, named_parameters
from accelerate.strategies.pipeline.microbatches import MicroBatch
from accelerate.strategies.pipeline.runner import Pipeline
from accelerate.strategies.pipeline.side_effects import OF_MODULES
from accelerate.strategies.pipeline.tracing import restored_attributes
from accelerate.strategies.pipeline.weights import whole_weights
from accelerate.strategies.tolerances import as_real

logger = get_logger(__name__)

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@contextmanager
def whole_reference(structure: nn.Module, pipeline: Pipeline) -> Iterator[nn.Module]:
    """Yields the whole model with the weights, modes and settings that the pipeline has now.

    Called on all ranks of the pipeline.
    """
    reference = copy_structure(structure)
    device = _device_for(pipeline.device, reference)
    targets = {
        **dict(reference.named_parameters(remove_duplicate=False)),
        **dict(reference.named_buffers(remove_duplicate=False)),
    }
    own = [name for name, p in named_parameters(pipeline.model.model).items() if p.requires_grad]
    trained = {name for names in gather_in_group(own, pipeline.group) for name in names}
    filled: set[int] = set()
    weights, send = whole_weights(pipeline)
    with torch.no_grad():
        for name, weight in weights.items():
            values, target = send(weight).to(device), targets.get(name)
            if target is None or id(target) in filled:  # not a tensor, or a tied one
                continue
            filled.add(id(target))
            if target.is_meta:
                _materialize(reference, target, nn.Parameter(values.clone(), requires_grad=name in trained))
            else:
                target.copy_(values)
    with whole_experts([pipeline.model.model]):  # they have another number of experts otherwise
        copy_settings(pipeline.model.model, reference)
    reference.to(device)
    with rng.restored_generators(pipeline.device):
        yield reference


def copy_structure(model: nn.Module) -> nn.Module:
    """Returns a copy of a model whose parameters are on the meta device.

    Attributes that cannot be copied, such as locks, are those of the model.
    """
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        for parameter in model.parameters()
    }
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:
        memo.update({id(value): value for value in _fixed_attributes(model)})
        return copy.deepcopy(model, memo)


def _fixed_attributes(model: nn.Module) -> Iterator[Any]:
    """Yields the attributes of modules that cannot be copied."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            try:
                copy.deepcopy(value, {id(each): each for each in model.modules()})
            except Exception:
                yield value


def _materialize(model: nn.Module, target: Tensor, parameter: nn.Parameter) -> None:
    """Replaces a parameter of a model on the meta device by one with values."""
    if not weakref.getweakrefs(target):
        torch.utils.swap_tensors(target, parameter)  # type: ignore[no-untyped-call]
        return
    for module in model.modules():  # recurrent layers, which replace their references with their attributes
        for name, value in list(module._parameters.items()):
            if value is target:
                setattr(module, name, parameter)


_OF_HOOKS = ("_output_capturing_hooks_installed",)
"""Attributes of transformers that say whether a module has hooks, which its copy installs itself."""


def copy_settings(model: nn.Module, reference: nn.Module) -> None:
    """Gives a copy of a model the modes, attributes, configuration and new buffers that the model has now."""
    modules = dict(reference.named_modules(remove_duplicate=False))
    for name, module in fsdp2_canonicalize_names(dict(model.named_modules(remove_duplicate=False))).items():
        attributes: Any = vars(modules[name]) if name in modules else {}
        for key, value in vars(module).items():
            is_plain = value is None or isinstance(value, (bool, int, float, str))
            if key in attributes and key not in _OF_HOOKS and (is_plain or key == "config"):
                attributes[key] = value
        known = modules[name]._buffers if name in modules else module._buffers
        for key, buffer in module._buffers.items():
            if key not in known and buffer is not None:  # such as a cache that the first forward creates
                modules[name].register_buffer(key, buffer.detach().clone(), persistent=False)


@contextmanager
def restored_state(model: nn.Module) -> Iterator[None]:
    """Restores attributes and buffers of a model at its end."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with restored_attributes(model.modules()):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, values in buffers:
                    buffer.copy_(values)


@contextmanager
def state_of_other(model: nn.Module, other: nn.Module) -> Iterator[None]:
    """Gives a model the weights and attributes of another one with the same modules inside the block."""
    others = dict(other.named_modules(remove_duplicate=False))
    modules = fsdp2_canonicalize_names(dict(model.named_modules(remove_duplicate=False)))
    with restored_attributes(model.modules()):
        for name in modules.keys() & others.keys():
            attributes = vars(others[name])
            vars(modules[name]).update({key: attributes[key] for key in attributes.keys() - OF_MODULES})
        yield


@contextmanager
def fixed_statistics(model: nn.Module) -> Iterator[list[str]]:
    """Lets batch normalization use its running statistics, and yields the names of its modules.

    In a pipeline it uses those of micro-batches, as it does with gradient accumulation.
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BATCH_NORMS) and module.training
    }
    for layer in layers.values():
        layer.eval()
    try:
        yield list(layers)
    finally:
        for layer in layers.values():
            layer.train()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the buffers of a model, and the numbers among the attributes of its modules."""
    numbers = {
        f"{name}.{key}".removeprefix("."): torch.tensor(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) in (int, float)
    }
    return numbers | {name: buffer.clone() for name, buffer in model.named_buffers()}


def changed_names(
    first: Mapping[str, Tensor], last: Mapping[str, Tensor], whole: Mapping[str, Tensor]
) -> Iterator[str]:
    """Yields the names of values that change with each micro-batch, to others than after the whole batch."""
    for name, value in last.items():
        others = [state.get(name, torch.zeros(())) for state in (first, whole)]
        number, others = as_real(value).double(), [as_real(other).double() for other in others]
        if not any(
            number.shape == other.shape
            and torch.allclose(number, other, rtol=1e-3, atol=1e-6, equal_nan=True)
            for other in others
        ):
            yield name


def warn_of_state(model: nn.Module, parts: Sequence[MicroBatch], names: Sequence[str]) -> None:
    """Warns of names of values that depend on micro-batches."""
    if names:
        logger.warning_once(
            f"The state of {listed(names)} in {type(model).__name__} depends on {len(parts)} micro-batches "
            f"of {parts[0].size} samples in place of their batch, as it does with gradient accumulation. Set "
            "microbatches=1 in PipelineConfig to compute it for batches, or use a layer without statistics "
            "of batches."
        )


def _device_for(device: torch.device, model: nn.Module) -> torch.device:
    """Returns the device if it has memory for weights, gradients and activations, and otherwise the CPU."""
    backend = of_device(device)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    fits = backend.is_host or backend.free_memory(device.index or 0) > 3 * size
    return device if fits else torch.device("cpu")
