"""DiLoCo equals a reference in plain torch, sends the bytes that it counts, and resumes exactly."""

from __future__ import annotations

import os
import random
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch import Tensor, nn

from accelerate import Accelerator, DiLoCo
from accelerate.local_sgd import LocalSGD
from accelerate.weights import read_safetensors

Run = Callable[..., list[Any]]
slow = pytest.mark.slow
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


# The reference: one process simulates all ranks, with lists of tensors and its own outer optimizer.


def reference(
    weights: list[Tensor], gradient: Any, ranks: int, steps: int, interval: int, inner: Any, **options: Any
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Returns the weights of each rank after each step, and those at the end of the block.

    `gradient(rank, step, weights)` returns the gradients of a rank, and `inner(weights)` its optimizer.
    """
    num_fragments, delay = options.get("num_fragments", 1), options.get("delay", 0)
    mixing = options.get("mixing", 0.5 if delay else 0.0)
    shared = [weight.to(torch.promote_types(weight.dtype, torch.float32)) for weight in weights]
    velocity: list[Any] = [None] * len(weights)
    local = [[weight.clone() for weight in weights] for _ in range(ranks)]
    optimizers = [inner(own) for own in local]
    parts, sent_at, in_flight = fragments_of(weights, num_fragments), [0] * num_fragments, []
    history = []

    def mean_progress(index: int) -> Tensor:
        return torch.stack(
            [shared[index] - local[rank][index].to(shared[index].dtype) for rank in range(ranks)]
        ).mean(0)

    def receive(part: int, progress: dict[int, Tensor]) -> None:
        for index in parts[part]:
            step = progress[index]
            velocity[index] = step.clone() if velocity[index] is None else 0.9 * velocity[index] + step
            shared[index] = shared[index] - 0.7 * (step + 0.9 * velocity[index])
            for rank in range(ranks):
                own = local[rank][index].to(shared[index].dtype)
                local[rank][index].data = (shared[index] + mixing * (own - shared[index])).to(
                    weights[index].dtype
                )

    for step in range(1, steps + 1):
        for rank in range(ranks):
            for own, grad in zip(local[rank], gradient(rank, step, local[rank]), strict=True):
                own.grad = grad
            optimizers[rank].step()
        for part in range(num_fragments):
            if step % interval == (part + 1) * interval // num_fragments % interval:
                in_flight.append((step + delay, part, {index: mean_progress(index) for index in parts[part]}))
                sent_at[part] = step
        for _, part, progress in [each for each in in_flight if each[0] <= step]:
            receive(part, progress)
        in_flight = [each for each in in_flight if each[0] > step]
        history.append([[own.detach().clone() for own in local[rank]] for rank in range(ranks)])
    for _, part, progress in in_flight:
        receive(part, progress)
    for part in range(num_fragments):
        for index in parts[part] if sent_at[part] < steps else ():
            shared[index] = shared[index] - mean_progress(index)
    return history, [value.to(weight.dtype) for value, weight in zip(shared, weights, strict=True)]


def fragments_of(weights: list[Tensor], count: int) -> list[list[int]]:
    """The division into adjacent fragments: each ends where its share of the elements is reached."""
    total, parts, seen = sum(map(Tensor.numel, weights)), [[]], 0
    for index, weight in enumerate(weights):
        parts[-1].append(index)
        seen += weight.numel()
        left, wanted = len(weights) - index - 1, count - len(parts)
        if wanted and (seen >= total * len(parts) / count or left == wanted):
            parts.append([])
    return parts


# The same training with DiLoCo.


class Net(nn.Module):
    """With a frozen parameter, tied weights and batch normalization."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.norm, self.leave = (
            nn.Linear(4, 6, bias=False),
            nn.BatchNorm1d(6),
            nn.Linear(6, 4, bias=False),
        )
        self.again = nn.Linear(4, 6, bias=False)
        self.again.weight = self.enter.weight
        self.scale = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(torch.tanh(self.norm(self.enter(x)))) * self.scale + self.again(x)[:, :4]


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * rank + step))


def loss_of(output: Tensor, inputs: Tensor) -> Tensor:
    return (output.float() - inputs.float().flip(1)).square().mean()


def inner_optimizer(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=0.02)


def begin(interval: int, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[Any, Any, Any, Any]:
    accelerator = Accelerator(cpu=not hasattr(torch, "sim"))
    model = Net(dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, inner_optimizer(trained))
    return accelerator, model, optimizer, DiLoCo(accelerator, model, interval, **options)


def trained_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().cpu().clone() for p in model.parameters() if p.requires_grad]


def take_step(
    accelerator: Any, model: Any, optimizer: Any, step: int, dtype: torch.dtype = torch.float32
) -> None:
    inputs = rows(accelerator.process_index, step).to(accelerator.device, dtype)
    accelerator.backward(loss_of(model(inputs), inputs))
    optimizer.step()
    optimizer.zero_grad()


def train(interval: int, steps: int, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    accelerator, model, optimizer, diloco = begin(interval, dtype, **options)
    history = []
    with diloco:
        for step in range(1, steps + 1):
            take_step(accelerator, model, optimizer, step, dtype)
            diloco.step()
            history.append(trained_of(model))
    buffers = [buffer.cpu().clone() for buffer in model.buffers()]
    return history, trained_of(model), buffers, diloco.num_steps


def expected(ranks: int, interval: int, steps: int, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """The reference, in which each rank has a model of its own for its buffers."""
    models = [Net(dtype) for _ in range(ranks)]
    weights = trained_of(models[0])

    def gradient(rank: int, step: int, own: list[Tensor]) -> list[Tensor]:
        parameters = [parameter for parameter in models[rank].parameters() if parameter.requires_grad]
        for parameter, weight in zip(parameters, own, strict=True):
            parameter.data = weight.detach().clone()
        inputs = rows(rank, step).to(dtype)
        return list(torch.autograd.grad(loss_of(models[rank](inputs), inputs), parameters))

    return reference(weights, gradient, ranks, steps, interval, inner_optimizer, **options)


Case = tuple[int, int, torch.dtype, dict[str, Any]]


def cases_of(seed: int, count: int) -> list[Case]:
    """A plain case, and random intervals, fragments, delays, mixing and dtypes."""
    draw = random.Random(seed)
    drawn: list[Case] = [(3, 8, torch.float32, {})]
    for _ in range(count):
        interval = draw.randint(1, 6)
        options: dict[str, Any] = {
            "num_fragments": draw.randint(1, min(interval, 4)),
            "delay": draw.randrange(interval),
        }
        if draw.random() < 0.5:
            options["mixing"] = round(draw.random(), 2)
        dtype = draw.choice([torch.float32, torch.float64])
        drawn.append((interval, draw.randint(1, 15), dtype, options))
    return drawn


def check_equal(case: Case, results: list[Any]) -> None:
    """Compare the results of all ranks with those of the reference."""
    interval, steps, dtype, options = case
    history, end = expected(len(results), interval, steps, dtype, options)
    for rank, (own_history, own_end, buffers, num_steps) in enumerate(results):
        assert num_steps == steps, case
        for now, then in zip(own_history, history, strict=True):
            for left, right in zip(now, then[rank], strict=True):
                torch.testing.assert_close(left, right, **CLOSE, msg=lambda text: f"{case}: {text}")
        for left, right in zip(own_end, end, strict=True):
            torch.testing.assert_close(left, right, **CLOSE, msg=lambda text: f"{case}: {text}")
        assert all(map(torch.equal, own_end, results[0][1])), case
        assert all(map(torch.equal, buffers, results[0][2])), case


@pytest.mark.parametrize(
    ("ranks", "seed", "count"), [(1, 1, 3), (2, 2, 4), pytest.param(4, 4, 4, marks=slow)]
)
def test_ranks_train_as_the_reference(run: Run, ranks: int, seed: int, count: int) -> None:
    cases = cases_of(seed, count)
    results = run(call_for_each, train, cases, processes=ranks)
    for case, *of_case in zip(cases, *results, strict=True):
        check_equal(case, of_case)


@slow
def test_global_parameters_on_the_cpu_do_not_change_the_results(run: Run) -> None:
    options = {"num_fragments": 2, "delay": 1}
    cases = [(4, 9, torch.float32, each) for each in ({**options, "device": "cpu"}, options)]
    for with_device, without in run(call_for_each, train, cases):
        assert all(map(torch.equal, with_device[1], without[1]))


@slow
def test_weights_in_bfloat16_have_global_parameters_in_float32(run: Run) -> None:
    options = {"num_fragments": 2, "delay": 1}
    _, end = expected(2, 4, 9, torch.bfloat16, options)
    for _, weights, _, _ in run(train, 4, 9, torch.bfloat16, options):
        for left, right in zip(weights, end, strict=True):
            assert left.dtype == torch.bfloat16
            torch.testing.assert_close(left, right, rtol=0.02, atol=0.02)


def test_int8_is_close_and_equal_on_all_ranks(run: Run) -> None:
    options = {"num_fragments": 2, "delay": 1}
    cases = [(4, 9, torch.float32, each) for each in (options, {**options, "quantize": "int8"})]
    results = run(call_for_each, train, cases, processes=3)
    (_, exact, _, _), (_, first, _, _) = results[0]
    for _, (_, weights, _, _) in results:
        assert all(map(torch.equal, weights, first))
    differences = [float((left - right).abs().max()) for left, right in zip(first, exact, strict=True)]
    assert 0 < max(differences) < 0.01


# Bytes


def sent_over_tcp() -> int:
    """Bytes that this process has sent over its open TCP connections, from the kernel."""
    total = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            connection = socket.socket(fileno=os.dup(int(entry)))
        except OSError:  # not a socket, or closed meanwhile
            continue
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(information) >= 208:
                    total += struct.unpack_from("Q", information, 200)[0]  # tcpi_bytes_sent
    return total


INTERVAL = 10
WAYS: dict[str, tuple[dict[str, Any] | None, float]] = {
    "DDP": (None, 1.0),
    "DiLoCo": ({}, 1 / INTERVAL),
    "fragments": ({"num_fragments": 5, "delay": 1}, 1 / INTERVAL),
    "int8": ({"num_fragments": 5, "delay": 1, "quantize": "int8"}, 260 / 1024 / INTERVAL),
}
"""Options, and the bytes of a step as a part of those of the gradients."""


def measure_bytes() -> dict[str, tuple[float, float]]:
    """Returns the bytes of a step on the network, and as DiLoCo counts them, by those of the parameters."""
    accelerator, steps, measured = Accelerator(cpu=True), 2 * INTERVAL, {}
    inputs = torch.randn(2, 256)
    for name, (options, _) in WAYS.items():
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        diloco = DiLoCo(accelerator, model, INTERVAL, enabled=options is not None, **(options or {}))
        with diloco:
            for step in range(2 * steps):
                if step == steps:  # the first pass opens connections and builds buckets
                    accelerator.wait_for_everyone()
                    before = sent_over_tcp(), diloco.bytes_sent
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()
            accelerator.wait_for_everyone()
            size = steps * sum(p.nbytes for p in model.parameters())
            after = sent_over_tcp(), diloco.bytes_sent
        measured[name] = (after[0] - before[0]) / size, (after[1] - before[1]) / size
    return measured


@pytest.mark.cpu_only
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux counts the bytes of connections")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=slow)])
def test_bytes_of_a_step_are_those_on_the_network(run: Run, ranks: int) -> None:
    for measured in run(measure_bytes, processes=ranks):
        for name, (options, part) in WAYS.items():
            sent, counted = measured[name]
            wanted = part * 2 * (ranks - 1) / ranks
            assert sent == pytest.approx(wanted, rel=0.05), name
            assert counted == pytest.approx(0 if options is None else wanted, rel=0.02), name


# Checkpoints


def resume(steps: int, interval: int, options: dict[str, Any]) -> Any:
    """Trains, saves in the middle, and trains on; then again in the same objects after `load_state`."""
    accelerator, model, optimizer, diloco = begin(interval, **options)
    ends = []
    with diloco:
        for step in range(steps):
            take_step(accelerator, model, optimizer, step)
            diloco.step()
        accelerator.save_state("checkpoint")
        for _ in range(2):
            for step in range(steps, steps + interval + 2):
                take_step(accelerator, model, optimizer, step)
                diloco.step()
            ends.append(trained_of(model))
            accelerator.load_state("checkpoint")
        with diloco.applied():
            shared = trained_of(model)
    files = sorted(path.name for path in Path("checkpoint").iterdir())
    weights = list(read_safetensors(Path("checkpoint", "model.safetensors")).values())
    assert all(any(torch.equal(value, weight) for weight in weights) for value in shared)
    return ends, shared, str(Path("checkpoint").resolve()), files


def go_on(folder: str, steps: int, interval: int, options: dict[str, Any]) -> Any:
    """Continues from a checkpoint in a new process."""
    accelerator, model, optimizer, diloco = begin(interval, **options)
    accelerator.load_state(folder)
    started, shared = diloco.num_steps, [value.detach().cpu().clone() for value in diloco.globals]
    with diloco:
        for step in range(steps, steps + interval + 2):
            take_step(accelerator, model, optimizer, step)
            diloco.step()
        end = trained_of(model)
    return end, started, shared, trained_of(model)


WITH_DELAY = {"num_fragments": 3, "delay": 3}


@pytest.mark.parametrize(
    ("steps", "options"),
    [
        (7, WITH_DELAY),  # an exchange has started
        pytest.param(7, {**WITH_DELAY, "quantize": "int8"}, marks=slow),
        pytest.param(8, {**WITH_DELAY, "quantize": "int8"}, marks=slow),
        pytest.param(6, {}, marks=slow),  # at the end of an interval
        pytest.param(2, {"device": "cpu"}, marks=slow),
    ],
)
def test_a_run_resumes_exactly_in_the_middle_of_an_interval(run: Run, steps: int, options: Any) -> None:
    saved = run(resume, steps, 6, options)
    resumed = run(go_on, saved[0][2], steps, 6, options)
    for (ends, shared, _, files), (end, started, own_shared, _) in zip(saved, resumed, strict=True):
        assert started == steps
        assert {"diloco.bin", "local_sgd_0_0.bin", "local_sgd_0_1.bin"} < set(files)
        for left, middle, right in zip(*ends, end, strict=True):
            assert torch.equal(left, middle)
            assert torch.equal(left, right)
        assert all(map(torch.equal, shared, own_shared))
    assert not all(map(torch.equal, saved[0][0][0], saved[1][0][0]))  # ranks differ


@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=slow)])
def test_another_number_of_ranks_resumes_with_the_same_global_parameters(run: Run, ranks: int) -> None:
    saved = run(resume, 7, 6, WITH_DELAY)
    for end, started, shared, at_end in (
        results := run(go_on, saved[0][2], 7, 6, WITH_DELAY, processes=ranks)
    ):
        assert started == 7
        assert all(map(torch.equal, shared, saved[0][1]))
        assert all(map(torch.equal, at_end, results[0][3]))
        assert all(torch.isfinite(value).all() for value in end)


def resume_local_sgd(folder: str | None) -> Any:
    accelerator = Accelerator()
    model = Net(torch.float32)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, inner_optimizer(trained))
    local_sgd = LocalSGD(accelerator, model, 3)
    if folder is not None:
        accelerator.load_state(folder)
    with local_sgd:
        for step in range(0 if folder is None else 4, 8):
            take_step(accelerator, model, optimizer, step)
            local_sgd.step()
            if step == 3:
                accelerator.save_state("checkpoint")
    return trained_of(model), str(Path("checkpoint").resolve())


def test_local_sgd_resumes_exactly_in_the_middle_of_an_interval(run: Run) -> None:
    saved = run(resume_local_sgd, None)
    for (before, _), (after, _) in zip(saved, run(resume_local_sgd, saved[0][1]), strict=True):
        assert all(map(torch.equal, before, after))


def resume_recent() -> Any:
    """Saves recent checkpoints in memory, as the loop takes steps, and loads the newest one."""
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration("project", automatic_checkpoint_naming=True, fast_dir="fast", fast_every=4)
    accelerator = Accelerator(cpu=not hasattr(torch, "sim"), project_config=project)
    model = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(model, inner_optimizer(model.parameters()))
    diloco = DiLoCo(accelerator, model, 6, num_fragments=2, delay=2)
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=2))
    with diloco:
        for batch in loader:
            accelerator.backward(loss_of(model(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
            if diloco.num_steps == 8:
                kept = trained_of(model), [value.detach().clone() for value in diloco.globals]
            if diloco.num_steps == 10:
                break
        accelerator.load_state()
        now = trained_of(model), [value.detach().clone() for value in diloco.globals]
        num_steps = diloco.num_steps
    accelerator.end_training()
    return [list(map(torch.equal, *pair)) for pair in zip(kept, now, strict=True)], num_steps


def test_recent_checkpoints_have_the_state_of_each_rank(run: Run) -> None:
    for equal, num_steps in run(resume_recent):
        assert num_steps == 8
        assert equal == [[True, True], [True, True]]


# Other parts of a run


def train_scaled(quantize: str | None) -> Any:
    """fp16 with a scaler, accumulation and clipping; one rank skips a step because of an overflow."""
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    model, optimizer = accelerator.prepare(model, inner_optimizer(model.parameters()))
    diloco = DiLoCo(accelerator, model, 3, num_fragments=2, delay=1, quantize=quantize)
    skipped, losses = 0, []
    with diloco:
        for step in range(60):
            inputs = rows(accelerator.process_index, step % 4).to(accelerator.device)
            with accelerator.accumulate(model):
                loss = loss_of(model(inputs), inputs)
                overflows = step == 9 and accelerator.process_index == 1
                accelerator.backward(loss * float("inf") if overflows else loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                skipped += accelerator.sync_gradients and optimizer.step_was_skipped
                optimizer.zero_grad()
                diloco.step()
                losses.append(loss.item())
    return diloco.num_steps, skipped, trained_of(model), sum(losses[-8:]) / sum(losses[:8])


@pytest.mark.parametrize("quantize", [None, pytest.param("int8", marks=slow)])
def test_a_step_that_one_rank_skips_keeps_the_ranks_together(run: Run, quantize: str | None) -> None:
    results = run(train_scaled, quantize)
    skipped = [result[1] for result in results]
    assert skipped[1] == skipped[0] + 1
    for num_steps, _, weights, change in results:
        assert num_steps == 30
        assert all(map(torch.equal, weights, results[0][2]))
        assert change < 0.9
