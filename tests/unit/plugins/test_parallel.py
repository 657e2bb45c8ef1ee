"""Details of the axes of the mesh, given or from the environment."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.base import ConfigurationError
from accelerate.plugins import (
    SCHEDULES,
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from accelerate.settings.sections.strategies import PP_SCHEDULES


def test_the_launcher_accepts_all_schedules() -> None:
    assert tuple(SCHEDULES) == PP_SCHEDULES


def test_context_parallelism_gathers_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TorchContextParallelConfig().cp_comm_strategy == "allgather"
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_COMM_STRATEGY", "alltoall")
    assert TorchContextParallelConfig().cp_comm_strategy == "alltoall"
    assert TorchContextParallelConfig("allgather").cp_comm_strategy == "allgather"


def test_sequence_parallelism_is_filled_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert DeepSpeedSequenceParallelConfig() == DeepSpeedSequenceParallelConfig(None, True, "sdpa")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH", "256")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE", "false")
    monkeypatch.setenv("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION", "flash_attention_2")
    assert DeepSpeedSequenceParallelConfig() == DeepSpeedSequenceParallelConfig(
        256, False, "flash_attention_2"
    )


@pytest.mark.parametrize(
    ("kind", "wrong", "named"),
    [
        (TorchContextParallelConfig, {"cp_comm_strategy": "ring"}, "cp_comm_strategy='ring'"),
        (
            DeepSpeedSequenceParallelConfig,
            {"sp_attn_implementation": "eager"},
            "sp_attn_implementation='eager'",
        ),
        (DeepSpeedSequenceParallelConfig, {"sp_seq_length_is_variable": False}, "Give sp_seq_length"),
        (TorchTensorParallelPlugin, {"tp_size": 0}, "tp_size=0"),
    ],
)
def test_invalid_settings_are_refused(kind: Any, wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        kind(**wrong)


def test_settings_without_effect_give_a_warning() -> None:
    assert TorchTensorParallelConfig() == TorchTensorParallelConfig(enable_async_tp=False)
    with pytest.warns(UserWarning, match="enable_async_tp=True has no effect"):
        TorchTensorParallelConfig(enable_async_tp=True)
