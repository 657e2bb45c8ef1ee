"""Optimizer and scheduler of Megatron-LM behave as scripts expect, and leave stepping to the engine."""

from __future__ import annotations

import pytest

from accelerate import Accelerator
from accelerate.base import PreparationError
from accelerate.utils import MegatronLMDummyScheduler

from .conftest import Fake, Start


def test_the_engine_has_stepped(start: Start, fake: Fake) -> None:
    _, model, optimizer, scheduler, loader = start()
    model.train()
    model(**next(iter(loader)))
    weight = fake.parts[0].table.weight.detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    assert weight.equal(fake.parts[0].table.weight)
    assert fake.optimizer.steps == 1
    assert fake.scheduler.increments == [2]
    assert scheduler.get_last_lr() == [0.1]
    assert (optimizer.num_updates, optimizer.step_was_skipped) == (1, False)


def test_skipped_steps_are_reported(start: Start, fake: Fake) -> None:
    accelerator, model, optimizer, _, loader = start()
    fake.optimizer.finite = False
    model.train()
    model(**next(iter(loader)))
    optimizer.step()
    assert optimizer.step_was_skipped
    assert accelerator.optimizer_step_was_skipped
    assert optimizer.num_updates == 0
    assert fake.scheduler.increments == []


@pytest.mark.usefixtures("states")
def test_a_dummy_scheduler_needs_megatron() -> None:
    with pytest.raises(
        PreparationError, match=r"MegatronLMDummyScheduler is a placeholder .* megatron_lm_plugin"
    ):
        Accelerator(cpu=True).prepare(MegatronLMDummyScheduler(None))
