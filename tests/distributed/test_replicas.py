"""Loops whose ranks would train apart equal one process, or raise an error on all ranks."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
from accelerate.base import StateError
from accelerate.local_sgd import LocalSGD
from accelerate.parallelism_config import ParallelismConfig
from accelerate.strategies import replicas
from accelerate.strategies.dtensors import Replicas
from accelerate.utils import GradientAccumulationPlugin

STEPS, ROWS = 5, 8  # rows of all ranks together
Run = Callable[..., list[Any]]
Loop = Callable[["Parts"], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Parts:
    """What a loop trains with; `again()` returns the batch of this rank in the next step."""

    folder: Path

    def __init__(self, prepare: Callable[[nn.Module], None] = lambda model: None, **arguments: Any) -> None:
        self.accelerator = Accelerator(**arguments)
        torch.manual_seed(0)
        self.bare = Net()
        prepare(self.bare)
        self.sgd = torch.optim.SGD(self.bare.parameters(), lr=0.1, momentum=0.9)
        self.model, self.optimizer = self.accelerator.prepare(self.bare, self.sgd)
        self.generator = torch.Generator().manual_seed(1)
        self.backward = self.accelerator.backward

    def batch(self) -> torch.Tensor:
        rows = torch.randn(ROWS, 4, generator=self.generator)
        size = ROWS // self.accelerator.num_processes
        return rows[self.accelerator.process_index * size :][:size]

    def loss(self, model: nn.Module | None = None) -> torch.Tensor:
        x = self.batch()
        return ((model or self.model)(x) - x.sum(1, keepdim=True).sin()).square().mean()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def before_prepare(p: Parts) -> None:
    for _ in range(STEPS):
        p.backward(p.loss(p.bare))
        p.accelerator.clip_grad_norm_(p.bare.parameters(), 0.1)
        p.step()


def unwrapped(p: Parts) -> None:
    for _ in range(STEPS):
        p.backward(p.loss(p.accelerator.unwrap_model(p.model)))
        p.step()


def partly_unwrapped(p: Parts) -> None:
    for _ in range(STEPS):
        p.backward(p.loss() + p.bare.first(p.batch()).square().mean())
        p.backward(p.bare.first(p.batch()).square().mean())
        p.step()


def two_forwards_two_backwards(p: Parts) -> None:
    for _ in range(STEPS):
        first, second = p.loss(), p.loss()
        p.backward(first)
        p.backward(second)
        p.step()


def two_backwards(p: Parts) -> None:
    for _ in range(STEPS):
        loss = p.loss()
        p.backward(loss, retain_graph=True)
        p.backward(loss * 0.5)
        p.step()


def accumulated_unwrapped(p: Parts) -> None:
    for _ in range(2 * STEPS):
        with p.accelerator.accumulate(p.model):
            p.backward(p.loss(p.bare))
            p.step()


def unfrozen(p: Parts) -> None:
    for index in range(STEPS):
        p.bare.first.requires_grad_(index >= 2)
        p.backward(p.loss())
        p.step()


def freeze_first(model: Any) -> None:
    model.first.requires_grad_(False)


def closures(p: Parts) -> None:
    lbfgs = p.accelerator.prepare(
        torch.optim.LBFGS(p.bare.parameters(), lr=1.0, max_iter=6, line_search_fn="strong_wolfe")
    )

    def closure(state: torch.Tensor) -> torch.Tensor:
        p.generator.set_state(state)
        lbfgs.zero_grad()
        loss = p.loss()
        p.backward(loss)
        return loss

    for _ in range(2):
        lbfgs.step(partial(closure, p.generator.get_state()))


def closure_of_sgd(p: Parts) -> None:
    def closure() -> float:
        p.optimizer.zero_grad()
        loss = p.loss()
        p.backward(loss)
        return loss.item()

    for _ in range(STEPS):
        p.optimizer.step(closure)


def raw(p: Parts) -> None:
    for _ in range(STEPS):
        p.loss().backward()
        p.step()


EQUAL: dict[str, tuple[Loop, dict[str, Any]]] = {
    "before_prepare": (before_prepare, {}),
    "unwrapped": (unwrapped, {}),
    "partly_unwrapped": (partly_unwrapped, {}),
    "two_forwards_two_backwards": (two_forwards_two_backwards, {}),
    "views of buckets": (
        two_forwards_two_backwards,
        {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]},
    ),
    "two_backwards": (two_backwards, {}),
    "accumulated_unwrapped": (accumulated_unwrapped, {"gradient_accumulation_steps": 2}),
    "unfrozen": (unfrozen, {"prepare": freeze_first}),
    "closures": (closures, {}),
    "closure_of_sgd": (closure_of_sgd, {}),
    "raw": (raw, {}),
}
"""Loops whose result equals that of one process with the joined batch."""


def train_equal() -> dict[str, list[torch.Tensor]]:
    results = {}
    for name, (loop, arguments) in EQUAL.items():
        parts = Parts(**copy.deepcopy(arguments))
        loop(parts)
        results[name] = [parameter.detach().clone() for parameter in parts.bare.parameters()]
        reset(parts)
    return results


def reset(parts: Parts) -> None:
    parts.accelerator.free_memory()
    parts.accelerator.state._reset_state()
    parts.accelerator.gradient_state._reset_state()


def test_loops_that_torch_lets_diverge_equal_one_process(run: Run) -> None:
    (one,) = run(train_equal, processes=1)
    several = run(train_equal)
    wrong = []
    for name, expected in one.items():
        for rank, results in enumerate(several):
            if not all(
                torch.allclose(a, b, rtol=1e-4, atol=1e-5)
                for a, b in zip(results[name], expected, strict=True)
            ):
                wrong.append(f"{name} on rank {rank}")
        if not all(map(torch.equal, *(results[name] for results in several))):
            wrong.append(f"{name}: ranks differ")
    assert not wrong


# Loops that are refused


def gradients_by_hand(p: Parts) -> None:
    for _ in range(STEPS):
        parameters = list(p.bare.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(p.loss(), parameters), strict=True):
            parameter.grad = gradient
        p.step()


def raw_unwrapped(p: Parts) -> None:
    for _ in range(STEPS):
        p.loss(p.bare).backward()
        p.step()


def raw_unfrozen(p: Parts) -> None:
    for index in range(STEPS):
        p.bare.first.requires_grad_(index >= 2)
        p.loss().backward()
        p.step()


def in_no_sync(p: Parts) -> None:
    for _ in range(STEPS):
        with p.accelerator.no_sync(p.model):
            p.backward(p.loss())
        p.step()


def not_prepared(p: Parts) -> None:
    scale = nn.Parameter(torch.ones(1))
    optimizer = p.accelerator.prepare(torch.optim.SGD([*p.bare.parameters(), scale], lr=0.1))
    for _ in range(STEPS):
        p.backward(p.loss() * scale)
        optimizer.step()
        optimizer.zero_grad()


def changed_weights(p: Parts) -> None:
    for _ in range(STEPS):
        p.backward(p.loss())
        p.step()
        with torch.no_grad():
            p.bare.head.bias.add_(p.accelerator.process_index)


def of_two_models(p: Parts) -> None:
    """One optimizer steps two models, whose parameters have the same names."""
    other = p.accelerator.prepare(Net())
    optimizer = p.accelerator.prepare(torch.optim.SGD([*p.bare.parameters(), *other.parameters()], lr=0.1))
    for _ in range(STEPS):
        p.backward(p.loss() + p.loss(other))
        p.bare.head.bias.grad.add_(p.accelerator.process_index)
        optimizer.step()
        optimizer.zero_grad()


def unscaled(p: Parts) -> None:
    """Only the first rank updates its weights in the first step."""
    p.accelerator.scaler = scaler = torch.amp.GradScaler("cpu")
    optimizer = p.accelerator.prepare(torch.optim.SGD(p.bare.parameters(), lr=0.1))
    for index in range(STEPS):
        scale = float("inf") if index == 0 and not p.accelerator.is_main_process else 1.0
        scaler.scale(p.loss(p.bare) * scale).backward()
        optimizer.step()
        optimizer.zero_grad()


def unused(p: Parts) -> None:
    p.backward(p.loss())
    p.step()


def add_unused(model: Any) -> None:
    model.unused = nn.Linear(2, 2)


def frozen_later(p: Parts) -> None:
    for index in range(STEPS):
        p.bare.first.requires_grad_(index == 0)
        p.backward(p.loss())
        p.step()


REFUSED: dict[str, tuple[Loop, dict[str, Any], int, str]] = {
    "gradients_by_hand": (gradients_by_hand, {}, 1, "first.weight.*torch.autograd.grad.*reduce"),
    "raw_unwrapped": (raw_unwrapped, {}, 1, "first.weight.*No forward has called the model"),
    "raw_unfrozen": (raw_unfrozen, {"prepare": freeze_first}, 3, "first.weight.*frozen or did not exist"),
    "in_no_sync": (in_no_sync, {}, 1, "first.weight.*no_sync"),
    "not_prepared": (not_prepared, {}, 1, "parameter 6 of group 0.*no prepared model"),
    "changed_weights": (changed_weights, {}, 2, "head.bias.*gradients are equal"),
    "of_two_models": (of_two_models, {}, 1, "model_0.head.bias.*changed on each rank alone"),
    "unused": (unused, {"prepare": add_unused}, 1, "does not depend on unused.weight.*find_unused"),
    "frozen_later": (frozen_later, {}, 2, "first.weight.*frozen after `prepare`.*find_unused"),
    "unscaled": (unscaled, {}, 1, "No forward has called the model"),
    "bf16": (raw_unwrapped, {"mixed_precision": "bf16"}, 1, "No forward has called the model"),
}
"""Loops that raise an error on all ranks, with the step and its text."""


def train_refused() -> dict[str, str]:
    results = {}
    for name, (loop, arguments, _, _) in REFUSED.items():
        parts = Parts(**copy.deepcopy(arguments))
        try:
            loop(parts)
        except StateError as error:
            results[name] = str(error)
        reset(parts)
    return results


def test_loops_that_cannot_be_reduced_raise_an_error_on_all_ranks(run: Run) -> None:
    wrong = []
    for rank, results in enumerate(run(train_refused)):
        for name, (_, _, step, pattern) in REFUSED.items():
            text = results.get(name, "no error")
            if f"after step {step} of SGD" not in text or not re.search(pattern, text):
                wrong.append(f"{name} on rank {rank}: {text}")
            if name != "no error" and "check_replicas=False" not in text:
                wrong.append(f"{name} does not name the switch: {text}")
    assert not wrong, "\n".join(wrong)


def step_in_hooks() -> None:
    parts = Parts()
    optimizer = torch.optim.SGD(parts.bare.parameters(), lr=0.1)
    for parameter in parts.bare.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(StateError, match=r"Step the optimizer after accelerator\.backward"):
        parts.backward(parts.loss())


def test_an_optimizer_that_steps_before_gradients_are_averaged_is_refused(run: Run) -> None:
    run(step_in_hooks)


# Correct programs


class Tower(Net):
    """Has statistics, dropout, a parameter that is not used, and one that each rank has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.unused, self.own = nn.Linear(3, 3), nn.Parameter(torch.zeros(1))
        self._ddp_params_and_buffers_to_ignore = ["own"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(self.first(x)))) + self.own


def tower(accelerator: Accelerator, lr: float = 0.1) -> tuple[nn.Module, Any]:
    model = Tower()
    return accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))


def train_tower(p: Parts) -> None:
    model, optimizer = tower(p.accelerator)
    for _ in range(9):
        p.backward(p.loss(model))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def train_plainly(p: Parts) -> None:
    for _ in range(9):
        p.backward(p.loss())
        p.step()


def train_joined(p: Parts) -> None:
    with p.accelerator.join_uneven_inputs([p.model]):
        for _ in range(5 + 3 * p.accelerator.process_index):
            p.backward(p.loss())
            p.step()
    train_plainly(p)


def train_joined_by_torch(p: Parts) -> None:
    if p.accelerator.num_processes > 1:
        with torch.distributed.algorithms.join.Join([p.model]):
            for _ in range(5 + 3 * p.accelerator.process_index):
                p.backward(p.loss())
                p.step()
    train_plainly(p)


def train_apart(p: Parts) -> None:
    with LocalSGD(p.accelerator, p.model, local_sgd_steps=4) as local_sgd:
        for _ in range(9):
            p.backward(p.loss())
            p.step()
            local_sgd.step()


def train_with_own_hook(p: Parts) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hooks

    state = hooks.PostLocalSGDState(None, torch.distributed.new_subgroups(1)[0], start_localSGD_iter=0)
    p.model.register_comm_hook(state, hooks.post_localSGD_hook)
    train_plainly(p)


def train_two_models(p: Parts) -> None:
    other = Net()
    other, other_optimizer = p.accelerator.prepare(other, torch.optim.Adam(other.parameters()))
    for _ in range(9):
        p.backward(p.loss(other))
        other_optimizer.step()
        other_optimizer.zero_grad()
        p.backward(p.loss() + p.loss(other))
        p.step()
        other_optimizer.zero_grad()


def train_sparse(p: Parts) -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    model, optimizer = p.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        rows = torch.randint(10, (ROWS,), generator=p.generator)[p.accelerator.process_index :: 2]
        p.backward(model(rows).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def train_muon(p: Parts) -> None:
    muon = p.accelerator.prepare(torch.optim.Muon([p.bare.first.weight, p.bare.second.weight]))
    for _ in range(5):
        p.backward(p.loss())
        muon.step()
        muon.zero_grad()


def train_skipping(p: Parts) -> None:
    for index in range(9):
        loss = p.loss()
        p.backward(loss * float("inf") if index in (0, 3) and p.accelerator.is_main_process else loss)
        p.step()


def reduce_in_optimizer(p: Parts) -> None:
    """An optimizer of the user that averages gradients itself."""

    class Reducing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                parameter.grad = p.accelerator.reduce(parameter.grad, "mean")
            return super().step(closure)

    optimizer = p.accelerator.prepare(Reducing(p.bare.parameters(), lr=0.1))
    for _ in range(5):
        p.loss(p.bare).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulate_unevenly(p: Parts) -> None:
    for _ in range(17):
        with p.accelerator.accumulate(p.model):
            p.backward(p.loss())
            p.step()
        if p.accelerator.sync_gradients:
            with torch.no_grad():
                p.model(p.batch())


def round_differently(p: Parts) -> None:
    for _ in range(9):
        p.backward(p.loss())
        for parameter in p.bare.parameters():
            parameter.grad *= 1 + 1e-6 * p.accelerator.process_index
        p.step()


def grow(p: Parts) -> None:
    optimizer = p.accelerator.prepare(torch.optim.SGD(p.bare.head.parameters(), lr=0.1))
    for index in range(9):
        if index in (2, 6):
            optimizer.add_param_group({"params": (p.bare.second, p.bare.first)[index // 6].parameters()})
        p.backward(p.loss())
        optimizer.step()
        p.bare.zero_grad()


def train_scaled(p: Parts) -> None:
    p.accelerator.scaler = torch.amp.GradScaler("cpu")
    optimizer = p.accelerator.prepare(torch.optim.SGD(p.bare.parameters(), lr=0.1))
    for index in range(9):
        p.accelerator.scaler.scale(p.loss() * (float("inf") if index == 2 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_resumed(p: Parts) -> None:
    train_plainly(p)
    p.accelerator.save_state(f"{p.folder}/saved")
    train_plainly(p)
    p.accelerator.load_state(f"{p.folder}/saved")
    train_plainly(p)


def ddp(**arguments: Any) -> dict[str, Any]:
    return {"kwargs_handlers": [DistributedDataParallelKwargs(**arguments)]}


def accumulation(**arguments: Any) -> dict[str, Any]:
    return {"gradient_accumulation_plugin": GradientAccumulationPlugin(**arguments)}


CORRECT: list[tuple[Loop, dict[str, Any]]] = [
    (train_tower, ddp(find_unused_parameters=True)),
    (train_plainly, ddp(static_graph=True)),
    (train_plainly, ddp(gradient_as_bucket_view=True)),
    (train_plainly, ddp(comm_hook="power_sgd", comm_state_option={"start_powerSGD_iter": 2})),
    (train_plainly, ddp(comm_hook="bf16")),
    (train_plainly, {"mixed_precision": "bf16"}),
    (train_joined, {}),
    (train_joined_by_torch, {}),
    (train_apart, {}),
    (train_with_own_hook, {}),
    (train_two_models, {}),
    (train_sparse, {}),
    (train_muon, {}),
    (train_skipping, accumulation(skip_nonfinite_updates=True)),
    (reduce_in_optimizer, {}),
    (accumulate_unevenly, {"gradient_accumulation_steps": 4}),
    (round_differently, {}),
    (grow, {}),
    (train_scaled, {}),
    (train_resumed, {}),
    (raw_unwrapped, accumulation(check_replicas=False)),
]


def train_correctly(folder: Path) -> list[str]:
    wrong = []
    for loop, arguments in CORRECT:
        parts = Parts(**copy.deepcopy(arguments))
        parts.folder = folder
        try:
            loop(parts)
        except StateError as error:
            wrong.append(f"{loop.__name__}, {arguments}: {error}")
        reset(parts)
    return wrong


def test_correct_programs_raise_no_error(run: Run, tmp_path: Path) -> None:
    assert run(train_correctly, tmp_path) == [[], []]


def count_calls(counted: Sequence[tuple[str, Loop, dict[str, Any]]]) -> dict[str, tuple[int, int]]:
    """Counts averages after the reducer, and comparisons."""
    results = {}
    for name, loop, arguments in counted:
        parts = Parts(**arguments)
        with (
            patch.object(Replicas, "average", autospec=True, side_effect=Replicas.average) as averages,
            patch.object(replicas, "digests", side_effect=replicas.digests) as comparisons,
        ):
            loop(parts)
        results[name] = averages.call_count, comparisons.call_count
        reset(parts)
    return results


def test_prepared_models_are_averaged_once_and_compared_at_powers_of_two(run: Run) -> None:
    counted: tuple[tuple[str, Loop, dict[str, Any]], ...] = (
        ("plain", train_plainly, {}),
        ("static graph", train_plainly, ddp(static_graph=True)),
        ("two models", train_two_models, {}),
        ("accumulation", accumulate_unevenly, {"gradient_accumulation_steps": 4}),
        ("unwrapped", unwrapped, {}),
        ("apart", train_apart, {}),
        ("switched off", train_plainly, accumulation(check_replicas=False)),
    )
    assert run(count_calls, counted)[0] == {
        "plain": (0, 4),
        "static graph": (0, 4),
        "two models": (0, 8),
        "accumulation": (0, 3),
        "unwrapped": (STEPS, 3),
        "apart": (0, 0),
        "switched off": (0, 0),
    }


@pytest.mark.slow
def test_compiled_models_are_averaged_once(run: Run) -> None:
    counted = [("compiled", train_plainly, {"dynamo_backend": "eager"})]
    assert run(count_calls, counted)[0] == {"compiled": (0, 4)}


# Shards with replicas


def train_hybrid() -> tuple[str, int]:
    """Trains as it should for four steps, and then with other gradients on each replica."""
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(parallelism_config=sizes, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for step in range(9):
            accelerator.backward(model(torch.randn(2, 4)).square().mean())
            for parameter in model.parameters():
                if step >= 4 and parameter.grad is not None:
                    parameter.grad *= 1 + accelerator.process_index // 2
            optimizer.step()
            optimizer.zero_grad()
    except StateError as error:
        return str(error), optimizer.num_updates
    return "", optimizer.num_updates


def test_replicas_of_shards_are_compared(run: Run) -> None:
    for text, updates in run(train_hybrid, processes=4):
        assert "after step 8 of SGD: first.weight" in text
        assert updates == 8


def train_with_ignored_layer() -> list[list[float]]:
    """FSDP ignores a layer, which ranks initialize differently."""
    torch.manual_seed(0)
    model = Net()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, ignored_modules=[model.head])
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
    with torch.no_grad():
        model.head.bias += accelerator.process_index
    generator = torch.Generator().manual_seed(1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(6):
        with accelerator.accumulate(model):
            rows = torch.randn(ROWS, 4, generator=generator)
            rows = rows[accelerator.process_index :: accelerator.num_processes]
            accelerator.backward(model(rows).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    return [state[name].tolist() for name in sorted(state)] if accelerator.is_main_process else []


def test_layers_that_fsdp_ignores_are_averaged(run: Run) -> None:
    (one,) = run(train_with_ignored_layer, processes=1)
    several, _ = run(train_with_ignored_layer)
    for a, b in zip(one, several, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b))
