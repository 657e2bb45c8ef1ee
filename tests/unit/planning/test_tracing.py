"""A traced step has the bytes of a step that runs, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate import torch_private
from accelerate.base import ConfigurationError, PreparationError
from accelerate.planning import Step, batch_size_of, blocks_of, loss_of, trace_step

CPU = torch.device("cpu")
WIDTH, LAYERS, BATCH = 64, 3, 32


class Net(nn.Module):
    """Blocks with a saved activation each, and a loss in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, values: Tensor, targets: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            values = block(values)
        return {"loss": nn.functional.mse_loss(self.head(values) * self.scale, targets)}


def make_step(**changes: Any) -> Step:
    model = Net()
    batch = {"values": torch.randn(BATCH, WIDTH), "targets": torch.randn(BATCH, 4)}
    return replace(Step(model, [torch.optim.AdamW(model.parameters())], batch, loss_of, CPU), **changes)


def run_step(step: Step, windows: int = 2) -> int:
    """The peak of steps with real tensors, by torch's tracker."""
    tracker = torch_private.MemTracker()
    tracker.track_external(step.model, *step.optimizers, *step.batch.values())
    with tracker:
        for _ in range(windows):
            for _ in range(2 if step.accumulates else 1):
                tracker.reset_mod_stats()
                step.loss(step.model, step.batch).backward()
            nn.utils.clip_grad_norm_(step.model.parameters(), 1.0)
            for optimizer in step.optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return tracker.get_tracker_snapshot("peak")[CPU]["Total"]


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize(
    "build",
    [
        torch.optim.AdamW,
        torch.optim.SGD,
        lambda parameters: torch.optim.AdamW(parameters, foreach=True),
        torch.optim.Adafactor,
    ],
    ids=["adamw", "sgd", "adamw-foreach", "adafactor"],
)
def test_the_peak_of_a_trace_is_that_of_a_run(build: Callable[..., Any], accumulates: bool) -> None:
    step = make_step(accumulates=accumulates)
    step = replace(step, optimizers=[build(step.model.parameters())])
    assert trace_step(step).peak.total == pytest.approx(run_step(step), rel=0.005)


def test_the_parts_are_those_of_model_and_optimizer() -> None:
    step = make_step()
    peak = trace_step(step).peak
    size = sum(parameter.nbytes for parameter in step.model.parameters())
    assert peak.parameters == size
    assert peak.buffers == 16
    assert peak.inputs == sum(tensor.nbytes for tensor in step.batch.values())
    assert peak.optimizer == 2 * size + 4 * len(list(step.model.parameters()))  # AdamW counts its steps
    assert trace_step(step).trained_bytes == size


def test_activations_grow_with_the_batch_and_the_rest_does_not() -> None:
    small, large = (trace_step(make_step(batch_size=size)) for size in (BATCH, 4 * BATCH))
    assert large.batch_size == 4 * BATCH
    assert large.peak.parameters == small.peak.parameters
    grown = large.peak.activations + large.peak.temporary
    assert grown > 3 * (small.peak.activations + small.peak.temporary)


def test_the_state_that_an_optimizer_has_is_counted_once() -> None:
    step = make_step()
    fresh = trace_step(step).peak
    run_step(step)
    assert trace_step(step).peak == fresh


def test_a_trace_changes_nothing() -> None:
    step = make_step(accumulates=True, batch_size=3)
    weights = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    generator = torch.get_rng_state()
    trace_step(step)
    assert all(torch.equal(weights[name], tensor) for name, tensor in step.model.state_dict().items())
    assert all(parameter.grad is None for parameter in step.model.parameters())
    assert not step.optimizers[0].state
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch_private.has_gradient_hooks(p) is False for p in step.model.parameters())


def test_a_model_on_the_meta_device_needs_no_memory() -> None:
    with torch.device("meta"):
        step = make_step()
    assert trace_step(step).peak == trace_step(make_step()).peak


def test_frozen_parameters_have_neither_gradients_nor_state() -> None:
    step = make_step()
    step.model.get_submodule("blocks").requires_grad_(False)
    trace = trace_step(replace(step, optimizers=[torch.optim.AdamW(step.model.head.parameters())]))
    size = sum(parameter.nbytes for parameter in step.model.head.parameters())
    assert trace.trained_bytes == size
    assert trace.step[0].gradients == size
    assert trace.peak.optimizer == 2 * size + 8


def test_tied_parameters_are_counted_once() -> None:
    step = make_step()
    step.model.get_submodule("blocks.1.0").weight = step.model.get_parameter("blocks.0.0.weight")
    step = replace(step, optimizers=[torch.optim.SGD(step.model.parameters())])
    assert trace_step(step).peak.parameters == sum(p.nbytes for p in step.model.parameters())


def test_parameters_that_are_cast_have_masters() -> None:
    trace = trace_step(
        make_step(parameter_dtype=torch.bfloat16, loss=lambda model, batch: _in_low(model, batch))
    )
    assert trace.master_ratio == 2
    assert 2 * trace.peak.parameters == trace_step(make_step()).peak.parameters


def _in_low(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = model(**batch)["loss"]
        return loss


def test_blocks_are_the_outermost_modules_in_lists() -> None:
    model = Net()
    assert blocks_of(model) == list(model.blocks)
    trace = trace_step(make_step())
    assert trace.largest_block == 4 * (WIDTH * WIDTH + WIDTH)
    assert trace.outside_blocks == 4 * (4 * WIDTH + 4)
    assert trace.block_outputs == LAYERS * 4 * BATCH * WIDTH


def test_an_operation_that_needs_too_many_values_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.planning.operators.MAX_BYTES", 0)
    model = nn.Linear(4, 4)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        values = model(batch)
        return values.repeat_interleave(values.sum(1).long(), dim=0).sum()

    step = Step(model, [torch.optim.SGD(model.parameters())], torch.ones(2, 4), loss, CPU)
    with pytest.raises(ConfigurationError, match="Linear cannot be traced: aten.repeat_interleave"):
        trace_step(step)


def test_an_output_without_a_loss_is_refused() -> None:
    model = nn.Linear(4, 4)
    step = Step(model, [torch.optim.SGD(model.parameters())], torch.ones(2, 4), loss_of, CPU)
    with pytest.raises(ConfigurationError, match="The output of Linear has no loss"):
        trace_step(step)


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    step = make_step()
    step.model.lock = (each for each in ())  # generators cannot be copied
    with pytest.raises(PreparationError, match="Net or its optimizer cannot be copied"):
        trace_step(step)


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no tensor with a dimension of samples"):
        batch_size_of({"scale": torch.tensor(1.0)})


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_without_a_plan_is_named(kind: Any) -> None:
    model = nn.Linear(4, 4)
    step = Step(model, [kind(model.parameters())], torch.ones(2, 4), loss_of, CPU)
    with pytest.raises(ConfigurationError, match=f"{kind.__name__}.*Plan with torch.optim.AdamW"):
        trace_step(step)


def test_a_lazy_module_needs_its_shapes() -> None:
    model = nn.Sequential(nn.LazyLinear(4))
    step = Step(model, [torch.optim.SGD(model.parameters())], torch.ones(2, 4), loss_of, CPU)
    with pytest.raises(
        ConfigurationError, match="0.weight.*have no shape yet.*Call the model with a batch once"
    ):
        trace_step(step)
