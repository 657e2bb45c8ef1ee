"""A run is planned from its objects; problems are returned as a list."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate.strategies import Bundle
from accelerate.strategies.megatron import library, plan_run
from accelerate.utils import MegatronLMDummyScheduler, MegatronLMPlugin

from .conftest import LENGTH, Fake, Model, samples


def objects(*further: Any, model: Any = None) -> Bundle:
    model = model or Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return Bundle([model, optimizer, MegatronLMDummyScheduler(optimizer, 100, 10), *further])


def loader(size: int) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=size)


def test_arguments_follow_from_the_prepared_objects(fake: Fake) -> None:
    plugin = MegatronLMPlugin(tp_degree=2, num_micro_batches=2)
    assert plan_run(plugin, objects(loader(2)), 4, "bf16", 1) == []
    arguments = plugin.megatron_lm_default_args
    expected = {
        "bf16": True,
        "data_parallel_size": 2,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "num_layers": 2,
        "seq_length": LENGTH,
        "optimizer": "adam",
        "lr": 0.1,
        "train_iters": 50,
        "lr_warmup_iters": 5,
    }
    assert expected.items() <= arguments.items()


@pytest.mark.parametrize(("smallest", "size"), [(True, 2), (False, 4)])
def test_batches_of_several_loaders(fake: Fake, smallest: bool, size: int) -> None:
    plugin = MegatronLMPlugin(is_train_batch_min=smallest)
    assert plan_run(plugin, objects(loader(4), loader(2)), 1, "no", 1) == []
    assert plugin.micro_batch_size == size


def test_samples_are_not_read_where_the_length_is_known(fake: Fake) -> None:
    class Unreadable(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("read")

    plugin = MegatronLMPlugin(seq_length=8)
    unreadable: DataLoader[Any] = DataLoader(Unreadable([1, 2]), batch_size=1)  # type: ignore[arg-type]
    assert plan_run(plugin, objects(unreadable), 1, "no", 1) == []


def test_random_states_are_unchanged(fake: Fake) -> None:
    before = torch.get_rng_state()
    plan_run(MegatronLMPlugin(), objects(DataLoader(samples(), batch_size=2, shuffle=True)), 1, "no", 1)
    assert before.equal(torch.get_rng_state())


def test_several_models(fake: Fake) -> None:
    problems = plan_run(MegatronLMPlugin(), objects(Model(), loader(2)), 1, "no", 1)
    assert len(problems) == 1
    assert problems[0].startswith("2 models")


def test_heads_that_megatron_has_not(fake: Fake) -> None:
    config = {
        "model_type": "bert",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    }
    model = type("BertForSequenceClassification", (Model,), {})(**config)
    (problem,) = plan_run(MegatronLMPlugin(), objects(loader(2), model=model), 1, "no", 1)
    assert "custom_model_provider_function" in problem
    own = MegatronLMPlugin(custom_model_provider_function=print)
    assert plan_run(own, objects(loader(2), model=model), 1, "no", 1) == []


def test_lengths_in_different_units(fake: Fake) -> None:
    plugin = MegatronLMPlugin(lr_decay_samples=10)
    (problem,) = plan_run(plugin, objects(loader(2)), 1, "no", 1)
    assert "train_iters=100 and lr_decay_samples=10" in problem


def test_the_length_of_training_is_that_of_the_plugin(fake: Fake) -> None:
    model = Model()
    bundle = Bundle([model, torch.optim.SGD(model.parameters(), lr=0.1), loader(2)])
    assert plan_run(MegatronLMPlugin(train_samples=100), bundle, 1, "no", 1) == []
    (problem,) = plan_run(MegatronLMPlugin(), bundle, 1, "no", 1)
    assert problem.startswith("train_iters: the length of the training")


def test_rates_that_fall_upwards(fake: Fake) -> None:
    (problem,) = plan_run(MegatronLMPlugin(min_lr=0.2), objects(loader(2)), 1, "no", 1)
    assert problem.startswith("min_lr=0.2: the optimizer's learning rate is lower, 0.1")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"tp_degree": 2, "sequence_parallelism": True}, "sequence_parallelism=True: the layers for it"),
        ({"context_parallel_size": 2}, "context_parallel_size=2: the layers for it"),
        (
            {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True},
            "use_precision_aware_optimizer=True: its Adam",
        ),
        ({"use_custom_fsdp": True}, "use_custom_fsdp=True: Megatron's own FSDP needs einops"),
    ],
)
def test_packages_that_only_some_runs_need(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], expected: str
) -> None:
    monkeypatch.setattr(library, "exists", lambda name: name.startswith("megatron"))
    (problem,) = plan_run(MegatronLMPlugin(seq_length=8, **fields), objects(loader(2)), 2, "no", 1)
    assert problem.startswith(expected)


@pytest.mark.parametrize(
    ("generation", "queues", "fields", "number"),
    [
        (9, None, {"tp_degree": 2}, 1),
        (9, "8", {"tp_degree": 2}, 1),
        (9, "1", {"tp_degree": 2}, 0),
        (9, None, {"tp_degree": 2, "use_custom_fsdp": True}, 0),
        (9, None, {"pp_degree": 2}, 0),
        (10, "1", {"use_custom_fsdp": True}, 1),
        (10, None, {"tp_degree": 2}, 0),
    ],
)
def test_missing_cuda_device_max_connections_is_a_problem(
    fake: Fake,
    monkeypatch: pytest.MonkeyPatch,
    generation: int,
    queues: str | None,
    fields: dict[str, Any],
    number: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (generation, 0))
    monkeypatch.setattr(library, "exists", lambda name: True)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    problems = plan_run(MegatronLMPlugin(**fields), objects(loader(2)), 2, "no", 1)
    assert len(problems) == number
    assert all(f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: " in problem for problem in problems)
