"""Tests of training by engines, against a recording stand-in for DeepSpeed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as rates

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.base import ConfigurationError, DistributedType, PreparationError, StateError
from accelerate.state import AcceleratorState
from accelerate.utils import AORecipeKwargs, DummyOptim, DummyScheduler

OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}


def configured(**more):
    return DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, **more})


def train(accelerator, parts, **limits):
    model, optimizer, loader = accelerator.prepare(parts.model, parts.optimizer, parts.loader)
    losses = []
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if limits and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), **limits)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def test_an_engine_is_built_from_all_objects(start, parts, package):
    accelerator, given = start(configured(gradient_accumulation_steps="auto")), parts()
    model, optimizer, loader = accelerator.prepare(given.model, given.optimizer, given.loader)
    assert accelerator.distributed_type == DistributedType.DEEPSPEED
    assert accelerator.deepspeed_engine_wrapped.engine is model
    assert accelerator.unwrap_model(model) is given.model
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert package.asked[0]["optimizer"] is given.optimizer
    config = accelerator.deepspeed_config
    assert config["gradient_accumulation_steps"] == 1
    assert config["zero_allow_untested_optimizer"] is True
    assert len(loader) == 6


def test_without_deepspeed_there_is_no_engine(states):
    accelerator = Accelerator(cpu=True)
    assert accelerator.deepspeed_engine_wrapped is None
    assert not hasattr(accelerator, "deepspeed_config")
    assert accelerator.deepspeed_ulysses_dl_adapter("loader", None) == "loader"


def test_dummy_optimizers_need_deepspeed(states, parts):
    given = parts()
    with pytest.raises(PreparationError, match="DummyOptim is a placeholder for .* DeepSpeed builds"):
        Accelerator(cpu=True).prepare(given.model, DummyOptim(given.model.parameters()))


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("limits", [{}, {"max_norm": 0.1}])
def test_losses_are_those_of_plain_training(start, parts, steps, limits):
    plain = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    expected, _ = train(plain, parts(), **limits)
    AcceleratorState._reset_state(True)
    found, _ = train(start(gradient_accumulation_steps=steps), parts(), **limits)
    assert found == pytest.approx(expected, abs=1e-6)


def test_the_engine_gets_accumulation_boundaries_and_steps_once(start, parts):
    accelerator = start(gradient_accumulation_steps=2)
    _, model = train(accelerator, parts())
    not_last, last = ("boundary", False), ("boundary", True)
    backward = ("backward", {"scale_wrt_gas": False})
    assert model.calls == [not_last, backward, last, backward, "step"] * 3


def test_a_step_that_was_not_called_is_run_before_the_next_forward(start, parts):
    accelerator, given = start(), parts()
    model, _, loader = accelerator.prepare(given.model, given.optimizer, given.loader)
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))
    assert model.calls.count("step") == 5
    assert accelerator.deepspeed_engine_wrapped.is_step_pending


def test_accumulation_steps_of_the_configuration_are_the_default(start, parts):
    accelerator = start(configured(gradient_accumulation_steps=3))
    assert accelerator.gradient_accumulation_steps == 3
    _, model = train(accelerator, parts())
    assert model.calls.count("step") == 2


def test_all_mismatches_are_in_one_error(start, parts):
    plugin = configured(
        gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=16, train_batch_size=5, x={"y": "auto"}
    )
    accelerator, given = start(plugin, gradient_accumulation_steps=4), parts()
    with pytest.raises(ConfigurationError) as caught:
        accelerator.prepare(given.model, given.optimizer, given.loader)
    said = str(caught.value)
    assert "train_micro_batch_size_per_gpu is 16 in the DeepSpeed configuration, and 4 by the loader" in said
    assert "is 2 in the DeepSpeed configuration, and 4 by Accelerator(gradient_accumulation_steps)" in said
    assert "train_batch_size is 5 in the DeepSpeed configuration, and 32 by" in said
    assert "x.y is 'auto'" in said


def test_auto_is_filled_again_for_other_batch_sizes(start, parts):
    plugin = DeepSpeedPlugin()
    accelerator, given = start(plugin), parts()
    accelerator.prepare(given.model, given.optimizer, given.loader)
    assert plugin.deepspeed_config["train_batch_size"] == 4
    accelerator.free_memory()
    again = parts()
    smaller = torch.utils.data.DataLoader(again.loader.dataset, batch_size=2)
    accelerator.prepare(again.model, again.optimizer, smaller)
    assert plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 2
    assert plugin.deepspeed_config["train_batch_size"] == 2


def test_the_batch_size_is_that_of_a_loader_prepared_before(start, parts):
    accelerator, given = start(), parts()
    accelerator.prepare(given.loader)
    accelerator.prepare(given.model, given.optimizer)
    assert accelerator.deepspeed_config["train_micro_batch_size_per_gpu"] == 4


def test_dummies_are_replaced_by_the_objects_of_the_engine(start, parts, package):
    plugin = configured(
        optimizer=OPTIMIZER, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    )
    accelerator, given = start(plugin), parts()
    stand_in = DummyOptim(given.model.parameters(), lr=0.5)
    schedule = DummyScheduler(stand_in, warmup_num_steps=10)
    model, optimizer, scheduler, _ = accelerator.prepare(given.model, stand_in, schedule, given.loader)
    assert "optimizer" not in package.asked[0]
    assert package.asked[0]["config"]["optimizer"]["params"] == {"lr": 0.5, "weight_decay": 0}
    assert package.asked[0]["config"]["scheduler"]["params"] == {"warmup_num_steps": 10}
    assert type(scheduler).__name__ == "DeepSpeedSchedulerWrapper"
    assert scheduler.optimizers == [optimizer]
    before = scheduler.scheduler.last_epoch
    scheduler.step()
    assert scheduler.scheduler.last_epoch == before
    assert accelerator._schedulers == [scheduler]


def test_a_scheduler_may_be_built_for_the_engines_optimizer(start, parts):
    accelerator, given = start(configured(optimizer=OPTIMIZER)), parts()
    stand_in = DummyOptim(given.model.parameters())
    schedule = DummyScheduler(
        stand_in, lr_scheduler_callable=lambda inner: torch.optim.lr_scheduler.ConstantLR(inner)
    )
    _, _, scheduler, _ = accelerator.prepare(given.model, stand_in, schedule, given.loader)
    assert isinstance(scheduler.scheduler, torch.optim.lr_scheduler.ConstantLR)


def test_a_scheduler_of_torch_follows_the_engines_steps(start, parts):
    accelerator, given = start(), parts()
    schedule = torch.optim.lr_scheduler.ExponentialLR(given.optimizer, 0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(
        given.model, given.optimizer, given.loader, schedule
    )
    assert scheduler.optimizers == [optimizer]
    x, y = next(iter(loader))
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.num_updates == 1


def warmup_then_decay(optimizer):
    parts = [rates.LinearLR(optimizer, 0.5, total_iters=2), rates.LambdaLR(optimizer, [lambda step: 1.0] * 3)]
    return rates.SequentialLR(optimizer, parts, milestones=[1])


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: rates.LambdaLR(optimizer, [lambda step, rate=rate: rate for rate in (1, 2, 3)]),
        lambda optimizer: rates.ExponentialLR(optimizer, 0.5),
        lambda optimizer: rates.CyclicLR(optimizer, [0.1, 0.2, 0.3], [0.4, 0.5, 0.6], step_size_up=2),
        lambda optimizer: rates.OneCycleLR(optimizer, [0.1, 0.2, 0.3], total_steps=9),
        warmup_then_decay,
        lambda optimizer: rates.ChainedScheduler([rates.StepLR(optimizer, 1), rates.ConstantLR(optimizer)]),
    ],
    ids=["lambda", "exponential", "cyclic", "one cycle", "sequential", "chained"],
)
def test_parameter_groups_without_parameters_are_dropped(start, schedule):
    def grouped(model):
        groups = [{"params": [model.weight]}, {"params": []}, {"params": [model.bias], "lr": 0.3}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.5)

    expected_optimizer = grouped(nn.Linear(3, 1))
    expected = schedule(expected_optimizer)
    plugin = configured(train_micro_batch_size_per_gpu=1)
    accelerator, model = start(plugin, step_scheduler_with_optimizer=False), nn.Linear(3, 1)
    optimizer = grouped(model)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, schedule(optimizer))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 3)).sum())
        optimizer.step()
        scheduler.step()
        expected_optimizer.step()
        expected.step()
        first, _, last = (group["lr"] for group in expected_optimizer.param_groups)
        assert [group["lr"] for group in optimizer.param_groups] == [first, last]
        assert scheduler.get_last_lr() == [first, last]


def test_each_model_has_its_engine_and_plugin(start, parts):
    first, second = DeepSpeedPlugin(zero_stage=1), DeepSpeedPlugin(zero_stage=2)
    accelerator = start(first, second)
    assert accelerator.deepspeed_plugin is first
    assert first.selected
    one, two = parts(), parts()
    model, optimizer, loader = accelerator.prepare(one.model, one.optimizer, one.loader)
    accelerator.state.select_deepspeed_plugin("b")
    assert accelerator.deepspeed_plugin is second
    assert accelerator.state.get_deepspeed_plugin("a") is first
    other, other_optimizer = accelerator.prepare(two.model, two.optimizer)
    assert (model.stage, other.stage) == (1, 2)
    x, y = next(iter(loader))
    accelerator.backward(nn.functional.mse_loss(model(x), y))
    accelerator.backward(nn.functional.mse_loss(other(x), y))
    norm = accelerator.clip_grad_norm_(other.parameters(), float("inf"))
    assert norm > 0
    optimizer.step()
    other_optimizer.step()
    assert model.calls.count("step") == other.calls.count("step") == 1
    with pytest.raises(StateError, match="no parameter of a prepared model"):
        accelerator.backward(torch.ones((), requires_grad=True))


def test_before_an_engine_there_is_no_backward_pass(start):
    with pytest.raises(StateError, match="comes after prepare"):
        start().backward(torch.ones((), requires_grad=True))


def test_a_model_that_is_not_trained_needs_no_engine(start, parts, package):
    accelerator = start(DeepSpeedPlugin(zero_stage=2), mixed_precision="bf16")
    model = accelerator.prepare(parts().model)
    assert package.asked == []
    assert model.weight.dtype == torch.bfloat16
    assert model(torch.ones(1, 3)).dtype == torch.bfloat16


def test_with_stage_three_a_model_that_is_not_trained_is_sharded(start, parts, package):
    plugin = DeepSpeedPlugin(
        hf_ds_config={"zero_optimization": {"stage": 3}, "optimizer": OPTIMIZER, "train_batch_size": 1}
    )
    accelerator = start(plugin)
    accelerator.prepare(parts().model)
    assert "optimizer" not in package.asked[0]["config"]
    assert accelerator.deepspeed_engine_wrapped is None


def test_an_evaluated_model_is_unchanged(start, parts, package):
    given = parts()
    assert start().prepare_model(given.model, evaluation_mode=True) is given.model
    assert package.asked == []


def test_objects_that_make_no_engine_are_refused_with_all_reasons(start, parts):
    accelerator, given = start(), parts()
    with pytest.raises(PreparationError) as caught:
        accelerator.prepare(given.model, parts().model, DummyOptim(given.model.parameters()))
    assert "2 models (Linear, Linear)" in str(caught.value)
    assert (
        "DummyOptim is a placeholder for the optimizer of DeepSpeed's configuration, which has none"
        in str(caught.value)
    )
    with pytest.raises(PreparationError, match="built from both"):
        accelerator.prepare_optimizer(given.optimizer)


def test_states_are_whole_copies(start, parts):
    accelerator, given = start(), parts()
    model, *_ = accelerator.prepare(given.model, given.optimizer, given.loader)
    state = accelerator.get_state_dict(model)
    assert set(state) == {"weight", "bias"}
    assert state["weight"].data_ptr() != given.model.weight.data_ptr()


@pytest.mark.parametrize("saves", [True, False])
def test_get_state_dict_gathers_shards_only_with_zero3_save_16bit_model(start, parts, saves):
    accelerator, given = start(DeepSpeedPlugin(zero_stage=3, zero3_save_16bit_model=saves)), parts()
    model, *_ = accelerator.prepare(given.model, given.optimizer, given.loader)
    if saves:
        assert set(accelerator.get_state_dict(model)) == {"weight", "bias"}
        return
    with pytest.raises(ConfigurationError, match="zero3_save_16bit_model=True"):
        accelerator.get_state_dict(model)


def test_unsupported_methods_of_an_engine_are_refused(start, parts):
    accelerator, given = start(gradient_accumulation_steps=2), parts()
    model, optimizer, _ = accelerator.prepare(given.model, given.optimizer, given.loader)
    with pytest.raises(ConfigurationError, match="clip_grad_value_ does not work with DeepSpeed"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(ConfigurationError, match=r"Use windows\(\)"):
        accelerator.accumulate(model, num_items=4)
    with pytest.raises(ConfigurationError, match="closure"):
        optimizer.step(lambda: 0)
    strategy = accelerator._runtime.strategy
    with pytest.raises(ConfigurationError, match="join_uneven_inputs does not work"):
        strategy.join([model])
    with pytest.raises(ConfigurationError, match="loaded with the engine"):
        strategy.state.load_weights(model, {}, lambda module, state: None)


def test_a_second_accelerator_shares_the_plugins_and_has_engines_of_its_own(start, parts):
    first = start(DeepSpeedPlugin(zero_stage=1))
    second = Accelerator()
    one, two = parts(), parts()
    first.prepare(one.model, one.optimizer, one.loader)
    assert second.deepspeed_engine_wrapped is None
    second.prepare(two.model, two.optimizer, two.loader)
    assert second.deepspeed_engine_wrapped.engine.module is two.model
    assert first.deepspeed_engine_wrapped.engine.module is one.model


def test_a_run_without_deepspeed_cannot_add_it(package):
    Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="already runs without DeepSpeed"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())


def test_the_number_format_is_that_of_the_configuration(start):
    plugin = configured(bf16={"enabled": True})
    accelerator = start(plugin)
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.scaler is None


def test_models_are_compiled_by_the_engine(start, parts):
    accelerator, given = start(dynamo_backend="eager"), parts()
    model, *_ = accelerator.prepare(given.model, given.optimizer, given.loader)
    ((name, arguments),) = [call for call in model.calls if call[0] == "compile"]
    assert name == "compile"
    assert arguments["backend"] == "eager"


def test_a_window_that_is_left_gives_a_warning(start, parts, caplog):
    accelerator, given = start(gradient_accumulation_steps=2), parts()
    model, _, loader = accelerator.prepare(given.model, given.optimizer, given.loader)
    for window in accelerator.windows(loader, model):
        for x, y in window:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
            break
        break
    assert "they are added to those of the next window" in caplog.text


def test_a_loader_of_windows_trains_as_accumulation_does(start, parts):
    plain, _ = train(start(gradient_accumulation_steps=2), parts())
    AcceleratorState._reset_state(True)
    accelerator, given = start(gradient_accumulation_steps=2), parts()
    model, optimizer, loader = accelerator.prepare(given.model, given.optimizer, given.loader)
    losses = []
    for window in accelerator.windows(loader, model, num_items=lambda batch: len(batch[0])):
        for x, y in window:
            loss = nn.functional.mse_loss(model(x), y, reduction="sum")
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item() / 4)
    assert losses == pytest.approx(plain, abs=1e-6)


def test_a_client_may_fill_the_accumulation_before_the_model_is_prepared(start, parts):
    plugin = DeepSpeedPlugin()
    accelerator, given = start(plugin), parts()
    plugin.deepspeed_config["gradient_accumulation_steps"] = 3  # transformers does, when it was "auto"
    accelerator.prepare(given.model, given.optimizer, given.loader)
    assert accelerator.gradient_accumulation_steps == 3
    assert plugin.deepspeed_config["train_batch_size"] == 12


def test_layers_compute_in_fp8_inside_an_engine(start, parts, monkeypatch):
    pytest.importorskip("torchao")
    accelerator = start(mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    model = nn.Sequential(nn.Linear(3, 16), nn.Linear(16, 16), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = accelerator.prepare(model, optimizer, parts().loader)
    assert [type(layer).__name__ for layer in engine.module] == ["Linear", "Float8Linear", "Linear"]
    assert engine.config["bf16"] == {"enabled": True}
    assert accelerator.fp8_backend == "AO"
