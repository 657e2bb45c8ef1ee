"""The engine calls Megatron-LM's schedules, counts, and keeps checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.base import CheckpointError, ConfigurationError
from accelerate.strategies.megatron.steps import GPTTrainStep

from .conftest import LENGTH, VOCABULARY, Fake, Start


def test_the_engine_sets_the_config_for_the_schedules(start: Start, fake: Fake) -> None:
    _, model, *_ = start()
    config = model.module_config
    assert config is fake.parts[0].config
    assert (config.timers, config.finalize_model_grads_func) == ("timers", "finalize")
    assert config.grad_scale_func == fake.optimizer.scale_loss
    assert not hasattr(config, "no_sync_func")
    assert model.base_model is fake.parts[0]


def test_overlapping_exchange(start: Start, fake: Fake) -> None:
    part: Any = fake.parts[0]
    part.no_sync = part.start_grad_sync = part.start_param_sync = lambda: None
    _, model, *_ = start(
        other_megatron_args={
            "overlap_grad_reduce": True,
            "align_grad_reduce": True,
            "overlap_param_gather": True,
            "align_param_gather": True,
        }
    )
    config = model.module_config
    assert (config.no_sync_func, config.grad_sync_func, config.param_sync_func) == (part.no_sync,) * 3


def test_one_iterator_for_each_part_of_the_model(start: Start, fake: Fake) -> None:
    _, model, *_, loader = start(num_micro_batches=2)
    batch = next(iter(loader))
    iterator, number = model.get_batch_data_iterator(batch)
    assert (len(list(iterator)), number) == (2, 2)
    model.module = fake.parts * 2
    iterators, number = model.get_batch_data_iterator(batch)
    assert [len(list(iterator)) for iterator in iterators] == [2, 2]


def test_a_train_step_updates_counters_and_returns_its_report(start: Start, fake: Fake) -> None:
    _, model, *_, loader = start(num_micro_batches=2)
    model.train()
    batch = next(iter(loader))
    report, skipped, norm, zeros = model.train_step(**batch)
    assert (list(report), skipped, norm, zeros) == (["lm loss"], False, 0.5, None)
    assert fake.parts[0].cleared == 1
    loss = model(**batch).loss
    assert float(loss) == pytest.approx(float(model.eval_step(**batch)["lm loss"]), rel=0.2)
    assert model.iteration == 1
    assert fake.get_args().consumed_train_samples == 4
    assert model.num_floating_point_operations_so_far == 40


def test_the_loss_is_the_mean_over_tokens(start: Start, fake: Fake) -> None:
    _, model, *_ = start(num_micro_batches=2)
    tokens = torch.randint(1, VOCABULARY, (4, LENGTH))
    labels = tokens.clone()
    labels[0, 3:] = labels[1:3, 1:5] = -100
    model.eval()
    output = model(input_ids=tokens, labels=labels)
    logits = fake.parts[0].table(tokens)[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], ignore_index=-100)
    assert float(output.loss) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert output.logits is None


def test_logits_are_returned_on_request(start: Start, fake: Fake) -> None:
    _, model, *_, loader = start(num_micro_batches=2, return_logits=True)
    model.eval()
    batch = next(iter(loader))
    output = model(**batch)
    assert output.logits.equal(fake.parts[0].table(batch["input_ids"]))
    assert fake.parts[0].calls[0]["labels"] is None


def test_tuples_for_models_without_return_dict(start: Start) -> None:
    _, model, *_, loader = start(other_megatron_args={"model_return_dict": False})
    model.eval()
    assert model(**next(iter(loader))).ndim == 0


def test_calls_without_tensors_are_refused(start: Start) -> None:
    _, model, *_ = start()
    with pytest.raises(ConfigurationError, match="without tensors"):
        model()


def test_evaluations_are_logged_when_training_continues(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    _, model, *_, loader = start()
    model.eval()
    for batch in loader:
        model(**batch)
    assert model.eval_total_loss_dict
    with caplog.at_level("INFO"):
        model.train()
    assert "evaluation after iteration 0" in caplog.text
    assert model.eval_total_loss_dict == {}


def test_checkpoints(start: Start, fake: Fake, tmp_path: Path) -> None:
    _, model, *_, loader = start()
    model.train()
    for batch in loader:
        model(**batch)
    model.save_checkpoint(tmp_path)
    ((_, iteration, parts, optimizer, scheduler, further),) = fake.called("save_checkpoint")
    assert (iteration, parts) == (4, fake.parts)
    assert optimizer is fake.optimizer
    assert scheduler is fake.scheduler
    assert further == {"num_floating_point_operations_so_far": 80}
    model.iteration = 0
    model.load_checkpoint(tmp_path)
    assert (model.iteration, model.num_floating_point_operations_so_far) == (4, 99)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        model.load_checkpoint(tmp_path / "other")


class OwnStep(GPTTrainStep):
    def __init__(self, accelerator: Any, args: Any, factor: float) -> None:
        super().__init__(accelerator, args)
        self.factor = factor


class OldStep:
    def __init__(self, args: Any) -> None:
        self.args = args


def test_custom_train_steps(start: Start) -> None:
    _, model, *_ = start(custom_train_step_class=OwnStep, custom_train_step_kwargs={"factor": 2.0})
    assert model.train_step_handler.factor == 2.0


def test_custom_train_steps_without_the_accelerator(start: Start, fake: Fake) -> None:
    _, model, *_ = start(custom_train_step_class=OldStep)
    assert model.train_step_handler.args is fake.get_args()
