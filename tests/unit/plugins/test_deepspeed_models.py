"""Tests of the configuration that models are built with."""

from __future__ import annotations

from accelerate.base import packages
from accelerate.plugins.deepspeed_config import config_to_build, register_with_transformers


def test_a_configuration_is_made_complete_enough_to_build_a_model():
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    assert config_to_build(config) == {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
    given = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 8}
    assert config_to_build(given) == {"train_micro_batch_size_per_gpu": 8}


def test_without_deepspeed_transformers_gets_no_configuration(monkeypatch):
    monkeypatch.setattr(packages, "is_deepspeed_available", lambda: False)
    assert register_with_transformers({}, True, None) is None
