"""Tests of engine, optimizer and scheduler behind our methods."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from accelerate import Accelerator
from accelerate.base import ConfigurationError
from accelerate.strategies.deepspeed import (
    DeepSpeedEngineWrapper,
    DeepSpeedOptimizerWrapper,
    DeepSpeedSchedulerWrapper,
)


class Engine:
    def __init__(self, clipping=None, sharded=True):
        self.config = {} if clipping is None else {"gradient_clipping": clipping}
        self.optimizer = SimpleNamespace(clip_grad=0.0) if sharded else SimpleNamespace()
        self.calls: list[object] = []

    def set_gradient_accumulation_boundary(self, is_boundary):
        self.calls.append(is_boundary)

    def backward(self, loss, **kwargs):
        self.calls.append(("backward", kwargs))

    def step(self):
        self.calls.append(("step", getattr(self.optimizer, "clip_grad", None)))

    def get_global_grad_norm(self):
        return torch.tensor(3.0)


def test_backward_steps_when_gradients_are_complete():
    engine = Engine()
    wrapper = DeepSpeedEngineWrapper(engine)
    wrapper.backward(torch.ones(()), sync_gradients=False, retain_graph=True)
    assert engine.calls == [False, ("backward", {"retain_graph": True})]
    wrapper.backward(torch.ones(()))
    assert engine.calls[2:] == [True, ("backward", {}), ("step", 0.0)]
    assert wrapper.get_global_grad_norm() == 3.0


CLIPPING_TABLE = [
    (None, 0.5, 0.5),
    (None, math.inf, 0.0),
    (0.0, 0.5, 0.5),
    (1.0, 1.0, 1.0),
    (1.0, math.inf, 1.0),
]


@pytest.mark.parametrize(("configured", "asked", "limit"), CLIPPING_TABLE)
def test_the_limit_is_that_of_the_configuration_or_of_the_call(configured, asked, limit):
    engine = Engine(configured)
    wrapper = DeepSpeedEngineWrapper(engine)
    wrapper.compute_gradients(torch.ones(()), True)
    assert wrapper.clip(asked).item() == 3.0
    assert engine.calls[-1] == ("step", limit)
    wrapper.finish_step()
    assert wrapper.clip(asked).item() == 3.0
    assert [call for call in engine.calls if call == ("step", limit)] == [("step", limit)]


def test_before_the_first_step_the_norm_is_nan(monkeypatch):
    monkeypatch.setattr(Engine, "get_global_grad_norm", lambda engine: None)
    assert math.isnan(DeepSpeedEngineWrapper(Engine()).clip(1.0).item())


def test_another_limit_than_the_configured_one_gives_a_warning(states, caplog):
    Accelerator(cpu=True)
    wrapper = DeepSpeedEngineWrapper(Engine(1.0))
    wrapper.compute_gradients(torch.ones(()), True)
    wrapper.clip(0.25)
    assert "max_norm=0.25" in caplog.text
    assert "gradient_clipping=1.0, which takes precedence" in caplog.text


def test_other_norms_are_refused():
    with pytest.raises(ConfigurationError, match="norm_type"):
        DeepSpeedEngineWrapper(Engine()).clip(1.0, norm_type=1)


def test_the_engine_clears_gradients_and_steps_at_the_end_of_a_window(states):
    accelerator = Accelerator(cpu=True)
    inner = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    inner.overflow = True
    wrapper, taken = DeepSpeedOptimizerWrapper(inner), []
    wrapper.run_step = lambda: taken.append(1)
    inner.param_groups[0]["params"][0].grad = torch.ones(1)
    wrapper.zero_grad()
    assert inner.param_groups[0]["params"][0].grad is not None
    accelerator.sync_gradients = False
    wrapper.step()
    assert taken == []
    accelerator.sync_gradients = True
    wrapper.step()
    assert taken == [1]
    assert wrapper.step_was_skipped
    assert wrapper.num_updates == 0
    inner.overflow = False
    wrapper.step()
    assert wrapper.num_updates == 1


def test_an_optimizer_without_overflow_skips_nothing(states):
    Accelerator(cpu=True)
    wrapper = DeepSpeedOptimizerWrapper(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1))
    wrapper.step()
    assert not wrapper.step_was_skipped


def test_the_engine_steps_its_scheduler(states):
    Accelerator(cpu=True)
    scheduler = SimpleNamespace(step=lambda: pytest.fail("stepped"), get_last_lr=lambda: [0.5])
    wrapper = DeepSpeedSchedulerWrapper(scheduler, [])
    wrapper.step()
    assert wrapper.get_last_lr() == [0.5]
    assert wrapper.belongs_to_engine
