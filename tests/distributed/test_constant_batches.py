"""Steps with `global_batch_size` do not depend on the number of processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.stand_ins.cases import call_for_each
from tests.stand_ins.streams import Stream
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import BatchSampler, DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.base import CheckpointError, ConfigurationError, StateError
from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin, set_seed

Run = Callable[..., list[Any]]


class Setting(NamedTuple):
    """Loader, global batch size and strategy of a run."""

    samples: int = 37
    batch_size: int = 4
    global_batch_size: int = 16
    drop_last: bool = False
    workers: int = 0
    seedable: bool = False
    epochs: int = 2
    stop: int | None = None  # number of steps after which the run is interrupted
    fsdp: bool = False
    has_generator: bool = True
    windows: bool = False
    counts_items: bool = False


class Result(NamedTuple):
    """Samples, learning rate and weights of each step."""

    samples: list[list[int]]
    rates: list[float]
    weights: list[torch.Tensor]

    def check(self, expected: Result) -> None:
        assert self.samples == expected.samples
        assert self.rates == expected.rates
        torch.testing.assert_close(self.weights, expected.weights, rtol=0, atol=1e-6)


class Progress:
    def __init__(self) -> None:
        self.epoch = self.batch = 0

    def state_dict(self) -> dict[str, int]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        vars(self).update(state)


class Training:
    """Training whose loss is a mean over samples."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, min_num_params=1) if setting.fsdp else None
        self.accelerator = Accelerator(
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                global_batch_size=setting.global_batch_size
            ),
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=setting.seedable, data_seed=7),
            fsdp_plugin=plugin,
        )
        set_seed(0)
        generator = torch.Generator().manual_seed(1)
        rows = torch.randn(setting.samples, 5, generator=generator)
        data = [(row, row.sum().tanh(), index) for index, row in enumerate(rows)]
        loader = DataLoader(
            data,  # type: ignore[arg-type]
            batch_size=setting.batch_size,
            shuffle=True,
            drop_last=setting.drop_last,
            num_workers=setting.workers,
            generator=torch.Generator().manual_seed(3) if setting.has_generator else None,
        )
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        prepared = self.accelerator.prepare(model, optimizer, scheduler, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.progress = Progress()
        self.accelerator.register_for_checkpointing(self.progress)
        self.folder: Path | None = None  # of the checkpoint that is saved at the stop
        self.samples: list[list[int]] = [[]]
        self.rates: list[float] = []

    def loss(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        kind = "sum" if self.setting.counts_items else "mean"
        return nn.functional.mse_loss(self.model(rows).squeeze(1), targets, reduction=kind)

    def train(self) -> Training:
        for epoch in range(self.progress.epoch, self.setting.epochs):
            skipped = self.progress.batch
            loader = self.accelerator.skip_first_batches(self.loader, skipped) if skipped else self.loader
            if self._windows(loader) if self.setting.windows else self._epoch(loader):
                return self
            self.progress.epoch, self.progress.batch = epoch + 1, 0
        return self

    def _epoch(self, loader: Any) -> bool:
        length = 0
        for rows, targets, indices in loader:
            length += 1
            items = {"num_items": len(rows)} if self.setting.counts_items else {}
            with self.accelerator.accumulate(self.model, **items):
                self.accelerator.backward(self.loss(rows, targets))
                self._step()
            if self._record(indices):
                return True
        assert length == len(loader)
        return False

    def _windows(self, loader: Any) -> bool:
        count = (lambda batch: len(batch[0])) if self.setting.counts_items else None
        for window in self.accelerator.windows(loader, self.model, num_items=count):
            for rows, targets, indices in window:
                self.accelerator.backward(self.loss(rows, targets))
                self._step()
                stops = self._record(indices)
            if stops:
                return True
        return False

    def _step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def _record(self, indices: torch.Tensor) -> bool:
        self.progress.batch += 1
        self.samples[-1] += self.accelerator.gather_for_metrics(indices).tolist()
        if self.accelerator.sync_gradients:
            self.rates.append(self.scheduler.get_last_lr()[0])
            self.samples[-1].sort()
            self.samples.append([])
        stops = self.accelerator.sync_gradients and len(self.rates) == self.setting.stop
        if stops and self.folder is not None:
            self.accelerator.save_state(self.folder)
        return stops

    def result(self) -> Result:
        state = self.accelerator.get_state_dict(self.model)
        return Result(self.samples[:-1], self.rates, [state[name] for name in sorted(state)])


def train(setting: Setting) -> Result:
    return Training(setting).train().result()


def begin(setting: Setting, folder: Path) -> Result:
    training = Training(setting)
    training.folder = folder
    return training.train().result()


def resume(setting: Setting, folder: Path, saved: Path | None = None) -> Result:
    training = Training(setting)
    training.accelerator.load_state(folder)
    training.folder = saved
    return training.train().result()


def plain(setting: Setting) -> Result:
    """Train one process without this package, with the global batch as the batch of the loader."""
    training = Training(setting._replace(batch_size=setting.global_batch_size))
    order: Any = training.loader.base_dataloader
    set_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(order.dataset, setting.global_batch_size, shuffle=True, generator=generator)
    samples, rates = [], []
    for _ in range(setting.epochs):
        for rows, targets, indices in loader:
            nn.functional.mse_loss(model(rows).squeeze(1), targets).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            samples.append(sorted(indices.tolist()))
            rates.append(scheduler.get_last_lr()[0])
    state = model.state_dict()
    return Result(samples, rates, [state[name] for name in sorted(state)])


@pytest.mark.parametrize(
    "processes", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2, 4))]
)
def test_a_step_is_that_of_one_process_with_the_global_batch(run: Run, processes: int) -> None:
    (expected,) = run(plain, Setting(), processes=1)
    for result in run(train, Setting(), processes=processes):
        result.check(expected)


SHORT = Setting(samples=34, global_batch_size=32)  # the last step has fewer samples than processes
SETTINGS = {
    "drop_last": Setting(drop_last=True),
    "workers": Setting(workers=1),
    "seedable": Setting(seedable=True),
    "short_end": SHORT,
    "large_batches": Setting(samples=20, batch_size=8, global_batch_size=8),  # larger than its part
    "no_generator": Setting(has_generator=False),
    "windows": Setting(windows=True),
    "num_items": Setting(counts_items=True),
    "both": Setting(windows=True, counts_items=True),
    "short_num_items": SHORT._replace(counts_items=True),
    "short_both": SHORT._replace(windows=True, counts_items=True),
}
IN_GATE = ("drop_last", "large_batches", "short_num_items", "short_both")


@pytest.mark.parametrize(
    "names",
    [IN_GATE, pytest.param([name for name in SETTINGS if name not in IN_GATE], marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_three_processes_take_the_steps_of_one(run: Run, names: Sequence[str]) -> None:
    cases = [(SETTINGS[name],) for name in names]
    (expected,) = run(call_for_each, train, cases, processes=1)
    for results in run(call_for_each, train, cases, processes=3):
        for name, result, wanted in zip(names, results, expected, strict=True):
            try:
                result.check(wanted)
            except AssertionError as error:
                raise AssertionError(name) from error


def test_shards_take_the_steps_of_one_process(run: Run) -> None:
    (expected,) = run(train, Setting(), processes=1)
    run(train, Setting(fsdp=True), processes=3)[0].check(expected)


@pytest.mark.parametrize(
    ("sizes", "seedable"),
    [
        ((2, 3), False),
        pytest.param((1, 3), True, marks=pytest.mark.slow),
        pytest.param((3, 1), False, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_with_another_size_as_if_it_had_not_changed(
    run: Run, tmp_path: Path, sizes: tuple[int, int], seedable: bool
) -> None:
    setting = Setting(seedable=seedable, has_generator=False)
    before, after = sizes
    (expected,) = run(train, setting, processes=1)
    first = run(begin, setting._replace(stop=2), tmp_path / "saved", processes=before)[0]
    for rest in run(resume, setting, tmp_path / "saved", processes=after):
        Result(first.samples + rest.samples, first.rates + rest.rates, rest.weights).check(expected)


@pytest.mark.slow
def test_a_size_may_change_several_times_in_one_epoch(run: Run, tmp_path: Path) -> None:
    setting = Setting(samples=61, batch_size=2, global_batch_size=8, epochs=2)
    (expected,) = run(train, setting, processes=1)
    chance, taken, folders = random.Random(0), 0, [tmp_path / str(number) for number in range(5)]
    results: list[Result] = []
    for number, processes in enumerate([3, 2, 4, 1]):
        count = chance.randint(1, 2)
        stopped, taken = setting._replace(stop=count), taken + count
        if number == 0:
            results.append(run(begin, stopped, folders[0], processes=processes)[0])
        else:
            source = folders[number - 1]
            results.append(run(resume, stopped, source, folders[number], processes=processes)[0])
    results.append(run(resume, setting, folders[3], processes=3)[0])
    samples = [step for result in results for step in result.samples]
    rates = [rate for result in results for rate in result.rates]
    Result(samples, rates, results[-1].weights).check(expected)


def save_between_micro_batches(setting: Setting, folder: Path) -> None:
    training = Training(setting)
    for rows, targets, _ in training.loader:
        with training.accelerator.accumulate(training.model):
            training.accelerator.backward(training.loss(rows, targets))
        training.progress.batch += 1
        assert not training.accelerator.sync_gradients
        training.accelerator.save_state(folder)
        break


def resume_is_refused(setting: Setting, folder: Path) -> str:
    training = Training(setting)
    training.accelerator.load_state(folder)
    with pytest.raises(CheckpointError) as caught:
        training.accelerator.skip_first_batches(training.loader, 1)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:.*middle of an accumulation window")
def test_a_checkpoint_between_micro_batches_needs_the_same_size(run: Run, tmp_path: Path) -> None:
    run(save_between_micro_batches, Setting(), tmp_path / "saved", processes=2)
    (message,) = run(resume_is_refused, Setting(), tmp_path / "saved", processes=1)
    assert "saved between two micro-batches" in message
    assert "sync_gradients" in message


def make_loader(kind: str) -> tuple[DataLoader[Any], DataLoaderConfiguration]:
    """Returns a loader that does not divide a global batch of 8 samples, and its configuration."""
    data: Any = [torch.tensor([float(index)]) for index in range(24)]
    sampler = BatchSampler(range(24), 2, drop_last=False)
    loaders: dict[str, Callable[[], DataLoader[Any]]] = {
        "stream": lambda: DataLoader(Stream(data), batch_size=2),
        "batch sampler": lambda: DataLoader(data, batch_sampler=list(sampler)),  # type: ignore[arg-type]
        "batch size": lambda: DataLoader(data, batch_size=3),
    }
    config = {"dispatched": {"dispatch_batches": True}, "split": {"split_batches": True}}.get(kind, {})
    make = loaders.get(kind, lambda: DataLoader(data, batch_size=2))
    return make(), DataLoaderConfiguration(**config)


def train_with(kind: str) -> list[str]:
    """Returns the errors of `backward` with a loader, inside `accumulate` and outside."""
    loader, config = make_loader(kind)
    plugin = GradientAccumulationPlugin(global_batch_size=8)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, dataloader_config=config)
    model, loader = accelerator.prepare(nn.Linear(1, 1), loader)
    messages = []
    for accumulate in (nullcontext, lambda: accelerator.accumulate(model)):
        with pytest.raises((ConfigurationError, StateError)) as caught:
            for rows in loader:
                with accumulate():
                    accelerator.backward(model(rows).mean())
        messages.append(str(caught.value))
    return messages


def test_loaders_that_do_not_divide_a_global_batch_are_refused(run: Run) -> None:
    kinds = ["stream", "batch size", "dispatched", "split", "batch sampler"]
    start = "global_batch_size=8: a constant global batch divides the batches of"
    for found in run(call_for_each, train_with, kinds, processes=2):
        wrong = {
            kind: messages
            for kind, messages in zip(kinds, found, strict=True)
            if not all(message.startswith(start) for message in messages)
        }
        assert wrong == {}


def train_without_accumulate() -> tuple[str, str]:
    plugin = GradientAccumulationPlugin(global_batch_size=8)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    data: Any = [torch.tensor([float(index)]) for index in range(24)]
    model, loader = accelerator.prepare(nn.Linear(1, 1), DataLoader(data, batch_size=2))
    with pytest.raises(StateError) as unscaled:
        for rows in loader:
            accelerator.backward(model(rows).mean())
    with pytest.raises(ConfigurationError) as assigned:
        accelerator.gradient_accumulation_steps = 3
    return str(unscaled.value), str(assigned.value)


def test_steps_that_do_not_follow_the_global_batch_are_refused(run: Run) -> None:
    for unscaled, assigned in run(train_without_accumulate, processes=2):
        assert unscaled.startswith("backward() was called outside of accumulate()")
        assert assigned.startswith("gradient_accumulation_steps=3: it follows from global_batch_size")


def count_windows(samples: int) -> tuple[int, list[float]]:
    training = Training(Setting(samples=samples, global_batch_size=32))
    accelerator = training.accelerator
    windows = accelerator.windows(training.loader, training.model, num_items=lambda batch: len(batch[0]))
    assert len(windows) == samples // 32 + 1
    counts = []
    for window in windows:
        counts.append(window.num_items)
        for rows, targets, _ in window:
            training.accelerator.backward(training.loss(rows, targets))
            training._step()
    return len(windows), counts


def test_a_process_without_a_sample_counts_no_items(run: Run) -> None:
    assert run(count_windows, 34, processes=3) == [(2, [32, 2])] * 3


def gather_an_epoch_of_evaluation(setting: Setting) -> list[int]:
    training = Training(setting)
    training.model.eval()
    return [
        int(index)
        for _, _, indices in training.loader
        for index in training.accelerator.gather_for_metrics(indices)
    ]


def test_an_evaluation_counts_each_sample_once(run: Run) -> None:
    for indices in run(gather_an_epoch_of_evaluation, Setting(samples=35), processes=3):
        assert sorted(indices) == list(range(35))
