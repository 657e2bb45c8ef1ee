"""A script for any strategy also trains with the engine of Megatron-LM."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.base import ConfigurationError, PreparationError
from accelerate.state import Topology
from accelerate.strategies import RunRequest, resolve_strategy
from accelerate.utils import (
    DistributedType,
    MegatronEngine,
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMOptimizerWrapper,
    MegatronLMPlugin,
    MegatronLMSchedulerWrapper,
)

from .conftest import Fake, Model, Start, samples


def test_prepare_puts_the_engine_and_its_wrappers_in_the_places(start: Start, fake: Fake) -> None:
    accelerator, model, optimizer, scheduler, loader = start(num_micro_batches=2)
    assert accelerator.distributed_type == DistributedType.MEGATRON_LM
    assert isinstance(model, MegatronEngine)
    assert isinstance(optimizer, MegatronLMOptimizerWrapper)
    assert isinstance(scheduler, MegatronLMSchedulerWrapper)
    assert optimizer.optimizer is fake.optimizer
    assert scheduler.scheduler is fake.scheduler
    assert [len(batch["input_ids"]) for batch in loader] == [4, 4]
    assert accelerator._models == [model]
    assert accelerator.unwrap_model(model) is model


def test_a_step_is_one_call(start: Start, fake: Fake) -> None:
    accelerator, model, optimizer, scheduler, loader = start(num_micro_batches=2)
    model.train()
    before = fake.parts[0].table.weight.detach().clone()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert fake.optimizer.steps == 2
    assert fake.scheduler.increments == [4, 4]
    assert fake.called("run") == [("run", {"num_microbatches": 2, "forward_only": False})] * 2
    assert optimizer.num_updates == 2
    assert float(norm) == 0.5
    assert not torch.equal(before, fake.parts[0].table.weight)
    assert loss.ndim == 0


def test_another_norm_than_that_of_the_plugin_gives_a_warning(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator, model, *_ = start(gradient_clipping=0.5)
    assert accelerator.clip_grad_norm_(model.parameters(), 1.0).isnan(), "no step was taken yet"
    assert "gradient_clipping=0.5" in caplog.text
    with pytest.raises(ConfigurationError, match="gradient_clipping"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)


def test_all_problems_are_in_one_error(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("megatron.training")]:
        monkeypatch.delitem(sys.modules, name)
    plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, gradient_accumulation_steps=2)
    model = Model(n_layer=3)
    optimizer = torch.optim.Adagrad(model.parameters())
    with pytest.raises(PreparationError) as caught:
        accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    message = str(caught.value)
    assert "7 reasons" in message
    for text in (
        "megatron.training cannot be imported. Install megatron-core 0.17 or newer",
        "1 processes cannot be divided: one replica of the model takes tp_degree=2 * pp_degree=2",
        "gradient_accumulation_steps=2",
        "micro_batch_size",
        "3 layers cannot be divided between pp_degree=2",
        "Adagrad",
        "ConstantLR",
    ):
        assert text in message
    assert fake.calls == []


def test_unknown_models_are_among_the_problems(fake: Fake) -> None:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(tp_degree=3))
    with pytest.raises(PreparationError, match=r"(?s)=1 = 3\..*model_type='opt'.*0 optimizers.*train_iters"):
        accelerator.prepare(Model(model_type="opt"), DataLoader(samples(), batch_size=2))


def test_a_variable_of_the_launcher_selects_megatron(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_MEGATRON_LM", "true")
    monkeypatch.setenv("MEGATRON_LM_NUM_MICRO_BATCHES", "4")
    accelerator = Accelerator(cpu=True)
    assert accelerator.distributed_type == DistributedType.MEGATRON_LM
    assert accelerator.state.megatron_lm_plugin.num_micro_batches == 4


@pytest.mark.usefixtures("states")
def test_other_objects_are_no_plugin() -> None:
    with pytest.raises(ConfigurationError, match="megatron_lm_plugin='dict'"):
        Accelerator(cpu=True, megatron_lm_plugin={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("fsdp_plugin", {"fsdp": FullyShardedDataParallelPlugin()}),
        ("deepspeed_plugin", {"deepspeed": DeepSpeedPlugin()}),
        ("parallelism_config", {"parallelism": ParallelismConfig(tp_size=2)}),
    ],
)
def test_megatron_with_another_strategy_is_refused(name: str, other: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=f"megatron_lm_plugin and {name}"):
        resolve_strategy(RunRequest(megatron=MegatronLMPlugin(), **other), Topology(size=2))


def test_a_run_without_megatron_cannot_add_it(fake: Fake) -> None:
    Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="already runs without Megatron-LM"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())


def test_objects_one_by_one_are_refused(fake: Fake) -> None:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
    for prepare, obj in (
        (accelerator.prepare_model, Model()),
        (accelerator.prepare_data_loader, DataLoader(samples(), batch_size=2)),
    ):
        with pytest.raises(PreparationError, match="one call of `prepare`"):
            prepare(obj)


def test_later_calls_prepare_loaders_only(start: Start) -> None:
    accelerator, *_ = start(num_micro_batches=2)
    loader = accelerator.prepare(DataLoader(samples(), batch_size=1))
    assert [len(batch["input_ids"]) for batch in loader] == [4, 4]
    with pytest.raises(PreparationError, match="has them already"):
        accelerator.prepare(Model())


def test_batches_of_the_users_own_sampler_are_refused(fake: Fake) -> None:
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(train_iters=5))
    model = Model()
    loader = DataLoader(samples(), batch_sampler=[[0, 1], [2]])
    with pytest.raises(PreparationError, match="1 reasons:.*\n.*batch_size=None"):
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)


def test_a_model_split_between_ranks_has_no_full_state_dict(start: Start) -> None:
    accelerator, model, *_ = start()
    with pytest.raises(ConfigurationError, match="save_checkpoint"):
        accelerator.get_state_dict(model)
    with pytest.raises(ConfigurationError, match="even_batches"):
        accelerator._runtime.strategy.join([model])


def test_an_evaluation_takes_no_step_and_has_losses_without_gradients(start: Start, fake: Fake) -> None:
    accelerator, model, *_, loader = start()
    model.eval()
    losses = [model(**batch).loss for batch in loader]
    assert fake.optimizer.steps == 0
    assert all(not loss.requires_grad for loss in losses)
    assert torch.isfinite(torch.stack(losses)).all()


def test_megatrons_own_data(fake: Fake) -> None:
    def iterators(provider: Any) -> list[Any]:
        batch = {"tokens": torch.ones(2, 6), "labels": torch.ones(2, 6), "loss_mask": torch.ones(2, 6)}
        return [iter([batch] * 4), iter([batch] * 2), None]

    sys.modules["megatron.training.training"].build_train_valid_test_data_iterators = iterators  # type: ignore[attr-defined]
    plugin = MegatronLMPlugin(num_micro_batches=2)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    model = Model()
    data = MegatronLMDummyDataLoader(
        data_path="text", splits_string="90,5,5", seq_length=6, micro_batch_size=2
    )
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=10)
    model, optimizer, scheduler, train, valid, test = accelerator.prepare(
        model, optimizer, scheduler, data, data, data
    )
    ((_, with_tokenizer),) = fake.called("set_global_variables")
    assert with_tokenizer
    assert fake.get_args().data_path == ["text"]
    assert fake.get_args().split == "90,5,5"
    assert [len(batch["tokens"]) for batch in train] == [4, 4]
    assert [len(batch["tokens"]) for batch in valid] == [4]
    assert next(test) == {}
    model.train()
    assert model(tokens=torch.ones(4, 6), labels=torch.ones(4, 6), loss_mask=torch.ones(4, 6)).loss > 0
