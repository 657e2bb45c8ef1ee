"""All settings that cannot be trained are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from accelerate.plugins import MegatronLMPlugin, find_wrong_network, find_wrong_sizes
from accelerate.plugins.megatron import read_backend


@pytest.mark.parametrize(
    ("given", "name"),
    [(True, "auto"), ("true", "auto"), (False, None), (None, None), ("FLASH", "flash"), ("flash", "flash")],
)
def test_the_attention_backend_is_read_from_text_and_booleans(given: Any, name: str | None) -> None:
    assert read_backend(given) == name


def test_processes_are_a_multiple_of_the_model_parallel_size() -> None:
    plugin = MegatronLMPlugin(tp_degree=2, pp_degree=2)
    assert find_wrong_sizes(plugin, 8) == []
    (problem,) = find_wrong_sizes(plugin, 6)
    assert "6 processes" in problem
    assert "tp_degree=2 * pp_degree=2 * context_parallel_size=1 = 4" in problem


def test_processes_are_a_multiple_of_the_expert_parallel_size() -> None:
    plugin = MegatronLMPlugin(expert_model_parallel_size=4)
    assert find_wrong_sizes(plugin, 4) == []
    (problem,) = find_wrong_sizes(plugin, 2)
    assert "expert_model_parallel_size=4" in problem


NETWORK = {"num_layers": 6, "num_attention_heads": 8, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("fields", "network", "problem"),
    [
        ({"pp_degree": 4}, {}, "6 layers cannot be divided between pp_degree=4"),
        ({"pp_degree": 3, "decoder_last_pipeline_num_layers": 1}, {}, "of which the last has 1"),
        ({"pp_degree": 2}, {"model_type_name": "t5"}, "no pipelines for T5"),
        (
            {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 2, "num_micro_batches": 2},
            {},
            "divisor of 3",
        ),
        (
            {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 3},
            {},
            "multiple of pp_degree=2",
        ),
        (
            {
                "pp_degree": 3,
                "num_layers_per_virtual_pipeline_stage": 1,
                "decoder_last_pipeline_num_layers": 2,
                "num_micro_batches": 3,
            },
            {},
            "decoder_last_pipeline_num_layers=2: the stages of an interleaved schedule",
        ),
        ({"tp_degree": 2}, {"num_experts": 4}, "sequence_parallelism=True, or tp_degree=1"),
        ({"tp_degree": 3}, {}, "8 attention heads"),
        ({"tp_degree": 4}, {"num_query_groups": 6}, "6 groups of queries"),
        ({"expert_model_parallel_size": 4}, {"num_experts": 6}, "6 experts"),
        ({"expert_model_parallel_size": 4}, {}, "no experts"),
        ({}, {"seq_length": 65}, "64 positions"),
        ({"tp_degree": 2, "sequence_parallelism": True}, {"seq_length": 33}, "multiple of 2"),
        ({"context_parallel_size": 2}, {"seq_length": 34}, "multiple of 4"),
    ],
)
def test_networks_that_do_not_fit(fields: dict[str, Any], network: dict[str, Any], problem: str) -> None:
    problems = find_wrong_network(MegatronLMPlugin(**fields), {**NETWORK, **network})
    assert len(problems) == 1
    assert problem in problems[0]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"pp_degree": 3, "tp_degree": 4},
        {"pp_degree": 2, "decoder_last_pipeline_num_layers": 2},
        {"pp_degree": 3, "num_layers_per_virtual_pipeline_stage": 2, "num_micro_batches": 6},
        {"context_parallel_size": 2},
    ],
)
def test_networks_that_fit(fields: dict[str, Any]) -> None:
    assert find_wrong_network(MegatronLMPlugin(**fields), {**NETWORK, "seq_length": 32}) == []
