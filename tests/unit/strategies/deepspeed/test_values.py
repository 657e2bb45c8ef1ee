"""Tests of the values for "auto" that follow from objects given to `prepare`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from accelerate.base import ConfigurationError
from accelerate.strategies.deepspeed import (
    DummyOptim,
    DummyScheduler,
    EngineInputs,
    auto_values_of,
    batch_sizes_of,
)

MODEL = torch.nn.Linear(1, 1)


def filled(config, **given):
    filling = auto_values_of(
        EngineInputs(MODEL if "model" not in given else given.pop("model"), **given), config
    )
    filling.fill(config)
    return config, filling


TABLE = [
    ("train_micro_batch_size_per_gpu", "auto", {"batch_sizes": [8, 4]}, 4),
    ("train_micro_batch_size_per_gpu", "auto", {"batch_sizes": [8, 4], "smallest": False}, 8),
    ("train_micro_batch_size_per_gpu", "auto", {"known_sizes": [16]}, 16),
    ("train_micro_batch_size_per_gpu", "auto", {"batch_sizes": [8], "known_sizes": [16]}, 8),
    ("train_batch_size", "auto", {"batch_sizes": [8], "accumulation": 2, "replicas": 4}, 64),
    ("gradient_accumulation_steps", "auto", {"accumulation": 3}, 3),
    ("gradient_clipping", "auto", {}, 0.0),
]


@pytest.mark.parametrize(("name", "written", "given", "value"), TABLE)
def test_auto_batch_sizes_are_filled_from_loaders_and_the_accelerator(name, written, given, value):
    config, filling = filled({name: written}, **given)
    assert config == {name: value}
    assert filling.missing == filling.mismatches == []


def test_a_batch_of_all_processes_gives_the_one_of_each():
    config, _ = filled(
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": "auto"}, accumulation=2, replicas=4
    )
    assert config["train_micro_batch_size_per_gpu"] == 4
    _, filling = filled(
        {"train_batch_size": 33, "train_micro_batch_size_per_gpu": "auto"}, replicas=4, optimizer=object()
    )
    assert filling.missing == ["train_micro_batch_size_per_gpu"]


def test_a_size_that_one_of_the_loaders_has_fits():
    _, filling = filled({"train_micro_batch_size_per_gpu": 8}, batch_sizes=[8, 4])
    assert filling.mismatches == []
    _, filling = filled({"train_micro_batch_size_per_gpu": 2}, batch_sizes=[8, 4])
    assert len(filling.mismatches) == 1


def test_an_auto_batch_size_without_a_loader_is_an_error():
    written = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"}
    _, filling = filled(written, optimizer=object())
    assert filling.missing == ["train_micro_batch_size_per_gpu", "train_batch_size"]
    with pytest.raises(ConfigurationError, match="pass the loader to prepare, with a batch_size"):
        filling.check_filled()


def test_auto_batch_sizes_without_an_optimizer_are_1():
    config, filling = filled({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto"})
    assert config == {"train_micro_batch_size_per_gpu": 1, "train_batch_size": 1}
    assert filling.missing == []


def test_auto_parameters_are_those_of_the_optimizer_and_others_are_left_to_deepspeed():
    names = ("lr", "weight_decay", "betas", "eps")
    config, _ = filled(
        {"optimizer": {"params": dict.fromkeys(names, "auto")}},
        optimizer=DummyOptim([], lr=0.1, betas=(0.5, 0.9)),
    )
    assert config["optimizer"]["params"] == {"lr": 0.1, "weight_decay": 0, "betas": (0.5, 0.9)}


@pytest.mark.parametrize(("scheduler_steps", "total", "warm"), [(1, 100, 10), (4, 25, 3)])
def test_schedules_are_counted_in_steps_of_the_optimizer(scheduler_steps, total, warm):
    names = ("total_num_steps", "warmup_num_steps", "warmup_min_lr", "warmup_max_lr")
    optimizer = DummyOptim([], lr=0.1)
    config, _ = filled(
        {"scheduler": {"params": dict.fromkeys(names, "auto")}},
        optimizer=optimizer,
        scheduler=DummyScheduler(optimizer, total_num_steps=100, warmup_num_steps=10),
        scheduler_steps=scheduler_steps,
    )
    assert config["scheduler"]["params"] == {
        "total_num_steps": total,
        "warmup_num_steps": warm,
        "warmup_min_lr": 0,
        "warmup_max_lr": 0.1,
    }


def test_a_schedule_of_an_optimizer_of_torch_has_its_rate():
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.3)
    config, _ = filled(
        {"scheduler": {"params": {"warmup_max_lr": "auto"}}},
        optimizer=optimizer,
        scheduler=DummyScheduler(optimizer),
    )
    assert config["scheduler"]["params"] == {"warmup_max_lr": 0.3}


BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (SimpleNamespace(hidden_size=10), [100, 90, 100]),
        (SimpleNamespace(hidden_sizes=[4, 10]), [100, 90, 100]),
        (SimpleNamespace(text_config=SimpleNamespace(hidden_size=10)), [100, 90, 100]),
        (SimpleNamespace(), []),
    ],
)
def test_bucket_sizes_follow_the_hidden_size_or_the_default_of_deepspeed(config, sizes):
    written = {"zero_optimization": dict.fromkeys(BUCKETS, "auto")}
    found, _ = filled(written, model=SimpleNamespace(config=config))
    assert list(found["zero_optimization"].values()) == sizes


def test_batch_sizes_are_those_of_one_process():
    plan = SimpleNamespace(batch_size=4)
    loaders = [
        SimpleNamespace(plan=plan, batch_size=8),
        SimpleNamespace(batch_sampler=SimpleNamespace(batch_size=6), batch_size=None),
        SimpleNamespace(batch_size=3),
        SimpleNamespace(),
    ]
    assert batch_sizes_of(loaders) == [4, 6, 3]
