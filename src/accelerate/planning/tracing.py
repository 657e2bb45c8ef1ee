"""Trace of one training step with fake tensors and torch's memory tracker, without computation.

`planning.variants` calls it for each variant of a step whose memory is planned.

Source: https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from accelerate import rng, torch_private
from accelerate.base import ConfigurationError, PreparationError, shortened, wrong_value
from accelerate.nested import iterate_tensors, recursively_apply
from accelerate.planning.checks import check_loss, check_step
from accelerate.planning.libraries import values_readable
from accelerate.planning.operators import OperatorMode
from accelerate.planning.parts import Trace
from accelerate.planning.recording import COLUMNS, Phase, Recording, Sizes
from accelerate.wrappers import FunctionMode

Copied = TypeVar("Copied")
Loss = Callable[[nn.Module, Any], Tensor]
"""Function of the model and a batch that returns the loss, as a training loop does before `backward`."""


@dataclass(frozen=True)
class Step:
    """Training step to be traced, whose model, optimizers and batch are not modified.

    Attributes:
        convert: Function that applies mixed precision and activation checkpointing to the model.
        accumulates: Whether the step has two forward and backward passes, as with gradient accumulation.
        parameter_dtype: Dtype that parameters are cast to before `convert`. The optimizer then updates master
            weights of the original dtype.
        max_norm: Norm to which gradients are clipped. None does not clip them.
        batch_size: Size of dimension 0 of the tensors in the batch. None uses that of the batch.
        keeps_output: Whether the loop keeps the output of the model until that of the next step.
        find_experts: Function that returns the modules of the model that hold the experts of a layer.
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
    batch_size: int | None = None
    keeps_output: bool = False
    find_experts: Callable[[nn.Module], Sequence[nn.Module]] = lambda model: ()


def loss_of(model: nn.Module, batch: object) -> Tensor:
    """Returns the loss in the output of a model for a batch, as models of transformers have it."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = output if isinstance(output, Tensor) else _loss_in(output)
    if loss is None or loss.numel() != 1:
        raise ConfigurationError(
            f"The output of {type(model).__name__} has no loss: it is a {type(output).__name__}. Add labels "
            "to the batch, or pass loss=lambda model, batch: ..., which returns the loss of a batch."
        )
    return loss


def loss_or_sum(model: nn.Module, batch: tuple[Sequence[Any], Mapping[str, Any]]) -> Tensor:
    """Returns the loss in the output of a model, or the sum of its outputs if it has none.

    Args:
        batch: Positional and keyword arguments of the model.
    """
    output = model(*batch[0], **batch[1])
    loss = None if isinstance(output, Tensor) else _loss_in(output)
    if loss is not None and loss.numel() == 1 and loss.requires_grad:
        return loss
    trained = [tensor.sum() for tensor in iterate_tensors(output) if tensor.requires_grad]
    return torch.stack([total.real.double() for total in trained]).sum() if trained else torch.zeros(())


def _loss_in(output: object) -> Tensor | None:
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    first = output[0] if named is None and isinstance(output, (tuple, list)) and output else named
    return first if isinstance(first, Tensor) else None


FAKE_TENSORS = "torch._subclasses.fake_tensor"
"""Name of the logger of fake tensors, which logs the tracebacks of errors."""
UNTRACEABLE_ERRORS = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "UnsupportedOperatorException",
)
"""Names of the errors that fake tensors raise for operators that need values."""


def trace_step(step: Step) -> Trace:
    """Returns the trace of a step, as `record_step` does for its recording."""
    return trace_of(record_step(step), step)


def trace_of(recording: Recording, step: Step) -> Trace:
    model = step.model
    can_split = bool(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None))
    size = batch_size_of(step.batch) if step.batch_size is None else step.batch_size
    num_experts = gcd(*(next(module.parameters()).shape[0] for module in step.find_experts(model)))
    return recording.trace(batch_size=size, can_split_layers=can_split, num_experts=num_experts)


def record_step(step: Step) -> Recording:
    """Returns the bytes of each part during a step, without computation and without allocation of weights.

    Raises:
        ConfigurationError: Fake tensors cannot run an operator of this model because it needs values, a
            parameter has no shape yet, or the optimizer cannot be traced. The message names the operator.
        PreparationError: The model or an optimizer cannot be copied.
    """
    check_step(step.model, step.optimizers, step.batch)
    mode = torch_private.fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
    operators = OperatorMode()
    model, optimizers = _fake_copies(mode, step)
    for fake, buffer in zip(model.buffers(), step.model.buffers(), strict=True):
        operators.store(fake, buffer)
    batch = _fake_batch(mode, step, operators)
    master_ratio = _cast(model, step.parameter_dtype) if step.parameter_dtype is not None else 1.0
    model = step.convert(model)
    tracker = torch_private.MemTracker()
    states = rng.capture_on_cpu()  # models use these generators, for example to drop layers
    try:
        with (
            torch_private.log_silenced(FAKE_TENSORS),
            warnings.catch_warnings(),
            torch_private.fake_parameters_converted(),
            values_readable(),
            mode,
        ):
            gc.collect()  # tensors in reference cycles of earlier calls are not part of the step
            tracker.track_external(model, *optimizers, *iterate_tensors(batch))
            traced = replace(step, model=model, optimizers=optimizers, batch=batch)
            return _run(traced, tracker, operators, master_ratio)
    except tuple(getattr(torch_private.fake_tensors, name) for name in UNTRACEABLE_ERRORS) as error:
        operation = getattr(error, "func", None) or shortened(str(error))
        raise ConfigurationError(
            f"The step of {type(model).__name__} cannot be traced: {operation} needs the values of a tensor, "
            "and a trace has only shapes. Replace it (for example .item(), nonzero() and masks as indices by "
            "torch.where), or plan a version of the model without it."
        ) from error
    finally:
        rng.restore(states)


@contextmanager
def fake_operators(mode: Any) -> Iterator[None]:
    """Runs operators on fake tensors inside the block, also those that need values, such as routing."""
    with torch_private.log_silenced(FAKE_TENSORS), values_readable(), mode, OperatorMode():
        yield


def _fake_copies(mode: object, step: Step) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Returns copies of the model and the optimizers, both with the same fake parameters."""
    tensors = {id(tensor): tensor for tensor in _tensors_of(step.model, step.optimizers)}
    memo: dict[int, Any] = {key: _fake(mode, tensor, step.device) for key, tensor in tensors.items()}
    model, optimizers = _copied((step.model, list(step.optimizers)), memo, step.model)
    for optimizer, original in zip(optimizers, step.optimizers, strict=True):
        # The default of torch for the real parameters. For fake tensors torch would choose the loop over
        # parameters, which needs less memory.
        for group, real in zip(optimizer.param_groups, original.param_groups, strict=True):
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = torch_private.default_to_foreach(real["params"], False, False)[1]
        # The traced step creates the state, because optimizers read numbers from an existing one.
        optimizer.state.clear()
    return model, optimizers


def meta_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of a model with its parameters on the meta device, and with the same buffers."""
    memo: dict[int, Any] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter.data, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    return _copied(model, memo, model)


def _copied(original: Copied, memo: dict[int, Any], model: nn.Module) -> Copied:
    """Returns a copy of objects, or raises an error that names the model."""
    try:
        return copy.deepcopy(original, memo)
    except (TypeError, RuntimeError, AttributeError, copy.Error) as error:
        raise PreparationError(
            f"{type(model).__name__} or its optimizer cannot be copied, which a plan needs: "
            f"{shortened(str(error))}. Remove what cannot be copied from its attributes."
        ) from error


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


def batch_size_of(batch: object) -> int:
    """Returns the size of dimension 0 of the first tensor in a batch."""
    size = next((tensor.shape[0] for tensor in iterate_tensors(batch) if tensor.ndim), None)
    if size is None:
        reason = "it has no tensor with a dimension of samples"
        raise wrong_value("batch", batch, reason, "Pass a batch as the model receives it")
    return size


def _fake_batch(mode: Any, step: Step, operators: OperatorMode) -> Any:
    """Returns a batch of fake tensors of the batch size of the step, and stores its values in `operators`."""
    original_size = batch_size_of(step.batch)
    size = original_size if step.batch_size is None else step.batch_size

    def resize(tensor: Tensor) -> Tensor:
        if size == original_size or not tensor.ndim or tensor.shape[0] != original_size:
            fake, value = _fake(mode, tensor, step.device), tensor
        else:
            with mode:
                fake = torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, device=step.device)
            value = tensor[:1].expand(fake.shape) if size else tensor
        operators.store(fake, value)
        return fake

    return recursively_apply(resize, step.batch)


def _fake(mode: Any, tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a fake tensor of the same shape and dtype, on the device of the run."""
    fake = mode.from_tensor(tensor)
    if fake.device == device:
        return fake  # type: ignore[no-any-return]
    with mode:
        moved = torch.empty_like(fake, device=device)
    return nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _cast(model: nn.Module, dtype: torch.dtype) -> float:
    """Casts a fake model in place, and returns the factor by which its trained parameters shrink."""
    before = _bytes(p for p in model.parameters() if p.requires_grad)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return before / max(1, _bytes(p for p in model.parameters() if p.requires_grad))


class _Moments:
    """Records the bytes of each part after each operator that a memory tracker observes."""

    def __init__(self, tracker: object, operators: OperatorMode, device: torch.device) -> None:
        self.tracker, self.operators, self.device = tracker, operators, device
        self.offloaded = 0
        self.names: list[int] = []
        self.sizes: list[list[float]] = []
        torch_private.record_moments(tracker, self.add)

    def now(self) -> list[float]:
        """Returns the current bytes of each part."""
        snapshot = torch_private.tracked_bytes(self.tracker)
        on_device = [sizes for device, sizes in snapshot.items() if device.type == self.device.type]
        return [
            float(sum(sizes.get(TRACKER_NAMES.get(part, ""), 0) for sizes in on_device)) for part in COLUMNS
        ]

    def add(self) -> None:
        on_host = torch_private.tracked_bytes(self.tracker).get(HOST, {})
        self.offloaded = max(self.offloaded, sum(on_host.get(name, 0) for name in TRACKER_NAMES.values()))
        self.names.append(id(self.operators.current))
        self.sizes.append(self.now())

    def take(self) -> Phase:
        """Returns the moments since the last call."""
        self.add()
        phase = Phase(np.array(self.names), np.array(self.sizes))
        self.names, self.sizes = [], []
        return phase


def _run(step: Step, tracker: Any, operators: OperatorMode, master_ratio: float) -> Recording:
    """Runs the step under the memory tracker and a mode of fake tensors, and returns its recording."""
    blocks = blocks_of(step.model)
    sizes = [_bytes(block.parameters()) for block in blocks]
    experts = step.find_experts(step.model)
    in_blocks = [
        sum(_bytes(e.parameters()) for e in experts if e in set(block.modules())) for block in blocks
    ]
    outputs: dict[nn.Module, int] = {}
    dispatched: dict[nn.Module, int] = {}
    phases: list[Phase] = []
    kept: list[Any] = []
    moments = _Moments(tracker, operators, step.device)
    operators.before_each = partial(torch_private.find_recomputation, tracker)

    def keep(model: nn.Module, args: tuple[Any, ...], output: object) -> None:
        kept[:] = [output]

    def count(block: nn.Module, args: tuple[Any, ...], output: object) -> None:
        outputs[block] = sum(tensor.numel() * tensor.element_size() for tensor in iterate_tensors(output))

    def count_rows(
        module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object
    ) -> None:
        hidden, indices = list(iterate_tensors((args, kwargs)))[:2]
        dispatched[module] = hidden.nbytes * indices.shape[-1]

    hooks = [block.register_forward_hook(count) for block in blocks]
    hooks += [module.register_forward_hook(count_rows, with_kwargs=True) for module in experts]
    hooks += [step.model.register_forward_hook(keep)] if step.keeps_output else []
    for _ in range(2 if step.accumulates else 1):
        torch_private.skip_frozen_gradients(tracker, step.model)
        torch_private.replace_module_hooks(tracker, step.model)
        with tracker, operators, FunctionMode(operators.convert):
            loss = step.loss(step.model, step.batch)
            check_loss(loss)
            phases.append(moments.take())
            loss.backward()  # type: ignore[no-untyped-call]
        del loss
        phases.append(moments.take())
    before = np.array(moments.now())
    with tracker, operators:
        if step.max_norm is not None:
            nn.utils.clip_grad_norm_(step.model.parameters(), step.max_norm)
        for optimizer in step.optimizers:
            optimizer.step()
    stepped, after = moments.take().sizes, np.array(moments.now())
    for hook in hooks:
        hook.remove()
    kept.clear()
    output = (after - np.array(moments.now())).sum()
    # In all later steps, the optimizer state exists before the forward pass.
    for index, phase in enumerate(phases):
        phase.sizes[:, STATE] += (after - before)[STATE]
        phase.sizes[:, COLUMNS.index("activations")] += output * (index % 2 == 0)
    scalars = {
        "trained_bytes": _bytes(p for p in step.model.parameters() if p.requires_grad),
        "largest_block": max(sizes, default=0),
        "outside_blocks": _bytes(step.model.parameters()) - sum(sizes),
        "block_outputs": sum(outputs.values()),
        "experts": sum(_bytes(module.parameters()) for module in experts),
        "trained_experts": sum(
            _bytes(p for p in module.parameters() if p.requires_grad) for module in experts
        ),
        "experts_in_block": max(in_blocks, default=0),
        "dispatched": sum(dispatched.values()),
        "offloaded": moments.offloaded,
        "master_ratio": master_ratio,
    }
    # Optimizer state that does not exist after the step is counted as temporary.
    peak: Sizes = stepped[stepped.sum(1).argmax()].copy()
    peak[COLUMNS.index("temporary")] += max(0, peak[STATE] - after[STATE])
    peak[STATE] = after[STATE]
    return Recording(tuple(phases), peak, scalars)


def lists_of_blocks(model: nn.Module) -> list[nn.Module]:
    """Returns the outermost `ModuleList` and `Sequential` modules."""
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    inner = {child for blocks in lists for block in blocks for child in block.modules()}
    return [blocks for blocks in lists if blocks not in inner]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Returns the outermost modules in lists that have parameters, such as the layers of a transformer."""
    blocks = dict.fromkeys(block for outer in lists_of_blocks(model) for block in outer.children())
    return [block for block in blocks if next(block.parameters(), None) is not None]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


TRACKER_NAMES = {
    "parameters": "Parameter",
    "buffers": "Buffer",
    "gradients": "Gradient",
    "optimizer": "Optstate",
    "activations": "Activation",
    "temporary": "Temp",
    "inputs": "Other",
}
"""Part -> name of the part in torch's memory tracker."""
HOST = torch.device("meta")
"""Device of tensors that a trace offloads, as the device of the run may be the CPU."""
STATE = COLUMNS.index("optimizer")
