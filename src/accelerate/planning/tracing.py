"""Trace one training step without memory and without computing: fake tensors, and torch's memory tracker.

Source: https://docs.pytorch.org/docs/stable/torch.compiler_fake_tensor.html
"""

from __future__ import annotations

import copy
import gc
import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from accelerate import torch_private
from accelerate.base import ConfigurationError, PreparationError, shortened, wrong_value
from accelerate.nested import iterate_tensors, recursively_apply
from accelerate.planning.kernels import Kernels
from accelerate.planning.operators import Conversions, Operators
from accelerate.planning.parts import Trace
from accelerate.planning.recording import COLUMNS, Phase, Recording, Sizes

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
    keeps_output: bool = False  # whether the loop has the output of the model until that of the next step
    measures: bool = True  # whether operators may run on the CPU to measure the buffers inside of them


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


WITHOUT_PLAN: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.LBFGS: "it computes the loss several times in each step",
    torch.optim.SparseAdam: "it takes sparse gradients",
}
"""Optimizer -> why its step cannot be traced."""

UNTRACEABLE = ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException")
"""Errors of fake tensors about operations that need values."""


def trace_step(step: Step) -> Trace:
    """Return the trace of a step; see `record_step`."""
    return trace_of(record_step(step), step)


def trace_of(recording: Recording, step: Step) -> Trace:
    """Return the trace of a step from its recording."""
    model = step.model
    can_split = bool(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None))
    size = batch_size_of(step.batch) if step.batch_size is None else step.batch_size
    return recording.trace(batch_size=size, can_split_layers=can_split)


def record_step(step: Step) -> Recording:
    """Return the bytes of each part during a step; nothing is computed, and no weights are allocated.

    Raises:
        ConfigurationError: fake tensors cannot run this model, with the operation that needs values; a
            parameter has no shape yet, or the optimizer cannot be traced.
        PreparationError: the model or an optimizer cannot be copied.
    """
    _check(step)
    mode = torch_private.fake_tensors.FakeTensorMode(allow_non_fake_inputs=True)
    on_cpu = step.device == torch.device("cpu")
    operators = Operators(Kernels(step.measures and on_cpu, on_cpu))
    model, optimizers = _fake_copies(mode, step)
    for fake, buffer in zip(model.buffers(), step.model.buffers(), strict=True):
        operators.learn(fake, buffer)
    batch = _fake_batch(mode, step, operators)
    masters = _cast(model, step.parameter_dtype) if step.parameter_dtype is not None else 1.0
    model = step.convert(model)
    tracker = torch_private.MemTracker()
    tracker.memory_tracking = {}  # it reads all values at each operator, which weak references make slow
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints the traceback of what is raised here
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), _kept_generators(), torch_private.fake_parameters_converted(), mode:
            gc.collect()  # what the model left in cycles is no part of the step
            # about modules that end with the forward pass, such as losses: their parents are tracked
            warnings.filterwarnings("ignore", "Module is None. Skipping", UserWarning)
            tracker.track_external(model, *optimizers, *iterate_tensors(batch))
            traced = replace(step, model=model, optimizers=optimizers, batch=batch)
            return _run(traced, tracker, operators, masters)
    except tuple(getattr(torch_private.fake_tensors, name) for name in UNTRACEABLE) as error:
        operation = getattr(error, "func", None) or shortened(str(error))
        raise ConfigurationError(
            f"The step of {type(model).__name__} cannot be traced: {operation} needs the values of a tensor, "
            "and a trace has only shapes. Replace it (for example .item(), nonzero() and masks as indices by "
            "torch.where), or plan a version of the model without it."
        ) from error
    finally:
        log.setLevel(level)


def _check(step: Step) -> None:
    """Raise an error for optimizers and parameters that no trace can have."""
    lazy = [name for name, each in step.model.named_parameters() if isinstance(each, UninitializedParameter)]
    if lazy:
        reason = f"{', '.join(lazy[:3])} of {type(step.model).__name__} have no shape yet"
        fix = "Call the model with a batch once before it is planned, as before it gets an optimizer"
        raise wrong_value("model", type(step.model).__name__, reason, fix)
    for optimizer in step.optimizers:
        kind = next((each for each in WITHOUT_PLAN if isinstance(optimizer, each)), None)
        if kind is not None:
            reason = f"{WITHOUT_PLAN[kind]}, and a plan traces one pass with dense gradients"
            fix = "Plan with torch.optim.AdamW, whose state is two values for each parameter"
            raise wrong_value("optimizer", type(optimizer).__name__, reason, fix)


@contextmanager
def _kept_generators() -> Iterator[None]:
    """Restore the generators of torch, numpy and Python: models draw from them which layers they drop."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)


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


def _fake_batch(mode: Any, step: Step, operators: Operators) -> Any:
    """Return the batch of fake tensors, with the samples of the step; operators learn its values."""
    given = batch_size_of(step.batch)
    size = given if step.batch_size is None else step.batch_size

    def resize(tensor: Tensor) -> Tensor:
        if size == given or not tensor.ndim or tensor.shape[0] != given:
            fake, value = _fake(mode, tensor, step.device), tensor
        else:
            with mode:
                fake = torch.empty((size, *tensor.shape[1:]), dtype=tensor.dtype, device=step.device)
            value = tensor[:1].expand(fake.shape) if size else tensor
        operators.learn(fake, value)
        return fake

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


class _Moments:
    """Records the bytes of each part at each operator that a tracker sees."""

    def __init__(self, tracker: Any, operators: Operators, device: torch.device) -> None:
        self.tracker, self.operators, self.device = tracker, operators, device
        self.names: list[int] = []
        self.sizes: list[list[float]] = []
        torch_private.record_moments(tracker, self.add)

    def now(self) -> list[float]:
        """Return the bytes of each part."""
        snapshot = torch_private.tracked_bytes(self.tracker)
        here = [sizes for place, sizes in snapshot.items() if place.type == self.device.type]
        return [float(sum(sizes.get(NAMES.get(part, ""), 0) for sizes in here)) for part in COLUMNS]

    def add(self) -> None:
        self.names.append(id(self.operators.current))
        self.sizes.append(self.now())

    def take(self) -> Phase:
        """Return the moments since the last call."""
        self.add()
        phase = Phase(np.array(self.names), np.array(self.sizes))
        self.names, self.sizes = [], []
        return phase


def _run(step: Step, tracker: Any, operators: Operators, masters: float) -> Recording:
    """Run the step under the tracker, in a mode of fake tensors."""
    blocks = blocks_of(step.model)
    sizes = [_bytes(block.parameters()) for block in blocks]
    outputs = 0
    phases: list[Phase] = []
    kept: list[Any] = []
    moments = _Moments(tracker, operators, step.device)

    def keep(model: nn.Module, args: Any, output: Any) -> None:
        kept[:] = [output]

    hooks = [step.model.register_forward_hook(keep)] if step.keeps_output else []
    for _ in range(2 if step.accumulates else 1):
        tracker.reset_mod_stats()
        torch_private.skip_frozen_gradients(tracker, step.model)
        with tracker, operators, Conversions(operators):
            loss = step.loss(step.model, step.batch)
            phases.append(moments.take())
            loss.backward()  # type: ignore[no-untyped-call]
        del loss
        phases.append(moments.take())
        seen = tracker.memory_tracking
        outputs = sum(getattr(seen[block], "output_mem", 0) for block in blocks if block in seen)
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
    # In all later steps the state of the optimizer exists before the forward pass.
    for index, phase in enumerate(phases):
        phase.sizes[:, STATE] += (after - before)[STATE]
        phase.sizes[:, COLUMNS.index("activations")] += output * (index % 2 == 0)
    facts = {
        "trained_bytes": _bytes(p for p in step.model.parameters() if p.requires_grad),
        "largest_block": max(sizes, default=0),
        "outside_blocks": _bytes(step.model.parameters()) - sum(sizes),
        "block_outputs": outputs,
        "masters": masters,
    }
    return Recording(tuple(phases), _peak_of_step(stepped, after), facts)


def _peak_of_step(moments: Sizes, after: Sizes) -> Sizes:
    """Return the moment with the most bytes; more state than remains is temporary."""
    peak: Sizes = moments[moments.sum(1).argmax()].copy()
    peak[COLUMNS.index("temporary")] += max(0, peak[STATE] - after[STATE])
    peak[STATE] = after[STATE]
    return peak


def lists_of_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost lists of modules."""
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    inside = {child for each in lists for block in each for child in block.modules()}
    return [each for each in lists if each not in inside]


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules in lists, such as the layers of a transformer, those with parameters."""
    blocks = dict.fromkeys(block for each in lists_of_blocks(model) for block in each.children())
    return [block for block in blocks if next(block.parameters(), None) is not None]


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


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
STATE = COLUMNS.index("optimizer")
