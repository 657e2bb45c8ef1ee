"""Training on several processes equals training on one with the joined batch."""

from __future__ import annotations

import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration, DistributedDataParallelKwargs
from accelerate.base import ConfigurationError
from accelerate.plugins import GradientAccumulationPlugin
from accelerate.utils import extract_model_from_parallel

SAMPLES, BATCH = 48, 4
Run = Callable[..., list[Any]]


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def network(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.detach().cpu().clone() for p in extract_model_from_parallel(model).parameters()]


def train(
    batch_size: int, *, steps: int = 1, clip: float | None = None, split: bool = False
) -> list[torch.Tensor]:
    """Two epochs; `batch_size` is that of one process, or the joined one with `split`."""
    accelerator = Accelerator(
        gradient_accumulation_steps=steps, dataloader_config=DataLoaderConfiguration(split_batches=split)
    )
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset(), batch_size=batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                if clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
    return weights(model)


def train_with_a_pickled_accelerator() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One epoch each by an accelerator and by its pickled copy, both with a model of their own."""
    accelerator = Accelerator(mixed_precision="bf16")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accelerator.prepare(model, optimizer, DataLoader(dataset(), batch_size=BATCH))
    trained = []
    for one in (pickle.loads(pickle.dumps(accelerator)), accelerator):
        (prepared,), (stepping,), (loader,) = one._models, one._optimizers, one._dataloaders
        for inputs, targets in loader:
            one.backward(torch.nn.functional.mse_loss(prepared(inputs), targets))
            stepping.step()
            stepping.zero_grad()
        bare = one.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert "forward" not in vars(bare)
        trained.append(weights(pickle.loads(pickle.dumps(bare))))
    return trained[0], trained[1]


def test_a_pickled_accelerator_trains_like_the_one_it_was_made_of(run: Run) -> None:
    (copied, own), (copied_there, own_there) = run(train_with_a_pickled_accelerator)
    equal([copied, copied_there, own_there], own)
    assert not torch.equal(own[0], weights(network())[0])


def objects_left() -> list[str]:
    """The objects of a run that are not freed by their last reference."""

    def run() -> dict[str, weakref.ref[Any]]:
        accelerator = Accelerator(mixed_precision="fp16")
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loader = DataLoader(dataset(), batch_size=BATCH)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
        objects = {"accelerator": accelerator, "model": model, "optimizer": optimizer, "loader": loader}
        return {name: weakref.ref(each) for name, each in objects.items()}

    run()  # imports modules, which keep the frames of the callers
    gc.collect()
    gc.disable()
    return [name for name, reference in run().items() if reference() is not None]


def test_objects_of_a_run_are_freed_without_the_garbage_collector(run: Run) -> None:
    assert run(objects_left) == [[], []]


def equal(several: list[list[torch.Tensor]], one: list[torch.Tensor]) -> None:
    for ours in several:
        for a, b in zip(ours, one, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.fixture
def one_process(run: Run) -> Callable[..., list[torch.Tensor]]:
    def one_process(function: Callable[..., Any], *args: Any) -> list[torch.Tensor]:
        return list(run(function, *args, processes=1)[0])

    return one_process


def train_plain(processes: int) -> list[torch.Tensor]:
    return train(BATCH * processes)


def train_clipped(processes: int) -> list[torch.Tensor]:
    return train(BATCH * processes, steps=2, clip=0.05)


def train_split(processes: int) -> list[torch.Tensor]:
    return train(BATCH * 2, split=True)


def train_two_models(processes: int) -> list[torch.Tensor]:
    """A pair that trains against each other, each with an optimizer of its own."""
    accelerator = Accelerator()
    maker, judge = network(1), network(2)
    make = torch.optim.Adam(maker.parameters(), lr=0.01)
    rate = torch.optim.SGD(judge.parameters(), lr=0.1)
    maker, judge, make, rate, loader = accelerator.prepare(
        maker, judge, make, rate, DataLoader(dataset(), batch_size=BATCH * processes)
    )
    for inputs, targets in loader:
        accelerator.backward((judge(inputs) - maker(inputs).detach()).square().mean())
        rate.step()
        rate.zero_grad()
        with accelerator.no_sync(judge):
            accelerator.backward((maker(inputs) - targets - judge(inputs).detach()).square().mean())
        make.step()
        make.zero_grad()
    return weights(maker) + weights(judge)


def call(function: Callable[[int], list[torch.Tensor]], processes: int) -> list[torch.Tensor]:
    return function(processes)


def test_two_processes_equal_one_with_the_joined_batch(run: Run, one_process: Any) -> None:
    functions = [train_clipped, train_split, train_two_models]
    one = one_process(call_for_each, call, [(function, 2) for function in functions])
    two = run(call_for_each, call, [(function, 1) for function in functions])
    for expected, *found in zip(one, *two, strict=True):
        equal(found, expected)


def test_three_processes_equal_one_with_the_joined_batch(run: Run, one_process: Any) -> None:
    equal(run(train_plain, 1, processes=3), one_process(train_plain, 3))


def train_on_a_numbered_cpu() -> tuple[str, list[torch.Tensor]]:
    trained = train(BATCH)
    return str(Accelerator().device), trained


def test_a_cpu_with_a_number_trains_as_the_cpu(run: Run, one_process: Any) -> None:
    answers = run(train_on_a_numbered_cpu, env={"ACCELERATE_TORCH_DEVICE": "cpu:64"})
    assert [device for device, _ in answers] == ["cpu:64"] * 2
    equal([trained for _, trained in answers], one_process(train, 2 * BATCH))


def accumulate_without_exchange() -> tuple[list[bool], bool]:
    """Whether gradients agreed on both ranks after each of two micro-batches, and after a late exchange."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = accelerator.prepare(network())
    rank = accelerator.process_index
    agree = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.full((1, 6), rank + 1.0)).sum())
        agree.append(same_gradients(accelerator, model))
    model.zero_grad()
    with accelerator.no_sync(model):
        loss = model(torch.full((1, 6), rank + 1.0)).sum() + model(torch.full((1, 6), rank + 2.0)).sum()
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(loss)
    return agree, same_gradients(accelerator, model)


def same_gradients(accelerator: Accelerator, model: torch.nn.Module) -> bool:
    gradient = extract_model_from_parallel(model)[0].weight.grad  # type: ignore[index]
    both = accelerator.gather(gradient.unsqueeze(0))
    return bool(torch.allclose(both[0], both[1], atol=1e-7))


def test_only_synchronising_rounds_exchange_gradients(run: Run) -> None:
    for agree, late in run(accumulate_without_exchange):
        assert agree == [False, True]
        assert late


def sync_each_batch() -> bool:
    from accelerate.utils import GradientAccumulationPlugin

    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    model = accelerator.prepare(network())
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((1, 6), accelerator.process_index + 1.0)).sum())
        assert not accelerator.sync_gradients
    return same_gradients(accelerator, model)


def test_every_batch_may_exchange_gradients(run: Run) -> None:
    assert run(sync_each_batch) == [True, True]


def join_uneven() -> tuple[int, list[torch.Tensor]]:
    accelerator = Accelerator()
    model = network()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(dataset(), batch_size=16)
    )
    batches = 0
    with accelerator.join_uneven_inputs([model], even_batches=False):
        for inputs, targets in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            batches += 1
    assert loader.batch_sampler.even_batches
    accelerator.wait_for_everyone()
    return batches, weights(model)


def test_ranks_may_run_out_of_batches_at_different_times(run: Run) -> None:
    (first, ours), (second, theirs) = run(join_uneven)
    assert (first, second) == (2, 1)
    equal([ours], theirs)


def join_others() -> tuple[list[int], list[str]]:
    """Joins with each kind of object; returns how many batches there were, and what was logged."""
    accelerator = Accelerator()
    inner, frozen = network(), network().requires_grad_(False)
    model, evaluated, optimizer, loader = accelerator.prepare(
        inner, frozen, torch.optim.SGD(inner.parameters(), lr=0.1), DataLoader(dataset(), batch_size=16)
    )
    raw, counts = network().to(accelerator.device), []
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate.strategies").addHandler(handler)
    try:
        for joined in (
            [frozen],
            [evaluated],
            [model, raw, optimizer],
            [inner],
            [raw],
            [raw],
            [optimizer],
            [],
        ):
            with accelerator.join_uneven_inputs(joined, even_batches=False):
                used = model if joined and joined[0] in (model, inner) else raw
                losses = [used(inputs).sum().backward() for inputs, _ in loader]
                counts.append(len(losses))
    finally:
        logging.getLogger("accelerate.strategies").removeHandler(handler)
    with pytest.raises(ConfigurationError, match="only models and optimizers can be joined"):
        accelerator.join_uneven_inputs(["model"]).__enter__()
    return counts, lines


def test_what_was_not_prepared_is_left_out_of_a_join(run: Run) -> None:
    for (counts, lines), batches in zip(run(join_others), (2, 1), strict=True):
        assert counts == [batches] * 8
        joined_nothing = [line for line in lines if "join_uneven_inputs joins nothing" in line]
        assert lines == joined_nothing
        assert len(lines) == (2 if batches == 2 else 0)  # the main process, once for each list


def prepare_held_loaders() -> list[str]:
    """What is logged for objects that `prepare` returns unchanged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("accelerate.strategies").addHandler(handler)
    try:
        accelerator, loader = Accelerator(), DataLoader(dataset(), batch_size=4)
        prepared = accelerator.prepare(loader)
        accelerator.prepare([1, 2], "text", enumerate(prepared), {"train": prepared})
        held = zip(loader, [1], strict=False)
        assert accelerator.prepare(held, [loader]) == (held, [loader])
    finally:
        logging.getLogger("accelerate.strategies").removeHandler(handler)
    return lines


def test_loaders_that_are_not_prepared_are_named_on_several_ranks(run: Run) -> None:
    first, others = run(prepare_held_loaders)
    assert len(first) == 1
    assert "prepare() returns objects of type zip, list unchanged" in first[0]
    assert others == []
    assert run(prepare_held_loaders, processes=1) == [[]]


def skip_together() -> tuple[bool, list[torch.Tensor], float]:
    """One rank's gradients overflow in float16: DDP hands the infinity to all, so all skip."""
    accelerator = Accelerator(mixed_precision="fp16")
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    value = float("inf") if accelerator.process_index == 1 else 1.0
    accelerator.backward(model(torch.full((2, 6), value)).sum())
    optimizer.step()
    scheduler.step()
    return accelerator.optimizer_step_was_skipped, weights(model), scheduler.get_last_lr()[0]


def test_all_ranks_skip_a_step_together_and_the_schedule_waits(run: Run) -> None:
    for skipped, after, rate in run(skip_together):
        assert skipped
        assert rate == 0.1
        equal([after], [p.detach() for p in network().parameters()])


def schedule_pace(policy: bool | str) -> float:
    accelerator = Accelerator(step_scheduler_with_optimizer=policy)  # type: ignore[arg-type]
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.backward(model(torch.ones(1, 6)).sum())
    optimizer.step()
    scheduler.step()
    return float(scheduler.get_last_lr()[0])


@pytest.mark.parametrize(("policy", "rate"), [(True, 0.25), ("per_update", 0.5)])
def test_a_schedule_steps_per_process_or_per_update(run: Run, policy: bool | str, rate: float) -> None:
    assert run(schedule_pace, policy) == [rate, rate]


def schedules_by_epoch() -> tuple[list[float], list[float]]:
    """Learning rates of epochs that end inside a window, by a schedule of epochs and by one of a metric."""
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    )
    models, optimizers = [network(), network()], []
    for model in models:
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
    by_epoch = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, gamma=0.5)
    by_metric = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizers[1], factor=0.5, patience=1)
    loader = DataLoader(dataset(), batch_size=8)  # three batches on each of two ranks
    loader, by_epoch, by_metric = accelerator.prepare(loader, by_epoch, by_metric)
    models, optimizers = (list(accelerator.prepare(*each)) for each in (models, optimizers))
    rates = []
    for _ in range(4):
        rates.append([optimizer.param_groups[0]["lr"] for optimizer in optimizers])
        for inputs, targets in loader:
            with accelerator.accumulate(*models):
                for model, optimizer in zip(models, optimizers, strict=True):
                    accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
                    optimizer.step()
                    optimizer.zero_grad()
        by_epoch.step()
        by_metric.step(1.0)
    first, second = zip(*rates, strict=True)
    return list(first), list(second)


def test_a_schedule_by_epoch_steps_once_an_epoch(run: Run) -> None:
    expected = ([0.1, 0.1, 0.05, 0.05], [0.1, 0.1, 0.1, 0.05])
    assert run(schedules_by_epoch) == [expected, expected]


def wrap_once() -> dict[str, bool]:
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
    model = network()
    frozen = torch.nn.Linear(1, 1).requires_grad_(False)
    prepared, still = accelerator.prepare(model, frozen)
    evaluated = accelerator.prepare_model(network(3), evaluation_mode=True)
    return {
        "wrapped": type(prepared).__name__ == "DistributedDataParallel" and prepared.static_graph,
        "again": accelerator.prepare(prepared) is prepared and accelerator.prepare(model) is prepared,
        "unwrapped": accelerator.unwrap_model(prepared) is model,
        "frozen": still is frozen,
        "evaluation": type(evaluated).__name__ == "Sequential",
        "label": accelerator.multi_device or accelerator.distributed_type == "MULTI_CPU",
        "clean names": set(accelerator.get_state_dict(prepared)) == set(model.state_dict()),
    }


def test_models_are_wrapped_once_and_can_be_unwrapped(run: Run) -> None:
    for facts in run(wrap_once):
        assert all(facts.values()), facts


class Scoring(torch.nn.Sequential):
    """Network with a method and an attribute beside its forward."""

    threshold = 0.5

    def score(self, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs) * 2


def freeze_and_score() -> list[str]:
    """Errors of methods of the network, and of layers that are frozen while a run trains, until one works."""
    texts = []
    for handlers in ([], [DistributedDataParallelKwargs(find_unused_parameters=True)]):
        accelerator = Accelerator(kwargs_handlers=handlers)
        inner = Scoring(torch.nn.Linear(6, 8), torch.nn.Linear(8, 1))
        model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
        for name in ("score", "threshold", "nothing"):
            assert not hasattr(model, name)
            try:
                getattr(model, name)
            except AttributeError as error:
                texts.append(str(error))
        for step in range(4):
            inner[0].requires_grad_(step < 2)  # replicas are compared after steps 1 and 2
            try:
                accelerator.backward(model(torch.full((1, 6), float(accelerator.process_index))).sum())
            except RuntimeError as error:
                texts.append(f"{type(error).__name__} in step {step}: {error}")
                break
            optimizer.step()
            optimizer.zero_grad()
    (weight,) = accelerator.gather(inner[1].weight.detach()[None]).unique(dim=0)
    assert torch.equal(weight, inner[1].weight)
    copied = pickle.loads(pickle.dumps(model))
    assert type(copied) is type(model)
    return texts


def test_errors_of_replicas_name_the_fix(run: Run) -> None:
    for score, threshold, nothing, frozen, *others in run(freeze_and_score):
        assert score.startswith("'DistributedDataParallel' object has no attribute 'score', which")
        assert "the prepared Scoring has. Use accelerator.unwrap_model(model).score." in score
        assert "unwrap_model(model).threshold" in threshold
        assert nothing == "'DistributedDataParallel' object has no attribute 'nothing'"
        assert frozen.startswith(
            "StateError in step 3: Parameters had no gradient in the backward pass before"
        )
        assert "DistributedDataParallelKwargs(find_unused_parameters=True)] to Accelerator" in frozen
        assert others == [score, threshold, nothing]  # the fix trains


def raise_a_flag() -> list[bool]:
    accelerator = Accelerator()
    answers = [accelerator.check_trigger()]
    if accelerator.is_last_process:
        accelerator.set_trigger()
    answers.append(accelerator.check_trigger())
    answers.append(accelerator.check_trigger())
    return answers


def test_a_flag_raised_on_one_rank_is_seen_on_all(run: Run) -> None:
    assert run(raise_a_flag) == [[False, True, False]] * 2


def compiled_step() -> list[torch.Tensor]:
    accelerator = Accelerator(dynamo_backend="eager", mixed_precision="bf16")
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with accelerator.accumulate(model):
        outputs = model(torch.full((1, 6), accelerator.process_index + 1.0))
        accelerator.backward(outputs.sum())
        optimizer.step()
    assert outputs.dtype == torch.float32
    assert set(accelerator.get_state_dict(model)) == set(network().state_dict())
    return weights(model)


def test_compiled_models_train_in_low_precision(run: Run) -> None:
    ours, theirs = run(compiled_step, timeout=120)
    equal([ours], theirs)
    assert not torch.equal(ours[0], next(network().parameters()))
