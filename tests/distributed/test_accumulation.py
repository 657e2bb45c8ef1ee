"""Gradients of windows equal those of one big batch over all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch.utils.data import DataLoader, Dataset

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.base import StateError
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    gather_object,
)

WIDTH = 4
Run = Callable[..., list[Any]]


class Sentences(Dataset[Any]):
    """Sequences of 1 to 9 tokens, padded, with the number of tokens in each."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randn(samples, 9, WIDTH, generator=generator)
        self.lengths = torch.randint(1, 10, (samples,), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": self.tokens[index], "length": self.lengths[index], "index": index}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(torch.nn.Linear(WIDTH, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(tokens).squeeze(-1)


def loss_sum(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    length = batch["length"][:, None]
    mask = torch.arange(9, device=length.device) < length
    return ((model(batch["tokens"]) - 1).square() * mask).sum()


def count(batch: dict[str, Any]) -> torch.Tensor:
    return batch["length"].sum()


def big_batch(data: Sentences, indices: list[int], model: torch.nn.Module) -> list[torch.Tensor]:
    """Gradients of the mean over all tokens of some samples, in one process and one batch."""
    batch = {"tokens": data.tokens[indices], "length": data.lengths[indices]}
    copied = Net()
    copied.load_state_dict(model.state_dict())
    (loss_sum(copied, batch) / count(batch)).backward()
    return [p.grad for p in copied.parameters()]  # type: ignore[misc]


def micro_batches(
    accelerator: Accelerator, way: str, models: tuple[torch.nn.Module, ...], loader: Any
) -> Iterator[dict[str, Any]]:
    """The batches of a loader, each to be trained on before the next one is taken."""
    if way == "windows":
        for window in accelerator.windows(loader, *models, num_items=count):
            yield from window
        return
    for batch in loader:
        with accelerator.accumulate(*models, num_items=count(batch)):
            yield batch


def difference(accelerator: Accelerator, way: str, samples: int, steps: int, models: int = 1) -> list[float]:
    """For each window of two epochs the largest difference of a gradient to that of the big batch."""
    data = Sentences(samples)
    nets = [Net() for _ in range(models)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    loader = accelerator.prepare(DataLoader(data, batch_size=2, shuffle=True))
    prepared = accelerator.prepare(*nets, *optimizers)
    trained, stepping = prepared[:models], prepared[models:]
    accelerator.gradient_accumulation_steps = steps
    differences, indices = [], []
    for _ in range(2):
        for batch in micro_batches(accelerator, way, trained, loader):
            for model in trained:
                accelerator.backward(loss_sum(model, batch))
            indices += batch["index"].tolist()
            if accelerator.sync_gradients:
                everywhere = gather_object(indices)
                accelerator.unscale_gradients()
                indices = []
                for net, model in zip(nets, trained, strict=True):
                    expected = big_batch(data, everywhere, net)
                    pairs = zip(expected, model.parameters(), strict=True)
                    differences.append(max((e - p.grad.cpu()).abs().max().item() for e, p in pairs))
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in stepping:
                optimizer.step()
                optimizer.zero_grad()
    accelerator.free_memory()
    assert not indices
    return differences


CASES = [
    ("windows", 23, 3, 1),
    ("windows", 16, 1, 1),
    ("windows", 7, 4, 2),
    ("accumulate", 23, 3, 1),
    ("accumulate", 16, 1, 1),
    ("accumulate", 7, 4, 2),
]


def all_differences(**choices: Any) -> list[tuple[Any, list[float]]]:
    accelerator = Accelerator(**choices)
    return [(case, difference(accelerator, *case)) for case in CASES]


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_gradients_equal_those_of_the_big_batch(run: Run, processes: int) -> None:
    results = run(all_differences, processes=processes)
    for case, differences in results[0]:
        assert len(differences) >= 2, case
        assert max(differences) <= 1e-6, (case, differences)
    assert len({str(result) for result in results}) == 1


def differences_when_exchanging_each_round() -> list[tuple[Any, list[float]]]:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    return all_differences(gradient_accumulation_plugin=plugin)


def test_sync_each_batch_gives_the_gradients_of_one_process(run: Run) -> None:
    for case, differences in run(differences_when_exchanging_each_round)[0]:
        assert max(differences) <= 1e-6, (case, differences)


def differences_in(precision: str) -> list[tuple[Any, list[float]]]:
    scaler = GradScalerKwargs(init_scale=64.0)
    return all_differences(mixed_precision=precision, kwargs_handlers=[scaler])


def test_mixed_precision_is_as_close_as_its_numbers(run: Run) -> None:
    tolerances = {"bf16": 3e-2, "fp16": 4e-3}
    results = run(call_for_each, differences_in, list(tolerances))[0]
    for (precision, tolerance), result in zip(tolerances.items(), results, strict=True):
        for case, differences in result:
            assert max(differences) <= tolerance, (precision, case, differences)


def flags_in_windows(dispatch: bool) -> list[list[Any]]:
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(list(range(9)), batch_size=1))
    state, found = accelerator.gradient_state, []
    for window in accelerator.windows(loader):
        for batch in window:
            whole = accelerator.gather_for_metrics(batch).tolist()
            found.append([state.end_of_dataloader, state.remainder, accelerator.sync_gradients, whole])
    assert state.active_dataloader is None
    assert accelerator.sync_gradients
    return found


def test_loader_flags_are_those_of_the_batch_in_use(run: Run) -> None:
    expected = []
    for ahead in (1, -1):  # the remainder is known before the last batch, except in dispatched batches
        expected.append(
            [
                [False, ahead, False, [0, 1]],
                [False, ahead, True, [2, 3]],
                [False, ahead, False, [4, 5]],
                [False, ahead, True, [6, 7]],
                [True, 1, True, [8]],
            ]
        )
    assert run(call_for_each, flags_in_windows, [False, True]) == [expected, expected]


def windows_of_different_lengths(batches: list[int], each: bool = False) -> list[tuple[int, int]]:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    net = torch.nn.Linear(1, 1)
    model = accelerator.prepare(net)
    mine = [torch.ones(1, 1)] * batches[accelerator.process_index]
    seen = []
    try:
        for window in accelerator.windows(mine, num_items=len):
            for batch in window:
                accelerator.backward(model(batch).sum())
            seen.append((len(window), window.num_items, net.weight.grad.item()))
            model.zero_grad()
    except StateError as error:
        return [str(error)]  # type: ignore[list-item]
    return seen  # type: ignore[return-value]


def test_processes_may_have_different_numbers_of_batches_in_a_window(run: Run) -> None:
    cases = [([3, 4],), ([2, 7],), ([3, 4], True)]
    first, second = run(call_for_each, windows_of_different_lengths, cases)
    assert first[0] == [(2, 4, 1.0), (1, 3, 1.0)]
    assert second[0] == [(2, 4, 1.0), (2, 3, 1.0)]
    assert first[1] == second[1] == [(2, 4, 1.0)]  # windows end on all processes together
    for (message,) in (first[2], second[2]):
        assert "sync_each_batch" in message


def left_early() -> tuple[list[float], bool]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=1.0))
    loader = accelerator.prepare(DataLoader(torch.ones(12, 1), batch_size=1))
    weights = []
    for number, window in enumerate(accelerator.windows(loader, num_items=len)):
        for batch in window:
            accelerator.backward(-model(batch).sum())
            if number == 1:
                break
        optimizer.step()
        optimizer.zero_grad()
        weights.append(net.weight.item())
    for _ in accelerator.windows(loader, num_items=len):
        break
    assert accelerator.gradient_state.active_dataloader is None
    accelerator.backward(model(batch).sum())
    return weights, accelerator.sync_gradients


def test_gradients_of_a_window_left_early_are_dropped(run: Run) -> None:
    assert run(left_early) == [([1.0, 1.0, 2.0], True)] * 2


def without_items() -> list[str]:
    accelerator = Accelerator()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    found = []
    with pytest.raises(StateError) as error, accelerator.accumulate(model, num_items=0):
        accelerator.backward(model(torch.ones(1, 1)).sum())
    found.append(str(error.value))
    with pytest.raises(StateError) as error:
        next(iter(accelerator.windows([1], num_items=lambda batch: 0)))
    return [*found, str(error.value)]


def test_a_window_without_items_is_refused_on_all_processes(run: Run) -> None:
    for found in run(without_items):
        assert all("no items" in text for text in found)


def windows_of_fsdp2(folder: str) -> list[list[float]]:
    """Gradients of windows with several numbers of items, the last one after a load in the middle of one."""
    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=2)
    models = [torch.nn.Linear(3, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.0) for model in models]
    *models, optimizers[0], optimizers[1] = accelerator.prepare(*models, *optimizers)
    accelerator.save_state(folder)

    def accumulate(items: int) -> None:
        with accelerator.accumulate(*models, num_items=items):
            for model in models:  # the second one is not gathered when the items of a window are known
                accelerator.backward(model(torch.ones(items, 3)).sum())

    def gradients() -> list[float]:
        found = [model.weight.grad.full_tensor().flatten().tolist() for model in models]
        for optimizer in optimizers:
            optimizer.zero_grad()
        return [value for values in found for value in values]

    found = []
    for items in ((1, 1), (3, 4 + accelerator.process_index)):
        for count in items:
            accumulate(count)
        found.append(gradients())
    accumulate(5)
    accelerator.load_state(folder)
    for count in (2, 3):
        accumulate(count)
    return [*found, gradients()]


def test_fsdp2_weighs_and_drops_gradients_that_were_not_reduced_yet(run: Run, tmp_path: Path) -> None:
    for found in run(windows_of_fsdp2, str(tmp_path / "checkpoint")):
        assert found == [pytest.approx([1.0] * 6)] * 3


ORDERS = ("fbsG", "fbsZ", "Zfbs", "fZbs", "zfbs", "fzbs", "fbsz", "fbSZ", "fbsZz")
"""Statements of a loop body: f forward, b backward, s step, Z optimizer.zero_grad, z model.zero_grad.

S and G are step and zero_grad where gradients are synchronized.
"""
WAYS_TO_TRAIN: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp": dict,
    "views": lambda: {"kwargs_handlers": [DistributedDataParallelKwargs(gradient_as_bucket_view=True)]},
    "fsdp2": lambda: {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)},
}
STEPS = 2


def loss_of(models: list[Any], number: int, inputs: torch.Tensor) -> torch.Tensor:
    """The loss of a model, of which that of the second one has gradients for the first one, too."""
    if not number:
        return models[0](inputs).sin().mean()
    return models[1](models[0](inputs)).square().mean()


def new_models(count: int) -> list[Any]:
    torch.manual_seed(0)
    return [torch.nn.Linear(3, 3).double() for _ in range(count)]


def new_inputs(world: int) -> torch.Tensor:
    return torch.randn(10 * world, 3, generator=torch.Generator().manual_seed(0)).double()


def momentum(model: torch.nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train_plain(count: int, world: int) -> torch.Tensor:
    """Weights of plain torch on the batches of all ranks, with each optimizer on its own loss."""
    models = new_models(count)
    optimizers = [momentum(model) for model in models]
    sums: dict[torch.Tensor, torch.Tensor] = {}
    for index, batch in enumerate(new_inputs(world).split(2 * world), 1):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            own = list(model.parameters())
            gradients = torch.autograd.grad(loss_of(models, number, batch) / STEPS, own)
            sums |= {p: sums.get(p, 0) + gradient for p, gradient in zip(own, gradients, strict=True)}
            if index % STEPS == 0 or index == 5:
                for p in own:
                    p.grad = sums.pop(p)
                optimizer.step()
    return torch.cat([p.detach().flatten() for model in models for p in model.parameters()])


def train_in_order(
    way: str, order: str, count: int, *, is_apart: bool = False, **fields: Any
) -> torch.Tensor:
    """Weights after training in one window of all models, or in windows of each model."""
    plugin = GradientAccumulationPlugin(num_steps=STEPS, **fields)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, **WAYS_TO_TRAIN[way]())
    models = new_models(count)
    optimizers: list[Any] = [momentum(model) for model in models]
    loader: Any = DataLoader(new_inputs(accelerator.num_processes), batch_size=2)
    *models, loader = accelerator.prepare(*models, *optimizers, loader)
    models, optimizers = models[:count], models[count:]
    numbers = [[number] for number in range(count)] if is_apart else [list(range(count))]
    for inputs, group in ((inputs, group) for inputs in loader for group in numbers):
        with accelerator.accumulate(*[models[number] for number in group]):
            for number in group:
                model, optimizer, loss = models[number], optimizers[number], inputs
                for statement in order:
                    if statement == "f":
                        loss = loss_of(models, number, inputs)
                    elif statement == "b":
                        accelerator.backward(loss)
                    elif statement == "z":
                        model.zero_grad()
                    elif statement == "s" or (statement == "S" and accelerator.sync_gradients):
                        optimizer.step()
                    elif statement == "Z" or (statement == "G" and accelerator.sync_gradients):
                        optimizer.zero_grad()
    weights = [p.detach() for model in models for p in model.parameters()]
    AcceleratorState._reset_state(True)
    return torch.cat([getattr(p, "full_tensor", lambda p=p: p)().flatten() for p in weights])


def differences_by_order(world: int) -> list[tuple[Any, ...]]:
    wrong: list[tuple[Any, ...]] = []
    cases = [(way, order, 1, False) for way in WAYS_TO_TRAIN for order in ORDERS]
    cases += [
        (way, order, 2, is_apart)
        for way in WAYS_TO_TRAIN
        for order in ("Zfbs", "zfbs")
        for is_apart in (False, True)
    ]
    for way, order, count, is_apart in cases:
        for early in (False, True) if way == "fsdp2" or count == 2 else (False,):
            case = way, order, count, is_apart, early
            try:
                found = train_in_order(way, order, count, is_apart=is_apart, sync_each_batch=early)
            except StateError as error:
                wrong.append((*case, str(error)))
                AcceleratorState._reset_state(True)
                continue
            difference = float((found.cpu() - train_plain(count, world)).abs().max())
            if difference > 1e-12:
                wrong.append((*case, difference))
    return wrong


def test_the_order_of_calls_does_not_change_the_updates_of_several_ranks(run: Run) -> None:
    assert run(differences_by_order, 2, timeout=120) == [[], []]
