"""Trace one training step without memory and without computing: fake tensors, and torch's memory tracker.

Source: https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
"""

from __future__ import annotations

import copy
import gc
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import ConfigurationError, PreparationError, shortened, wrong_value
from accelerate.nested import iterate_tensors, recursively_apply
from accelerate.planning.parts import Parts, Trace, not_dominated

Snapshot = Mapping[Any, Mapping[str, int]]
Loss = Callable[[nn.Module, Any], Tensor]
"""From the model and a batch to the loss: what a loop does before it calls `backward`."""


@dataclass(frozen=True)
class Step:
    """What is traced: a model, its optimizers and a batch, none of which is changed.

    `convert` returns the model in the number format of the run; `parameter_dtype` is what its parameters are
    cast to before, where `masters` says that the optimizer steps larger ones.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    batch: Any
    loss: Loss
    device: torch.device
    convert: Callable[[nn.Module], nn.Module] = lambda model: model
    accumulates: bool = False
    parameter_dtype: torch.dtype | None = None
    max_norm: float | None = 1.0
    batch_size: int | None = None  # that dimension 0 of tensors in the batch gets


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    """Call a model with a batch, and return the loss in its output, as models of transformers have it."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    found = output if isinstance(output, Tensor) else _loss_in(output)
    if found is None or found.numel() != 1:
        raise ConfigurationError(
            f"The output of {type(model).__name__} has no loss: it is a {type(output).__name__}. Add labels "
            "to the batch, or pass loss=lambda model, batch: ..., which returns the loss of a batch."
        )
    return found


def _loss_in(output: Any) -> Tensor | None:
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    first = output[0] if named is None and isinstance(output, (tuple, list)) and output else named
    return first if isinstance(first, Tensor) else None


UNTRACEABLE = ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
"""Errors of fake tensors about operations that need values."""


def trace_step(step: Step) -> Trace:
    """Return the bytes of each part during a step; nothing is computed, and no weights are allocated.

    Raises:
        ConfigurationError: fake tensors cannot run this model, with the operation that needs values.
        PreparationError: the model or an optimizer cannot be copied.
    """
    mode = torch_private.fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
    model, optimizers = _fake_copies(mode, step)
    batch = _fake_batch(mode, step)
    masters = _cast(model, step.parameter_dtype) if step.parameter_dtype is not None else 1.0
    model = step.convert(model)
    tracker = torch_private.MemTracker()
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints the traceback of what is raised here
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), mode:
            gc.collect()  # what the model left in cycles is no part of the step
            # about modules that end with the forward pass, such as losses: their parents are tracked
            warnings.filterwarnings("ignore", "Module is None. Skipping", UserWarning)
            tracker.track_external(model, *optimizers, *iterate_tensors(batch))
            return _run(replace(step, model=model, optimizers=optimizers, batch=batch), tracker, masters)
    except tuple(getattr(torch_private.fake_tensors, name) for name in UNTRACEABLE) as error:
        operation = getattr(error, "func", None) or shortened(str(error))
        raise ConfigurationError(
            f"The step of {type(model).__name__} cannot be traced: {operation} needs the values of a tensor, "
            "and a trace has only shapes. Replace it (for example .item(), nonzero() and masks as indices by "
            "torch.where), or plan a version of the model without it."
        ) from error
    finally:
        log.setLevel(level)


def _fake_copies(mode: Any, step: Step) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Return copies of the model and the optimizers that share fake parameters."""
    tensors = {id(tensor): tensor for tensor in _tensors_of(step.model, step.optimizers)}
    memo: dict[int, Any] = {key: _fake(mode, tensor, step.device) for key, tensor in tensors.items()}
    try:
        model, optimizers = copy.deepcopy((step.model, list(step.optimizers)), memo)
    except (TypeError, RuntimeError, AttributeError, copy.Error) as error:
        raise PreparationError(
            f"{type(step.model).__name__} or its optimizer cannot be copied, which a plan needs: "
            f"{shortened(str(error))}. Remove what cannot be copied from its attributes."
        ) from error
    for optimizer, original in zip(optimizers, step.optimizers, strict=True):
        _choose_foreach(optimizer, original)
        optimizer.state.clear()  # the traced step makes it: optimizers read numbers from what exists
    return model, optimizers


def _tensors_of(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Tensor]:
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor
        if tensor.grad is not None:
            yield tensor.grad
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))


def batch_size_of(batch: Any) -> int:
    """Return dimension 0 of the first tensor in a batch."""
    size = next((tensor.shape[0] for tensor in iterate_tensors(batch) if tensor.ndim), None)
    if size is None:
        reason = "it has no tensor with a dimension of samples"
        raise wrong_value("batch", batch, reason, "Pass a batch as the model receives it")
    return size


def _fake_batch(mode: Any, step: Step) -> Any:
    """Return the batch of fake tensors, with the number of samples of the step."""
    given = batch_size_of(step.batch)
    size = given if step.batch_size is None else step.batch_size

    def resize(tensor: Tensor) -> Tensor:
        if size == given or not tensor.ndim or tensor.shape[0] != given:
            return _fake(mode, tensor, step.device)
        with mode:
            return torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, device=step.device)

    return recursively_apply(resize, step.batch)


def _fake(mode: Any, tensor: Tensor, device: torch.device) -> Tensor:
    """Return a fake tensor of the same shape and dtype, on the device of the run."""
    fake = mode.from_tensor(tensor)
    if fake.device == device:
        return fake  # type: ignore[no-any-return]
    with mode:
        moved = torch.empty_like(fake, device=device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _choose_foreach(optimizer: torch.optim.Optimizer, original: torch.optim.Optimizer) -> None:
    """Let a copy update parameters one by one or all at once as the original does: fake tensors are always
    updated one by one, which takes less memory."""
    for group, given in zip(optimizer.param_groups, original.param_groups, strict=True):
        if group.get("foreach", False) is None and not group.get("fused"):
            group["foreach"] = torch_private.default_to_foreach(given["params"], False, False)[1]


def _cast(model: nn.Module, dtype: torch.dtype) -> float:
    """Cast a fake model in place; return by how much its trained parameters shrink."""
    before = _bytes(p for p in model.parameters() if p.requires_grad)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return before / max(1, _bytes(p for p in model.parameters() if p.requires_grad))


def _run(step: Step, tracker: Any, masters: float) -> Trace:
    """Run the step under the tracker, in a mode of fake tensors."""
    blocks = blocks_of(step.model)
    sizes = [_bytes(block.parameters()) for block in blocks]
    outputs = 0
    work: list[Snapshot] = []
    for _ in range(2 if step.accumulates else 1):
        tracker.reset_mod_stats()
        torch_private.skip_frozen_gradients(tracker, step.model)
        with tracker:
            step.loss(step.model, step.batch).backward()  # type: ignore[no-untyped-call]
        work += [tracker.get_tracker_snapshot("peak"), *_module_snapshots(tracker)]
        seen = tracker.memory_tracking
        outputs = sum(getattr(seen[block], "output_mem", 0) for block in blocks if block in seen)
    before = _on_device(tracker.get_tracker_snapshot(), step.device)
    # Optimizers read numbers, on which the sizes of their tensors do not depend.
    with torch_private.numbers_assumed(), tracker:
        if step.max_norm is not None:
            nn.utils.clip_grad_norm_(step.model.parameters(), step.max_norm)
        for optimizer in step.optimizers:
            optimizer.step()
    peak = _on_device(tracker.get_tracker_snapshot("peak"), step.device)
    state = _on_device(tracker.get_tracker_snapshot(), step.device).optimizer
    # In all later steps the state of the optimizer exists before the forward pass.
    added = state - before.optimizer
    moments = (_on_device(snapshot, step.device) for snapshot in work)
    return Trace(
        batch_size=batch_size_of(step.batch),
        work=not_dominated(replace(moment, optimizer=moment.optimizer + added) for moment in moments),
        step=(replace(peak, optimizer=state, temporary=peak.temporary + max(0, peak.optimizer - state)),),
        trained_bytes=_bytes(p for p in step.model.parameters() if p.requires_grad),
        largest_block=max(sizes, default=0),
        outside_blocks=_bytes(step.model.parameters()) - sum(sizes),
        block_outputs=outputs,
        masters=masters,
        can_split_layers=bool(getattr(step.model, "tp_plan", None) or getattr(step.model, "_tp_plan", None)),
    )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in lists, such as the layers of a transformer, those with parameters."""
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    inside = {child for each in lists for block in each for child in block.modules()}
    blocks = dict.fromkeys(block for each in lists if each not in inside for block in each)
    return [block for block in blocks if next(block.parameters(), None) is not None]


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _module_snapshots(tracker: Any) -> Iterator[Snapshot]:
    """Return what was allocated when modules began and ended, and at their peaks."""
    for statistics in tracker.memory_tracking.values():
        for snapshots in statistics.snapshots.values():
            yield from snapshots


NAMES = {
    "parameters": "Parameter",
    "buffers": "Buffer",
    "gradients": "Gradient",
    "optimizer": "Optstate",
    "activations": "Activation",
    "temporary": "Temp",
    "inputs": "Other",
}
"""Part -> the name that torch's tracker has for it."""


def _on_device(snapshot: Snapshot, device: torch.device) -> Parts:
    here = [sizes for place, sizes in snapshot.items() if place.type == device.type]
    return Parts(**{part: sum(sizes.get(name, 0) for sizes in here) for part, name in NAMES.items()})
